"""The search for the cheapest path to a version, from border to border of the graph's cells. Pure.

Dijkstra's algorithm, from the target backwards. A vertex leads, by the survey of its cell, to that cell's borders, to
the starts in it and to its cheapest anchor; a border leads over its arcs to other cells. Owns the invariant that what
it finds is what a search over all versions would find.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from deltad.store.graph.cells import INFINITE, Arc, Cell, Survey, Vertex, bytes_of, steps_to
from deltad.store.graph.edge import Hop, Path
from deltad.types import Version, VersionId


@dataclass(frozen=True, slots=True)
class _End:
    """Where a path may begin: at a vertex that is held or has an anchor, by the way of a survey."""

    weight: int
    vertex: Vertex
    survey: Survey
    anchor: Arc | None = None


class Search:
    """One question. `held` are the starts by their cell, `free` the anchors that cost nothing any more."""

    def __init__(
        self,
        target: Vertex,
        held: Mapping[Cell, Collection[Vertex]],
        *,
        free: Sequence[Arc],
        changed: Mapping[Arc, int],
        anchors: bool,
        backwards: bool,
    ) -> None:
        self._target = target
        self._run = target.name.run
        self._held = held
        self._anchors = anchors
        self._backwards = backwards
        self._changed = changed
        self._touched: set[Cell | None] = {arc.cell for arc in changed}
        self._touched |= {cell for arc in changed if arc.base is None for cell in arc.target.cells}
        self._free: dict[Cell, list[Arc]] = {}
        for arc in free:
            self._free.setdefault(arc.target.cells[0], []).append(arc)
        self._came: dict[Vertex, Arc | tuple[Cell, Survey]] = {}
        self._surveyed: list[tuple[Cell, Survey]] = []
        self._best: _End | None = None
        self._paid: _End | None = None

    def path(self) -> Path | None:
        """The cheapest path, or None. Any that needs no anchor to be fetched is preferred to any that does."""
        far = {self._target: 0}
        queue = [(0, self._target.ordinal, self._target)]

        def reach(vertex: Vertex, weight: int, came: Arc | tuple[Cell, Survey]) -> None:
            if weight < far.get(vertex, INFINITE):
                far[vertex] = weight
                self._came[vertex] = came
                heappush(queue, (weight, vertex.ordinal, vertex))

        while queue:
            weight, _, vertex = heappop(queue)
            if weight > far[vertex]:
                continue
            if self._decided(weight):
                break
            came = self._came.get(vertex)
            inner = came[0] if isinstance(came, tuple) else None
            for cell in vertex.cells:
                # What is reached within a cell was surveyed from where the cell was entered.
                if cell is not inner:
                    survey = self._survey(cell, vertex)
                    self._ends(weight, cell, survey)
                    way = cell, survey
                    for border in cell.borders:
                        if border in survey.far:
                            reach(border, weight + survey.far[border], way)
            for arc, before in steps_to(vertex, backwards=self._backwards):
                if arc.cell is None:
                    reach(before, weight + self._changed.get(arc, arc.weight), arc)
        end = self._best or self._paid
        return None if end is None else self._walk(end)

    def origins(self) -> list[VersionId]:
        """After a search in vain: the versions that lead to the target, and to which nothing leads; ascending."""
        found = set()
        for cell, survey in self._surveyed:
            # Where edges cannot be had, more is loose than the cell knows.
            loose = survey.far if self._changed else cell.loose
            found |= {vertex.name for vertex in loose if vertex in survey.far and not self._led_to(vertex)}
        return sorted(found)

    def _led_to(self, vertex: Vertex) -> bool:
        return any(self._changed.get(arc, arc.weight) < INFINITE for arc in vertex.into)

    def _decided(self, weight: int) -> bool:
        """Whether nothing as far as this, or further, can be better than what is found."""
        if self._best is not None:
            return weight > self._best.weight
        return not self._held and not self._free and self._paid is not None and weight > self._paid.weight

    def _survey(self, cell: Cell, to: Vertex) -> Survey:
        changed = self._changed if cell in self._touched else {}
        survey = cell.survey(to, backwards=self._backwards, changed=changed)
        self._surveyed.append((cell, survey))
        return survey

    def _ends(self, weight: int, cell: Cell, survey: Survey) -> None:
        far = survey.far
        for vertex in self._held.get(cell, ()):
            if vertex in far:
                self._best = self._better(_End(weight + far[vertex], vertex, survey), self._best)
        for arc in self._free.get(cell, ()):
            if arc.target in far:
                total = weight + far[arc.target] + self._changed[arc]
                self._best = self._better(_End(total, arc.target, survey, arc), self._best)
        if self._anchors and survey.joined is not None:
            end = _End(weight + survey.join, survey.joined.target, survey, survey.joined)
            self._paid = self._better(end, self._paid)

    def _better(self, one: _End, other: _End | None) -> _End:
        if other is None or one.weight != other.weight:
            return one if other is None or one.weight < other.weight else other
        return max(one, other, key=self._preference)

    def _preference(self, end: _End) -> tuple[bool, bool, Version, str]:
        """Of ends of the same weight: one that is held, of the same run, and newer."""
        name = end.vertex.name
        return end.anchor is None, name.run == self._run, name.version, name.run

    def _walk(self, end: _End) -> Path:
        hops = [] if end.anchor is None else [Hop(end.anchor.edge)]
        at, survey = end.vertex, end.survey
        while True:
            while at is not survey.to:
                at = _over(survey.step[at], at, hops)
            came = self._came.get(at)
            while isinstance(came, Arc):
                at = _over(came, at, hops)
                came = self._came.get(at)
            if came is None:
                break
            survey = came[1]
        start = end.vertex.name if end.anchor is None else None
        return Path(start, tuple(hops), bytes_of(end.weight))


def _over(arc: Arc, vertex: Vertex, hops: list[Hop]) -> Vertex:
    """Walk an arc from one of its ends to the other."""
    inverse = arc.target is vertex
    hops.append(Hop(arc.edge, inverse))
    if not inverse or arc.base is None:
        return arc.target
    return arc.base
