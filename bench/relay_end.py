"""The ends of a link that is measured, each a process of its own.

    python -m bench.relay_end serve DIR BYTES HOST PORT [CUT_PORT]   chunks as the relay serves them, and one /file
    python -m bench.relay_end pull DIR URL TIMES                     all of them, checked, so many times
    python -m bench.relay_end send BYTES PORT                        bytes on a socket, to every connection
    python -m bench.relay_end receive BYTES PORT                     recv_into and sha256 of them, and nothing else

`serve` cuts connections to CUT_PORT after 8 to 32 MiB each, and prints a line for each cut. Readers print one JSON
object. It may not measure anything but what a reader needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import socket
import sys
import time
from pathlib import Path

from aiohttp import web

from deltad.errors import UnavailableError
from deltad.protocol.access import Doorkeeper, Principal, Right
from deltad.protocol.pull_plan import Kind, Wanted, check_arrival, want
from deltad.relay.client import RelayClient
from deltad.relay.server import RelayServer
from deltad.relay.slots import Slots
from deltad.store.announce import Announcements
from deltad.store.store import Store

TOKEN = "bench"
CHUNK = 8 << 20
CONNECTIONS = 16
_PIECE = 256 << 10


async def serve(directory: Path, size: int, host: str, port: int, cut_port: int | None) -> None:
    """Until it is killed. Prints `ready`."""
    rng = random.Random(1)
    store = Store.open(directory / "store")
    chunks = [rng.randbytes(CHUNK) for _ in range(size // CHUNK)]
    (directory / "chunks").write_text(json.dumps([store.put_chunk(chunk).hex() for chunk in chunks]))
    (directory / "file").write_bytes(b"".join(chunks))
    del chunks

    async def file(request: web.Request) -> web.StreamResponse:
        return web.FileResponse(directory / "file")

    relay = RelayServer(
        store,
        daemon="bench",
        boot="1",
        door=Doorkeeper(lambda: ((TOKEN, Principal("bench", frozenset({Right.READ}))),)),
        announcements=Announcements(),
        on_report=lambda report: None,
    )
    root = web.Application()
    root.router.add_get("/file", file)
    for application, at in ((relay.app(), port), (root, port + 1)):
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, at).start()
    if cut_port is not None:
        await asyncio.start_server(lambda r, w: _cut(r, w, host, port, rng), host, cut_port)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _cut(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int, rng: random.Random
) -> None:
    source, sink = await asyncio.open_connection(host, port)
    left = rng.randrange(8 << 20, 32 << 20)

    async def forth() -> None:
        while data := await reader.read(_PIECE):
            sink.write(data)

    asking = asyncio.create_task(forth())
    try:
        while left > 0 and (data := await source.read(min(_PIECE, left))):
            writer.write(data)
            await writer.drain()
            left -= len(data)
        if left <= 0:
            print("cut", flush=True)
    except ConnectionError:
        pass
    finally:
        asking.cancel()
        sink.transport.abort()
        writer.close()


async def pull(directory: Path, url: str, times: int) -> None:
    """Print, for each time, how long it took, the bytes that came, and the processor's time."""
    wanted = [want(Kind.CHUNK, bytes.fromhex(name), CHUNK) for name in json.loads((directory / "chunks").read_text())]
    slots, received = Slots(CONNECTIONS), 0
    loop = asyncio.get_running_loop()

    def count(some: int) -> None:
        nonlocal received
        received += some
        slots.received(some, loop.time())

    async def one(client: RelayClient, chunk: Wanted) -> None:
        async with slots.turn() as body:
            while len(body) < chunk.size:
                try:
                    await client.fetch(chunk, body, count=lambda some: None)
                except UnavailableError:
                    continue
            data = bytes(body)
        await asyncio.to_thread(check_arrival, chunk, data, url)

    results = []
    async with RelayClient(url, lambda: TOKEN, count=count) as client:
        begun = time.monotonic()
        await client.hello()
        slots.width.measured(time.monotonic() - begun)
        for _ in range(times):
            received, begun, used = 0, time.monotonic(), time.process_time()
            await asyncio.gather(*(one(client, chunk) for chunk in wanted))
            results.append((time.monotonic() - begun, received, time.process_time() - used))
    print(json.dumps({"times": results, "width": slots.width.size}), flush=True)


def send(size: int, port: int) -> None:
    """Prints `ready`."""
    piece = os.urandom(1 << 20)
    with socket.create_server(("127.0.0.1", port)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                for _ in range(size // len(piece)):
                    connection.sendall(piece)


def receive(size: int, port: int) -> None:
    buffer, digest, left = bytearray(1 << 20), hashlib.sha256(), size
    view = memoryview(buffer)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        begun, used = time.monotonic(), time.process_time()
        while left and (came := connection.recv_into(buffer)):
            digest.update(view[:came])
            left -= came
        print(json.dumps({"times": [(time.monotonic() - begun, size - left, time.process_time() - used)]}))


def main(what: str, *arguments: str) -> None:
    match what, arguments:
        case "serve", (directory, size, host, port, *cut):
            asyncio.run(serve(Path(directory), int(size), host, int(port), int(cut[0]) if cut else None))
        case "pull", (directory, url, times):
            asyncio.run(pull(Path(directory), url, int(times)))
        case "send", (size, port):
            send(int(size), int(port))
        case "receive", (size, port):
            receive(int(size), int(port))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
