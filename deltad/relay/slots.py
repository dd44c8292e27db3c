"""Who may fetch an object over a link now, and who waits for a turn.

It may not decide how many may: that is `Width`. Owns one invariant: those who wait go on in the order in which they
came, as soon as there is room, and one that is cancelled holds nobody up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from deltad.protocol.width import Width


class Slots:
    """`async with slots:` while an object is on its way. All methods belong to one event loop."""

    def __init__(self, most: int) -> None:
        self.width = Width(most)
        self._waiting: deque[asyncio.Future[None]] = deque()

    def received(self, count: int, now: float) -> None:
        """So many bytes came over the link."""
        if self.width.received(count, now):
            self._admit()

    async def __aenter__(self) -> None:
        if self.width.has_room and not self._waiting:
            self.width.taken()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self.width.given_back()
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0].done() or self.width.has_room):
            turn = self._waiting.popleft()
            if not turn.done():
                self.width.taken()
                turn.set_result(None)
