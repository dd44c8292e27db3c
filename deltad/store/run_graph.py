"""The version graph of one run as it is held here, kept in step with its records and edges.

It is built when the first path is asked for, since that takes the size of every edge, and then grows with the run.
The graph of a fork also holds what leads to the versions of other runs that it starts from, and follows those runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from deltad.delta.record import EdgeRef, VersionRecord
from deltad.errors import DeltadError, FormatError, NotFoundError
from deltad.store.graph import Edge, VersionGraph, joins
from deltad.store.path import Hop, Path
from deltad.types import Digest, RunId, Version, VersionId

Answer = TypeVar("Answer")


class Run(Protocol):
    """What the graph asks of the run that it belongs to."""

    run: RunId
    graph: RunGraph

    def sibling(self, run: RunId) -> Run | None: ...

    def record(self, version: Version) -> VersionRecord: ...

    def records(self) -> list[VersionRecord]: ...

    def edges(self, version: Version, variant: str) -> tuple[EdgeRef, ...]: ...

    def edge(self, edge: EdgeRef, target: VersionId) -> Edge: ...


@dataclass(slots=True)
class _Part:
    """The graph of one variant, and the versions that have new edges since it was looked at.

    `reach`: up to which version each other run is in it.
    """

    graph: VersionGraph
    grown: list[VersionId]
    reach: dict[RunId, Version] = field(default_factory=dict)
    joins: dict[VersionId, Edge] | None = None


class RunGraph:
    """Methods may be called from any thread. Its lock is taken before those of runs, never while one is held."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.RLock()
        self._growing = threading.Lock()
        self._parts: dict[str, _Part] = {}
        self._followers: dict[RunId, RunGraph] = {}
        """The graphs of forks, by run, which hold some of this run's versions too. Replaced, never changed."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else sees or changes the graph, or those of forks, meanwhile."""
        graphs = {**self._followers, self._run.run: self}
        with ExitStack() as stack:
            for run in sorted(graphs):  # always in this order, so that no two wait for each other
                stack.enter_context(graphs[run]._lock)
            yield

    def grew(self, version: Version) -> None:
        """Another edge leads to a version, or it is new."""
        for graph in (self, *self._followers.values()):
            with graph._growing:
                for part in graph._parts.values():
                    part.grown.append(VersionId(self._run.run, version))

    def forget(self) -> None:
        """Versions or edges are gone, or an object that edges need is held no more, or again. Waits for nobody."""
        for graph in (self, *self._followers.values()):
            with graph._growing:
                graph._parts.clear()

    def runs(self, variant: str) -> list[RunId]:
        """The other runs of which some versions are in the graph: those that this one forks, and what those fork."""
        with self._lock:
            return sorted(self._current(variant).reach)

    def path(
        self,
        record: VersionRecord,
        variant: str,
        held: Collection[Version],
        elsewhere: Collection[VersionId],
        *,
        anchors: bool,
        avoid: Collection[Digest] = (),
    ) -> Path:
        """See `RunStore.path`."""
        run = self._run.run
        with self._lock:
            graph = self._current(variant).graph
            starts = [*(VersionId(run, version) for version in held), *elsewhere]
            found = graph.path(record.id, starts, left=dict.fromkeys(avoid), anchors=anchors)
        return Path(found.start, tuple(self._hop(hop.edge) for hop in found.hops))

    def ask(self, variant: str, question: Callable[[VersionGraph], Answer]) -> Answer:
        """See `RunStore.ask_graph`."""
        with self._lock:
            return question(self._current(variant).graph)

    def is_led_to(self, version: Version, variant: str, gone: Collection[Digest] = ()) -> bool:
        """Whether a way leads from an anchor to a version without the edges `gone`."""
        with self._lock:
            graph = self._current(variant).graph
            try:
                graph.path(VersionId(self._run.run, version), left=dict.fromkeys(gone))
            except NotFoundError:
                return False
            return True

    def join(self, version: Version, variant: str) -> Edge | None:
        """The last edge of the cheapest way to a version from an anchor; None if there is no such way."""
        with self._lock:
            part = self._current(variant)
            if part.joins is None:
                part.joins = joins(part.graph.edges())
            return part.joins.get(VersionId(self._run.run, version))

    def _current(self, variant: str) -> _Part:
        with self._growing:
            part = self._parts.get(variant)
        if part is None:
            # Entered before the records are read: whatever comes, or goes, from then on is told to it.
            part = _Part(VersionGraph(variant), [])
            with self._growing:
                self._parts[variant] = part
            first = [record.id for record in self._run.records()]
            with self._growing:
                part.grown = [*first, *part.grown]
        with self._growing:
            grown, part.grown = part.grown, []
        try:
            while grown:
                bases = [base for version in grown for base in self._add(part, version)]
                grown = [version for base in bases for version in self._reach(part, base)]
        except DeltadError:
            # Half of it is not the graph; it is built anew when it is asked for again.
            with self._growing:
                self._parts.pop(variant, None)
            raise
        return part

    def _add(self, part: _Part, version: VersionId) -> list[VersionId]:
        """Add the edges to a version; returns those versions of other runs that they start from."""
        run = self._run.sibling(version.run)
        if run is None:
            return []
        if run is not self._run and (version.run not in part.reach or version.version > part.reach[version.run]):
            return []  # newer than what a fork starts from
        try:
            record = run.record(version.version)
            edges = [run.edge(edge, version) for edge in run.edges(version.version, part.graph.variant)]
        except (NotFoundError, FormatError):
            return []  # gone meanwhile, or without this variant
        part.graph.add_version(version, record.sequence)
        for edge in edges:
            part.graph.add(edge)
        part.joins = None
        return [edge.base for edge in edges if edge.base is not None and edge.base.run != version.run]

    def _reach(self, part: _Part, base: VersionId) -> list[VersionId]:
        """Versions of another run up to the one that a fork starts from, as far as they are not in the graph yet."""
        run = self._run.sibling(base.run)
        reached = part.reach.get(base.run)
        if run is None or run is self._run or (reached is not None and base.version <= reached):
            return []
        part.reach[base.run] = base.version
        with run.graph._growing:
            run.graph._followers = {**run.graph._followers, self._run.run: self}
        records = (record.id for record in run.records())
        return [v for v in records if v.version <= base.version and (reached is None or v.version > reached)]

    def _hop(self, edge: Edge) -> Hop:
        run = self._run.sibling(edge.target.run)
        if run is None:
            raise NotFoundError(f"run {edge.target.run}", expected="a run that is held here", found="none of that name")
        base = None if edge.base is None else edge.base.version
        return Hop(run.record(edge.target.version), EdgeRef(edge.kind, base, edge.manifest, edge.size))
