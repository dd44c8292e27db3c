"""How the version graph is kept: versions in cells, and what is known about the ways within one. Pure.

A search over 100,000 versions would take half a second. But versions that come one after another are joined mostly
with each other, and few edges lead from one run of a few hundred, a *cell*, into another. So the ways within a cell
from its *borders* are surveyed once, and a search goes from border to border (Delling et al., "Customizable Route
Planning", 2011). Owns the invariant that a kept survey is that of its cell as it is now.
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
    """A version in the graph. `known` is False for one that is only the base of an edge."""

    __slots__ = ("anchors", "cell", "into", "known", "name", "ordinal", "out")

    def __init__(self, name: VersionId, ordinal: int, cell: Cell) -> None:
        self.name = name
        self.ordinal = ordinal
        self.cell = cell
        self.known = False
        self.into: tuple[Arc, ...] = ()
        self.out: tuple[Arc, ...] = ()
        self.anchors: tuple[Arc, ...] = ()


class Arc:
    """An edge between two vertices, or an anchor of one."""

    __slots__ = ("base", "edge", "invertible", "target", "weight")

    def __init__(self, edge: Edge, base: Vertex | None, target: Vertex) -> None:
        self.edge = edge
        self.base = base
        self.target = target
        self.weight = weight_of(edge.bytes)
        self.invertible = edge.invertible

    @property
    def crosses(self) -> bool:
        return self.base is not None and self.base.cell is not self.target.cell


@dataclass(slots=True)
class Survey:
    """The cheapest ways within a cell to one of its vertices.

    `far` is the weight from each vertex that leads there, `step` the arc that begins the way. `joined` is the anchor
    of the cell from which it is cheapest, and `join` the weight with it.
    """

    far: dict[Vertex, int]
    step: dict[Vertex, Arc]
    join: int = INFINITE
    joined: Arc | None = None


@dataclass(slots=True, eq=False)
class Cell:
    """Versions that came one after another.

    `borders` are those with arcs into other cells, and how many; `anchored` those with an anchor, and `loose` those to
    which no arc leads. `given` counts the vertices that it was ever given.
    """

    given: int = 0
    borders: dict[Vertex, int] = field(default_factory=dict)
    anchored: dict[Vertex, None] = field(default_factory=dict)
    loose: dict[Vertex, None] = field(default_factory=dict)
    surveys: dict[tuple[Vertex, bool], Survey] = field(default_factory=dict)

    def survey(self, to: Vertex, *, backwards: bool, changed: Mapping[Arc, int]) -> Survey:
        """The ways to a vertex of this cell, with the weights of `changed` arcs, which are not kept."""
        if changed:
            return self._survey(to, backwards, changed)
        found = self.surveys.get((to, backwards))
        if found is None:
            found = self._survey(to, backwards, changed)
            # The newest version is asked for most, and its cell changes most; only borders are asked for again.
            if to in self.borders:
                self.surveys[to, backwards] = found
        return found

    def _survey(self, to: Vertex, backwards: bool, changed: Mapping[Arc, int]) -> Survey:
        far = {to: 0}
        step: dict[Vertex, Arc] = {}
        queue = [(0, to.ordinal, to)]
        while queue:
            weight, _, vertex = heappop(queue)
            if weight > far[vertex]:
                continue
            for arc, before in steps_to(vertex, backwards=backwards):
                if before.cell is self:
                    total = weight + (changed.get(arc, arc.weight) if changed else arc.weight)
                    if total < far.get(before, INFINITE):
                        far[before] = total
                        step[before] = arc
                        heappush(queue, (total, before.ordinal, before))
        found = Survey(far, step)
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
