"""A TCP proxy that does to a conversation what bad networks and dying hosts do.

    async with ChaosProxy(upstream_port) as proxy:
        proxy.plan(Mishap(1000, Fault.FLIP), Mishap(5000, Fault.CUT))
        ... talk to proxy.port ...

Offsets count the bytes that come from the upstream, over all connections together, from the moment the
plan was made. Bytes towards the upstream pass unharmed, and are counted. Everything is exact to the
byte, whatever pieces the sockets deliver, so a test that fails can be repeated with its plan; with
several connections at once, which of them an offset falls into depends on the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

_PIECE_BYTES = 16 << 10


class Fault(StrEnum):
    """What happens at an offset."""

    FLIP = "flip"
    """One byte has other bits."""
    DROP = "drop"
    """One byte is left out."""
    DOUBLE = "double"
    """One byte comes twice."""
    SWAP = "swap"
    """One byte comes after the one that follows it."""
    INSERT = "insert"
    """`Mishap.data` comes in between."""
    CUT = "cut"
    """The connection ends here."""
    STALL = "stall"
    """The connection stays open, and nothing comes any more."""


@dataclass(frozen=True, slots=True, order=True)
class Mishap:
    """A fault before (INSERT, CUT, STALL) or at the byte with offset `at`. `data`: the mask of a FLIP, one
    byte, or what INSERT inserts."""

    at: int
    fault: Fault
    data: bytes = b"\x01"


def random_mishaps(seed: int, *, count: int, within: int, faults: tuple[Fault, ...] = tuple(Fault)) -> list[Mishap]:
    """`count` mishaps at offsets below `within`, the same for the same seed."""
    rng = random.Random(seed)
    return sorted(
        Mishap(rng.randrange(within), rng.choice(faults), bytes([rng.randrange(1, 256)])) for _ in range(count)
    )


class ChaosProxy:
    """Forwards connections to `upstream_port` on loopback. `rate`: bytes per second from the upstream, or None."""

    def __init__(self, upstream_port: int, *, rate: float | None = None) -> None:
        self.upstream_port = upstream_port
        self.port = 0
        self.rate = rate
        self.connections = 0
        """Connections that were made so far."""
        self.downstream = 0
        """Bytes that came from the upstream since the plan was made."""
        self.requests = 0
        """Bytes that went to the upstream."""
        self.happened: list[Mishap] = []
        self._plan: deque[Mishap] = deque()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._free_at = 0.0
        self._news = asyncio.Event()
        self._late: dict[asyncio.StreamWriter, bytes] = {}
        """By connection the byte that comes after the next one."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *mishaps: Mishap) -> None:
        """Let these happen, counted from now on; earlier plans are forgotten."""
        self._plan = deque(sorted(mishaps))
        self.downstream = 0
        self.happened.clear()

    async def __aenter__(self) -> ChaosProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut_all()
        await self._server.wait_closed()

    async def until_happened(self, count: int) -> None:
        """Wait until this many mishaps of the plan have happened."""
        while len(self.happened) < count:
            self._news.clear()
            await self._news.wait()

    async def cut_all(self) -> None:
        """End every connection now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        upstream: asyncio.StreamWriter | None = None
        try:
            from_upstream, upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            async with asyncio.TaskGroup() as both:
                back = both.create_task(self._back(from_upstream, writer))
                forth = both.create_task(self._forth(reader, upstream))
                await asyncio.wait((back, forth), return_when=asyncio.FIRST_COMPLETED)
                back.cancel()
                forth.cancel()
        except (OSError, asyncio.CancelledError, BaseExceptionGroup):
            pass  # either end is gone, or the test is over
        finally:
            self._tasks.discard(task)
            for end in (writer, upstream):
                if end is not None:
                    # Closing waits for what is unsent, and nobody may be reading any more.
                    end.transport.abort() if end.transport.get_write_buffer_size() else end.close()
                    with contextlib.suppress(OSError, asyncio.CancelledError):
                        await end.wait_closed()

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE_BYTES):
            self.requests += len(data)
            writer.write(data)
            await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE_BYTES):
            await self._pace(len(data))
            goes_on = await self._pass(data, writer)
            if not goes_on:
                return
        writer.write(self._late.pop(writer, b""))

    async def _pace(self, count: int) -> None:
        if self.rate is not None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + count / self.rate
            await asyncio.sleep(self._free_at - now)

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> bool:
        """Pass on a piece with all that happens within it. False if the connection ends there."""
        start, self.downstream = self.downstream, self.downstream + len(data)
        if late := self._late.pop(writer, b""):
            writer.write(data[:1] + late)
            data, start = data[1:], start + 1
        at = 0
        # Where something has befallen a byte already, what comes next befalls the one after it.
        while self._plan and max(self._plan[0].at, start + at) < start + len(data):
            mishap = self._plan.popleft()
            self.happened.append(mishap)
            self._news.set()
            offset = max(mishap.at - start, at)
            writer.write(data[at:offset])
            at = offset
            one = data[at : at + 1]
            match mishap.fault:
                case Fault.FLIP:
                    writer.write(bytes([one[0] ^ (mishap.data[0] or 1)]))
                    at += 1
                case Fault.DROP:
                    at += 1
                case Fault.DOUBLE:
                    writer.write(one)
                case Fault.SWAP:
                    writer.write(data[at + 1 : at + 2])
                    at += 2
                    if at <= len(data):
                        writer.write(one)
                    else:
                        self._late[writer] = one  # the piece ends here; it comes after the first byte of the next
                case Fault.INSERT:
                    writer.write(mishap.data)
                case Fault.CUT:
                    await writer.drain()
                    return False
                case Fault.STALL:
                    await writer.drain()
                    await asyncio.Event().wait()
        writer.write(data[at:])
        await writer.drain()
        return True
