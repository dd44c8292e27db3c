"""Over which edges a daemon reaches the newest version that a peer has told it of.

Pure. Best first: deltas that lead there from what is held here; an anchor; deltas from an older anchor.
A region that holds the base never downloads an anchor again, so deltas are followed as far down as what
is held before an anchor is taken. Versions are committed in ascending order, so nothing at or below the
newest one held can still be pulled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from deltad.delta.manifest import EdgeKind
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
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

    `chain` holds the versions to pull and, for each of their variants, the edge to fetch. Where
    `unknown` is not empty, the records of these bases must be seen before the chain can be told.
    """

    chain: dict[Version, dict[str, EdgeRef]]
    unknown: frozenset[Version] = frozenset()


@dataclass(frozen=True, slots=True)
class _Way:
    edges: dict[str, EdgeRef]
    replays_anchor: bool
    unknown: Version | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """Records that a peer sent and that are not durable here yet, beside those that are.

    `refused` are versions and `lacking` the manifests of edges that cannot be had from this peer, or not be
    read here.
    """

    seen: Mapping[Version, VersionRecord]
    holdings: Holdings
    refused: Collection[Version] = frozenset()
    lacking: Collection[bytes] = frozenset()

    def root(self, version: Version, variant: str) -> bytes | None:
        """The root of a version that is held or seen; None if it has no such variant."""
        record = self.holdings.record(version) or self.seen.get(version)
        variants = () if record is None else record.variants
        return next((v.root for v in variants if v.name == variant), None)

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
        latest = self.holdings.latest()
        ways: dict[Version, _Way | None] = {}
        for version in sorted(self.seen):  # bases come before what is built on them
            ways[version] = self._way(self.seen[version], ways, latest)
        target = next((version for version in sorted(ways, reverse=True) if ways[version] is not None), None)
        chain: dict[Version, dict[str, EdgeRef]] = {}
        unknown: set[Version] = set()
        todo = [] if target is None else [target]
        while todo:
            version = todo.pop()
            way = ways.get(version)
            if way is None or version in chain:
                continue
            chain[version] = way.edges
            if way.unknown is not None:
                unknown.add(way.unknown)
            if not self.seen[version].parent_run:  # a fork starts in another run
                todo += (edge.base for edge in way.edges.values() if edge.base is not None)
        return Ways(dict(sorted(chain.items())), frozenset(unknown))

    def _way(self, record: VersionRecord, ways: Mapping[Version, _Way | None], latest: Version | None) -> _Way | None:
        edges: dict[str, EdgeRef] = {}
        replays_anchor = False
        for variant in record.variants:
            way = self._variant_way(record, variant, ways, latest)
            if way is None or way.unknown is not None:
                return way
            edges |= way.edges
            replays_anchor |= way.replays_anchor
        return _Way(edges, replays_anchor)

    def _variant_way(
        self,
        record: VersionRecord,
        variant: VariantRecord,
        ways: Mapping[Version, _Way | None],
        latest: Version | None,
    ) -> _Way | None:
        usable = [edge for edge in variant.edges if edge.manifest not in self.lacking]
        anchor = next((edge for edge in usable if edge.kind is EdgeKind.ANCHOR), None)
        if record.parent_run:
            return self._fork_way(record, variant, usable, anchor)
        from_older_anchor: EdgeRef | None = None
        unknown: Version | None = None
        for edge in usable:
            base = edge.base
            if base is None or base in self.refused:
                continue
            if self.holdings.record(base) is not None:
                if self.root(base, variant.name) is not None:
                    return _Way({variant.name: edge}, replays_anchor=False)
            elif latest is not None and base < latest:
                continue
            elif base not in self.seen:
                unknown = base
            elif (way := ways.get(base)) is not None and self.root(base, variant.name) is not None:
                if way.unknown is not None:
                    unknown = way.unknown
                elif way.replays_anchor:
                    from_older_anchor = edge
                else:
                    return _Way({variant.name: edge}, replays_anchor=False)
        if unknown is not None and (anchor is None or latest is not None):
            return _Way({}, replays_anchor=False, unknown=unknown)
        best = anchor or from_older_anchor
        return None if best is None else _Way({variant.name: best}, replays_anchor=True)

    def _fork_way(
        self, record: VersionRecord, variant: VariantRecord, usable: list[EdgeRef], anchor: EdgeRef | None
    ) -> _Way | None:
        """A fork is reached from what is held of the run that it forks, whatever that run is being pulled to."""
        for edge in usable:
            if self.base_root(record, edge, variant.name) is not None:
                return _Way({variant.name: edge}, replays_anchor=False)
        return None if anchor is None else _Way({variant.name: anchor}, replays_anchor=True)
