"""How the version graph is kept: versions in cells, and what is known about the ways within one. Pure.

A search over 100,000 versions would take half a second. But versions that come one after another are joined mostly
with each other, and few edges lead on from a few hundred of them, a *cell*. So the ways within a cell from its
*borders* are surveyed once, and a search goes from border to border (Delling et al., "Customizable Route Planning",
2011). The first version of a cell is also the last of the one before, since that is where edges of a ladder meet. Owns
the invariant that a kept survey is that of its cell as it is now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from deltad.store.graph.edge import Edge
from deltad.types import VersionId

CELL_VERSIONS = 256
"""Versions in a cell: surveys of a cell and a search over all borders take about as long, at 100,000 versions."""

_HOP_BITS = 24
INFINITE = 1 << 100


def weight_of(bytes_: int) -> int:
    """Bytes, and then hops, as one number to add up and to compare."""
    return (bytes_ << _HOP_BITS) + 1


def bytes_of(weight: int) -> int:
    """The bytes of a sum of weights."""
    return weight >> _HOP_BITS


class Vertex:
    """A version in the graph, in one cell or in two. `known` is False for one that is only the base of an edge."""

    __slots__ = ("anchors", "cells", "into", "known", "name", "ordinal", "out")

    def __init__(self, name: VersionId, ordinal: int, cells: tuple[Cell, ...]) -> None:
        self.name = name
        self.ordinal = ordinal
        self.cells = cells
        self.known = False
        self.into: tuple[Arc, ...] = ()
        self.out: tuple[Arc, ...] = ()
        self.anchors: tuple[Arc, ...] = ()


class Arc:
    """An edge between two vertices, or an anchor of one. `cell` is the one that holds both; None: it leads across."""

    __slots__ = ("base", "cell", "edge", "invertible", "target", "weight")

    def __init__(self, edge: Edge, base: Vertex | None, target: Vertex) -> None:
        self.edge = edge
        self.base = base
        self.target = target
        self.weight = weight_of(edge.bytes)
        self.invertible = edge.invertible
        self.cell: Cell | None = None
        if base is not None:
            self.cell = next((cell for cell in base.cells if cell in target.cells), None)


@dataclass(slots=True)
class Survey:
    """The cheapest ways within a cell to one of its vertices.

    `far` is the weight from each vertex that leads there, `step` the arc that begins the way. `joined` is the anchor
    of the cell from which it is cheapest, and `join` the weight with it.
    """

    to: Vertex
    far: dict[Vertex, int]
    step: dict[Vertex, Arc]
    join: int = INFINITE
    joined: Arc | None = None


@dataclass(slots=True, eq=False)
class Cell:
    """Versions that came one after another.

    `borders` are the vertices that are in another cell too or have arcs that lead across, and how many reasons there
    are for it; `anchored` those with an anchor, and `loose` those to which no arc leads.
    """

    borders: dict[Vertex, int] = field(default_factory=dict)
    anchored: dict[Vertex, None] = field(default_factory=dict)
    loose: dict[Vertex, None] = field(default_factory=dict)
    surveys: dict[tuple[Vertex, bool], Survey] = field(default_factory=dict)

    def survey(self, to: Vertex, *, backwards: bool, changed: Mapping[Arc, int]) -> Survey:
        """The ways to a vertex of this cell. With the weights of `changed` arcs they are not kept."""
        if changed:
            return self._survey(to, backwards, changed)
        found = self.surveys.get((to, backwards))
        if found is None:
            found = self._survey(to, backwards, changed)
            # The newest version is asked for most, and its cell changes most; only borders are asked for again.
            if to in self.borders:
                self.surveys[to, backwards] = found
        return found

    def border(self, vertex: Vertex) -> None:
        """One more reason for a vertex to be a border."""
        self.borders[vertex] = self.borders.get(vertex, 0) + 1

    def no_border(self, vertex: Vertex) -> None:
        """One reason less."""
        self.borders[vertex] -= 1
        if not self.borders[vertex]:
            del self.borders[vertex]
            for backwards in (False, True):
                self.surveys.pop((vertex, backwards), None)

    def _survey(self, to: Vertex, backwards: bool, changed: Mapping[Arc, int]) -> Survey:
        far = {to: 0}
        step: dict[Vertex, Arc] = {}
        queue = [(0, to.ordinal, to)]
        while queue:
            weight, _, vertex = heappop(queue)
            if weight > far[vertex]:
                continue
            for arc, before in steps_to(vertex, backwards=backwards):
                if arc.cell is self:
                    total = weight + (changed.get(arc, arc.weight) if changed else arc.weight)
                    if total < far.get(before, INFINITE):
                        far[before] = total
                        step[before] = arc
                        heappush(queue, (total, before.ordinal, before))
        found = Survey(to, far, step)
        for vertex in self.anchored:
            if vertex in far:
                for arc in vertex.anchors:
                    total = far[vertex] + changed.get(arc, arc.weight)
                    if total < found.join:
                        found.join, found.joined = total, arc
        return found


def steps_to(vertex: Vertex, *, backwards: bool) -> list[tuple[Arc, Vertex]]:
    """The arcs that lead to a vertex, and from where; with `backwards`, those that can be walked back to it, too."""
    steps = [(arc, arc.base) for arc in vertex.into if arc.base is not None]
    if backwards:
        steps += [(arc, arc.target) for arc in vertex.out if arc.invertible]
    return steps
