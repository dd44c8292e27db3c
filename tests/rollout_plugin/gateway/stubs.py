"""Replicas that answer by a script, and a gateway before them, each on real TCP in a thread of this process.

A stub's token i after a prompt is `(length of the prompt + i) % 256`, so that a gap or a token given twice shows.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from deltad.client.messages import (
    FleetView,
    RegionReport,
    RegionView,
    ReplicaReport,
    ReplicaState,
    RunReport,
    VersionInfo,
)
from deltad.errors import ReplicaError
from deltad.types import parse_version
from rollout_plugin.gateway.admission import Admission, Pace
from rollout_plugin.gateway.fleet import Fleet
from rollout_plugin.gateway.metrics import GatewayMetrics
from rollout_plugin.gateway.server import Gateway, Settings
from rollout_plugin.gateway.text import Words
from rollout_plugin.gateway.turns import Turns
from rollout_plugin.gateway.upstream import Replicas
from rollout_plugin.log import Log
from rollout_plugin.messages import GenerateRequest, Refusal, StreamLine

RUN = "policy"


@dataclass
class StubReplica:
    """A replica at `version`. `at_token` is called before each token and may swap, cut, break off, or hold."""

    name: str
    version: str = "v000001"
    staleness: int = 0
    state: ReplicaState = ReplicaState.VERIFIED
    refuses: Refusal | None = None
    at_token: Callable[[StubReplica, int], Any] = lambda stub, token: None
    asked: list[GenerateRequest] = field(default_factory=list)
    left_early: int = 0
    address: str = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=GenerateRequest)
        self.asked.append(asked)
        if self.refuses is not None:
            return web.Response(status=503, body=msgspec.json.encode(self.refuses))
        if asked.min_version and parse_version(self.version) < parse_version(asked.min_version):
            error = ReplicaError("replica", expected=asked.min_version, found=self.version)
            return web.Response(status=409, body=msgspec.json.encode(Refusal(error.kind, str(error), True)))
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await self._say(response, StreamLine(id="x", replica=self.name))
            for token in range(asked.max_new_tokens):
                for sample in range(asked.n):
                    value = (len(asked.prompt_ids) + token) % 256
                    done = self.at_token(self, token)
                    if asyncio.iscoroutine(done):
                        done = await done
                    if done == "cut":
                        assert request.transport is not None
                        request.transport.abort()
                        return response
                    if done == "fence":
                        await self._say(response, StreamLine(error=Refusal("Unavailable", "replica: fenced", True)))
                        return response
                    await self._say(response, StreamLine(sample, (value,), (-0.5,), self.version))
            await self._say(response, StreamLine(ended=(False,) * asked.n))
        except (ConnectionError, asyncio.CancelledError):
            self.left_early += 1
            raise
        await response.write_eof()
        return response

    async def _say(self, response: web.StreamResponse, line: StreamLine) -> None:
        await response.write(msgspec.json.encode(line) + b"\n")

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            self.name, RUN, "bf16", self.state, self.version, "ab" * 32, self.address, staleness=self.staleness
        )


@dataclass
class Stage:
    """Stubs and a gateway before them. `latest` and `sequence` are what the daemon says of the run."""

    stubs: tuple[StubReplica, ...]
    latest: str = "v000001"
    sequence: int = 1
    url: str = ""
    log: io.StringIO = field(default_factory=io.StringIO)
    gateway: Gateway | None = None
    fleet: Fleet | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def view(self) -> FleetView:
        run = RunReport(
            self.latest, "", tuple(stub.report() for stub in self.stubs), (info(self.latest, self.sequence),)
        )
        return FleetView(RUN, self.latest, 0, 0, (RegionView(RegionReport("d", "b", 1, {RUN: run}), 0.0, True),))

    def settled(self, condition: Callable[[], bool]) -> None:
        """Wait until the gateway shows something."""
        deadline = threading.Event()
        for _ in range(3000):
            if condition():
                return
            deadline.wait(0.01)
        raise AssertionError("the gateway never came to what was waited for")


def info(version: str, sequence: int) -> VersionInfo:
    return VersionInfo(
        *(RUN, version, "", "", "", "bf16", "delta", "", "", "", 0.0, 1, 0, 1, 1, 1, 0.0), sequence=sequence
    )


@contextmanager
def staged(
    *stubs: StubReplica,
    pace: Pace | None = None,
    most_running: int = 64,
    most_waiting: int = 64,
    patience: float = 20.0,
    silence: float = 30.0,
    words: Callable[[], Words] | None = None,
    **settings: Any,
) -> Iterator[Stage]:
    """A gateway before these stubs, until the end of the block."""
    stage = Stage(stubs)
    started = threading.Event()
    ended = asyncio.Event()

    async def live() -> None:
        stage.loop = asyncio.get_running_loop()
        async with _serving(stage.stubs):
            fleet = stage.fleet = Fleet(stage.view, variant="bf16", every=0.01, told=lambda trouble: None)
            turns = Turns(
                Admission(most_running=most_running, most_waiting=most_waiting, pace=pace),
                lambda: fleet.roster.sequence,
            )
            replicas = Replicas(connections=256, silence=silence)
            gateway = stage.gateway = Gateway(
                Settings(RUN, patience, **settings),
                fleet=fleet,
                replicas=replicas,
                turns=turns,
                metrics=GatewayMetrics.create(),
                words=words or _no_words,
                log=Log(stage.log),
            )
            runner = web.AppRunner(gateway.app(), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            stage.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            following = asyncio.create_task(_follow(fleet, turns))
            started.set()
            await ended.wait()
            following.cancel()
            await runner.cleanup()
            await replicas.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert started.wait(30)
    if stubs:
        stage.settled(lambda: bool(stage.fleet and stage.fleet.roster.members))
    try:
        yield stage
    finally:
        assert stage.loop is not None
        stage.loop.call_soon_threadsafe(ended.set)
        thread.join(30)


async def _follow(fleet: Fleet, turns: Turns) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fleet.follow())
        while True:
            await fleet.changed(60)
            turns.grant()


def _no_words() -> Words:
    from rollout_plugin.gateway.text import load_words

    return load_words(dict)


@asynccontextmanager
async def _serving(stubs: tuple[StubReplica, ...]) -> AsyncIterator[None]:
    runners = []
    for stub in stubs:
        app = web.Application()
        app.router.add_post("/v1/generate", stub.generate)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    try:
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


def events(body: bytes) -> list[Any]:
    """The events of a streamed answer; the mark of its end is None."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return [None if line == b"[DONE]" else json.loads(line) for line in lines]
