"""What a link carries while it is busy. No IO.

Takes the time (seconds on a monotonic clock) as an argument. Owns one invariant: waiting is not counted,
neither for a body to begin nor between bodies, so that a link that is idle most of the time is not taken
for a slow one.
"""

from __future__ import annotations

HALF_LIFE = 300.0
"""Seconds after which what was seen counts half."""
LEAST_BYTES = 64 << 10
"""Below this, aged, nothing is known."""


class Goodput:
    """Counts bytes against the seconds in which at least one body was arriving.

    A body counts from its first piece on and without it: what had come when reading began took no time that
    anyone could measure.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._arriving = 0
        self._at = 0.0

    def begin(self, now: float) -> None:
        """The first piece of a body is here."""
        self._pass(now)
        self._arriving += 1

    def arrived(self, count: int, now: float) -> None:
        """`count` further bytes of a body that has begun."""
        self._pass(now)
        self._bytes += count

    def end(self, now: float) -> None:
        """A body that has begun is whole, or was cut off."""
        self._pass(now)
        self._arriving -= 1

    def rate(self, now: float) -> float:
        """Bytes a second; 0 where too little was seen, or too long ago."""
        self._pass(now)
        return self._bytes / self._seconds if self._bytes >= LEAST_BYTES and self._seconds > 0 else 0.0

    def _pass(self, now: float) -> None:
        passed, self._at = now - self._at, now
        kept = 0.5 ** (passed / HALF_LIFE)
        self._bytes *= kept
        self._seconds = self._seconds * kept + (passed if self._arriving else 0.0)
