"""The ends of the gateway's bench, each a process: an engine that streams by the clock, and a plain proxy.

    python -m bench.gateway_end engine DIR     a replica's streamed endpoint, and the daemon that tells of it
    python -m bench.gateway_end proxy URL DIR  passes requests and replies through, byte for byte

Each writes its address into `DIR/engine` or `DIR/proxy`. A token's id is the moment at which it was sent, in
microseconds of the system's monotonic clock, so that whoever gets it knows how long it took.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from deltad.client.messages import FleetView, RegionReport, RegionView, ReplicaReport, ReplicaState, RunReport
from rollout_plugin.messages import GenerateRequest, StreamLine

RUN = "bench"
INTERVAL = 0.03
"""Seconds between two tokens of a stream."""


def now() -> int:
    """Microseconds of the clock that all processes of a machine share."""
    return time.monotonic_ns() // 1000


async def _generate(request: web.Request) -> web.StreamResponse:
    asked = msgspec.json.decode(await request.read(), type=GenerateRequest)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    begun = time.monotonic()
    for at in range(asked.max_new_tokens):
        await asyncio.sleep(max(0.0, begun + at * INTERVAL - time.monotonic()))
        line = StreamLine(0, (now(),), (-0.5,), "v000001", "x" if at == 0 else "")
        await response.write(msgspec.json.encode(line) + b"\n")
    await response.write(msgspec.json.encode(StreamLine(ended=(False,))) + b"\n")
    await response.write_eof()
    return response


async def _engine(home: Path) -> None:
    app = web.Application()
    app.router.add_post("/v1/generate", _generate)
    url = await _serve(app)

    async def fleet(request: web.Request) -> web.Response:
        replica = ReplicaReport("r1", RUN, "bf16", ReplicaState.VERIFIED, "v000001", "00" * 32, url)
        report = RegionReport("bench", "b", 1, {RUN: RunReport("v000001", "", (replica,))})
        view = FleetView(RUN, "v000001", 1, 1, (RegionView(report, 0.0, True),))
        return web.Response(body=msgspec.json.encode(view), content_type="application/json")

    daemon = web.Application()
    daemon.router.add_get(f"/v1/runs/{RUN}/fleet", fleet)
    runner = web.AppRunner(daemon, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, str(home / "deltad.sock")).start()
    (home / "engine").write_text(url)


async def _proxy(target: str, home: Path) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def pass_through(request: web.Request) -> web.StreamResponse:
        async with session.post(f"{target}{request.path}", data=await request.read()) as upstream:
            response = web.StreamResponse(status=upstream.status)
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_post("/v1/generate", pass_through)
    (home / "proxy").write_text(await _serve(app))


async def _serve(app: web.Application) -> str:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _live(arguments: list[str]) -> None:
    if arguments[0] == "engine":
        await _engine(Path(arguments[1]))
    else:
        await _proxy(arguments[1], Path(arguments[2]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(_live(sys.argv[1:]))
