"""Buckets as a daemon uses them: keeping its runs there, and pulling others' from there; and the caps on both.

The library behind is imported when the first bucket is configured, and not before. Owns one invariant: whatever a
bucket does, or however long it is gone, the daemon goes on, and so does the twin as soon as the bucket behaves.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import structlog

from deltad.client.messages import RegionReport
from deltad.config import BucketConfig, Config
from deltad.delta.record import VersionRecord
from deltad.errors import DeltadError
from deltad.limits import Limits
from deltad.ops.metrics import Metrics
from deltad.protocol.backoff import Backoff
from deltad.protocol.cadence import Cadence
from deltad.protocol.pacing import Cap
from deltad.relay.pacer import Pacer
from deltad.relay.puller import Puller, PullerPolicy, PullStats
from deltad.store.announce import Announcements
from deltad.store.store import Store
from deltad.types import RunId, Version

log = structlog.get_logger()

FETCHES = 8
"""Objects that are fetched from a bucket at a time, and connections to it."""
LOOK_SECONDS = 30.0
"""How often a twin is compared with the store though nothing was announced: derived edges come and go quietly."""
SWEEP_SECONDS = 600.0
"""The longest time between two sweeps; a shorter grace is swept twice as often as it lasts."""
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
"""Seconds between tries that fail."""


class Home(Protocol):
    """What is asked of the daemon."""

    config: Config
    store: Store
    limits: Limits
    boot: str
    announcements: Announcements
    metrics: Metrics
    pacer: Pacer

    def region_report(self) -> RegionReport: ...

    def on_pulled(self, record: VersionRecord, stats: PullStats) -> None: ...


def make_pacer(config: Config) -> Pacer:
    """The caps of all `[[pace]]` sections."""
    return Pacer([Cap(pace.rate, pace.run, pace.peer, pace.since, pace.until) for pace in config.paces])


def bucket_puller(home: Home, config: BucketConfig, policy: PullerPolicy) -> Puller:
    """Pulls from a bucket as from an upstream. Raises MissingPackageError, or ConfigError for its settings."""
    from deltad.relay.bucket_client import BucketClient
    from deltad.store.bucket.obstore import ObstoreBucket

    bucket = ObstoreBucket(config.url, _settings(config), stall_seconds=policy.stall, connect_seconds=policy.connect)
    return Puller(
        home.store,
        url=config.url,
        source=lambda tell: BucketClient(bucket, count=tell, poll=config.poll, limits=home.limits),
        runs=config.pull,
        connections=FETCHES,
        announcements=home.announcements,
        region_report=home.region_report,
        on_committed=home.on_pulled,
        limits=home.limits,
        # Each look at which runs there are takes a listing, which costs as much as a write.
        policy=replace(policy, hello=max(policy.hello, 5 * config.poll)),
        pacer=home.pacer,
        on_received=lambda received: home.metrics.received(config.url, received),
        on_failure=lambda error: home.metrics.pull_failed(config.url, error),
    )


class Twins:
    """Keeps runs in one bucket for as long as `run` runs. `problem` says what is in the way, in words."""

    def __init__(self, home: Home, config: BucketConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises MissingPackageError, or ConfigError for the bucket's settings."""
        from deltad.store.bucket.obstore import ObstoreBucket
        from deltad.store.bucket.sweep import Sweep
        from deltad.store.bucket.twin import Twin

        self.url = config.url
        self.problem = ""
        self._home = home
        self._config = config
        self._clock = clock
        self._twin = Twin(
            home.store,
            ObstoreBucket(config.url, _settings(config)),
            daemon=home.config.daemon.name,
            boot=home.boot,
            pace=lambda run, size: home.pacer.take(run, config.url, size),
            on_sent=lambda size: home.metrics.put_into_bucket(config.url, size),
        )
        self._sweep = Sweep(self._twin, grace=config.grace, clock=clock)
        self._swept_at: float | None = None
        self._doing: dict[RunId, str] = {}
        self._cadences: dict[RunId, Cadence] = {}
        self._done: dict[RunId, tuple[Version | None, int]] = {}
        self._backoff = Backoff(FIRST_DELAY, LONGEST_DELAY, random.Random())  # noqa: S311 - spreads retries

    async def run(self) -> None:
        """Bring what is new, and sweep now and then, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            troubles = [trouble for run in self._runs() if (trouble := await self._tried(self._advance(run)))]
            troubles += [trouble for trouble in [await self._tried(self._sweep_when_due())] if trouble]
            if troubles:
                self.problem = "; ".join(dict.fromkeys(troubles))
                await asyncio.sleep(self._backoff.failed(loop.time()) - loop.time())
                continue
            self.problem = ""
            self._backoff.succeeded()
            wait = min(LOOK_SECONDS, self._sweeps_every())
            await self._home.announcements.wait_until(lambda: True if self._has_news() else None, wait)

    def activity(self, run: RunId) -> str:
        """What the twin of a run is doing, or suffers from, in words; empty where all is well."""
        cadence = self._cadences.get(run)
        parts = (self._doing.get(run, ""), cadence.remark(f"the link to {self.url}") if cadence else "")
        return "; ".join(part for part in parts if part)

    def _runs(self) -> list[RunId]:
        declared = {run.id for run in self._home.config.runs}
        return [run for run in self._home.store.runs() if self._config.publishes(run, declared=run in declared)]

    def _standing(self, run: RunId) -> tuple[Version | None, int]:
        records = self._home.store.run(run)
        latest = records.latest()
        return None if latest is None else latest.version, records.targets().sequence

    def _has_news(self) -> bool:
        return any(self._standing(run) != self._done.get(run) for run in self._runs())

    async def _advance(self, run: RunId) -> None:
        standing = self._standing(run)
        if standing != self._done.get(run):
            self._doing[run] = f"putting {standing[0]} into {self.url}"
        try:
            advanced = await self._twin.advance(run)
        finally:
            self._doing.pop(run, None)
        self._done[run] = standing
        if advanced is not None:
            self._cadences.setdefault(run, Cadence()).passed_over(advanced.skipped)
            log.info(
                "version_in_bucket",
                run=run,
                bucket=self.url,
                version=str(advanced.newest),
                bytes=advanced.bytes,
                skipped=advanced.skipped,
            )

    def _sweeps_every(self) -> float:
        return min(SWEEP_SECONDS, max(self._config.grace / 2, 1.0))

    async def _sweep_when_due(self) -> None:
        now = self._clock()
        if self._swept_at is None or now - self._swept_at >= self._sweeps_every():
            await self._sweep.run()
            self._swept_at = now

    async def _tried(self, work: Awaitable[None]) -> str:
        """What went wrong with it, in words; so that one run's trouble does not hold up the others."""
        try:
            await work
        except DeltadError as error:
            self._home.metrics.bucket_failed(self.url, error)
            if str(error) not in self.problem:
                log.warning("bucket_trouble", bucket=self.url, kind=error.kind, error=str(error))
            return str(error)
        return ""


def _settings(config: BucketConfig) -> Callable[[], dict[str, str]]:
    return config.credentials_file.read if config.credentials_file else dict
