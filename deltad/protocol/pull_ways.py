"""Over which edges a daemon reaches the newest version that a peer has told it of.

Pure. Deltas from what is held here, then anchors; among those, what is known to take the fewest bytes. A region
that holds the base never downloads an anchor again, so deltas are followed as far down as what is held before
an anchor is taken. Versions are committed in ascending order, so nothing at or below the newest one held can
still be pulled. What a peer hints of edges is weighed and never believed: whatever it says, each version on the
way is one that a record of its own stands for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deltad.delta.record import EdgeRef, VersionRecord
from deltad.protocol.hints import Hint
from deltad.types import Digest, Version, VersionId


class Holdings(Protocol):
    """What is durable here, answered at once. It may grow at any time, by whatever hand."""

    def latest(self) -> Version | None:
        """The newest version of the run."""

    def record(self, version: Version) -> VersionRecord | None: ...

    def elsewhere(self, version: VersionId) -> VersionRecord | None:
        """A version of another run."""

    def size(self, digest: Digest) -> int | None:
        """Size in bytes of an object that is held."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What leads to the newest version that can be reached.

    `chain` holds the versions to pull and, for each of their variants, the edge to fetch. Before it can be told,
    the records of other versions must be seen: of those in `named`, which hints lead over; and of those in
    `unknown`, below which it is not known where the way leads.
    """

    chain: dict[Version, dict[str, EdgeRef]]
    unknown: frozenset[Version] = frozenset()
    named: frozenset[Version] = frozenset()


@dataclass(frozen=True, slots=True, order=True)
class _Cost:
    """What a way takes, the worst first: an anchor, edges of which nobody has said how large they are, bytes, edges."""

    anchor: bool = False
    unweighed: int = 0
    bytes: int = 0
    edges: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.anchor or other.anchor,
            self.unweighed + other.unweighed,
            self.bytes + other.bytes,
            self.edges + other.edges,
        )


@dataclass(frozen=True, slots=True)
class _Way:
    edges: dict[str, EdgeRef]
    cost: _Cost = field(default_factory=_Cost)
    unknown: Version | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """Records that a peer sent and that are not durable here yet, beside those that are.

    `refused` are versions and `lacking` the manifests of edges that cannot be had from this peer, or not be
    read here. `hints` by manifest, `left` the bytes that edges which are being fetched still take. `begun` is the
    lowest version that is being fetched, and its edges: it is pulled to its end where it leads on at all, so that
    a peer whose newest version changes all the time does not keep us from ever getting anywhere.
    """

    seen: Mapping[Version, VersionRecord]
    holdings: Holdings
    refused: Collection[Version] = frozenset()
    lacking: Collection[bytes] = frozenset()
    hints: Mapping[bytes, Hint] = field(default_factory=dict)
    left: Mapping[bytes, int] = field(default_factory=dict)
    begun: tuple[Version, Mapping[str, EdgeRef]] | None = None

    def root(self, version: Version, variant: str) -> bytes | None:
        """The root of a version that is held or seen; None if it has no such variant."""
        record = self.holdings.record(version) or self.seen.get(version)
        variants = () if record is None else record.variants
        return next((v.root for v in variants if v.name == variant), None)

    def is_near(self, record: VersionRecord) -> bool:
        """Whether a delta that the record names leads to it from what is held, in each of its variants."""
        return all(
            any(
                edge.base is not None and (bool(record.parent_run) or self._is_held(edge.base, variant.name))
                for edge in self._own(record, variant.name)
            )
            for variant in record.variants
        )

    def base_root(self, record: VersionRecord, edge: EdgeRef, variant: str) -> bytes | None:
        """The root of the version that an edge starts from, where that is known: for a fork, held in its own run."""
        base = record.base(edge)
        if base is None or base.run == record.run:
            return None if base is None else self.root(base.version, variant)
        found = self.holdings.elsewhere(base)
        return next((v.root for v in found.variants if v.name == variant), None) if found else None

    def awaited(self) -> frozenset[VersionId]:
        """The versions of other runs from which forks that were seen lead on, and which are not held."""
        bases = (base for record in self.seen.values() for base in record.bases_elsewhere)
        return frozenset(base for base in bases if self.holdings.elsewhere(base) is None)

    def ways(self) -> Ways:
        """The chain to the newest version that can be reached; empty if there is none."""
        search = _Search(self, self.begun)
        if self.begun is not None and search.target not in search.led:
            search = _Search(self, None)
        return search.ways()

    def _is_held(self, base: Version | None, variant: str) -> bool:
        return base is not None and self.holdings.record(base) is not None and self.root(base, variant) is not None

    def _own(self, record: VersionRecord, variant: str) -> Iterator[EdgeRef]:
        """The edges that a record names, but for those that are of no use here."""
        for edge in record.variant(variant).edges:
            # The base of a fork belongs to another run: it is held there, or the edge is of no use yet.
            useless = record.parent_run and edge.base is not None and self.base_root(record, edge, variant) is None
            if edge.manifest not in self.lacking and not useless:
                yield edge

    def _weight(self, edge: EdgeRef) -> _Cost:
        hint = self.hints.get(edge.manifest)
        size = self.left.get(edge.manifest, None if hint is None else hint.bytes)
        return _Cost(edge.base is None, int(size is None), size or 0, 1)


class _Search:
    """One look for the cheapest ways, from the lowest version up: bases come before what is built on them."""

    def __init__(self, graph: Graph, begun: tuple[Version, Mapping[str, EdgeRef]] | None) -> None:
        self._graph = graph
        self._latest = graph.holdings.latest()
        self._names = [variant.name for variant in graph.seen[max(graph.seen)].variants] if graph.seen else []
        self._hinted: dict[tuple[Version, str], list[EdgeRef]] = {}
        for hint in graph.hints.values():
            if self._may_lead_over(hint.target) and hint.edge.manifest not in graph.lacking:
                self._hinted.setdefault((hint.target, hint.variant), []).append(hint.edge)
        self._ways: dict[Version, _Way | None] = {}
        self.led: set[Version] = set()
        """The versions to which deltas lead from the one that is begun, and itself."""
        for version in sorted({*graph.seen, *(target for target, _ in self._hinted)}):
            if begun is not None and version == begun[0]:
                self._ways[version] = _Way(dict(begun[1]))
                self.led.add(version)
            elif (way := self._way(version)) is not None or version in graph.seen:
                self._ways[version] = way
        ends = (version for version in graph.seen if self._ways[version] is not None)
        self.target = max(ends, default=None)

    def ways(self) -> Ways:
        chain: dict[Version, dict[str, EdgeRef]] = {}
        unknown: set[Version] = set()
        todo = [version for version in (self.target, min(self.led, default=None)) if version is not None]
        while todo:
            version = todo.pop()
            way = self._ways.get(version)
            if way is None or version in chain:
                continue
            chain[version] = way.edges
            if way.unknown is not None:
                unknown.add(way.unknown)
            if not self._forks(version):  # a fork starts in another run
                todo += (edge.base for edge in way.edges.values() if edge.base is not None)
        return Ways(dict(sorted(chain.items())), frozenset(unknown), frozenset(chain.keys() - self._graph.seen.keys()))

    def _forks(self, version: Version) -> bool:
        record = self._graph.seen.get(version)
        return record is not None and bool(record.parent_run)

    def _may_lead_over(self, version: Version) -> bool:
        """Whether a hint may speak of this version: one that can be pulled."""
        return version not in self._graph.refused and (self._latest is None or version > self._latest)

    def _way(self, version: Version) -> _Way | None:
        record = self._graph.seen.get(version)
        names = self._names if record is None else [variant.name for variant in record.variants]
        edges: dict[str, EdgeRef] = {}
        cost = _Cost()
        forks = self._forks(version)
        leads = not forks
        for name in names:
            own = () if record is None else tuple(self._graph._own(record, name))
            named = () if record is None else record.variant(name).edges
            apart = {edge.manifest for edge in named}
            others = [edge for edge in self._hinted.get((version, name), ()) if edge.manifest not in apart]
            if forks:
                others = [edge for edge in others if edge.base is None]
            leads &= any(edge.base in self.led for edge in (*own, *others))
            way = self._variant_way(name, own, others, forks=forks)
            if way is None or way.unknown is not None:
                return way
            edges |= way.edges
            cost += way.cost
        if leads:
            self.led.add(version)
        return _Way(edges, cost)

    def _variant_way(
        self, name: str, own: Collection[EdgeRef], others: Collection[EdgeRef], *, forks: bool
    ) -> _Way | None:
        """The cheapest way to a version. One that `forks` is reached from what is held of the run that it forks."""
        best: _Way | None = None
        unknown: Version | None = None
        for edge in (*own, *others):
            cost = self._graph._weight(edge)
            base = edge.base
            if base is None or forks or self._graph._is_held(base, name):
                pass
            elif (
                base in self._graph.refused
                or self._graph.holdings.record(base) is not None
                or (self._latest is not None and base < self._latest)
            ):
                continue
            elif base in self._ways:
                below = self._ways[base]
                if below is None or (base in self._graph.seen and self._graph.root(base, name) is None):
                    continue
                if below.unknown is not None:
                    unknown = below.unknown
                    continue
                cost += below.cost
            else:
                # Of a derived edge the peer would have told where its base comes from.
                unknown = base if edge in own else unknown
                continue
            if best is None or cost < best.cost:
                best = _Way({name: edge}, cost)
        if unknown is not None and (best is None or (best.cost.anchor and self._latest is not None)):
            return _Way({}, unknown=unknown)
        return best
