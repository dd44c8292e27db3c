"""Carrying out the pull machine's decisions for one run: requests, threads and timers around `Pull`.

It may not decide what to ask for. Owns two invariants: an object is stored only after `check_arrival` has
seen it and the machine has taken it; and nothing that the peer does ends the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import structlog

from deltad.delta.record import VersionRecord
from deltad.errors import DeltadError, NotFoundError, PeerError, UnavailableError
from deltad.figures import duration
from deltad.limits import Limits
from deltad.protocol.backoff import Backoff
from deltad.protocol.hints import Hint
from deltad.protocol.pull import Pull, PullPolicy
from deltad.protocol.pull_decisions import (
    Commit,
    Decision,
    Fetch,
    FetchRecord,
    ListEdges,
    ListVersions,
    Load,
    Wait,
)
from deltad.protocol.pull_plan import Arrived, Kind, Wanted, check_arrival
from deltad.protocol.time_left import TimeLeft
from deltad.relay.link import Link
from deltad.relay.pacer import Pacer
from deltad.relay.slots import Slots
from deltad.relay.source import Source
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version, VersionId

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PullStats:
    """What one version cost this daemon: body bytes received, by kind of object, failed tries included.

    `seconds` run from the first byte that was asked for to the commit. What an earlier life of the
    daemon received is not counted.
    """

    record: int
    layout: int
    manifest: int
    page: int
    file: int
    chunk: int
    seconds: float
    newest: int = 0
    """The place in the run of the newest version that was known when this one was committed; 0 if that is not told."""

    @property
    def bytes(self) -> int:
        return self.record + self.layout + self.manifest + self.page + self.file + self.chunk


@dataclass(slots=True)
class _Account:
    started: float
    received: Counter[str] = field(default_factory=Counter)

    def close(self, now: float, newest: int) -> PullStats:
        kinds = {kind.value: self.received[kind.value] for kind in Kind}
        return PullStats(record=self.received["record"], seconds=now - self.started, newest=newest, **kinds)


@dataclass(frozen=True, slots=True)
class StoreHoldings:
    """Answers the machine's questions out of the store."""

    store: Store
    run: RunStore

    def latest(self) -> Version | None:
        latest = self.run.latest()
        return None if latest is None else latest.version

    def record(self, version: Version) -> VersionRecord | None:
        try:
            return self.run.record(version)
        except NotFoundError:
            return None

    def elsewhere(self, version: VersionId) -> VersionRecord | None:
        run = self.store.find_run(version.run)
        return None if run is None else run.find(version.version)

    def size(self, digest: Digest) -> int | None:
        try:
            return self.store.size(digest)
        except NotFoundError:
            return None


class Peer(Protocol):
    """What a run's puller shares with the others of the same upstream."""

    link: Link
    slots: Slots
    """A turn is held while an object is on its way."""
    pacer: Pacer

    async def rested(self) -> None:
        """Return once the link does not rest."""

    def note_failure(self, error: DeltadError) -> None: ...

    def note_success(self) -> None: ...


class RunPull:
    """Pulls one run. `on_committed` is called in the event loop after each commit."""

    def __init__(
        self,
        run: RunId,
        store: Store,
        client: Source,
        peer: Peer,
        *,
        on_committed: Callable[[VersionRecord, PullStats], None],
        policy: PullPolicy,
        poll_seconds: float,
        limits: Limits,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._run_store = store.run(run)
        self._client = client
        self._peer = peer
        self._on_committed = on_committed
        self._time_left = TimeLeft()
        self._policy = policy
        self._poll_seconds = poll_seconds
        self._limits = limits
        self._rng = rng
        self._holdings = StoreHoldings(store, self._run_store)
        self.pull = Pull(run, client.url, self._holdings, rng=rng, policy=policy, limits=limits)
        self._work = f"the pull of {run} from {client.url}"  # further upstreams may bring the same run
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accounts: dict[Version, _Account] = {}
        self._partials: OrderedDict[Wanted, bytes] = OrderedDict()

    @property
    def run_id(self) -> RunId:
        return self.pull.run

    def wake(self) -> None:
        """Something changed: decide again."""
        self._wake.set()

    async def look(self) -> Version | None:
        """Ask the peer once for what it has above what is held here. Raises DeltadError."""
        held = self._holdings.latest()
        try:
            data = await self._client.latest(self.run_id, after=held, wait=0.0)
        except NotFoundError:
            return None
        self._peer.note_success()
        return None if data is None else self._see(data, held)

    async def follow(self) -> None:
        """Wait for new records at the peer, for ever."""
        backoff = Backoff(self._policy.first_delay, self._policy.longest_delay, self._rng)
        while True:
            await self._peer.rested()
            started, newest, forgives_at = _now(), self.pull.newest, self.pull.forgives_at
            wait = self._poll_seconds
            if forgives_at is not None:
                wait = min(wait, max(forgives_at - started, self._policy.first_delay))
            try:
                data = await self._guarded(self._client.latest(self.run_id, after=newest, wait=wait))
                self._peer.note_success()
                if data is not None:
                    self._see(data, newest)
                    backoff.succeeded()
                    continue
            except NotFoundError:
                self._peer.note_success()  # no such run yet
            except DeltadError as error:
                self._peer.note_failure(error)
            if _now() - started >= wait / 2:
                backoff.succeeded()
            elif not self._peer.link.resting(_now()):
                # A peer that answers with nothing at once, or nonsense, is asked ever less often.
                await asyncio.sleep(backoff.failed(_now()) - _now())

    async def drive(self) -> None:
        """Carry out what the machine decides, for ever."""
        try:
            while True:
                self._wake.clear()
                # What it asks the store for from now on stays there until it has come to its end.
                self._store.leases.set_work(self._work, running=self.pull.busy)
                until: float | None = None
                for decision in self.pull.decide(_now()):
                    if isinstance(decision, Wait):
                        until = decision.until
                    else:
                        self._start(decision)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self._wake.wait()
        finally:
            self._store.leases.set_work(self._work, running=False)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def activity(self, now: float) -> str:
        """What this run is doing, in words."""
        link = self._peer.link
        latest = self._holdings.latest()
        if resting := link.resting(now):
            return resting
        if progress := self.pull.progress():
            version, done, total = progress
            left = self._time_left.seconds(str(version), done, total, now)
            ends = "" if left is None else f", {duration(left)} left"
            return f"pulling {version}: {done} of {total} objects, {link.rate(now) / 1e6:.1f} MB/s{ends}"
        if self.pull.problem is not None:
            return f"waiting: {self.pull.problem}"
        if self.pull.busy:
            return f"asking how to reach {self.pull.newest}"
        if not link.up:
            return "connecting"
        return "no version yet" if latest is None else f"up to date at {latest}"

    def _see(self, data: bytes, after: Version | None) -> Version:
        """Take the peer's latest record, which it says is above `after`. Raises PeerError."""
        now = _now()
        record = self.pull.record_seen(data, now)
        if after is not None and record.version <= after:
            raise PeerError(
                f"{self._client.url}: latest of {self.run_id}",
                expected=f"a version above {after}",
                found=str(record.version),
            )
        self._accounts = {version: account for version, account in self._accounts.items() if self.pull.knows(version)}
        self._account(record.version, now).received["record"] += len(data)
        self.wake()
        return record.version

    def _start(self, decision: Decision) -> None:
        task = asyncio.create_task(self._carry_out(decision))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.wake()

    async def _carry_out(self, decision: Decision) -> None:
        match decision:
            case FetchRecord(version):
                await self._fetch_record(version)
            case ListVersions(after):
                await self._list_versions(after)
            case ListEdges(after):
                await self._list_edges(after)
            case Fetch(wanted, version):
                await self._fetch(wanted, version)
            case Load(wanted):
                await self._load(wanted)
            case Commit(version, data, derived):
                await self._commit(version, data, derived)

    async def _fetch_record(self, version: Version) -> None:
        account = self._account(version, _now())
        try:
            data = await self._guarded(
                self._client.record(self.run_id, version, count=lambda n: account.received.update(record=n))
            )
            self.pull.record_seen(data, _now(), asked=version)
        except NotFoundError:
            self.pull.record_missing(version, _now())
        except DeltadError as error:
            self._peer.note_failure(error)
            self.pull.record_failed(version, _now(), wrong=not isinstance(error, UnavailableError))
        else:
            self._peer.note_success()

    async def _list_versions(self, after: Version | None) -> None:
        versions: tuple[Version, ...] = ()
        try:
            versions = await self._guarded(self._client.versions(self.run_id, after=after))
        except DeltadError as error:
            self._peer.note_failure(error)
        self.pull.versions_listed(versions)

    async def _list_edges(self, after: Version | None) -> None:
        hints: tuple[Hint, ...] = ()
        try:
            hints = await self._guarded(self._client.edges(self.run_id, after=after))
        except NotFoundError:
            pass  # it does not know the question
        except UnavailableError as error:
            self._peer.note_failure(error)
            self.pull.edges_failed(_now())
            return
        except DeltadError as error:
            self._peer.note_failure(error)
        self.pull.edges_listed(hints, _now())

    async def _fetch(self, wanted: Wanted, version: Version) -> None:
        data = self._partials.pop(wanted, b"")
        had = len(data)
        try:
            async with self._peer.slots.turn() as body:
                body.extend(data)
                received = self._account(version, _now()).received
                try:
                    await self._guarded(
                        self._client.fetch(
                            wanted,
                            body,
                            count=lambda n: received.update({wanted.kind.value: n}),
                            pace=lambda n: self._peer.pacer.take(self.run_id, self._client.url, n),
                        )
                    )
                finally:
                    data = bytes(body)
            arrived = await self._guarded(self._check(wanted, data))
        except NotFoundError as error:
            self._peer.note_failure(error)
            self.pull.object_missing(wanted, _now())
        except UnavailableError as error:
            self._keep_partial(wanted, data)
            self._peer.note_failure(error)
            self.pull.object_failed(wanted, _now(), progressed=len(data) > had)
        except DeltadError as error:
            self._peer.note_failure(error)
            self.pull.object_failed(wanted, _now(), wrong=True)
        else:
            del data
            self._peer.note_success()
            await self._keep(arrived)

    def _keep_partial(self, wanted: Wanted, data: bytes) -> None:
        if data:
            self._partials[wanted] = data
        while len(self._partials) > self._policy.in_flight:
            self._partials.popitem(last=False)

    async def _keep(self, arrived: Arrived) -> None:
        try:
            useful = await self._guarded(self._take(arrived))
        except DeltadError as error:
            self._peer.note_failure(error)
            self.pull.object_failed(arrived.wanted, _now(), wrong=True)
            return
        if not useful:
            self._note_problem()
            return
        put = self._store.put_chunk if arrived.wanted.kind is Kind.CHUNK else self._store.put
        try:
            await self._guarded(asyncio.to_thread(put, arrived.data))
        except DeltadError as error:
            log.error("object_not_stored", run=self.run_id, object=str(arrived.wanted), error=str(error))
            self.pull.object_failed(arrived.wanted, _now())
        else:
            self.pull.object_stored(arrived.wanted)

    async def _load(self, wanted: Wanted) -> None:
        try:
            data = await self._guarded(asyncio.to_thread(self._store.read, wanted.digest))
            arrived = await self._guarded(self._check(wanted, data))
            await self._guarded(self._take_held(arrived))
        except DeltadError as error:
            log.error("held_object_unusable", run=self.run_id, object=str(wanted), error=str(error))
            self.pull.load_failed(wanted)
        else:
            self._note_problem()

    async def _take(self, arrived: Arrived) -> bool:
        return self.pull.object_arrived(arrived, _now())

    async def _take_held(self, arrived: Arrived) -> None:
        self.pull.object_loaded(arrived, _now())

    async def _check(self, wanted: Wanted, data: bytes) -> Arrived:
        return await asyncio.to_thread(check_arrival, wanted, data, self._client.url, limits=self._limits)

    async def _commit(self, version: Version, data: bytes, derived: Collection[Digest]) -> None:
        try:
            await self._guarded(asyncio.to_thread(self._run_store.commit, data, derived))
        except DeltadError as error:
            self.pull.commit_failed(version, error, _now())
            self._note_problem()
            return
        newest = self.pull.newest_sequence
        self.pull.committed(version)
        stats = self._account(version, _now()).close(_now(), newest)
        for older in [v for v in self._accounts if v <= version]:
            del self._accounts[older]
        if not self.pull.busy:
            self._partials.clear()
        record = self._run_store.record(version)
        seconds = round(stats.seconds, 3)
        log.info("version_pulled", run=self.run_id, version=str(version), bytes=stats.bytes, seconds=seconds)
        try:
            self._on_committed(record, stats)
        except Exception:
            log.exception("committed_version_not_announced", version=str(record.id))

    def _account(self, version: Version, now: float) -> _Account:
        return self._accounts.setdefault(version, _Account(now))

    def _note_problem(self) -> None:
        if self.pull.problem is not None:
            self._peer.note_failure(self.pull.problem)

    async def _guarded(self, work: Awaitable[T]) -> T:
        """Whatever goes wrong unforeseen is one more failed try, with its traceback in the log."""
        try:
            return await work
        except DeltadError:
            raise
        except Exception as error:
            log.exception("pull_step_failed", upstream=self._client.url, run=self.run_id)
            raise UnavailableError(self._client.url, found=f"{type(error).__name__}: {error}") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
