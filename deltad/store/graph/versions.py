"""The version graph of one variant: what leads from version to version, and the cheapest path. Pure.

Owns the invariants that a path is as cheap as any, and that no anchor is fetched where deltas lead from what is held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from deltad.errors import NotFoundError
from deltad.figures import count
from deltad.store.graph.cells import CELL_VERSIONS, INFINITE, Arc, Cell, Vertex, weight_of
from deltad.store.graph.edge import Edge, Path
from deltad.store.graph.search import Search
from deltad.types import Digest, RunId, VersionId

_NOTHING: Mapping[Digest, int | None] = MappingProxyType({})
_NAMED = 3


class VersionGraph:
    """Versions of one variant, and the edges between them. Changes cost what they touch, not what is there.

    Answers are partly kept, so questions, too, are for one thread at a time. `variant` is for messages alone, and
    `cell_versions` for speed alone.
    """

    def __init__(self, variant: str, *, cell_versions: int = CELL_VERSIONS) -> None:
        self.variant = variant
        self._cell_versions = cell_versions
        self._vertices: dict[VersionId, Vertex] = {}
        self._arcs: dict[Digest, Arc] = {}
        self._cells: dict[tuple[RunId, int], Cell] = {}
        self._ordinal = 0

    def __len__(self) -> int:
        """How many versions were added and not removed."""
        return sum(vertex.known for vertex in self._vertices.values())

    def __contains__(self, version: VersionId) -> bool:
        """Whether a version was added."""
        vertex = self._vertices.get(version)
        return vertex is not None and vertex.known

    def versions(self) -> list[VersionId]:
        """All versions that were added, by run, ascending."""
        return sorted(name for name, vertex in self._vertices.items() if vertex.known)

    def edge(self, manifest: Digest) -> Edge | None:
        """The edge with this manifest."""
        arc = self._arcs.get(manifest)
        return None if arc is None else arc.edge

    def edges(self) -> Iterator[Edge]:
        """All edges, in the order in which they were added."""
        return (arc.edge for arc in self._arcs.values())

    def edges_to(self, version: VersionId) -> tuple[Edge, ...]:
        """The edges that lead to a version: anchors, then deltas."""
        vertex = self._vertices.get(version)
        return () if vertex is None else tuple(arc.edge for arc in (*vertex.anchors, *vertex.into))

    def edges_from(self, version: VersionId) -> tuple[Edge, ...]:
        """The edges that start from a version."""
        vertex = self._vertices.get(version)
        return () if vertex is None else tuple(arc.edge for arc in vertex.out)

    def add_version(self, version: VersionId, sequence: int | None = None) -> None:
        """Add a version; one that is there stays as it is. It may never have an edge.

        Planning is fast where `sequence`, its place in its run, tells which others are near to it. Without it, its
        number has to do.
        """
        self._vertex(version, sequence).known = True

    def add(self, edge: Edge) -> None:
        """Add an edge, and the version that it leads to if it is not there. One with the same manifest is replaced."""
        self.remove(edge.manifest)
        self.add_version(edge.target)
        target = self._vertex(edge.target)
        base = None if edge.base is None else self._vertex(edge.base)
        arc = Arc(edge, base, target)
        self._arcs[edge.manifest] = arc
        if base is None:
            target.anchors += (arc,)
            for cell in target.cells:
                cell.anchored[target] = None
                cell.surveys.clear()
        else:
            target.into += (arc,)
            base.out += (arc,)
            target.cells[0].loose.pop(target, None)
            if arc.cell is not None:
                arc.cell.surveys.clear()
            else:
                for end in (base, target):
                    for cell in end.cells:
                        cell.border(end)

    def remove(self, manifest: Digest) -> None:
        """Take an edge away, if it is there. Its versions stay."""
        arc = self._arcs.pop(manifest, None)
        if arc is None:
            return
        base, target = arc.base, arc.target
        if base is None:
            target.anchors = _without(target.anchors, arc)
            for cell in target.cells:
                cell.surveys.clear()
                if not target.anchors:
                    del cell.anchored[target]
        else:
            target.into = _without(target.into, arc)
            base.out = _without(base.out, arc)
            if not target.into:
                target.cells[0].loose[target] = None
            if arc.cell is not None:
                arc.cell.surveys.clear()
            else:
                for end in (base, target):
                    for cell in end.cells:
                        cell.no_border(end)
            self._forget_bare(base)

    def remove_version(self, version: VersionId) -> None:
        """Take a version away, and the edges that lead to it. Those that start from it still serve whoever holds it."""
        vertex = self._vertices.get(version)
        if vertex is None:
            return
        vertex.known = False
        for edge in self.edges_to(version):
            self.remove(edge.manifest)
        self._forget_bare(vertex)

    def path(
        self,
        target: VersionId,
        starts: Collection[VersionId] = (),
        *,
        left: Mapping[Digest, int | None] = _NOTHING,
        anchors: bool = True,
        backwards: bool = False,
    ) -> Path:
        """The cheapest path to `target` from one of `starts`, which are held; or else from an anchor, with `anchors`.

        `left` tells, by manifest, how many bytes are still to be fetched where that is not all of an edge, and None
        for an edge that cannot be had. Of paths of as many bytes the one with fewer hops is taken, and then the one
        with the newer start. Anchors of which nothing is left to fetch are as good as starts. With `backwards`, blind
        deltas are also walked from target to base. Raises NotFoundError, which says what is missing, if nothing leads
        there. Takes time for each of `starts`, so name those that are worth starting from.
        """
        if target in starts:
            return Path(target, (), 0)
        vertex = self._vertices.get(target)
        if vertex is None:
            raise NotFoundError(f"{target} variant {self.variant}", found="no such version here")
        changed = {
            arc: INFINITE if cost is None else weight_of(cost)
            for manifest, cost in left.items()
            if (arc := self._arcs.get(manifest)) is not None
        }
        free = [arc for arc, weight in changed.items() if anchors and arc.base is None and weight == weight_of(0)]
        held: dict[Cell, list[Vertex]] = {}
        for start in starts:
            if (found := self._vertices.get(start)) is not None:
                held.setdefault(found.cells[0], []).append(found)
        search = Search(vertex, held, free=free, changed=changed, anchors=anchors, backwards=backwards)
        path = search.path()
        if path is None:
            raise self._unreachable(
                target, starts, search.origins(), sum(w == INFINITE for w in changed.values()), anchors
            )
        return path

    def _unreachable(
        self, target: VersionId, starts: Collection[VersionId], origins: list[VersionId], lacking: int, anchors: bool
    ) -> NotFoundError:
        expected = f"deltas from {_some(sorted(starts))}" if starts else "deltas from a version that is held"
        if anchors:
            expected += ", or an anchor"
        if origins == [target]:
            found = "nothing leads to it"
        elif origins:
            found = f"what leads there begins at {_some(origins)}, to which nothing leads"
        else:
            found = "what leads there begins nowhere"
        if not anchors and any(edge.base is None for origin in origins for edge in self.edges_to(origin)):
            found += " but an anchor, and none may be used"
        if lacking:
            found += f"; {count(lacking, 'edge')} cannot be had"
        return NotFoundError(f"a path to {target} variant {self.variant}", expected=expected, found=found)

    def _vertex(self, version: VersionId, sequence: int | None = None) -> Vertex:
        vertex = self._vertices.get(version)
        if vertex is None:
            self._ordinal += 1
            place = version.version.number if sequence is None else sequence
            cells = [self._cell(version.run, place // self._cell_versions)]
            if place % self._cell_versions == 0:
                cells.append(self._cell(version.run, place // self._cell_versions - 1))
            vertex = self._vertices[version] = Vertex(version, self._ordinal, tuple(cells))
            cells[0].loose[vertex] = None
            if len(cells) > 1:
                for cell in cells:
                    cell.border(vertex)
        return vertex

    def _cell(self, run: RunId, block: int) -> Cell:
        cell = self._cells.get((run, block))
        if cell is None:
            cell = self._cells[run, block] = Cell()
        return cell

    def _forget_bare(self, vertex: Vertex) -> None:
        if not vertex.known and not vertex.out:
            del self._vertices[vertex.name]
            del vertex.cells[0].loose[vertex]
            for cell in vertex.cells:
                cell.borders.pop(vertex, None)
                cell.surveys.clear()


def _without(arcs: tuple[Arc, ...], gone: Arc) -> tuple[Arc, ...]:
    return tuple(arc for arc in arcs if arc is not gone)


def _some(versions: list[VersionId]) -> str:
    """The newest few by name, and how many more there are."""
    named = ", ".join(str(version) for version in versions[: -_NAMED - 1 : -1])
    return named if len(versions) <= _NAMED else f"{named} and {count(len(versions) - _NAMED, 'more', 'more')}"
