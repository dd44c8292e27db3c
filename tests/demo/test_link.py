"""The slow link: nothing is lost or reordered, and it is as slow as it says, no slower and no faster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.demo.link import PIECE_BYTES, Lane, Link, parse_address


class _EagerSelector(selectors.DefaultSelector):
    """Waits for no timer: where no socket is ready, the loop's clock jumps to the next timer at once."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # What was written to a loopback socket is readable at the other end a moment later.
        ready = super().select(0.002 if timeout is None or timeout > 0 else 0)
        if not ready and timeout is not None and timeout > 0:
            self.loop.jump(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Real sockets under a clock that moves only when nothing else is left to do."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _EagerSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


def in_virtual_time(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scene())


@contextlib.asynccontextmanager
async def echo_behind_link(*, rtt: float, mbit: float) -> AsyncIterator[tuple[Link, tuple[str, int]]]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link(("127.0.0.1", 0), server.sockets[0].getsockname()[:2], rtt=rtt, mbit=mbit)
    address = await link.start()
    try:
        yield link, address
    finally:
        await link.close()
        server.close()


async def send_and_receive(address: tuple[str, int], data: bytes) -> tuple[bytes, float, float]:
    """Sends all of `data`, then the end; returns what came back and when the first and the last byte did."""
    reader, writer = await asyncio.open_connection(*address)
    clock = asyncio.get_running_loop().time

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    received = [await reader.read(65536)]
    first = clock()
    while piece := await reader.read(65536):
        received.append(piece)
    await sending
    writer.close()
    await writer.wait_closed()
    return b"".join(received), first, clock()


pieces = st.lists(st.tuples(st.integers(1, PIECE_BYTES), st.floats(0, 0.2)), min_size=1, max_size=60)


@given(pieces, st.floats(1e5, 1e8), st.floats(0, 0.5))
def test_no_window_of_time_carries_more_than_the_rate_and_the_burst(
    offered: list[tuple[int, float]], rate: float, delay: float
) -> None:
    lane = Lane(rate=rate, delay=delay)
    now, sent = 0.0, []
    for count, pause in offered:
        now += pause
        sent.append((lane.send(count, now), count))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            window = sent[last][0].departs - sent[first][0].departs
            carried = sum(count for _, count in sent[first : last + 1])
            assert carried <= lane.burst + rate * window + PIECE_BYTES * 1e-6
    assert lane.carried == sum(count for count, _ in offered)


@given(pieces, st.floats(1e5, 1e8), st.floats(0, 0.5))
def test_pieces_keep_their_order_and_each_is_delayed_by_exactly_the_delay(
    offered: list[tuple[int, float]], rate: float, delay: float
) -> None:
    lane = Lane(rate=rate, delay=delay)
    now, before = 0.0, 0.0
    for count, pause in offered:
        now += pause
        passage = lane.send(count, now)
        assert passage.departs >= max(now, before)
        assert passage.arrives == passage.departs + delay
        before = passage.departs


def test_a_busy_lane_is_never_slower_than_its_rate_whatever_the_delay() -> None:
    lane = Lane(rate=1e6, delay=10.0)
    now = 0.0
    for _ in range(1000):
        now = lane.send(PIECE_BYTES, now).departs
    assert now == pytest.approx((1000 * PIECE_BYTES - lane.burst) / 1e6)


def test_bytes_come_out_as_they_went_in_and_are_counted_per_direction() -> None:
    async def scene() -> None:
        data = os.urandom(3_000_001)
        async with echo_behind_link(rtt=0.08, mbit=50) as (link, address):
            received, _, _ = await send_and_receive(address, data)
            assert received == data
            assert link.stats() == {
                "bytes_to_target": len(data),
                "bytes_from_target": len(data),
                "connections": 1,
                "refused": 0,
            }

    in_virtual_time(scene)


def test_a_transfer_takes_the_time_that_the_rate_gives_it_although_the_delay_is_long() -> None:
    async def scene() -> None:
        data = bytes(10_000_000)
        async with echo_behind_link(rtt=1.0, mbit=50) as (_, address):
            _, first, last = await send_and_receive(address, data)
            assert 2.0 <= first <= 2.2  # the handshake, then there and back
            assert len(data) * 8 / 50e6 == pytest.approx(last - 2.0, rel=0.1)

    in_virtual_time(scene)


def test_connections_share_the_rate() -> None:
    async def scene() -> None:
        data = bytes(2_500_000)
        async with echo_behind_link(rtt=0.08, mbit=50) as (_, address):
            times = await asyncio.gather(*(send_and_receive(address, data) for _ in range(4)))
            ends = [last for _, _, last in times]
            assert max(ends) == pytest.approx(4 * len(data) * 8 / 50e6, rel=0.2)
            assert min(ends) > 0.8 * max(ends)

    in_virtual_time(scene)


async def test_a_target_that_is_down_closes_the_client_and_the_link_lives_on() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[:2]
    server.close()
    await server.wait_closed()

    link = Link(("127.0.0.1", 0), target, rtt=0.001, mbit=1000)
    address = await link.start()
    assert await _first_answer(address) == b""
    assert link.counts.refused == 1

    server = await asyncio.start_server(answer, *target)
    assert await _first_answer(address) == b"hello"
    await link.close()
    server.close()


async def _first_answer(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(b"hello")
        return await reader.read(100)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_the_link_as_a_program_says_where_it_listens_counts_and_stops_when_told(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    server = await asyncio.start_server(_discard, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deltad.demo.link", "--listen", "127.0.0.1:0", "--target", f"127.0.0.1:{port}"),
        *("--rtt-ms", "1", "--mbit", "100", "--stats-file", str(stats)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    address = parse_address((await process.stdout.readline()).decode().split()[-1])
    assert await _first_answer(address) == b"gone"
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    counts = {"bytes_to_target": 5, "bytes_from_target": 4, "connections": 1, "refused": 0}
    assert json.loads(stats.read_bytes()) == {"listen": f"{address[0]}:{address[1]}", **counts}
    server.close()


async def _discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(5)
    writer.write(b"gone")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("text", ["", "7700", ":7700", "host:", "host:x", "host:70000", "host:٣"])
def test_an_address_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)
