"""Pulling one run from one peer: what to ask for, in which order, and when to try again.

Sans-IO. Facts come in as events with `now` (seconds on any monotonic clock), decisions go out for a
shell to carry out; every decision is given once and answered by one of the events named beside it.
It may not touch sockets, files or clocks. Owns four invariants: nothing is asked of the peer that is
held here; at most `in_flight` things are asked for at a time; versions are committed in ascending order,
each when all that it needs is durable; and no answer, however wrong, late or repeated, does more than
cost time.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from deltad.delta.coding import CODERS
from deltad.delta.record import EdgeRef, VersionRecord
from deltad.errors import CoderError, DeltadError, LimitError, NotFoundError, PeerError, StoreError, UntrustedError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.backoff import Backoff
from deltad.protocol.hints import Hint, Hints
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
from deltad.protocol.pull_plan import Arrived, VersionPlan, Wanted, parse_record
from deltad.protocol.pull_ways import Graph, Holdings
from deltad.protocol.trust import TrustList
from deltad.types import Digest, RunId, Version, VersionId


@dataclass(frozen=True, slots=True)
class PullPolicy:
    """How eagerly to pull. Delays in seconds, `chain_bytes` in bytes of records."""

    in_flight: int = 4
    """Things that are asked for at a time."""
    versions_ahead: int = 4
    """Versions whose objects are fetched at a time; the lowest one always goes first."""
    records_ahead: int = 16
    """Records asked for below one whose base is not known yet."""
    first_delay: float = 0.2
    longest_delay: float = 30.0
    refused_delay: float = 30.0
    """How long a version that contradicts itself, or an edge that the peer lacks, is left alone."""
    trust: TrustList = field(default_factory=TrustList)
    """Whose records, and whose derived edges, are believed."""
    coders: frozenset[int] = CODERS
    """The coders that this daemon reads. Edges that need others are left alone."""
    chain_bytes: int = 64 << 20
    """Bound on the memory for records of versions that are not committed yet."""


@dataclass(frozen=True, slots=True)
class _Seen:
    record: VersionRecord
    data: bytes

    @property
    def cost(self) -> int:
        """About the memory it takes, in bytes."""
        return 2 * len(self.data) + 2048


_LIST = "list of versions"
_EDGES = "list of edges"
_TRIES = 3
"""Questions for edges that fail, and answers other than what a hinted edge wants, before another way is taken."""
_PATIENCE = 10
"""Requests in a row that bring nothing of what a hinted edge wants, before another way is taken."""


class Pull:
    """The pull machine. All methods belong to one thread."""

    def __init__(
        self,
        run: RunId,
        peer: str,
        holdings: Holdings,
        *,
        rng: random.Random,
        policy: PullPolicy | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.run = run
        self.peer = peer
        self.problem: DeltadError | None = None
        """Why the run does not move on, until it does."""
        self._holdings = holdings
        self._rng = rng
        self._policy = policy or PullPolicy()
        self._limits = limits
        self._latest = holdings.latest()
        self._seen: dict[Version, _Seen] = {}
        self._plans: dict[Version, VersionPlan] = {}
        self._walk: list[Version] = []
        self._unknown: frozenset[Version] = frozenset()
        """Bases that records name and below which it is not known where the way leads."""
        self._hints = Hints(coders=self._policy.coders, refused_delay=self._policy.refused_delay)
        self._hinted_for: Version | None = None
        """The version about which the peer is to be asked."""
        self._asked_about: Version | None = None
        self._listed: tuple[Version, ...] | None = None
        self._asked: set[Hashable] = set()
        self._backoffs: dict[Hashable, tuple[Backoff, float]] = {}
        self._refused: dict[Version, float] = {}
        self._lacking: dict[bytes, float] = {}
        self._unreadable: dict[bytes, CoderError] = {}
        self._damaged: set[Digest] = set()
        self._down_until = 0.0
        self._stale = False
        self._wake: float | None = None
        self._awaited: frozenset[VersionId] = frozenset()
        """Versions of other runs that forks start from, where nothing else leads on."""
        self._asks_again_at: float | None = None
        """When the peer is asked again whether anything else leads on, while something is awaited."""

    # What is known.

    @property
    def awaits(self) -> VersionId | None:
        """The version of another run that a fork starts from, where nothing else leads on and it is not held."""
        return min(self._awaited, default=None)

    @property
    def newest_sequence(self) -> int:
        """The highest place in the run of what the peer was seen to have and is not held yet; 0 if there is none."""
        return max((seen.record.sequence for seen in self._seen.values()), default=0)

    @property
    def newest(self) -> Version | None:
        """The newest version that is held, on its way, or refused: ask the peer for what comes after it."""
        return max((v for v in (self._latest, *self._seen, *self._refused) if v is not None), default=None)

    @property
    def forgives_at(self) -> float | None:
        """When the next refused version may be looked at again: ask the peer for its latest then."""
        return min(self._refused.values(), default=None)

    @property
    def busy(self) -> bool:
        """Whether a version is known that is to be pulled."""
        return bool(self._seen)

    def knows(self, version: Version) -> bool:
        """Whether the version is on its way."""
        return version in self._seen or version in self._asked

    def progress(self) -> tuple[Version, int, int] | None:
        """The version that comes next, its objects that are here, and all it is known to need."""
        if not self._plans:
            return None
        version = min(self._plans)
        return version, *self._plans[version].progress

    # Events: records.

    def record_seen(self, data: bytes, now: float, *, asked: Version | None = None) -> VersionRecord:
        """The peer sent a record, in answer to a `FetchRecord` (`asked`) or as its latest.

        Raises PeerError and believes nothing if it is malformed, another than was asked for, or signed by nobody who
        is trusted for it.
        """
        record = parse_record(data, self.run, self.peer, asked, limits=self._limits)
        try:
            self._policy.trust.check_record(record)
        except UntrustedError as untrusted:
            self.problem = PeerError(self.peer, found=str(untrusted))
            raise self.problem from None
        version = record.version
        self._asked.discard(asked)
        self._backoffs.pop(version, None)
        held = self._latest is not None and version <= self._latest
        needless = asked is not None and asked not in self._walk
        if held or needless or version in self._seen or version in self._refused:
            return record
        self._seen[version] = _Seen(record, data)
        self._stale = True
        if sum(seen.cost for seen in self._seen.values()) > self._policy.chain_bytes:
            error = LimitError(
                f"the records up to {max(self._seen)}",
                expected=f"at most {self._policy.chain_bytes} bytes to the next anchor or version that is held here",
                found=f"{len(self._seen)} records and neither",
            )
            self._refuse(max(self._seen), error, now)
            self._seen.clear()
            self._plans.clear()
            self._walk.clear()
        return record

    def record_missing(self, version: Version, now: float) -> None:
        """The peer does not have a record that its other records, or its hints, point to."""
        self._asked.discard(version)
        hinted = self._hints.leads(version)
        if hinted:
            self._hints.drop_version(version, now)
            self._stale = True
        if not hinted or version in self._unknown:
            self._refuse(version, NotFoundError("its record", found="the peer does not have it"), now)

    def record_failed(self, version: Version, now: float, *, wrong: bool = False) -> None:
        """It did not come, or (`wrong`) the answer was something else."""
        self._asked.discard(version)
        failures = self._try_later(version, now)
        if self._is_vain(failures, wrong) and version not in self._unknown and self._hints.leads(version):
            self._hints.drop_version(version, now)
            self._stale = True

    def versions_listed(self, versions: Iterable[Version]) -> None:
        """The peer's answer to `ListVersions`; empty if it failed. It only saves round trips."""
        self._asked.discard(_LIST)
        self._listed = tuple(sorted(versions, reverse=True))

    def edges_listed(self, hints: Iterable[Hint], now: float) -> None:
        """The peer's answer to `ListEdges`; empty if it has none to give. It only saves bytes and round trips."""
        self._asked.discard(_EDGES)
        self._backoffs.pop(_EDGES, None)
        if self._asked_about is not None:
            planned = {edge.manifest for plan in self._plans.values() for edge in plan.edges.values()}
            self._hints.take(hints, self._asked_about, planned)
            self._asked_about = self._hinted_for = None
        self._stale = True

    def edges_failed(self, now: float) -> None:
        """The peer could not be asked for edges."""
        self._asked.discard(_EDGES)
        if self._try_later(_EDGES, now) >= _TRIES:
            self.edges_listed((), now)

    # Events: objects.

    def object_arrived(self, arrived: Arrived, now: float) -> bool:
        """Checked bytes came in. True: store them, then tell `object_stored`. False: they are of no use.

        What was paid for is kept even if the plans have changed since it was asked for.
        """
        wanted = arrived.wanted
        if wanted not in self._asked or any(plan.is_storing(wanted) for plan in self._plans.values()):
            return False
        if not self._take(arrived, now, durable=False):
            self._asked.discard(wanted)
            return False
        return True

    def object_stored(self, wanted: Wanted) -> None:
        self._asked.discard(wanted)
        self._backoffs.pop(wanted, None)
        self._damaged.discard(wanted.digest)
        for plan in self._plans.values():
            plan.stored(wanted)

    def object_failed(self, wanted: Wanted, now: float, *, progressed: bool = False, wrong: bool = False) -> None:
        """It did not come, was not what was wanted (`wrong`), or could not be stored.

        A try that brought `progressed` bytes nearer to the end does not lengthen the delay.
        """
        self._asked.discard(wanted)
        if progressed:
            self._backoffs.pop(wanted, None)
        failures = self._try_later(wanted, now)
        for version, plan in self._plans.items():
            if plan.is_storing(wanted):
                self._plans[version] = self._plan(version, plan.edges)
        if self._is_vain(failures, wrong):
            needing = {manifest for plan in self._plans.values() for manifest in plan.needed_by(wanted)}
            self._leave(needing & self._derived(), now)

    def object_missing(self, wanted: Wanted, now: float) -> None:
        """The peer does not have an object that its records lead to: try other edges."""
        self._asked.discard(wanted)
        self._try_later(wanted, now)
        self.problem = NotFoundError(f"{self.peer}: {wanted}", found="the peer does not have it")
        needing = {manifest for plan in self._plans.values() for manifest in plan.needed_by(wanted)}
        derived = needing & self._derived()
        for manifest in needing - derived:
            self._lacking[manifest] = now + self._policy.refused_delay
            self._stale = True
        for version, plan in list(self._plans.items()):
            if any(edge.manifest in self._lacking for edge in plan.edges.values()):
                del self._plans[version]  # so that other edges are asked for from what is held
        self._leave(derived, now)

    def object_loaded(self, arrived: Arrived, now: float) -> None:
        """Bytes that were held here already."""
        self._asked.discard(arrived.wanted)
        self._take(arrived, now, durable=True)

    def load_failed(self, wanted: Wanted) -> None:
        """What is held under that name is damaged or gone: it has to come from the peer again."""
        self._asked.discard(wanted)
        self._damaged.add(wanted.digest)

    # Events: commits and the peer.

    def committed(self, version: Version) -> None:
        self._asked.discard(("commit", version))
        self._backoffs.pop(("commit", version), None)
        plan = self._plans.pop(version, None)
        if plan is not None and plan.derived:
            self._hints.led_on()
        self.problem = None
        self._stale = True
        self._forget_held()

    def commit_failed(self, version: Version, error: DeltadError, now: float) -> None:
        """The store did not take the version. Its own troubles pass; a contradiction is the peer's."""
        self._asked.discard(("commit", version))
        if not isinstance(error, (StoreError, NotFoundError)):
            self._contradicted(version, error, now)
            return
        self.problem = error
        self._try_later(("commit", version), now)
        if isinstance(error, NotFoundError) and version in self._plans:
            self._plans[version] = self._plan(version, self._plans[version].edges)
            self._stale = True

    def peer_down(self, until: float) -> None:
        """Ask nothing of the peer before `until`. What is in flight is answered by events as ever."""
        self._down_until = until

    def peer_up(self) -> None:
        self._down_until = 0.0

    # Decisions.

    def decide(self, now: float) -> tuple[Decision, ...]:
        """What to do now; each thing is said once. Call it after every event and when a `Wait` is over."""
        self._wake = None
        self._forgive(now)
        self._forget_held()
        if any(self._holdings.elsewhere(base) is not None for base in self._awaited):
            self.problem = None
            self._stale = True
        if self._asks_again_at is not None and now >= self._asks_again_at:
            self._asks_again_at = None
            self._hints.ask_again()  # it is told what is awaited, and may have cut an anchor
            self._stale = True
        if self._stale:
            self._stale = False
            self._choose_ways(now)
        decisions: list[Decision] = []
        decisions += self._ask_records(now)
        for version in sorted(self._plans):
            decisions += self._ask_objects(version, now)
        decisions += self._commit_next(now)
        if self._awaited:
            # Another run brings them, or an anchor is cut; nobody may tell us.
            if self._asks_again_at is None:
                self._asks_again_at = now + self._policy.longest_delay
            self._wake_at(self._asks_again_at)
        decisions.append(Wait(self._wake))
        return tuple(decisions)

    def _ask_records(self, now: float) -> Iterator[Decision]:
        if self._hinted_for is not None and self._may_ask(_EDGES, now):
            self._asked.add(_EDGES)
            self._asked_about = self._hinted_for
            yield ListEdges(min(self._plans, default=self._latest))
        if self._unknown and len(self._seen) > 1 and self._listed is None and self._may_ask(_LIST, now):
            self._asked.add(_LIST)
            yield ListVersions(self._latest)
        for version in self._walk:
            if self._may_ask(version, now):
                self._asked.add(version)
                yield FetchRecord(version)

    def _ask_objects(self, version: Version, now: float) -> list[Decision]:
        plan = self._plans[version]
        decisions: list[Decision] = []
        closed = True
        while closed:
            closed = False
            plan.refill(4 * self._policy.in_flight)
            for wanted in plan.open():
                if wanted in self._asked:
                    continue
                held = self._is_held(wanted)
                if held and not wanted.is_read:
                    plan.close(wanted)
                    closed = True
                elif len(self._asked) >= self._policy.in_flight:
                    break
                elif held:
                    self._asked.add(wanted)
                    decisions.append(Load(wanted))
                elif self._may_ask(wanted, now):
                    self._asked.add(wanted)
                    decisions.append(Fetch(wanted, version))
        return decisions

    def _is_held(self, wanted: Wanted) -> bool:
        # A file of another size under that name is damaged, or the peer lies: its own bytes will tell.
        return wanted.digest not in self._damaged and self._holdings.size(wanted.digest) == wanted.size

    def _commit_next(self, now: float) -> Iterator[Decision]:
        version = min(self._plans, default=None)
        if version is None or not self._plans[version].complete:
            return
        plan = self._plans[version]
        if any(self._lacks_base(plan.record, edge) for edge in plan.edges.values()):
            return  # what it is built on has to be reached in another way first
        key = ("commit", version)
        if key in self._asked or not self._is_due(key, now):
            return
        try:
            self._policy.trust.check_record(plan.record)
        except UntrustedError as error:  # its key was trusted when it came, and is not any more
            self._refuse(version, error, now)
            return
        self._asked.add(key)
        yield Commit(version, plan.data, plan.derived)

    def _lacks_base(self, record: VersionRecord, edge: EdgeRef) -> bool:
        """Whether an edge starts from a version that is not held, of this run or of the one that is forked."""
        base = record.base(edge)
        if base is None:
            return False
        held = self._holdings.record(base.version) if base.run == self.run else self._holdings.elsewhere(base)
        return held is None

    def _may_ask(self, key: Hashable, now: float) -> bool:
        if key in self._asked or len(self._asked) >= self._policy.in_flight:
            return False
        if now < self._down_until:
            self._wake_at(self._down_until)
            return False
        return self._is_due(key, now)

    def _is_due(self, key: Hashable, now: float) -> bool:
        _, due = self._backoffs.get(key, (None, now))
        if now < due:
            self._wake_at(due)
            return False
        return True

    def _wake_at(self, when: float) -> None:
        self._wake = when if self._wake is None else min(self._wake, when)

    def _try_later(self, key: Hashable, now: float) -> int:
        """One more failure; returns how many there were in a row."""
        fresh = Backoff(self._policy.first_delay, self._policy.longest_delay, self._rng)
        backoff, _ = self._backoffs.get(key, (fresh, now))
        self._backoffs[key] = backoff, backoff.failed(now)
        return backoff.failures

    # What leads where.

    def _graph(self) -> Graph:
        left = {manifest: size for plan in self._plans.values() for manifest, size in plan.left().items()}
        return Graph(
            {version: seen.record for version, seen in self._seen.items()},
            self._holdings,
            self._refused,
            self._lacking.keys() | self._unreadable.keys(),
            self._hints.by_manifest,
            left,
            self._begun(),
        )

    def _begun(self) -> tuple[Version, dict[str, EdgeRef]] | None:
        """The lowest version that is planned, and its edges, if they still lead there from what is held."""
        version = min(self._plans, default=None)
        if version is None:
            return None
        edges = self._plans[version].edges
        derived = self._plans[version].derived
        for edge in edges.values():
            known = edge.manifest not in derived or edge.manifest in self._hints.by_manifest
            gone = self._lacks_base(self._plans[version].record, edge)
            if gone or not known or edge.manifest in self._lacking or edge.manifest in self._unreadable:
                return None
        return version, edges

    def _choose_ways(self, now: float) -> None:
        """Plan the newest version that can be reached, and those that it is reached through."""
        graph = self._graph()
        newest = max(self._seen, default=None)
        self._hinted_for = None
        if newest is not None and self._hints.lacks(newest, now) and not graph.is_near(self._seen[newest].record):
            self._hinted_for = newest
            return  # what is under way goes on; the peer is asked for a shorter way first
        ways = graph.ways()
        self._walk_on(ways.unknown, ways.named)
        if ways.unknown or ways.named:
            return  # what is planned goes on; what the newest version needs is not known yet
        self._awaited = frozenset() if ways.chain else self._graph().awaited()
        if not ways.chain and self._seen:
            self.problem = (
                self.problem
                or self._first_unreadable()
                or self._first_awaited()
                or NotFoundError(
                    f"{self.peer}: {VersionId(self.run, max(self._seen))}",
                    expected="an anchor, or a delta from a version that is held here",
                    found="neither",
                )
            )
        old, self._plans = self._plans, {}
        for version, edges in list(ways.chain.items())[: self._policy.versions_ahead]:
            same = version in old and old[version].edges == edges
            self._plans[version] = old[version] if same else self._plan(version, edges)
        for key in [key for key in self._backoffs if isinstance(key, Wanted)]:
            if not any(plan.wants(key) for plan in self._plans.values()):
                del self._backoffs[key]

    def _walk_on(self, unknown: frozenset[Version], named: frozenset[Version]) -> None:
        """Ask for the records of these versions, and for some below the unknown bases that will be bases in turn."""
        self._unknown = unknown
        self._walk = sorted(unknown | named, reverse=True)
        if not unknown:
            self._listed = None
            return
        for version in self._listed or ():
            if len(self._walk) >= self._policy.records_ahead:
                break
            new = self._latest is None or version > self._latest
            if new and version < min(unknown) and version not in self._seen and version not in self._refused:
                self._walk.append(version)

    def _plan(self, version: Version, edges: dict[str, EdgeRef]) -> VersionPlan:
        seen, graph = self._seen[version], self._graph()
        roots = {
            name: root for name, edge in edges.items() if (root := graph.base_root(seen.record, edge, name)) is not None
        }
        policy = self._policy
        return VersionPlan(
            seen.record, seen.data, edges, roots, coders=policy.coders, trust=policy.trust, limits=self._limits
        )

    # What is wrong, and for how long.

    def _take(self, arrived: Arrived, now: float, *, durable: bool) -> bool:
        """Give an object to the plans that want it. False if it is flawed, or contradicts one of them."""
        sound = arrived.flaw is None
        for version, plan in sorted(self._plans.items()):
            try:
                plan.take(arrived, durable=durable)
            except CoderError as error:
                self._pass_over(version, arrived.wanted.digest, error)
                sound = False
            except DeltadError as error:
                self._contradicted(version, error, now)
                sound = False
        return sound

    def _contradicted(self, version: Version, error: DeltadError, now: float) -> None:
        """What came contradicts the version's record, or is nonsense: derived edges are to blame first."""
        plan = self._plans.get(version)
        if plan is None or not plan.derived:
            self._refuse(version, error, now)
            return
        self.problem = PeerError(f"{self.peer}: {VersionId(self.run, version)}", found=str(error))
        self._leave(set(plan.derived), now)

    def _derived(self) -> set[bytes]:
        """Manifests of the planned edges that only hints have named."""
        return {manifest for plan in self._plans.values() for manifest in plan.derived}

    def _leave(self, derived: set[bytes], now: float) -> None:
        """Take other ways than over these derived edges."""
        if not derived:
            return
        self._hints.drop(derived, now)
        for version in [version for version, plan in self._plans.items() if derived & set(plan.derived)]:
            del self._plans[version]
        self._stale = True

    def _is_vain(self, failures: int, wrong: bool) -> bool:
        return failures >= (_TRIES if wrong else _PATIENCE)

    def _refuse(self, version: Version, error: DeltadError, now: float) -> None:
        self.problem = PeerError(f"{self.peer}: {VersionId(self.run, version)}", found=str(error))
        self._refused[version] = now + self._policy.refused_delay
        self._seen.pop(version, None)
        self._plans.pop(version, None)
        self._stale = True

    def _pass_over(self, version: Version, manifest: bytes, error: CoderError) -> None:
        """An edge that is not read here: its version may have another, and so may those after it."""
        self.problem = self._unreadable[manifest] = error
        del self._plans[version]
        self._stale = True

    def _first_awaited(self) -> NotFoundError | None:
        """What a fork starts from, where nothing else leads to it and that is not held."""
        if (base := self.awaits) is None:
            return None
        return NotFoundError(
            f"{self.peer}: {VersionId(self.run, min(self._seen))}",
            expected=f"{base}, from which it forks, or an anchor",
            found="neither",
            hint=f"pull run {base.run} too: name it in the `runs` of an [[upstream]] that has it",
        )

    def _first_unreadable(self) -> CoderError | None:
        """Why no edge leads to the lowest version that is known of, where that is for its coder."""
        record = self._seen[min(self._seen)].record
        edges = (edge for variant in record.variants for edge in variant.edges)
        return next((self._unreadable[edge.manifest] for edge in edges if edge.manifest in self._unreadable), None)

    def _forgive(self, now: float) -> None:
        """Refused versions and edges that the peer lacked are looked at again after a while."""
        for digest in [digest for digest, until in self._lacking.items() if until <= now]:
            del self._lacking[digest]
            self._stale = True
            if not self._plans:
                self._hints.ask_again()  # by now the peer may have come by another edge
        for version in [version for version, until in self._refused.items() if until <= now]:
            del self._refused[version]
            self._stale = True
        for until in (*self._refused.values(), *self._lacking.values()):
            self._wake_at(until)

    def _forget_held(self) -> None:
        """Drop what is durable, whoever made it so, and what is older than that."""
        latest = self._holdings.latest()
        if latest == self._latest:
            return
        if latest is None or (self._latest is not None and latest < self._latest):
            # What was held is not believed any more: it may come anew, by another way.
            self._latest = latest
            self._hints.ask_again()
            self._stale = True
            return
        self._latest = latest
        self._stale = True
        for table in (self._seen, self._plans, self._refused):
            for version in [version for version in table if version <= latest]:
                del table[version]
        ahead = {e.manifest for s in self._seen.values() for variant in s.record.variants for e in variant.edges}
        self._hints.forget_held(latest)
        for manifest in self._unreadable.keys() - ahead - self._hints.by_manifest.keys():
            del self._unreadable[manifest]
