"""How long what is under way will still take, told from how it went since it was first looked at. Pure."""

from __future__ import annotations

_LEAST_DONE = 3
_LEAST_SECONDS = 1.0


class TimeLeft:
    """Of one thing after the other, each known by its name."""

    def __init__(self) -> None:
        self._name = ""
        self._done = 0
        self._since = 0.0

    def seconds(self, name: str, done: int, total: int, now: float) -> float | None:
        """Seconds until `total` parts are done, if they go on as they went; None until enough of them went.

        `now`: seconds on a monotonic clock.
        """
        if name != self._name or done < self._done:
            self._name, self._done, self._since = name, done, now
        went, took = done - self._done, now - self._since
        if went < _LEAST_DONE or took < _LEAST_SECONDS:
            return None
        return (total - done) * took / went
