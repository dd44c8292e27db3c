"""A slow link between two regions: a TCP proxy with a round-trip time and a rate limit.

It runs as a process of its own (`python -m deltad.demo.link`), so that it shares no event loop with what it
delays. It may not look into the bytes. Its invariant: bytes leave in the order in which they came, never
faster than the rate over all connections of a direction together, never earlier than half a round trip after
they left the rate limit; and no number of bytes under way makes the rate lower than that.

What it does not imitate: loss, and the window of a single long-distance TCP stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 16 * 1024
"""What is read at once: at 50 Mbit/s it takes 2.6 ms, and no connection waits longer than that for another one."""

_QUEUE_PIECES = 1024
_STATS_SECONDS = 0.25


class Passage(NamedTuple):
    """When a piece has passed the rate limit, and when it comes out at the far end."""

    departs: float
    arrives: float


class Lane:
    """One direction of the link: a token bucket that all connections share, then a delay. Does no IO.

    `rate` in bytes per second, `delay` in seconds. The bucket holds 20 ms of the rate (at least two pieces),
    so that a late wake-up does not cost throughput. Times are on any monotonic clock.
    """

    def __init__(self, *, rate: float, delay: float) -> None:
        self.delay = delay
        self.rate = rate
        self.burst = max(0.02 * rate, 2.0 * PIECE_BYTES)
        self.carried = 0
        self._empty_until = -math.inf

    def send(self, count: int, now: float) -> Passage:
        """Book `count` bytes that are offered `now`; they are behind all that was booked before."""
        # `_empty_until` is when the debt of all earlier pieces is paid; a full bucket is `burst` bytes of credit.
        paid = max(self._empty_until, now - self.burst / self.rate) + count / self.rate
        self._empty_until = paid
        self.carried += count
        departs = max(paid, now)
        return Passage(departs, departs + self.delay)


@dataclass(slots=True)
class Counts:
    """Connections taken, and those closed because the target did not answer."""

    connections: int = 0
    refused: int = 0


class Link:
    """The proxy: forwards every connection on `listen` to `target`, both as (host, port).

    `rtt` in seconds, `mbit` in 10^6 bits per second for each direction.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], *, rtt: float, mbit: float) -> None:
        self._listen = listen
        self._target = target
        self._rtt = rtt
        rate = mbit * 1e6 / 8
        self.to_target = Lane(rate=rate, delay=rtt / 2)
        self.from_target = Lane(rate=rate, delay=rtt / 2)
        self.counts = Counts()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._queue_pieces = max(_QUEUE_PIECES, math.ceil(2 * rate * rtt / PIECE_BYTES))

    async def start(self) -> tuple[str, int]:
        """Listen; returns the address with the real port. Raises OSError where that is not possible."""
        self._server = await asyncio.start_server(self._accept, *self._listen, limit=4 * PIECE_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Stop listening and cut all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def stats(self) -> dict[str, int]:
        """What was carried so far, per direction, in bytes."""
        return {
            "bytes_to_target": self.to_target.carried,
            "bytes_from_target": self.from_target.carried,
            "connections": self.counts.connections,
            "refused": self.counts.refused,
        }

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.counts.connections += 1
        try:
            await self._forward(reader, writer)
        except* OSError:
            pass  # either end went away: the finally below cuts the other one
        except* asyncio.CancelledError:
            pass  # by `close`, and nobody awaits this task but `close`
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A handshake over the real link takes a round trip before the first byte may follow.
        await asyncio.sleep(self._rtt)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=4 * PIECE_BYTES)
        except OSError:
            self.counts.refused += 1
            raise
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, far_writer, self.to_target))
                both.create_task(self._carry(far_reader, writer, self.from_target))
            for end in (far_writer, writer):
                end.close()  # unlike abort, this sends what is still buffered
                await end.wait_closed()
        finally:
            far_writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: Lane) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self._queue_pieces)
        async with asyncio.TaskGroup() as ends:
            ends.create_task(_take(reader, lane, under_way))
            ends.create_task(_deliver(writer, under_way))


async def _take(reader: asyncio.StreamReader, lane: Lane, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
    while piece := await reader.read(PIECE_BYTES):
        passage = lane.send(len(piece), _now())
        await _sleep_until(passage.departs)
        await under_way.put((passage.arrives, piece))
    await under_way.put((_now() + lane.delay, b""))


async def _deliver(writer: asyncio.StreamWriter, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
    while True:
        arrives, piece = await under_way.get()
        await _sleep_until(arrives)
        if not piece:
            break
        writer.write(piece)
        await writer.drain()
    await writer.drain()
    writer.write_eof()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _sleep_until(moment: float) -> None:
    if (wait := moment - _now()) > 0:
        await asyncio.sleep(wait)


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {text!r}: expected host:port")
    return host, int(port)


async def _serve(link: Link, stats_file: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    host, port = await link.start()
    print(f"link listens on {host}:{port}", flush=True)
    written: dict[str, int] | None = None
    while True:
        if stats_file is not None and (stats := link.stats()) != written:
            _write_atomically(stats_file, json.dumps({"listen": f"{host}:{port}", **stats}))
            written = stats
        if stop.is_set():
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _STATS_SECONDS)
    await link.close()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    """The command line of `python -m deltad.demo.link`."""
    parser = argparse.ArgumentParser(prog="python -m deltad.demo.link", description="A slow link, as a TCP proxy.")
    parser.add_argument("--listen", type=parse_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--target", type=parse_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--rtt-ms", type=float, default=80.0, help="round-trip time (default 80)")
    parser.add_argument("--mbit", type=float, default=50.0, help="10^6 bit/s for each direction (default 50)")
    parser.add_argument("--stats-file", type=Path, help="where the byte counts are kept, as JSON")
    options = parser.parse_args(arguments)
    if options.rtt_ms < 0 or options.mbit <= 0:
        parser.error("--rtt-ms must not be negative, and --mbit must be above 0")
    link = Link(options.listen, options.target, rtt=options.rtt_ms / 1000, mbit=options.mbit)
    try:
        asyncio.run(_serve(link, options.stats_file))
    except OSError as error:
        print(f"link on {options.listen[0]}:{options.listen[1]}: {error}", file=sys.stderr)
        return 69
    return 0


if __name__ == "__main__":
    sys.exit(main())
