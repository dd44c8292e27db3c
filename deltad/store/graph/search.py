"""The search for the cheapest path to a version, from border to border of the graph's cells. Pure.

Dijkstra's algorithm, from the target backwards. A vertex that is entered from another cell leads, by the survey of its
own cell, to that cell's borders, to the starts in it and to its cheapest anchor; a border leads over its arcs to other
cells. Owns the invariant that what it finds is what a search over all versions would find.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from deltad.store.graph.cells import INFINITE, Arc, Cell, Survey, Vertex, bytes_of, steps_to
from deltad.store.graph.edge import Hop, Path
from deltad.types import VersionId


@dataclass(frozen=True, slots=True)
class _End:
    """Where a path may begin: at a vertex that is held or has an anchor, on the way to `by`, by its survey."""

    weight: int
    vertex: Vertex
    by: Vertex
    anchor: Arc | None = None

    def rank(self, run: str) -> tuple[int, bool, bool, VersionId]:
        """What is better is less, but for the version, of which the newer is better."""
        return self.weight, self.anchor is not None, self.vertex.name.run != run, self.vertex.name

    def better(self, than: _End | None, run: str) -> bool:
        if than is None or self.weight != than.weight:
            return than is None or self.weight < than.weight
        *mine, name = self.rank(run)
        *other, other_name = than.rank(run)
        if mine != other:
            return mine < other
        return (name.version, name.run) > (other_name.version, other_name.run)


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
        self._touched = {end.cell for arc in changed for end in (arc.base, arc.target) if end is not None}
        self._free: dict[Cell, list[Arc]] = {}
        for arc in free:
            self._free.setdefault(arc.target.cell, []).append(arc)
        self._came: dict[Vertex, tuple[Vertex, Arc | None]] = {}
        self._surveys: dict[Vertex, Survey] = {}
        self._best: _End | None = None
        self._paid: _End | None = None

    def path(self) -> Path | None:
        """The cheapest path, or None. Any that needs no anchor to be fetched is preferred to any that does."""
        far = {self._target: 0}
        queue = [(0, self._target.ordinal, self._target)]

        def reach(vertex: Vertex, weight: int, after: Vertex, arc: Arc | None) -> None:
            if weight < far.get(vertex, INFINITE):
                far[vertex] = weight
                self._came[vertex] = after, arc
                heappush(queue, (weight, vertex.ordinal, vertex))

        while queue:
            weight, _, vertex = heappop(queue)
            if weight > far[vertex]:
                continue
            if self._decided(weight):
                break
            after = self._came.get(vertex)
            # What is reached within a cell was surveyed from where the cell was entered.
            if after is None or after[1] is not None:
                survey = self._survey(vertex)
                self._ends(vertex, weight, survey)
                for border in vertex.cell.borders:
                    if border is not vertex and border in survey.far:
                        reach(border, weight + survey.far[border], vertex, None)
            if vertex in vertex.cell.borders:
                for arc, before in steps_to(vertex, backwards=self._backwards):
                    if before.cell is not vertex.cell:
                        reach(before, weight + self._changed.get(arc, arc.weight), vertex, arc)
        end = self._best or self._paid
        return None if end is None else self._walk(end)

    def origins(self) -> list[VersionId]:
        """After a search in vain: the versions that lead to the target, and to which nothing leads; ascending."""
        found = set()
        for by, survey in self._surveys.items():
            # Where edges cannot be had, more is loose than the cell knows.
            loose = survey.far if by.cell in self._touched else by.cell.loose
            found |= {vertex.name for vertex in loose if vertex in survey.far and not self._led_to(vertex)}
        return sorted(found)

    def _led_to(self, vertex: Vertex) -> bool:
        return any(self._changed.get(arc, arc.weight) < INFINITE for arc in vertex.into)

    def _decided(self, weight: int) -> bool:
        """Whether nothing as far as this, or further, can be better than what is found."""
        if self._best is not None:
            return weight > self._best.weight
        return not self._held and not self._free and self._paid is not None and weight > self._paid.weight

    def _survey(self, vertex: Vertex) -> Survey:
        changed = self._changed if vertex.cell in self._touched else {}
        survey = vertex.cell.survey(vertex, backwards=self._backwards, changed=changed)
        self._surveys[vertex] = survey
        return survey

    def _ends(self, by: Vertex, weight: int, survey: Survey) -> None:
        ends = [_End(weight + survey.far[v], v, by) for v in self._held.get(by.cell, ()) if v in survey.far]
        ends += [
            _End(weight + survey.far[arc.target] + self._changed[arc], arc.target, by, arc)
            for arc in self._free.get(by.cell, ())
            if arc.target in survey.far
        ]
        for end in ends:
            if end.better(self._best, self._run):
                self._best = end
        if self._anchors and survey.joined is not None:
            end = _End(weight + survey.join, survey.joined.target, by, survey.joined)
            if end.better(self._paid, self._run):
                self._paid = end

    def _walk(self, end: _End) -> Path:
        hops = [] if end.anchor is None else [Hop(end.anchor.edge)]
        at, by = end.vertex, end.by
        while True:
            step = self._surveys[by].step
            while at is not by:
                at = _over(step[at], at, hops)
            if by is self._target:
                break
            # `by` was entered over an arc, from a vertex that may have been reached within its cell.
            after, arc = self._came[by]
            assert arc is not None
            _over(arc, by, hops)
            at = by = after
            if after is not self._target and self._came[after][1] is None:
                by = self._came[after][0]
        start = end.vertex.name if end.anchor is None else None
        return Path(start, tuple(hops), bytes_of(end.weight))


def _over(arc: Arc, vertex: Vertex, hops: list[Hop]) -> Vertex:
    """Walk an arc from one of its ends to the other."""
    inverse = arc.target is vertex
    hops.append(Hop(arc.edge, inverse))
    if not inverse or arc.base is None:
        return arc.target
    return arc.base
