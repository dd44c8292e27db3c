"""Whether the publisher of a run is still heard of through an upstream. Pure: takes the time, reads no clock.

`now` is seconds on a monotonic clock of this daemon. Owns two invariants: a run counts as heard of only when a signed
heartbeat with a higher number than all before it has come; and one that comes again, or an older one, changes nothing.
"""

from __future__ import annotations

from deltad.delta.heartbeat import Heartbeat
from deltad.errors import IntegrityError
from deltad.types import Version

PATIENCE_SECONDS = 60.0
"""How long a publisher may be silent before that is told of."""


class Pulse:
    """One run at one upstream. `since` is when it began to be listened to."""

    def __init__(self, since: float, *, patience: float = PATIENCE_SECONDS) -> None:
        self.last: Heartbeat | None = None
        self._heard = since
        self._patience = patience
        self._behind_since: float | None = None

    def hear(self, beat: Heartbeat, now: float) -> bool:
        """Take in a heartbeat whose signature was checked. False if it is the one that was heard last.

        Raises IntegrityError for an older one, or for another one of the same number: it was replayed, or two
        publishers use one key.
        """
        if self.last is not None and beat.number <= self.last.number:
            if beat == self.last:
                return False
            raise IntegrityError(
                f"heartbeat of {beat.run}",
                expected=f"a number above {self.last.number}",
                found=f"{beat.number}",
                hint="it was replayed, or its publisher's store is an old copy",
            )
        self.last = beat
        self._heard = now
        return True

    def trouble(self, held: Version | None, now: float) -> str:
        """What speaks against the upstream, given the newest version that is held here; empty if nothing does."""
        silent = now - self._heard
        if silent > self._patience:
            last = f"the last was {self.last}" if self.last else "there never was one"
            return (
                f"no signed heartbeat of the publisher for {silent:.0f} s ({last}): it is stopped, or the upstream "
                "is cut off from it, frozen, or replays what it once had"
            )
        said = None if self.last is None else self.last.latest
        if said is None or (held is not None and held >= said):
            self._behind_since = None
            return ""
        if self._behind_since is None:
            self._behind_since = now
        behind = now - self._behind_since
        if behind <= self._patience:
            return ""
        return f"the publisher has been at {said} for {behind:.0f} s, and it has not come through this upstream"
