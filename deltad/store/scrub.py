"""When the scrub may read, and how far it has come. Pure.

The scrub reads all that is stored once in `every` seconds, bit by bit, never faster than `budget`, and gives way to
work that fills the store. Owns two invariants: in any span of time no more is read than the budget allows for it,
beyond one piece and one second's worth; and whatever fills the store, the scrub stands still for `YIELD_SECONDS` at
most.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

YIELD_SECONDS = 600.0
"""How long the scrub gives way to work that does not end."""
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Everything is read once in `every` seconds, where that takes no more than `budget` bytes a second."""

    every: float
    budget: int

    def rate(self, total: int) -> float:
        """Bytes a second at which `total` bytes are read."""
        return max(1.0, min(self.budget, total / self.every))


class Pacer:
    """Says how long to wait before the next piece. `now` is any monotonic clock's, in seconds."""

    def __init__(self, pace: Pace, now: float) -> None:
        self._pace = pace
        self._at = now
        self._credit = 0.0
        self._yields_since: float | None = None

    def rest(self, now: float, total: int, *, busy: bool) -> float:
        """Seconds until a piece may be read; 0 for now. `total`: bytes of all that is stored; `busy`: other work
        fills the store."""
        rate = self._pace.rate(total)
        self._credit = min(self._credit + (now - self._at) * rate, rate)
        self._at = now
        if not busy:
            self._yields_since = None
        elif self._yields_since is None:
            self._yields_since = now
        if self._yields_since is not None and now - self._yields_since < YIELD_SECONDS:
            return _POLL_SECONDS
        return -self._credit / rate if self._credit <= -1 else 0.0

    def read(self, count: int) -> None:
        """A piece of so many bytes was read."""
        self._credit -= count


class Progress(msgspec.Struct, frozen=True):
    """How far the scrub has come. Losing it costs time and nothing else.

    `after`: the key of the last piece that was read, empty at the start of a pass. `began` is when this pass began,
    and `covered` when the last one did that came to its end: all that was stored then was read since. Both in Unix
    time, for people.
    """

    after: str = ""
    began: float = 0.0
    covered: float = 0.0

    def read(self, key: str) -> Progress:
        """The piece of this key was read."""
        return msgspec.structs.replace(self, after=key)

    def finished(self, now: float) -> Progress:
        """The pass has come to its end, and the next one begins."""
        return Progress(began=now, covered=self.began)


def decode_progress(data: bytes, now: float) -> Progress:
    """What was kept; a new pass where that is damaged."""
    try:
        return msgspec.json.decode(data, type=Progress)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Progress(began=now)
