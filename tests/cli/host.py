"""A daemon for the command line to talk to: the real local API over a real store, with deeds that are only noted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web
from structlog.testing import capture_logs

from deltad.client.messages import (
    ExportReply,
    ExportRequest,
    PublishReply,
    PublishRequest,
    RegionReport,
    RunReport,
    StatusView,
    VerifyReply,
    VerifyRequest,
)
from deltad.daemon.describe import describe
from deltad.daemon.notes import Note
from deltad.local.binding import bind_unix_socket
from deltad.local.fleet import Fleet
from deltad.local.server import LocalServer
from deltad.store.announce import Announcements
from deltad.store.store import Store
from deltad.types import RunId
from tests.cli.terminal import Deltad, Ended
from tests.kit.operations import MemoryOperations, status_view
from tests.kit.versions import Lineage


class NotingOperations(MemoryOperations):
    """Answers from memory and keeps what it was asked.

    `found_root`, when set, is what a verify finds. `hold_publish`, when set, is awaited by a publish, during
    which the daemon says that it does `activity`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.published: list[PublishRequest] = []
        self.exported: list[ExportRequest] = []
        self.found_root = ""
        self.wrong_tensors: tuple[str, ...] = ()
        self.hold_publish: asyncio.Event | None = None
        self.activity = ""

    async def publish(self, run: RunId, request: PublishRequest) -> PublishReply:
        self.published.append(request)
        if self.hold_publish is not None:
            await self.hold_publish.wait()
        return await super().publish(run, request)

    async def export(self, run: RunId, request: ExportRequest) -> ExportReply:
        self.exported.append(request)
        return await super().export(run, request)

    async def verify(self, run: RunId, request: VerifyRequest) -> VerifyReply:
        reply = await super().verify(run, request)
        if not self.found_root:
            return reply
        return msgspec.structs.replace(reply, found=self.found_root, match=False, wrong_tensors=self.wrong_tensors)

    def status(self) -> StatusView:
        self._maybe_refuse()
        runs = {
            str(run): RunReport(held[-1].version if held else "", self.activity, versions=tuple(held))
            for run, held in self.held.items()
        }
        return status_view(region=RegionReport("a", "boot-1", 1, runs))


@dataclass(frozen=True, slots=True)
class Host:
    """A host with a daemon on it. Awaiting it runs a command there, beside the daemon's event loop."""

    socket: Path
    store: Store
    operations: NotingOperations
    command: Deltad

    async def deltad(self, *arguments: object) -> Ended:
        """`deltad ARGUMENTS… --socket …` with this daemon's socket."""
        return await asyncio.to_thread(self.command, *arguments, "--socket", self.socket)

    def hold(self, lineage: Lineage) -> None:
        """Make all versions of a lineage durable here."""
        lineage.fill(self.store)
        self.describe(RunId(lineage.run), lineage.versions[0].layout.weight_bytes)

    def describe(self, name: RunId, weight_bytes: int) -> None:
        """Know all versions of a run that the store holds."""
        run = self.store.run(name)
        self.operations.held[name] = [describe(run, record, weight_bytes, Note()) for record in run.records()]


@asynccontextmanager
async def serving(home: Path, command: Deltad) -> AsyncIterator[Host]:
    """A daemon without any run, until the block ends."""
    store = Store.open(home / "store")
    host = Host(home / "d.sock", store, NotingOperations(), command)
    server = LocalServer(store, host.operations, Fleet("a", "boot-1"), Announcements())
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, bind_unix_socket(host.socket)).start()
        # The daemon shares this process with the command, whose output its log must not mix with.
        with capture_logs():
            yield host
    finally:
        await runner.cleanup()
        store.close()
