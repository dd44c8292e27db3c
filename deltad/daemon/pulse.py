"""The daemon's pulse: the service manager's watchdog is fed from progress, never from a timer that cannot stop.

One beat is a turn of the event loop and a turn of the pool of threads that reads, encodes and writes. Owns the
invariant that a loop that is stuck, or a pool in which nothing comes to its turn, stops the pulse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from deltad.ops.notify import Notifier

log = structlog.get_logger("deltad.daemon")

STATUS_SECONDS = 5.0
"""How often the status line is renewed where no watchdog asks for more."""
_BEATS = 3
"""How often the watchdog is fed within its time, so that a beat that comes late kills nobody."""

Work = Callable[[Callable[[], None]], "asyncio.Future[None]"]
"""Has a worker thread call a function, and is done once it was called."""


class Pulse:
    """Feeds the watchdog and tells the status. `status` says in one line how the daemon is."""

    def __init__(self, notifier: Notifier, status: Callable[[], str], *, work: Work | None = None) -> None:
        self._notifier = notifier
        self._status = status
        self._work = work or _in_pool

    @property
    def every(self) -> float:
        """Seconds between beats."""
        wanted = self._notifier.watchdog / _BEATS
        return min(wanted, STATUS_SECONDS) if wanted else STATUS_SECONDS

    def ready(self) -> None:
        """All is bound, or a reload is over."""
        self._notifier.ready(self._status())

    async def run(self) -> None:
        """Beat for as long as the daemon runs."""
        while True:
            await self.beat()
            await asyncio.sleep(self.every)

    async def beat(self) -> None:
        """Return once the pool has had a turn and the service manager has been told."""
        await self._work(lambda: None)
        status = self._status()
        if self._notifier.watchdog:
            self._notifier.alive(status)
        else:
            self._notifier.status(status)


def _in_pool(function: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.get_running_loop().run_in_executor(None, function)
