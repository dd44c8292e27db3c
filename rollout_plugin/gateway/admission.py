"""How many requests may run at once, and how far rollouts may run ahead of the trainer.

Pure: the caller waits. The second bound is that of asynchronous RL: with `batch` rollouts to a version and a staleness
of at most `bound`, no more than (versions since the start + bound + 1) × batch rollouts may have begun, or some would
be trained on at a greater staleness than that (AReaL, arXiv 2505.24298, equation 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from deltad.errors import UnavailableError


class BusyError(UnavailableError):
    """More is held back already than may be; nothing of the request was begun."""

    http_status = 429


@dataclass(frozen=True, slots=True)
class Pace:
    """`batch` rollouts make a version, and none may be more than `bound` versions old when it is trained on."""

    batch: int
    bound: int


class Admission:
    """Counts what runs and what waits. `begin` what may; `end` what has begun."""

    def __init__(self, *, most_running: int, most_waiting: int, pace: Pace | None = None) -> None:
        self.running = 0
        self.waiting = 0
        self._begun = 0
        self._first: int | None = None
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._pace = pace

    def queue(self) -> None:
        """Begin to wait. Raises BusyError where too many do."""
        if self.waiting >= self._most_waiting:
            raise BusyError(
                "gateway",
                expected=f"at most {self._most_waiting} requests held back",
                found="as many",
                hint="try again later, or start more replicas",
            )
        self.waiting += 1

    def unqueue(self) -> None:
        """Wait no longer."""
        self.waiting -= 1

    def why_not(self, sequence: int) -> str:
        """Empty if a request may begin while `sequence` versions have been made, else the reason in words."""
        if self.running >= self._most_running:
            return f"{self.running} requests are running"
        if self._pace is not None:
            if self._first is None:
                self._first = sequence
            allowed = (sequence - self._first + self._pace.bound + 1) * self._pace.batch
            if self._begun >= allowed:
                return f"{self._begun} rollouts have begun, as many as may before the next version"
        return ""

    def begin(self, rollouts: int = 1) -> None:
        """So many begin. Asked for before: `why_not`."""
        self.running += rollouts
        self._begun += rollouts

    def end(self, rollouts: int = 1, *, answered: bool) -> None:
        """They are over. Those that were not answered make no rollout, and others may begin in their place."""
        self.running -= rollouts
        if not answered:
            self._begun -= rollouts
