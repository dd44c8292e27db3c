"""How a link to an upstream is doing: up or not, since when it rests, how fast it is. No IO.

Takes the time (seconds on a monotonic clock) as an argument. Owns one invariant: while the link rests,
nobody on it asks anything.
"""

from __future__ import annotations

import random
from collections import deque

from deltad.errors import ConfigError, DeltadError, DeniedError
from deltad.protocol.backoff import Backoff

_RATE_SECONDS = 5.0


class Link:
    """`first_delay`, `longest_delay`: rests between tries. `denied_delay`: the rest after a wrong token."""

    def __init__(self, *, first_delay: float, longest_delay: float, denied_delay: float, rng: random.Random) -> None:
        self.up = False
        self.error: DeltadError | None = None
        self.rests_until = 0.0
        self.bytes_received = 0
        self.rtt = 0.0
        self._denied_delay = denied_delay
        self._backoff = Backoff(first_delay, longest_delay, rng)
        self._told = ""
        self._told_down = ""
        self._arrivals: deque[tuple[float, int]] = deque()

    def failed(self, error: DeltadError, now: float, *, reachable: bool) -> bool:
        """A request failed. True if that is news: the link was up, or the reason is another than last time.

        The whole link rests if nobody was reached or the token was refused; else it is the request's own
        trouble and only remembered.
        """
        self.error = error
        refused = isinstance(error, (DeniedError, ConfigError))
        if reachable and not refused:
            news, self._told = str(error) != self._told, str(error)
            return news
        news, self._told_down = self.up or str(error) != self._told_down, str(error)
        self.up = False
        if now >= self.rests_until:
            self.rests_until = now + self._denied_delay if refused else self._backoff.failed(now)
        return news

    def succeeded(self) -> bool:
        """A request was answered. True if that is news."""
        news = not self.up
        self.up = True
        self.error = None
        self.rests_until = 0.0
        self._backoff.succeeded()
        return news

    def retry_now(self) -> None:
        """Somebody asks for it: do not rest any longer."""
        self.rests_until = 0.0

    def received(self, count: int, now: float) -> None:
        self.bytes_received += count
        self._arrivals.append((now, count))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Bytes per second over the last few seconds."""
        self._forget(now)
        if not self._arrivals:
            return 0.0
        return sum(count for _, count in self._arrivals) / max(now - self._arrivals[0][0], 0.5)

    def resting(self, now: float) -> str:
        """What it rests for, in words; empty if it does not."""
        if now >= self.rests_until or self.error is None:
            return ""
        reason = self.error.found or str(self.error)
        return f"waiting {self.rests_until - now:.1f} s before trying again: {reason}"

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] < now - _RATE_SECONDS:
            self._arrivals.popleft()
