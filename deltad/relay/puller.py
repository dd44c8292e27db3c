"""Pulling from one upstream: its runs, the link to it, and this region's reports back to it.

It may not store or decide; per run that is `RunPull` and the pull machine. Owns one invariant: whatever
the upstream does, or however long it is gone, pulling goes on by itself as soon as it behaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from deltad.client.messages import RegionReport, UpstreamView
from deltad.delta import FORMAT
from deltad.delta.heartbeat import Heartbeat
from deltad.delta.record import VersionRecord
from deltad.errors import ConfigError, DeltadError, DeniedError, NotFoundError, PeerError, UnavailableError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_plan import Wanted, check_arrival
from deltad.relay.client import ClientTls, RelayClient
from deltad.relay.heartbeat_pull import HeartbeatPull
from deltad.relay.link import Link
from deltad.relay.pacer import Pacer
from deltad.relay.run_pull import PullStats, RunPull
from deltad.relay.slots import Slots
from deltad.relay.source import Count, Source
from deltad.relay.target_pull import TargetPull
from deltad.store.announce import Announcements
from deltad.store.store import Store
from deltad.types import RunId, Version, VersionId

__all__ = ["PullStats", "Puller", "PullerPolicy"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PullerPolicy:
    """Times in seconds. `in_flight` of `pull` is set from the number of connections."""

    pull: PullPolicy = field(default_factory=PullPolicy)
    poll: float = 10.0
    """How long the upstream may hold a question for newer versions. A connection that went silent is noticed
    after this and `stall`."""
    hello: float = 2.0
    """Between two looks at which runs there are, and after a failure that is not the link's."""
    report: float = 3.0
    """The longest time between two reports."""
    report_gap: float = 0.1
    """The shortest time between two reports."""
    stall: float = 20.0
    """A reply without progress is cut off after this."""
    connect: float = 10.0
    first_rest: float = 0.2
    longest_rest: float = 5.0
    """Between two tries to reach an upstream that does not answer."""
    heartbeat: float = 10.0
    """Between two questions for the heartbeat of a run's publisher."""
    denied_rest: float = 30.0
    """Between two tries with a token that was refused."""


class Puller:
    """Pulls `runs` (names, or `*` for all) from the daemon at `url` into `store`, for as long as `run` runs.

    `token` and `tls` are those of `RelayClient`. With `source`, whom that makes is asked in place of a daemon, such
    as a bucket; it is given what to tell of every body byte. `pacer` holds bodies to caps. Objects are fetched over as
    many connections as make it faster, up to `connections`, which are kept for what comes next. `on_committed` is
    called in the event loop after each commit, before the announcement. All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        url: str,
        token: Callable[[], str] | None = None,
        tls: ClientTls | None = None,
        source: Callable[[Count], Source] | None = None,
        pacer: Pacer | None = None,
        runs: tuple[str, ...],
        connections: int,
        announcements: Announcements,
        region_report: Callable[[], RegionReport],
        on_committed: Callable[[VersionRecord, PullStats], None],
        limits: Limits = DEFAULT_LIMITS,
        policy: PullerPolicy | None = None,
        on_heartbeat: Callable[[Heartbeat], None] = lambda beat: None,
        on_received: Callable[[int], None] = lambda count: None,
        on_failure: Callable[[DeltadError], None] = lambda error: None,
    ) -> None:
        """`on_heartbeat` is told of each newer sign of life of a publisher, `on_received` of every piece that came, in
        bytes, and `on_failure` of every failed request."""
        self.url = url
        self._on_heartbeat = on_heartbeat
        self._on_received = on_received
        self._on_failure = on_failure
        self._policy = policy or PullerPolicy()
        # Twice the connections, so that the link is busy while what came before is checked and stored.
        self._pull_policy = replace(self._policy.pull, in_flight=2 * connections)
        self._store = store
        self._runs = runs
        self._announcements = announcements
        self._region_report = region_report
        self._on_committed = on_committed
        self._limits = limits
        self._rng = random.Random()  # noqa: S311 - spreads retries, guards nothing
        self.link = Link(
            first_delay=self._policy.first_rest,
            longest_delay=self._policy.longest_rest,
            denied_delay=self._policy.denied_rest,
            rng=self._rng,
        )
        self.slots = Slots(connections)
        self.pacer = pacer or Pacer(())
        self._client: Source
        if source is not None:
            self._client = source(self._count)
        else:
            self._client = RelayClient(
                url,
                token,
                tls=tls,
                count=self._count,
                limits=limits,
                stall_seconds=self._policy.stall,
                connect_seconds=self._policy.connect,
            )
        self._pulls: dict[RunId, RunPull] = {}
        self._targets: dict[RunId, TargetPull] = {}
        self._heartbeats: dict[RunId, HeartbeatPull] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._begun = asyncio.Event()
        self._roused = asyncio.Event()
        self._reported: RegionReport | None = None

    async def run(self) -> None:
        """Pull and report until cancelled."""
        try:
            async with self._client, asyncio.TaskGroup() as self._tasks:
                self._begun.set()
                for run in self._runs:
                    if run != "*":
                        self._add(RunId(run))
                self._tasks.create_task(self._for_ever(self._greet, self._policy.hello))
                self._tasks.create_task(self._for_ever(self._report, self._policy.report_gap))
        finally:
            self._tasks = None
            self._begun.clear()
            self._pulls.clear()
            self._targets.clear()
            self._heartbeats.clear()
            self.link.up = False

    def follows(self, run: RunId) -> bool:
        """Whether this run is pulled from this upstream, if the upstream has it."""
        return run in self._runs or "*" in self._runs

    async def pull_once(self, run: RunId, wait: float) -> bool:
        """Pull now. True once everything of the run that the upstream had when it was asked is durable here.

        False if `wait` seconds were not enough. Raises DeniedError at once, and what else is in the way
        (UnavailableError, PeerError) when the wait is over; NotFoundError for a run that is not followed.
        """
        if not self.follows(run):
            raise NotFoundError(f"run {run}", found=f"it is not pulled from {self.url}", hint="see `[[upstream]] runs`")
        trouble: DeltadError | None = UnavailableError(self.url, found="pulling has not begun, or has ended")
        try:
            async with asyncio.timeout(wait):
                await self._begun.wait()
                trouble = None
                while True:
                    self._rouse()
                    try:
                        # A name that nobody has, such as a typo, is not followed from here on.
                        if run not in self._pulls and run not in await self._client.runs():
                            return True
                        target = await self._add(run).look()
                        break
                    except (DeniedError, ConfigError) as error:
                        self.note_failure(error)
                        raise
                    except DeltadError as error:
                        trouble = error
                        self.note_failure(error)
                        await asyncio.sleep(self._policy.first_rest)
                while not self._holds(run, target):
                    await self._announcements.wait_until(lambda: self._holds(run, target) or None, 1.0)
        except TimeoutError:
            if run in self._pulls:
                trouble = self._pulls[run].pull.problem or trouble
            if trouble is not None:
                raise trouble from None
            return False
        return True

    async def fetch(self, wanted: Wanted) -> bytes:
        """An object's bytes, checked, for whoever needs it outside a pull.

        Raises NotFoundError if the upstream has not got it, UnavailableError while nobody can be asked, PeerError.
        """
        if not self._begun.is_set() or self.link.rests_until > _now():
            raise UnavailableError(self.url, found=self.link.resting(_now()) or "pulling has not begun, or has ended")
        async with self.slots.turn() as body:
            await self._client.fetch(wanted, body, count=lambda count: None)
            data = bytes(body)
        return (await asyncio.to_thread(check_arrival, wanted, data, self.url, limits=self._limits)).data

    def view(self) -> UpstreamView:
        """The link as `deltad status` shows it."""
        now = _now()
        problems = (
            *(pull.pull.problem for pull in self._pulls.values()),
            *(target.problem for target in self._targets.values()),
        )
        problem = next((problem for problem in problems if problem), None)
        error = self.link.error or problem
        doubts = [f"{run}: {words}" for run, beats in sorted(self._heartbeats.items()) if (words := beats.trouble())]
        if error is None and doubts and self.link.up:
            error = UnavailableError(self.url, found="; ".join(doubts))
        return UpstreamView(
            url=self.url,
            up=self.link.up,
            activity=self._activity(now),
            rtt=self.link.rtt,
            bytes_received=self.link.bytes_received,
            rate=self.link.rate(now),
            # The view has the URL beside it, and so has whoever shows it.
            error="" if error is None else str(error).removeprefix(f"{self.url}: "),
            error_kind="" if error is None else error.kind,
        )

    def activity(self, run: RunId) -> str:
        """What a run is doing, in words; empty for a run that the upstream is not known to have."""
        pull = self._pulls.get(run)
        return "" if pull is None else pull.activity(_now())

    # What the runs share (`deltad.relay.run_pull.Peer`).

    async def rested(self) -> None:
        """Return once the link does not rest."""
        while (left := self.link.rests_until - _now()) > 0:
            self._roused.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._roused.wait()

    def note_failure(self, error: DeltadError) -> None:
        """A request failed: say so once, and rest if the upstream cannot be reached or refuses us."""
        self._on_failure(error)
        if self.link.failed(error, _now(), reachable=self._client.reachable):
            log.warning("upstream_trouble", upstream=self.url, kind=error.kind, error=str(error))
        for pull in self._pulls.values():
            pull.pull.peer_down(self.link.rests_until)
            pull.wake()

    def note_success(self) -> None:
        """A request was answered."""
        if self.link.succeeded():
            log.info("upstream_up", upstream=self.url)
            self._rouse()

    # Loops.

    async def _for_ever(self, work: Callable[[], Awaitable[None]], pause: float = 0.0) -> None:
        """Do it again and again, `pause` seconds apart."""
        while True:
            try:
                await work()
                await asyncio.sleep(pause)
                continue
            except DeltadError as error:
                self.note_failure(error)
            except Exception:
                log.exception("upstream_loop_failed", upstream=self.url)
            if not self.link.resting(_now()):
                await asyncio.sleep(self._policy.hello)

    async def _greet(self) -> None:
        """See that we speak the same format, how far away it is, and which runs there are."""
        await self.rested()
        started = _now()
        hello = await self._client.hello()
        self.link.rtt = _now() - started
        if not self.slots.width.used:  # else the reply may have waited behind what is on its way
            self.slots.width.measured(self.link.rtt)
        if FORMAT not in hello.formats:
            raise PeerError(
                f"{self.url} ({hello.daemon!r:.80})",
                expected=f"a daemon that reads format {FORMAT}",
                found=f"formats {hello.formats!r:.80}",
                hint="run the same version of deltad on both sides",
            )
        self.note_success()
        if "*" in self._runs:
            for run in await self._client.runs():
                if run in self._pulls or len(self._pulls) < self._limits.runs:
                    self._add(run)

    async def _report(self) -> None:
        """Send this region's report when it has changed, or when the last one grows old."""
        await self.rested()

        def changed() -> RegionReport | None:
            report = self._region_report()
            return report if _without_sequence(report) != self._reported else None

        report = await self._announcements.wait_until(changed, self._policy.report)
        report = report or self._region_report()
        rate = self._client.goodput.rate(_now())
        coders = tuple(sorted(self._pull_policy.coders))
        await self._client.report(msgspec.structs.replace(report, pull_rate=round(rate), coders=coders))
        self._reported = _without_sequence(report)
        self.note_success()

    def _add(self, run: RunId) -> RunPull:
        pull = self._pulls.get(run)
        if pull is None:
            assert self._tasks is not None
            pull = RunPull(
                run,
                self._store,
                self._client,
                self,
                on_committed=self._committed,
                policy=self._pull_policy,
                poll_seconds=min(self._policy.poll, self._limits.long_poll_seconds),
                limits=self._limits,
                rng=self._rng,
            )
            self._pulls[run] = pull
            target = self._targets[run] = TargetPull(
                self._store.run(run),
                self._client,
                self,
                on_moved=self._announcements.announce,
                policy=self._pull_policy,
                poll_seconds=min(self._policy.poll, self._limits.long_poll_seconds),
                rng=self._rng,
            )
            pull.pull.peer_down(self.link.rests_until)
            self._tasks.create_task(self._for_ever(pull.follow))
            self._tasks.create_task(self._for_ever(pull.drive))
            self._tasks.create_task(self._for_ever(target.follow))
            if isinstance(self._client, RelayClient):  # nobody lives in a bucket
                beats = self._heartbeats[run] = HeartbeatPull(
                    self._store.run(run),
                    self._client,
                    self,
                    trust=self._pull_policy.trust,
                    limits=self._limits,
                    every=self._policy.heartbeat,
                    on_heard=self._on_heartbeat,
                )
                self._tasks.create_task(self._for_ever(beats.follow))
        return pull

    def look_again(self) -> None:
        """What is held here may be less than it was: see what the peer has."""
        for pull in self._pulls.values():
            pull.wake()

    def awaited(self) -> dict[RunId, VersionId]:
        """The runs for which only a version of another run would lead on, and that version; see `Pull.awaits`."""
        awaited = ((run, pull.pull.awaits) for run, pull in self._pulls.items())
        return {run: base for run, base in awaited if base is not None}

    def _count(self, count: int) -> None:
        self.link.received(count, _now())
        self.slots.received(count, _now())
        self._on_received(count)

    def _committed(self, record: VersionRecord, stats: PullStats) -> None:
        try:
            self._on_committed(record, stats)
        finally:
            self._announcements.announce()
            for pull in self._pulls.values():
                pull.wake()  # a fork may start from what came

    def _rouse(self) -> None:
        self.link.retry_now()
        self._roused.set()
        for pull in self._pulls.values():
            pull.pull.peer_up()
            pull.wake()

    def _holds(self, run: RunId, target: Version | None) -> bool:
        if target is None:
            return True
        latest = self._store.run(run).latest()
        return latest is not None and latest.version >= target

    def _activity(self, now: float) -> str:
        if resting := self.link.resting(now):
            return resting
        if not self.link.up:
            return "connecting"
        if len(self._pulls) == 1:
            return next(iter(self._pulls.values())).activity(now)
        return "; ".join(f"{run}: {pull.activity(now)}" for run, pull in sorted(self._pulls.items())) or "no run yet"


def _without_sequence(report: RegionReport) -> RegionReport:
    return msgspec.structs.replace(report, sequence=0)


def _now() -> float:
    return asyncio.get_running_loop().time()
