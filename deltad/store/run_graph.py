"""The version graph of one run as it is held here, kept in step with its records and edges.

It is built when the first path is asked for, since that takes the size of every edge, and then grows with the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from deltad.delta.record import EdgeRef, VersionRecord
from deltad.errors import FormatError, NotFoundError
from deltad.store.graph import Edge, VersionGraph, joins
from deltad.store.path import Hop, Path
from deltad.types import Digest, RunId, Version, VersionId

Answer = TypeVar("Answer")


class Run(Protocol):
    """What the graph asks of the run that it belongs to."""

    run: RunId

    def record(self, version: Version) -> VersionRecord: ...

    def records(self) -> list[VersionRecord]: ...

    def edges(self, version: Version, variant: str) -> tuple[EdgeRef, ...]: ...

    def edge(self, edge: EdgeRef, target: VersionId) -> Edge: ...


@dataclass(slots=True)
class _Part:
    """The graph of one variant, and the versions that have new edges since it was looked at."""

    graph: VersionGraph
    grown: list[Version]
    joins: dict[VersionId, Edge] | None = None


class RunGraph:
    """Methods may be called from any thread. Its lock is taken before the run's own, never while that is held."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.RLock()
        self._growing = threading.Lock()
        self._parts: dict[str, _Part] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else sees or changes the graph meanwhile."""
        with self._lock:
            yield

    def grew(self, version: Version) -> None:
        """Another edge leads to a version, or it is new."""
        with self._growing:
            for part in self._parts.values():
                part.grown.append(version)

    def forget(self) -> None:
        """Versions or edges are gone."""
        with self._growing:
            self._parts.clear()

    def path(
        self,
        record: VersionRecord,
        variant: str,
        held: Collection[Version],
        *,
        anchors: bool,
        avoid: Collection[Digest] = (),
    ) -> Path:
        """See `RunStore.path`."""
        run = self._run.run
        with self._lock:
            graph = self._current(variant).graph
            starts = [VersionId(run, version) for version in held]
            found = graph.path(record.id, starts, left=dict.fromkeys(avoid), anchors=anchors)
        hops = tuple(self._hop(hop.edge) for hop in found.hops)
        return Path(None if found.start is None else found.start.version, hops)

    def ask(self, variant: str, question: Callable[[VersionGraph], Answer]) -> Answer:
        """See `RunStore.ask_graph`."""
        with self._lock:
            return question(self._current(variant).graph)

    def join(self, version: Version, variant: str) -> Edge | None:
        """The last edge of the cheapest way to a version from an anchor; None if there is no such way."""
        with self._lock:
            part = self._current(variant)
            if part.joins is None:
                part.joins = joins(part.graph.edges())
            return part.joins.get(VersionId(self._run.run, version))

    def _current(self, variant: str) -> _Part:
        with self._growing:
            if variant not in self._parts:
                grown = [record.version for record in self._run.records()]
                self._parts[variant] = _Part(VersionGraph(variant), grown)
            part = self._parts[variant]
            grown, part.grown = part.grown, []
        for version in grown:
            try:
                record, edges = self._run.record(version), self._run.edges(version, variant)
            except (NotFoundError, FormatError):
                continue  # gone meanwhile, or without this variant
            part.graph.add_version(record.id, record.sequence)
            for edge in edges:
                part.graph.add(self._run.edge(edge, record.id))
            part.joins = None
        return part

    def _hop(self, edge: Edge) -> Hop:
        base = None if edge.base is None else edge.base.version
        return Hop(self._run.record(edge.target.version), EdgeRef(edge.kind, base, edge.manifest, edge.size))
