"""Since when no new version of a run came, by this daemon's own monotonic clock: what publishers' clocks say is for
people alone. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deltad.figures import duration
from deltad.types import RunId


class Staleness:
    """When versions came, of all runs. A run counts from the start of the daemon, until its first one comes."""

    def __init__(self, after: float, clock: Callable[[], float]) -> None:
        """`after`: for how many seconds a run may be without a new version; 0 is for ever."""
        self._after = after
        self._clock = clock
        self._started = clock()
        self._came: dict[RunId, float] = {}

    def came(self, run: RunId) -> None:
        """A new version is durable here."""
        self._came[run] = self._clock()

    def reasons(self, runs: Iterable[RunId]) -> list[str]:
        """Why these runs make the daemon unready; empty if they do not."""
        if not self._after:
            return []
        now = self._clock()
        waited = {run: now - self._came.get(run, self._started) for run in runs}
        return [
            f"run {run}: no new version came for {duration(seconds)}"
            for run, seconds in waited.items()
            if seconds > self._after
        ]
