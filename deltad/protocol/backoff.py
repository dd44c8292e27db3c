"""When to try again what has failed. Pure."""

from __future__ import annotations

import random


class Backoff:
    """When to try again: the delay doubles from `first` to `longest` and is drawn from its upper half."""

    def __init__(self, first: float, longest: float, rng: random.Random) -> None:
        self._first = first
        self._longest = longest
        self._rng = rng
        self.failures = 0

    def failed(self, now: float) -> float:
        """One more failure; returns the time of the next try."""
        delay = min(self._longest, self._first * 2.0 ** min(self.failures, 64))
        self.failures += 1
        return now + delay * (0.5 + self._rng.random() / 2)

    def succeeded(self) -> None:
        self.failures = 0
