"""Who connects and asks for nothing, or too often, is cut off; who asks is not (slowloris; P22)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from deltad.daemon.porch import Porch
from deltad.limits import Limits

LIMITS = Limits(connections=4, address_connections=3, idle_seconds=10.0)


class Porched:
    """A server on loopback with one route that answers when it is told to."""

    def __init__(self) -> None:
        self.porch = Porch(LIMITS, face="test")
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        app = web.Application()
        app.router.add_get("/", self._handle)
        self.porch.guard(app)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.port = 0

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.set()
        await self.answer.wait()
        return web.Response(text="at last")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self.runner.server is not None
        before = len(self.runner.server.connections)
        ends = await asyncio.open_connection("127.0.0.1", self.port)
        while len(self.runner.server.connections) == before:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        return ends

    def look(self, now: float) -> None:
        assert self.runner.server is not None
        self.porch.look(self.runner.server.connections, now)


@pytest.fixture
async def porched() -> AsyncIterator[Porched]:
    porched = Porched()
    await porched.runner.setup()
    await web.TCPSite(porched.runner, "127.0.0.1", 0).start()
    porched.port = porched.runner.addresses[0][1]
    yield porched
    porched.answer.set()
    await porched.runner.cleanup()


async def is_cut(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_a_head_that_never_ends_is_cut_off_and_a_request_under_way_is_not(porched: Porched) -> None:
    slow_reader, slow = await porched.connect()
    slow.write(b"GET / HTTP/1.1\r\nX-Slow: ")
    asking_reader, asking = await porched.connect()
    asking.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await porched.asked.wait()
    porched.look(0.0)
    porched.look(9.9)
    slow.write(b"still here")
    porched.look(10.0)
    assert await is_cut(slow_reader)
    porched.look(1000.0)
    porched.answer.set()
    assert (await asking_reader.readline()).startswith(b"HTTP/1.1 200")
    for writer in (slow, asking):
        writer.close()


async def test_of_too_many_from_one_address_the_first_stay(porched: Porched) -> None:
    ends = [await porched.connect() for _ in range(5)]
    porched.look(0.0)
    assert await is_cut(ends[3][0])
    assert await is_cut(ends[4][0])
    for _, writer in ends[:3]:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    porched.answer.set()
    for reader, _ in ends[:3]:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    for _, writer in ends:
        writer.close()
