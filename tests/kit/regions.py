"""Two ends of a relay on loopback: real stores, real servers, real clients, short delays.

async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
    lineage.fill(upstream.store)
    upstream.announcements.announce()
    await downstream.reaches(version)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from aiohttp import web

from deltad.client.messages import RegionReport
from deltad.delta.coding import CODERS
from deltad.delta.record import VersionRecord
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.access import Doorkeeper
from deltad.protocol.pull import PullPolicy
from deltad.relay.pacer import Pacer
from deltad.relay.puller import Puller, PullerPolicy, PullStats
from deltad.relay.server import RelayServer
from deltad.relay.source import Count, Source
from deltad.store.announce import Announcements
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version
from tests.kit.versions import Published

TOKEN = "a-token"
RUN = RunId("policy")
READ = tuple(sorted(CODERS))
"""The coders that a daemon reads, as it tells its upstream."""

QUICK = PullerPolicy(
    pull=PullPolicy(first_delay=0.01, longest_delay=0.05, refused_delay=0.05),
    poll=1.0,
    hello=0.05,
    report=1.0,
    report_gap=0.0,
    stall=0.5,
    connect=5.0,
    first_rest=0.01,
    longest_rest=0.05,
    heartbeat=0.02,
    denied_rest=0.05,
)
"""Tries again at once, so that a test which breaks things a hundred times is over in seconds."""


class Upstream:
    """A store and the relay server on it. `port` stays the same over `stop` and `start`.

    `wrap` may wrap the application, to lie in front of it; `store` is another's, such as a downstream's.
    """

    def __init__(
        self,
        path: Path,
        *,
        token: str = TOKEN,
        limits: Limits = DEFAULT_LIMITS,
        stall_seconds: float = 30.0,
        wrap: Callable[[web.Application], web.Application] = lambda app: app,
        store: Store | None = None,
        heartbeat: Callable[[RunId], bytes | None] = lambda run: None,
    ) -> None:
        self._heartbeat = heartbeat
        self.store = store or Store.open(path)
        self._owned = store is None
        self.announcements = Announcements()
        self.reports: list[RegionReport] = []
        self.token = token
        self.port = 0
        self._limits = limits
        self._stall_seconds = stall_seconds
        self._wrap = wrap
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def publish(self, *versions: Published) -> None:
        for published in versions:
            published.commit_into(self.store)
        self.announcements.announce()

    def _take(self, report: RegionReport) -> None:
        self.reports.append(report)
        self.announcements.announce()

    async def start(self) -> None:
        server = RelayServer(
            self.store,
            daemon="upstream",
            boot="boot-1",
            door=Doorkeeper.of(lambda: self.token),
            announcements=self.announcements,
            on_report=self._take,
            heartbeat=self._heartbeat,
            limits=self._limits,
            stall_seconds=self._stall_seconds,
        )
        self._runner = web.AppRunner(self._wrap(server.app()), access_log=None, shutdown_timeout=2.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Upstream:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if self._owned:
            self.store.close()


class Downstream:
    """A store and a puller that fills it. A `restart` keeps the store."""

    def __init__(
        self,
        path: Path,
        url: str,
        *,
        token: str = TOKEN,
        runs: tuple[str, ...] = (RUN,),
        connections: int = 2,
        policy: PullerPolicy = QUICK,
        limits: Limits = DEFAULT_LIMITS,
        source: Callable[[Count], Source] | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        """`source` makes whom to ask in place of the daemon at `url`, and `pacer` holds bodies to caps."""
        self.store = Store.open(path)
        self.announcements = Announcements()
        self.token = token
        self.committed: list[tuple[VersionRecord, PullStats]] = []
        self.report = RegionReport("downstream", "boot-1", 1)
        self._new = lambda url: Puller(
            self.store,
            url=url,
            token=lambda: self.token,
            source=source,
            pacer=pacer,
            runs=runs,
            connections=connections,
            announcements=self.announcements,
            region_report=lambda: self.report,
            on_committed=lambda record, stats: self.committed.append((record, stats)),
            limits=limits,
            policy=policy,
        )
        self._url = url
        self.puller = self._new(url)
        self._task: asyncio.Task[None] | None = None
        self._restarted = False

    def start(self) -> None:
        self.puller = self._new(self._url)
        self._task = asyncio.create_task(self.puller.run())

    def another(self, url: str) -> Puller:
        """A puller from a further upstream into the same store; the caller runs it."""
        return self._new(url)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            self._restarted = True

    async def reaches(self, version: Version, *, run: RunId = RUN, within: float = 60.0) -> None:
        """Wait until a version is durable here, and `committed` tells so."""

        def held() -> bool | None:
            latest = self.store.run(run).latest()
            told = any(record.run == run and record.version >= version for record, _ in self.committed)
            return True if latest is not None and latest.version >= version and (told or self._restarted) else None

        if await self.announcements.wait_until(held, within) is None:
            raise AssertionError(f"{version} did not arrive: {self.puller.view()}")

    def objects(self) -> set[Digest]:
        """The digests of all objects that are held here."""
        return set(self.store.objects.sizes())

    async def __aenter__(self) -> Downstream:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        self.store.close()
