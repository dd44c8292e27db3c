"""A daemon that pulls, without sockets or files: the pull machine, what it holds, and a peer in memory.

Nothing happens by itself: `decide` collects decisions in `outstanding`, and whoever drives the test
answers them, honestly with `answer`, or in any other way.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from deltad.delta.layout import decode_layout
from deltad.delta.manifest import decode_manifest, decode_page
from deltad.delta.record import VersionRecord, decode_record
from deltad.errors import PeerError
from deltad.limits import DEFAULT_LIMITS, Limits
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
from deltad.protocol.pull_plan import Wanted, check_arrival
from deltad.types import Digest, RunId, Version, VersionId
from tests.kit.versions import Published


@dataclass
class MemoryHoldings:
    """Implements `deltad.protocol.pull_ways.Holdings`; what it holds survives a restart."""

    records: dict[Version, VersionRecord] = field(default_factory=dict)
    objects: dict[Digest, bytes] = field(default_factory=dict)
    others: dict[VersionId, VersionRecord] = field(default_factory=dict)
    """Versions of other runs."""

    def latest(self) -> Version | None:
        return max(self.records, default=None)

    def record(self, version: Version) -> VersionRecord | None:
        return self.records.get(version)

    def elsewhere(self, version: VersionId) -> VersionRecord | None:
        return self.others.get(version)

    def size(self, digest: Digest) -> int | None:
        data = self.objects.get(digest)
        return None if data is None else len(data)

    def hold(self, published: Published) -> None:
        self.records[published.version] = published.record
        self.objects |= published.objects


class PullingDaemon:
    """`peer_records` and `peer_objects` are what the peer has; take away from them or add to them at will.

    `damaged` names objects that are held and cannot be read. `hints` is what the peer says of edges; one that has
    none answers at once, like one that knows of no such question.
    """

    def __init__(self, run: str, policy: PullPolicy, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.run = RunId(run)
        self.policy = policy
        self.limits = limits
        self.now = 0.0
        self.holdings = MemoryHoldings()
        self.peer_records: dict[Version, bytes] = {}
        self.peer_objects: dict[Digest, bytes] = {}
        self.damaged: set[Digest] = set()
        self.hints: list[Hint] = []
        self.fetches: Counter[Digest] = Counter()
        self.record_fetches: Counter[Version] = Counter()
        self.commits: list[Version] = []
        self.restart()

    def restart(self) -> list[Decision]:
        """A new life with the same holdings. Returns what was outstanding."""
        lost = list(getattr(self, "outstanding", ()))
        self.outstanding: list[Decision] = []
        self.wake: float | None = None
        self.pull = Pull(
            self.run, "peer-1", self.holdings, rng=random.Random(1), policy=self.policy, limits=self.limits
        )
        return lost

    def offer(self, *versions: Published) -> None:
        """The peer has these from now on."""
        for published in versions:
            self.peer_records[published.version] = published.data
            self.peer_objects |= published.objects

    def notice(self, published: Published) -> None:
        """The peer's latest record comes in."""
        self.pull.record_seen(published.data, self.now)
        self.decide()

    def decide(self) -> None:
        """Collect decisions, and hold them to what is promised of every one."""
        *decisions, wait = self.pull.decide(self.now)
        if not self.hints and any(isinstance(decision, ListEdges) for decision in decisions):
            self.pull.edges_listed((), self.now)
            more = self.pull.decide(self.now)
            decisions, wait = [d for d in decisions if not isinstance(d, ListEdges)] + list(more[:-1]), more[-1]
        assert isinstance(wait, Wait), "the last decision says when to ask again"
        assert wait.until is None or wait.until >= self.now
        self.wake = wait.until
        for decision in decisions:
            assert decision not in self.outstanding, "a decision is given once"
            if isinstance(decision, Fetch):
                digest = decision.wanted.digest
                assert digest in self.damaged or self.holdings.size(digest) is None, "what is held is not asked for"
                self.fetches[decision.wanted.digest] += 1
            if isinstance(decision, FetchRecord):
                assert decision.version not in self.holdings.records, "what is held is not asked for"
                self.record_fetches[decision.version] += 1
            self.outstanding.append(decision)
        asked = [d for d in self.outstanding if not isinstance(d, Commit)]
        assert len(asked) <= self.policy.in_flight, "no more is in flight than the policy allows"

    def answer(self, decision: Decision) -> None:
        """Carry a decision out with the peer as it is; it may be one of an earlier life."""
        self._drop(decision)
        match decision:
            case FetchRecord(version):
                if version in self.peer_records:
                    self.pull.record_seen(self.peer_records[version], self.now, asked=version)
                else:
                    self.pull.record_missing(version, self.now)
            case ListVersions(after):
                self.pull.versions_listed(v for v in self.peer_records if after is None or v > after)
            case ListEdges():
                self.pull.edges_listed(self.hints, self.now)
            case Fetch(wanted):
                self._answer_fetch(wanted)
            case Load(wanted) if wanted.digest in self.damaged:
                self.pull.load_failed(wanted)
            case Load(wanted):
                data = self.holdings.objects[wanted.digest]
                self.pull.object_loaded(check_arrival(wanted, data, "peer-1", limits=self.limits), self.now)
            case Commit(version, data, derived):
                self._check_commit(data, derived)
                latest = self.holdings.latest()
                assert latest is None or version > latest or version in self.holdings.records, "ascending order"
                self.holdings.records[version] = self.pull.record_seen(data, self.now)
                self.commits.append(version)
                self.pull.committed(version)
            case _:
                raise AssertionError(decision)
        self.decide()

    def _answer_fetch(self, wanted: Wanted) -> None:
        if wanted.digest not in self.peer_objects:
            self.pull.object_missing(wanted, self.now)
            return
        try:
            arrived = check_arrival(wanted, self.peer_objects[wanted.digest], "peer-1", limits=self.limits)
        except PeerError:
            self.pull.object_failed(wanted, self.now, wrong=True)
            return
        if self.pull.object_arrived(arrived, self.now):
            self.damaged.discard(wanted.digest)
            self.holdings.objects[wanted.digest] = arrived.data
            self.pull.object_stored(wanted)

    def _check_commit(self, data: bytes, derived: tuple[Digest, ...]) -> None:
        """A store would take the version: each variant has an edge that is held whole, from a version that is."""
        record = decode_record(data)
        objects = self.holdings.objects
        for variant in record.variants:
            layout = decode_layout(objects[Digest(variant.layout)])
            whole = 0
            for digest in {*(Digest(edge.manifest) for edge in variant.edges), *derived} & objects.keys():
                manifest = decode_manifest(objects[digest])
                pages = [page for page in manifest.pages if Digest(page.digest) in objects]
                chunks = [c for p in pages for c in decode_page(objects[Digest(p.digest)], p, layout)]
                base = manifest.base is None or manifest.base.version in self.holdings.records
                if manifest.base is not None and manifest.base.run:
                    base = VersionId(RunId(manifest.base.run), manifest.base.version) in self.holdings.others
                mine = manifest.target.version == record.version and manifest.target.root == variant.root
                held = all(Digest(chunk.digest) in objects for chunk in chunks)
                whole += base and mine and held and len(pages) == len(manifest.pages)
            assert whole, "an edge leads there that is held whole"

    def _drop(self, decision: Decision) -> None:
        """No longer outstanding: the decision, and any other that the same answer satisfies."""
        wanted = decision.wanted if isinstance(decision, (Fetch, Load)) else None
        self.outstanding = [
            d
            for d in self.outstanding
            if d != decision and (wanted is None or not isinstance(d, (Fetch, Load)) or d.wanted != wanted)
        ]

    def lose(self, decision: Decision) -> None:
        """A decision fails."""
        self.outstanding.remove(decision)
        match decision:
            case FetchRecord(version):
                self.pull.record_failed(version, self.now)
            case ListVersions():
                self.pull.versions_listed(())
            case ListEdges():
                self.pull.edges_failed(self.now)
            case Fetch(wanted):
                self.pull.object_failed(wanted, self.now)
            case _:
                raise AssertionError(decision)
        self.decide()

    def finish(self) -> None:
        """Answer everything honestly, letting time pass where the machine waits, until it rests."""
        self.decide()
        for _ in range(2_000):
            if self.outstanding:
                self.answer(self.outstanding[0])
            elif self.wake is not None and self.pull.busy:
                self.now = self.wake
                self.decide()
            else:
                return
        raise AssertionError(f"does not come to rest: {self.outstanding}, waiting for {self.wake}")
