"""Who may fetch an object over a link now, who waits for a turn, and the memory that is fetched into.

It may not decide how many may: that is `Width`. Owns two invariants: those who wait go on in the order in which they
came, as soon as there is room, and one that is cancelled holds nobody up; and a body takes little more memory than
its bytes, however small the pieces are that they come in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deltad.protocol.width import Width

_LARGE_BYTES = 16 << 10
_MOST_BYTES = 1 << 20
"""Of pieces that were put together."""


class Body:
    """The bytes of an object as they come in. Large pieces are kept as they are, and small ones put together."""

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)

    def extend(self, piece: bytes) -> None:
        last = self._pieces[-1] if self._pieces else b""
        self._filled += len(piece)
        if len(piece) >= _LARGE_BYTES:
            self._pieces.append(piece)
        elif isinstance(last, bytearray) and len(last) < _MOST_BYTES:
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def clear(self) -> None:
        self._pieces.clear()
        self._filled = 0


class Slots:
    """Turns at one link. All methods belong to one event loop."""

    def __init__(self, most: int) -> None:
        self.width = Width(most)
        self._waiting: deque[asyncio.Future[None]] = deque()

    def received(self, count: int, now: float) -> None:
        """So many bytes came over the link."""
        if self.width.received(count, now):
            self._admit()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Body]:
        """Held while an object is on its way, which is fetched into the empty body."""
        await self._wait()
        try:
            yield Body()
        finally:
            self._give_back()

    async def _wait(self) -> None:
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

    def _give_back(self) -> None:
        self.width.given_back()
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0].done() or self.width.has_room):
            turn = self._waiting.popleft()
            if not turn.done():
                self.width.taken()
                turn.set_result(None)
