"""One daemon: its runs, what feeds them and what serves them. Implements the port of the local API.

All methods belong to the event loop's thread. What blocks goes to worker threads through `Versions`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import msgspec
import structlog

import deltad
from deltad.client.handover import HandedOver, HandOver, HandOverReply, JoinReply, JoinRequest
from deltad.client.messages import (
    CollectReply,
    CollectRequest,
    ExportReply,
    ExportRequest,
    NextReply,
    PinReply,
    PlanReply,
    PublishReply,
    PublishRequest,
    RegionReport,
    Seconds,
    StatusView,
    Target,
    TargetReply,
    TargetRequest,
    TargetsReply,
    UpstreamView,
    VerifyReply,
    VerifyRequest,
    VersionInfo,
)
from deltad.config import Config
from deltad.daemon.buckets import Twins, bucket_puller, make_pacer
from deltad.daemon.chores import Chores
from deltad.daemon.deriving import Deriving
from deltad.daemon.fencing import WatchFence
from deltad.daemon.handing import HandOvers
from deltad.daemon.heartbeats import Heartbeats
from deltad.daemon.hotloads import make_hot_loads
from deltad.daemon.keeping import Keeper, collect_reply
from deltad.daemon.leading import Lead
from deltad.daemon.notes import Note
from deltad.daemon.origin import Handed, Origin, Published, PublishOptions
from deltad.daemon.remarks import Remarks
from deltad.daemon.scrubbing import Scrubbing
from deltad.daemon.staleness import Staleness
from deltad.daemon.store_size import StoreSize
from deltad.daemon.targets import move, target_of, targets_reply
from deltad.daemon.trusting import doubts_in_words, sift_stored, trust_list
from deltad.daemon.versions import Versions
from deltad.delta.backend.choice import Candidates, candidates, probe
from deltad.delta.backend.fallback import Switch
from deltad.delta.keys import PublicKey
from deltad.delta.record import VersionRecord
from deltad.delta.threads import default_threads
from deltad.errors import DeltadError, NotFoundError, UsageError
from deltad.figures import size
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.local.fleet import Fleet, Standing
from deltad.ops.history import History
from deltad.ops.metrics import Metrics
from deltad.protocol.cadence import Cadence
from deltad.protocol.mode import AUTO, ModeChoice, choose_mode
from deltad.protocol.pull import PullPolicy
from deltad.relay.client import ClientTls
from deltad.relay.puller import Puller, PullerPolicy, PullStats
from deltad.store.announce import Announcements
from deltad.store.mirror import Mirror
from deltad.store.pins import Pin
from deltad.store.rederive import Rederiver
from deltad.store.store import Store
from deltad.types import RunId, Variant, Version, VersionId, parse_daemon_name, parse_run, parse_version

log = structlog.get_logger()

_TRAILING_NUMBER = re.compile(r"([0-9]{1,15})\Z")


class Node:
    """Holds a daemon's state for as long as it runs. Implements `deltad.local.operations.Operations`."""

    def __init__(
        self, config: Config, store: Store, *, limits: Limits = DEFAULT_LIMITS, backends: Candidates | None = None
    ) -> None:
        """Opens and measures backends, which blocks. `backends` are those of this build, unless given."""
        self.config = config
        self.store = store
        self.limits = limits
        self.boot = uuid.uuid4().hex
        choice = probe(
            config.backend.kind,
            backends or candidates(config.backend.device, config.backend.memory_limit),
            clock=time.monotonic,
            on_switch=self.on_switch,
        )
        self.backend, self.backend_reason = choice.backend, choice.reason
        self.threads = config.backend.threads or default_threads()
        self._key = config.signing.key_file.read() if config.signing else None
        self.trust = trust_list(config)
        sift_stored(store, config, self.trust, self._public_key)
        self.announcements = Announcements()
        self.metrics = Metrics.create(deltad.__version__)
        self.metrics.backend(self.backend.name, self.backend_reason)
        self.fleet = Fleet(config.daemon.name, self.boot, limits=limits, on_report=self.metrics.replica_reported)
        self.heartbeats = Heartbeats(store, tuple(run.id for run in config.runs), self._key)
        self._tls = {u.url: ClientTls(u.tls, u.name) for u in config.upstreams if u.tls is not None}
        self.pacer = make_pacer(config)
        self.pullers = [self._puller(i) for i in range(len(config.upstreams))]
        self.pullers += [
            bucket_puller(self, bucket, PullerPolicy(PullPolicy(trust=self.trust)))
            for bucket in config.buckets
            if bucket.pull
        ]
        self.twins = [Twins(self, bucket) for bucket in config.buckets if bucket.publish]
        self.unwell: dict[str, str] = {}
        """Parts that are not well now, each with the reason, for readiness."""
        self.remarks = Remarks()
        self.activities: dict[RunId, str] = {}
        self.fences = {watch.run: WatchFence(store.run(watch.run), watch) for watch in config.watches}
        for fence in self.fences.values():
            fence.settle()
        self._cadences: dict[RunId, Cadence] = {}
        self._runs: dict[RunId, Versions] = {}
        self._origins: dict[RunId, Origin] = {}
        self._started = time.monotonic()
        self.store_size = StoreSize(store)
        self.keeper = Keeper(store, config)
        self.scrubbing = Scrubbing(
            store, config.scrub, self.metrics, self.pullers, mirrors=self._mirrors, rederiver=self._rederiver
        )
        self.deriving = Deriving(store, config, self.metrics)
        self.chores = Chores(self)
        self.history = History()
        self._staleness = Staleness(config.metrics.stale_after if config.metrics else 0.0, time.monotonic)
        self.hot_loads = make_hot_loads(self)
        self._handovers = HandOvers(store, self.backend, self)
        self._leads = {lead.run: Lead(lead, limits) for lead in config.leads}

    @property
    def _public_key(self) -> PublicKey | None:
        return self._key.public if self._key else None

    def take_up(self, config: Config) -> None:
        """Trust whom a reloaded configuration trusts, and show upstreams the certificates that lie there now.

        Blocks; called in a worker thread. Raises ConfigError.
        """
        for upstream in config.upstreams:
            if upstream.tls is not None and upstream.url in self._tls:
                self._tls[upstream.url].renew(upstream.tls)
        for lead in config.leads:
            if lead.run in self._leads:
                self._leads[lead.run].tls.renew(lead.tls)
        self.trust.replace(trust_list(config))
        sift_stored(self.store, self.config, self.trust, self._public_key)

    def look_again(self) -> None:
        """What is believed may have changed: pull what is lacking now, and let whoever waits for a version look."""
        for puller in self.pullers:
            puller.look_again()
        self.announcements.announce()

    # Runs.

    def versions_of(self, run: RunId) -> Versions:
        """Raises NotFoundError for a run that is neither declared nor held nor pulled."""
        if run not in self._runs:
            known = run in self.store.runs() or self.config.run(run) is not None or self._is_named(run)
            if not known:
                raise NotFoundError(
                    f"run {run}",
                    expected="one that is declared in a [[run]], or pulled",
                    found=", ".join(self.store.runs()) or "no run",
                )
            self._runs[run] = Versions(
                self.store,
                run,
                self.backend,
                daemon=self.config.daemon.name,
                key=self._key,
                shares=self._key is not None or not self.trust.demands(run),
                threads=self.threads,
                on_change=self.announcements.announce,
            )
        return self._runs[run]

    def runs(self) -> list[RunId]:
        """All runs that are declared or held, in order of their names."""
        return sorted({*self.store.runs(), *(run.id for run in self.config.runs)})

    def _is_named(self, run: RunId) -> bool:
        return self.config.names(run)

    def origin(self, run: RunId) -> Origin:
        """The one writer of a declared run. Raises UsageError for a run that is pulled, not published."""
        if run not in self._origins:
            declared = self.config.run(run)
            if declared is None:
                raise UsageError(
                    f"run {run}", expected="a [[run]] declared in this daemon's configuration", found="none"
                )
            watch = next((watch for watch in self.config.watches if watch.run == run), None)
            publish_as = watch.publish_as if watch else "source"
            mirror = self.versions_of(run).mirror(declared.variant)
            self._origins[run] = Origin(
                self.store,
                run,
                declared.variant,
                self.backend,
                publish_as=publish_as,
                mirror=mirror,
                key=self._key,
                threads=self.threads,
            )
        return self._origins[run]

    async def publish_checkpoint(
        self, run: RunId, directory: Path, number: int, **how: Unpack[PublishOptions]
    ) -> PublishReply:
        """Publish and tell everyone. Raises what `Origin.publish` raises."""
        versions = self.versions_of(run)
        fence = self.fences.get(run)
        try:
            self.activities[run] = f"encoding {directory.name}"
            how = {"coding": self.coding(run), **how}
            if fence is not None and fence.holds(directory):
                how["opens"] = fence.opens
            published = await versions.publish(self.origin(run), directory, number, **how)
        except DeltadError:
            if fence is not None:
                await asyncio.to_thread(fence.settle)
            raise
        finally:
            self.activities.pop(run, None)
        return self._on_published(versions, published)

    async def publish_handed(
        self, run: RunId, handed: Handed, number: int, **how: Unpack[PublishOptions]
    ) -> PublishReply:
        """Publish what ranks handed over, and tell everyone. Raises what `Origin.publish_handed` raises."""
        versions = self.versions_of(run)
        return self._on_published(versions, await versions.publish_handed(self.origin(run), handed, number, **how))

    def refused(self, run: RunId, error: DeltadError) -> None:
        """What was to be published made no version: counted, and told in the status until there is a newer one."""
        self.metrics.checkpoint_refused(run, error)
        self.remarks.refused(run, error, self.latest(run))

    def named(self, run: RunId, text: str) -> Version:
        """See `Versions.named`."""
        return self.versions_of(run).named(text)

    def latest(self, run: RunId) -> Version | None:
        """The newest version of a run that is held or declared."""
        record = self.versions_of(run).records.latest()
        return None if record is None else record.version

    def _on_published(self, versions: Versions, published: Published) -> PublishReply:
        info = versions.info(published.record.version)
        if not published.already:
            self._staleness.came(versions.run)
            self.store_size.came(info.delta_bytes)
            self.metrics.published(info)
            log.info(
                "version_published",
                run=versions.run,
                version=info.version,
                kind=info.kind,
                bytes=info.delta_bytes,
                coder=info.coder,
                coder_reason=info.coder_reason,
            )
            self.announcements.announce()
        return PublishReply(version=info, already=published.already)

    def coding(self, run: RunId) -> ModeChoice:
        """How a delta of a declared run is to be coded now, and why."""
        declared = self.config.run(run)
        readers = self.fleet.readers(run, time.monotonic())
        return choose_mode(declared.coder if declared else AUTO, readers, threads=self.threads)

    def on_pulled(self, record: VersionRecord, stats: PullStats) -> None:
        """A version has come from an upstream and is durable."""
        cadence = self._cadences.setdefault(RunId(record.run), Cadence())
        self.metrics.passed_over(record.run, cadence.arrived(record.sequence, stats.newest))
        versions = self.versions_of(RunId(record.run))
        versions.note(record.version, Note(Seconds(transfer=stats.seconds), pulled_bytes=stats.bytes))
        info = versions.info(record.version)
        self.store_size.came(info.delta_bytes)
        self.metrics.pulled(info)
        self._staleness.came(versions.run)
        self.announcements.announce()

    # The port of the local API.

    async def publish(self, run: RunId, request: PublishRequest) -> PublishReply:
        directory = Path(request.directory)
        if not directory.is_absolute():
            raise UsageError(f"directory {request.directory[:200]!r}", expected="an absolute path")
        if not await asyncio.to_thread(directory.exists):
            raise NotFoundError(f"{directory}", expected="a checkpoint directory", found="nothing of that name")
        number = self._number(run, directory) if request.number is None else request.number
        if number < 0:
            raise UsageError(f"version number {number}", expected="0 or more")
        how: PublishOptions = {"identity": request.identity, "new_epoch": request.new_epoch, "epoch": request.epoch}
        if (base := _begins_from(run, request, self.versions_of(run).named)) is not None:
            how["begin_from"] = base
        return await self.publish_checkpoint(run, directory, number, **how)

    async def join(self, run: RunId, request: JoinRequest) -> JoinReply:
        if lead := self._leads.get(run):
            return await lead.join(run, request)
        return await self._handovers.join(run, request)

    async def hand_over(
        self, run: RunId, head: HandOver, chunks: AsyncIterator[bytes], tail: Callable[[], Awaitable[HandedOver]]
    ) -> HandOverReply:
        lead = self._leads.get(run)
        reply = await (lead or self._handovers).hand_over(run, head, chunks, tail)
        if head.rank == 0 and lead is None:
            self.metrics.publishes_skipped_for(run, head.skipped)
        return reply

    async def pull(self, run: RunId, wait: float) -> VersionInfo | None:
        pullers = [puller for puller in self.pullers if puller.follows(run)]
        if not pullers:
            raise UsageError(
                f"run {run}", expected="an [[upstream]] or [[bucket]] that brings it", found="none in the configuration"
            )
        await asyncio.gather(*(puller.pull_once(run, wait) for puller in pullers))
        return self.versions_of(run).latest()

    async def export(self, run: RunId, request: ExportRequest) -> ExportReply:
        versions = self.versions_of(run)
        target = self._target(run)
        version = self._version(versions, request.version or (target.version if target else ""))
        if not request.replica and not request.directory:
            raise UsageError("an export", expected="a directory, or the replica that it is for", found="neither")
        variant = None
        if request.replica:
            variant = Variant(self.fleet.registration(request.replica).variant)
        directory = Path(request.directory)
        if not request.directory:
            await asyncio.to_thread(self.drop_export, request.replica)
            directory = self.store.exports() / request.replica / str(version)
        if (how := request.disk_delta) is not None:
            base = parse_version(how.base) if how.base else None
            root = await versions.export_disk_delta(version, base, directory, how.encoding, how.checksum)
        else:
            root = await versions.export(version, variant, directory)
        return ExportReply(directory=str(directory), version=str(version), root=root)

    async def verify(self, run: RunId, request: VerifyRequest) -> VerifyReply:
        versions = self.versions_of(run)
        return await versions.verify(self._version(versions, request.version))

    async def pin(self, run: RunId, version: Version, by: str, why: str) -> PinReply:
        reply = await self.versions_of(run).pin(version, Pin(by, why, time.time()))
        if reply.changed:
            log.info("version_pinned", run=run, version=str(version), by=by, why=why)
        return reply

    async def unpin(self, run: RunId, version: Version) -> PinReply:
        reply = await self.versions_of(run).unpin(version)
        if reply.changed:
            log.info("version_unpinned", run=run, version=str(version))
        return reply

    async def move_target(self, run: RunId, request: TargetRequest, by: str) -> TargetReply:
        records = self.versions_of(run).records
        reply = await asyncio.to_thread(move, records, self.config, request, by=by, now=time.time())
        if reply.changed:
            said = msgspec.structs.asdict(request)
            log.info("target_moved", run=run, by=by, target=reply.target.version if reply.target else "newest", **said)
            self.announcements.announce()
        heard = not request.fleet or request.fleet in self.fleet.daemons()
        return msgspec.structs.replace(reply, heard=heard)

    def targets(self, run: RunId) -> TargetsReply:
        return targets_reply(self.versions_of(run).records, self.config.daemon.name)

    def _target(self, run: RunId) -> Target | None:
        return target_of(self.versions_of(run).records, self.config.daemon.name)

    async def collect(self, request: CollectRequest) -> CollectReply:
        self.chores.renew_leases(time.monotonic())
        collected = await self.keeper.collect(dry_run=request.dry_run)
        self.chores.forget_gone()
        return collect_reply(collected)

    def versions(self, run: RunId) -> list[VersionInfo]:
        return self.versions_of(run).all()

    def next_for(self, run: RunId, variant: Variant, served: Version | None) -> NextReply | None:
        return self.versions_of(run).next_for(variant, served)

    def status(self) -> StatusView:
        now = time.monotonic()
        standings = self.standings()
        reasons = self.reasons()
        return StatusView(
            daemon=self.config.daemon.name,
            boot=self.boot,
            version=deltad.__version__,
            backend=self.backend.name,
            backend_reason=self.backend_reason,
            uptime=now - self._started,
            ready=not reasons,
            reasons=tuple(reasons),
            store=str(self.store.path),
            store_bytes=self.store_size.bytes,
            free_bytes=self.store.free_bytes(),
            region=self.fleet.region(standings, now),
            upstreams=tuple(puller.view() for puller in self.pullers),
            regions=self.fleet.regions(standings, now),
            scrub=self.scrubbing.view(),
        )

    # Views for the other faces.

    def reasons(self) -> list[str]:
        """Why this daemon is not ready; empty if it is."""
        found = [f"{part}: {reason}" for part, reason in sorted(self.unwell.items())]
        if self.scrubbing.problem:
            found.append(f"scrub: {self.scrubbing.problem}")
        doubts = {run: doubts_in_words(self.store.run(run)) for run in self.store.held_runs()}
        found += [f"run {run}: {words}" for run, words in doubts.items() if words]
        found += [f"bucket {twins.url}: {twins.problem}" for twins in self.twins if twins.problem]
        found += self._staleness.reasons(self.runs())
        free = self.store.free_bytes()
        if free < 2 * self.limits.disk_reserve_bytes:
            found.append(f"store: {size(free)} free, close to the reserve of {size(self.limits.disk_reserve_bytes)}")
        found += [f"upstream {view.url}: {view.error or view.activity}" for view in self.upstreams() if not view.up]
        return found

    def upstreams(self) -> list[UpstreamView]:
        """Every upstream and bucket that is pulled from."""
        return [puller.view() for puller in self.pullers]

    def standings(self) -> dict[RunId, Standing]:
        """What this daemon holds of each run and is doing about it."""
        found = {
            run: Standing(self.versions_of(run).all(), self._activity(run), self._target(run)) for run in self.runs()
        }
        awaited = {run: base for puller in self.pullers for run, base in puller.awaited().items()}
        for run, base in awaited.items():
            if not (known := found.get(run, Standing())).versions:
                found[run] = replace(known, awaits=str(base))
        return found

    def region_report(self) -> RegionReport:
        """The next report to send upstream."""
        return self.fleet.region_report(self.standings(), time.monotonic())

    def on_report(self, report: RegionReport) -> None:
        """A daemon below reported."""
        if self.fleet.receive(report, time.monotonic()):
            self.announcements.announce()

    def on_switch(self, switch: Switch) -> None:
        """Another backend computes from now on. Called on the thread that met it, unlike all else here."""
        self.backend_reason = switch.reason
        self.metrics.backend(switch.backend, switch.reason)
        if switch.failed:
            self.metrics.fell_back(switch.failed)
        write = log.warning if switch.failed else log.info
        write("backend_switched", backend=switch.backend, backend_reason=switch.reason)

    def describe_all(self) -> None:
        """Read what every version that is held is, and takes. Blocks; called before anything is served."""
        self.store_size.measure()
        self.heartbeats.make_ready()
        for run in self.runs():
            if latest := self.versions_of(run).all()[-1:]:
                self.metrics.latest(latest[0])

    def deeds(self) -> set[asyncio.Task[Published]]:
        """Publishes that are under way."""
        return {deed for versions in self._runs.values() for deed in versions.deeds}

    async def plan(self, run: RunId) -> PlanReply:
        versions = self.versions_of(run)
        return await self.deriving.explain(versions, self.fleet.view(run, versions.all(), time.monotonic()))

    def known(self) -> list[Versions]:
        """What is known of each run that was asked for."""
        return list(self._runs.values())

    def _mirrors(self) -> list[Mirror]:
        """Of all runs that are held."""
        return [mirror for run in self.store.runs() for mirror in self.versions_of(run).mirrors()]

    def _rederiver(self, run: RunId, variant: str) -> Rederiver:
        mirror = self.versions_of(run).mirror(Variant(variant))
        declared = self.config.run(run)
        baseline = self.origin(run).baseline if declared and declared.variant == variant else _no_baseline
        return Rederiver(self.store, mirror, self.backend, baseline, self.threads)

    def drop_export(self, replica: str) -> None:
        """Remove what was exported for a replica. An engine that has mapped it keeps its pages."""
        shutil.rmtree(self.store.exports() / parse_daemon_name(replica), ignore_errors=True)

    def _activity(self, run: RunId) -> str:
        latest = self.versions_of(run).records.latest()
        remark = self.remarks.about(run, None if latest is None else latest.version)
        doing = [self.activities[run]] if run in self.activities else [puller.activity(run) for puller in self.pullers]
        twins = (twins.activity(run) for twins in self.twins)
        cadence = self._cadences[run].remark() if run in self._cadences else ""
        return "; ".join(part for part in (*doing, cadence, self.deriving.activity(run), *twins, remark) if part)

    def _version(self, versions: Versions, text: str) -> Version:
        if text:
            return parse_version(text)
        latest = versions.latest()
        if latest is None:
            raise NotFoundError(f"a version of run {versions.run}", found="none yet")
        return parse_version(latest.version)

    def _number(self, run: RunId, directory: Path) -> int:
        if match := _TRAILING_NUMBER.search(directory.name):
            return int(match[1])
        latest = self.versions_of(run).records.latest()
        return 0 if latest is None else latest.version.number + 1

    def _puller(self, index: int) -> Puller:
        upstream = self.config.upstreams[index]
        return Puller(
            self.store,
            url=upstream.url,
            token=upstream.token_file.read if upstream.token_file else None,
            tls=self._tls.get(upstream.url),
            runs=upstream.runs,
            connections=upstream.connections,
            announcements=self.announcements,
            region_report=self.region_report,
            on_committed=self.on_pulled,
            limits=self.limits,
            policy=PullerPolicy(PullPolicy(trust=self.trust)),
            on_heartbeat=self.heartbeats.heard,
            pacer=self.pacer,
            on_received=lambda count: self.metrics.received(upstream.url, count),
            on_failure=lambda error: self.metrics.pull_failed(upstream.url, error),
        )


def _no_baseline(record: VersionRecord) -> None:
    """Where a run is not published, no checkpoint is kept."""


def _begins_from(run: RunId, request: PublishRequest, named: Callable[[str], Version]) -> VersionId | None:
    """The version from which a publish opens an epoch or forks; `named` finds one of the run. Raises UsageError."""
    if sum((request.new_epoch, bool(request.resume_from), request.fork_from is not None)) > 1:
        raise UsageError("a publish", expected="one of new_epoch, resume_from and fork_from", found="several")
    if request.epoch < 0:
        raise UsageError(f"epoch {request.epoch}", expected="0 or more")
    if request.resume_from:
        return VersionId(run, named(request.resume_from))
    if request.fork_from is None:
        return None
    base = VersionId(parse_run(request.fork_from.run), parse_version(request.fork_from.version))
    if base.run == run:
        raise UsageError(
            f"a fork of {base}",
            expected="a version of another run",
            found=f"run {run} itself",
            hint="to go on from an older version of the run, resume from it",
        )
    return base
