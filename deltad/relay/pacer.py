"""Waiting for one's turn at the caps: timers and the wall clock around `deltad.protocol.pacing`.

Only bodies of objects wait; what is asked and told beside them never does. It may not decide whose turn it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from deltad.protocol.pacing import Block, Cap, Pacing
from deltad.types import RunId

LOOK_SECONDS = 20.0
"""A cap that begins or ends by the time of day does so this much late at most."""


def minute_of_day() -> int:
    """Of this host's local time."""
    local = time.localtime()
    return local.tm_hour * 60 + local.tm_min


class Pacer:
    """The caps of one daemon. Methods belong to the event loop's thread. `minute` is asked for the time of day."""

    def __init__(self, caps: Sequence[Cap], *, minute: Callable[[], int] = minute_of_day) -> None:
        self._caps = tuple(caps)
        self._minute = minute
        self._pacing: Pacing | None = None
        self._waiting: dict[Block, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, run: RunId, peer: str, count: int) -> None:
        """Return once `count` bytes of a run, from or to the peer at a URL, may go on."""
        if not self._caps:
            return
        loop = asyncio.get_running_loop()
        if self._pacing is None:
            self._pacing = Pacing(self._caps, loop.time())
        block = self._pacing.ask(run, peer, count)
        if block is None:
            return
        turn = self._waiting[block] = loop.create_future()
        self._look()
        try:
            await turn
        finally:
            self._waiting.pop(block, None)
            self._pacing.withdraw(block)

    def _look(self) -> None:
        assert self._pacing is not None
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        passed, again = self._pacing.let_pass(loop.time(), self._minute())
        for block in passed:
            turn = self._waiting.pop(block)
            if not turn.done():
                turn.set_result(None)
        if again is not None:
            self._timer = loop.call_at(min(again, loop.time() + LOOK_SECONDS), self._look)
