"""A daemon's `Operations` over plain memory, and a whole local API on a real Unix socket around it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from deltad.client import Client
from deltad.client.messages import (
    CollectReply,
    CollectRequest,
    Decided,
    Explanation,
    ExportReply,
    ExportRequest,
    NextReply,
    PinInfo,
    PinReply,
    PlanReply,
    PublishReply,
    PublishRequest,
    RegionReport,
    StatusView,
    Step,
    Target,
    TargetReply,
    TargetRequest,
    TargetsReply,
    VerifyReply,
    VerifyRequest,
    VersionInfo,
)
from deltad.delta.encoding import sha256
from deltad.errors import NotFoundError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.local.binding import bind_unix_socket
from deltad.local.fleet import Fleet
from deltad.local.server import LocalServer
from deltad.store.announce import Announcements
from deltad.store.store import Store
from deltad.types import RunId, Variant, Version, parse_version

T = TypeVar("T")

RUN = RunId("policy")


def root_for(number: int) -> str:
    """The root that `version_info` gives the version of this number, in hex."""
    return sha256(f"root {number}".encode()).hex()


def version_info(number: int, *, run: str = RUN, epoch: int = 1) -> VersionInfo:
    """A plausible description of a version."""
    return VersionInfo(
        run=run,
        version=str(Version(epoch, number)),
        parent=str(Version(epoch, number - 1)) if number > 1 else "",
        identity="",
        source=f"/checkpoints/step_{number}",
        variant="bf16",
        kind="delta" if number > 1 else "anchor",
        reason="",
        root=root_for(number),
        layout=sha256(b"layout").hex(),
        density=0.004,
        elements=1000,
        changed=4,
        full_bytes=2000,
        delta_bytes=12,
        chunks=1,
        created=1_700_000_000.0 + number,
    )


class MemoryOperations:
    """Implements `deltad.local.operations.Operations`: versions are what was added or published.

    A run is known once it was declared. `refusal`, when set, is what the next deed raises.
    """

    def __init__(self, *runs: RunId) -> None:
        self.held: dict[RunId, list[VersionInfo]] = {run: [] for run in runs}
        self.refusal: Exception | None = None
        self.dropped: list[str] = []
        self.collected: list[CollectRequest] = []
        self.moved: list[tuple[TargetRequest, str]] = []
        """What was asked of the target, and by whom."""
        self.standing: TargetsReply | None = None
        """What is told of the target; by default that nothing was ever said."""
        self.move_reply: TargetReply | None = None

    def add(self, *numbers: int, run: RunId = RUN) -> None:
        """Versions become durable."""
        self.held.setdefault(run, []).extend(version_info(number, run=run) for number in numbers)

    async def publish(self, run: RunId, request: PublishRequest) -> PublishReply:
        self._maybe_refuse()
        trailing = re.search(r"[0-9]+$", request.directory)
        number = request.number if request.number is not None else int(trailing[0]) if trailing else None
        if number is None:
            raise UsageError(f"directory {request.directory}", expected="a name that ends with a number")
        for info in self.versions(run):
            if info.version == str(Version(1, number)):
                return PublishReply(info, already=True)
        self.add(number, run=run)
        return PublishReply(self.held[run][-1], already=False)

    async def pull(self, run: RunId, wait: float) -> VersionInfo | None:
        self._maybe_refuse()
        versions = self.versions(run)
        return versions[-1] if versions else None

    async def export(self, run: RunId, request: ExportRequest) -> ExportReply:
        self._maybe_refuse()
        info = self._version(run, request.version)
        directory = request.directory or f"/exports/{request.replica}/{info.version}"
        return ExportReply(directory, info.version, info.root)

    async def verify(self, run: RunId, request: VerifyRequest) -> VerifyReply:
        self._maybe_refuse()
        info = self._version(run, request.version)
        return VerifyReply(info.version, info.root, info.root, True, 1)

    async def pin(self, run: RunId, version: Version, by: str, why: str) -> PinReply:
        return self._set_pin(run, version, PinInfo(by, why, 1_700_000_000.0))

    async def unpin(self, run: RunId, version: Version) -> PinReply:
        return self._set_pin(run, version, None)

    def _set_pin(self, run: RunId, version: Version, pin: PinInfo | None) -> PinReply:
        self._maybe_refuse()
        info = self._version(run, str(version))
        held = self.held[run]
        held[held.index(info)] = msgspec.structs.replace(info, pin=pin)
        return PinReply(info.version, pin, changed=info.pin != pin)

    async def collect(self, request: CollectRequest) -> CollectReply:
        self._maybe_refuse()
        self.collected.append(request)
        versions = tuple(
            Explanation(f"{run}/{info.version}", info.delta_bytes, info is held[-1], "because")
            for run, held in self.held.items()
            for info in held
        )
        objects = (Explanation("object " + "0" * 64, 7, False, "led nowhere"),)
        return CollectReply(versions, objects, kept_objects=3, dropped_objects=1, dropped_bytes=7)

    async def move_target(self, run: RunId, request: TargetRequest, by: str) -> TargetReply:
        self._maybe_refuse()
        self.moved.append((request, by))
        versions = self.versions(run)
        latest = versions[-1].version if versions else ""
        target = Target(request.version or latest, request.fleet, by, request.why, 1_700_000_000.0, "a", 1)
        return self.move_reply or TargetReply(run, target, latest, changed=True)

    async def plan(self, run: RunId) -> PlanReply:
        self.versions(run)
        decided = (
            Decided("bf16", "fold v000001 → v000003", "2 versions on the ladder"),
            Decided("bf16", "cut an anchor of v000003", "joining takes too much", "no work is left"),
        )
        return PlanReply(run, decided, "", 1 << 20, 3 << 20)

    def targets(self, run: RunId) -> TargetsReply:
        self.versions(run)
        return self.standing or TargetsReply(run)

    def versions(self, run: RunId) -> list[VersionInfo]:
        if run not in self.held:
            raise NotFoundError(f"run {run}", found="not declared or held here")
        return self.held[run]

    def next_for(self, run: RunId, variant: Variant, served: Version | None) -> NextReply | None:
        versions = self.versions(run)
        newer = [info for info in versions if served is None or parse_version(info.version) > served]
        if not newer:
            return None
        if served is None or str(served) not in [info.version for info in versions]:
            return NextReply(newer[-1].version, reload=True)
        chain = versions[-len(newer) - 1 :]
        steps = tuple(
            Step(target.version, target.root, base.version, base.root, sha256(target.version.encode()).hex())
            for base, target in zip(chain, newer, strict=False)
        )
        return NextReply(newer[-1].version, steps)

    def drop_export(self, replica: str) -> None:
        self.dropped.append(replica)

    def status(self) -> StatusView:
        self._maybe_refuse()
        return status_view()

    def _version(self, run: RunId, version: str) -> VersionInfo:
        for info in reversed(self.versions(run)):
            if not version or info.version == str(parse_version(version)):
                return info
        raise NotFoundError(f"{run}/{version or 'latest'}", found="not held here")

    def _maybe_refuse(self) -> None:
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal


def status_view(**changes: object) -> StatusView:
    """The status of an idle daemon, with changes."""
    view = StatusView(
        daemon="a",
        boot="boot-1",
        version="0.1.0",
        backend="numpy",
        backend_reason="as configured",
        uptime=12.5,
        ready=True,
        reasons=(),
        store="/store",
        store_bytes=10,
        free_bytes=20,
        region=RegionReport("a", "boot-1", 0),
        upstreams=(),
        regions=(),
    )
    return msgspec.structs.replace(view, **changes)


class ObservedAnnouncements(Announcements):
    """Announcements that tell a test when someone has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Condition()
        self._waiting = 0

    async def wait_until(self, answer: Callable[[], T | None], timeout: float) -> T | None:
        async with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            return await super().wait_until(answer, timeout)
        finally:
            async with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    async def someone_waits(self, count: int = 1) -> None:
        """Returns once `count` callers wait; each of them has asked, or asks before anything else runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting >= count)


class ListeningFleet(Fleet):
    """A fleet that tells a test of every sign of life."""

    signs = 0
    sign: asyncio.Event | None = None

    def heard(self, replica: str, now: float) -> None:
        super().heard(replica, now)
        self.signs += 1
        if self.sign is not None:
            self.sign.set()


@dataclass
class LocalDaemon:
    """All that stands behind one local API, and a client of it."""

    socket: Path
    store: Store
    operations: MemoryOperations
    fleet: ListeningFleet
    announcements: ObservedAnnouncements
    clock: Callable[[], float]
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.socket)

    async def ask(self, call: Callable[..., T], /, *arguments: object, **options: object) -> T:
        """Call the synchronous client while this loop serves it."""
        return await asyncio.to_thread(call, *arguments, **options)

    def add(self, *numbers: int, run: RunId = RUN) -> None:
        """Versions become durable, and everyone is told."""
        self.operations.add(*numbers, run=run)
        self.announcements.announce()


@asynccontextmanager
async def serve_locally(
    home: Path,
    *,
    limits: Limits = DEFAULT_LIMITS,
    quiet_for: float = 120.0,
    progress_seconds: float = 30.0,
) -> AsyncIterator[LocalDaemon]:
    """Serve a `MemoryOperations` that knows the run `policy` on `home/deltad.sock`."""
    store = Store.open(home / "store")
    clock = asyncio.get_running_loop().time
    fleet = ListeningFleet("a", "boot-1", quiet_for=quiet_for, limits=limits)
    daemon = LocalDaemon(home / "deltad.sock", store, MemoryOperations(RUN), fleet, ObservedAnnouncements(), clock)
    server = LocalServer(
        store,
        daemon.operations,
        fleet,
        daemon.announcements,
        limits,
        clock=clock,
        progress_seconds=progress_seconds,
    )
    runner = web.AppRunner(server.app(), access_log=None, lingering_time=0, shutdown_timeout=10)
    await runner.setup()
    try:
        await web.SockSite(runner, bind_unix_socket(daemon.socket)).start()
        yield daemon
    finally:
        await runner.cleanup()
        store.close()
