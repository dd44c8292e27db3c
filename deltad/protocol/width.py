"""How many objects come over one link at a time: more while that makes it faster, fewer where it does not.

Pure: takes the time (seconds on a monotonic clock) as an argument. It may not open or close a connection. Owns one
invariant: the width is between 1 and its ceiling, and a growth that did not pay is taken back.
"""

from __future__ import annotations

FIRST = 8
"""The width of a link of which nothing is known."""
WINDOW = 0.5
"""The least number of seconds over which a rate is taken; and at least `ROUND_TRIPS`."""
ROUND_TRIPS = 5.0
GAIN = 1.08
"""What the rate must grow by for a growth to stay. A wider link that is not faster only takes from others."""
FULL = 0.9
"""The share of bytes that must come while all of the width is used for a rate to say anything."""
FIRST_HOLD = 15.0
LONGEST_HOLD = 240.0
"""For how many seconds a width stays after a growth that did not pay; longer each time, up to this."""


class Width:
    """The width of one link: how many objects may be on their way at once."""

    def __init__(self, most: int) -> None:
        self.size = min(FIRST, most)
        self.used = 0
        self._most = most
        self._rtt = 0.0
        self._before = self.size
        self._base: float | None = None
        self._trying = False
        self._hold = FIRST_HOLD
        self._grows_at = 0.0
        self._begun: float | None = None
        self._bytes = self._full = 0

    @property
    def has_room(self) -> bool:
        """Whether one more may be on its way."""
        return self.used < self.size

    def measured(self, rtt: float) -> None:
        """A round trip took so many seconds."""
        self._rtt = rtt

    def taken(self) -> None:
        """One more is on its way."""
        self.used += 1

    def given_back(self) -> None:
        """One is here, or has failed."""
        self.used -= 1
        if not self.used:
            self._begin(None)  # the time until the next one is asked for says nothing

    def received(self, count: int, now: float) -> bool:
        """So many bytes came in. True if the width has changed."""
        if self._begun is None:
            self._begin(now)
            return False
        if now < self._begun:
            return False
        self._bytes += count
        self._full += count if not self.has_room else 0
        seconds = now - self._begun
        if seconds < max(WINDOW, ROUND_TRIPS * self._rtt):
            return False
        rate, full = self._bytes / seconds, self._full >= FULL * self._bytes
        self._begin(now)
        return full and self._judge(rate, now)

    def _begin(self, at: float | None) -> None:
        self._begun, self._bytes, self._full = at, 0, 0

    def _judge(self, rate: float, now: float) -> bool:
        size = self.size
        if self._trying and self._base is not None and rate < GAIN * self._base:
            self.size, self._trying = self._before, False
            self._grows_at = now + self._hold
            self._hold = min(2 * self._hold, LONGEST_HOLD)
        elif self._trying or now >= self._grows_at:
            if self._trying:
                self._hold = FIRST_HOLD
            self._base, self._before = rate, self.size
            self.size = min(2 * self.size, self._most)
            self._trying = self.size > self._before
        if self.size != size:
            # What is on its way now was asked for at the old width, and new connections have to gain speed first.
            self._begin(now + max(WINDOW, ROUND_TRIPS * self._rtt) / 2)
        return self.size != size
