"""What to fold, where to cut an anchor, and what to drop, so that nobody's way to a version is long. Pure.

Skip deltas stand on a ladder: between versions whose sequences are neighbouring multiples of 2, of 4, of 8, and so on.
From any version to any later one that takes two of each size at most. Whoever lags or joins gets a skip delta of its
own where that is still too many. An anchor is cut where even that is too many bytes. Owns the invariant that nothing
is planned beyond the budget, and that every action says why.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType

from deltad.delta.manifest import EdgeKind
from deltad.errors import NotFoundError
from deltad.figures import count, size
from deltad.store.graph.actions import Action, Budget, CutAnchor, Drop, Encode, Fold, Plan, PutOff, Reader
from deltad.store.graph.edge import Edge, Path
from deltad.store.graph.versions import VersionGraph
from deltad.types import Digest, VersionId

MOST_HOPS = 8
"""Edges that a reader's way may have before it gets a skip delta of its own."""

JOIN_BOUND = 1.5
"""How many times the bytes of its anchor the cheapest way of a newcomer may take."""

_FOLD_BOUND = 1.4
"""The same, for what a fold is to make of it; where it would take more, an anchor lasts longer."""

GROWTH = 0.6
"""Folding n equal deltas takes n to this power times one: 8 steps took 0.49 of their bytes, 50 steps 0.20."""

_LOOK_BACK = 2
"""How many rungs of each size, the newest, are folded where they are missing."""

_WORTH = 0.95
"""A rung that takes more than this share of the bytes of its parts is not worth its room."""

Line = Sequence[tuple[int, VersionId]]
"""The versions that lead to the newest, ascending, each with its sequence in the run."""


def line_to(
    graph: VersionGraph,
    newest: VersionId,
    sequence: Mapping[VersionId, int],
    parents: Mapping[VersionId, VersionId] = MappingProxyType({}),
) -> list[tuple[int, VersionId]]:
    """The versions of its run that deltas lead over to the newest, ascending, with their sequences.

    Over the one that a version was made from, if `parents` has it and it is here: an epoch that was resumed from an
    older version also has an edge from the one that it left behind, which is not of its line.
    """
    found = [newest]
    while True:
        bases = [edge.base for edge in graph.edges_to(found[-1]) if edge.base is not None]
        bases = [base for base in bases if base in graph and base.run == newest.run and base < found[-1]]
        if not bases:
            return [(sequence[version], version) for version in reversed(found)]
        parent = parents.get(found[-1])
        found.append(parent if parent in bases else max(bases))


def estimate(parts: Sequence[int]) -> int:
    """About how many bytes deltas of so many bytes take when they are folded."""
    return int(math.fsum(part ** (1 / GROWTH) for part in parts) ** GROWTH)


def plan(graph: VersionGraph, line: Line, readers: Sequence[Reader], budget: Budget) -> Plan:
    """What to do now. Takes time for each derived edge and each reader.

    Readers on their way to a version that is not here are passed over. Anchors and deltas that a record lists are
    nobody's to drop here.
    """
    needs = _Needs(graph, budget)
    newest = line[-1][1]
    joining = Counter({newest: 0})
    for reader in readers:
        if reader.target not in graph:
            continue
        if reader.alone:
            needs.join_alone(reader)
        elif not needs.lag(reader):
            joining[reader.target] += reader.count
    for target, newcomers in joining.items():
        needs.join(target, newcomers, bounded=target == newest)
    needs.ladder(line)
    return _within(graph, line, needs, budget)


class _Wish:
    """Something to make, that saves so many bytes of transfer for `work` bytes of reading and `room` on disk."""

    __slots__ = ("action", "room", "saved", "urgent", "work")

    def __init__(self, action: Fold | Encode | CutAnchor, *, work: int, room: int, saved: float, urgent: bool) -> None:
        self.action = action
        self.work = work
        self.room = room
        self.saved = saved
        self.urgent = urgent

    @property
    def base(self) -> VersionId | None:
        return None if isinstance(self.action, CutAnchor) else self.action.base

    @property
    def parts(self) -> list[Digest]:
        return [part.manifest for part in self.action.parts] if isinstance(self.action, Fold) else []

    @property
    def rank(self) -> tuple[bool, float]:
        """What is better is less: what somebody waits for, and then what saves most for what it takes."""
        return not self.urgent, -self.saved / self.work


class _Needs:
    """What is on somebody's way now, and what is wished for."""

    def __init__(self, graph: VersionGraph, budget: Budget) -> None:
        self._graph = graph
        self._budget = budget
        self._wishes: dict[tuple[VersionId | None, VersionId], _Wish] = {}
        self.used: set[Digest] = set()

    def wishes(self) -> list[_Wish]:
        """All of them, the best first."""
        return sorted(self._wishes.values(), key=lambda wish: wish.rank)

    def join(self, target: VersionId, newcomers: int, *, bounded: bool) -> None:
        """Keep the cheapest way of newcomers short, and that to the newest version within its bound."""
        anchor_bytes = float(self._budget.anchor)
        try:
            path = self._graph.path(target)
        except NotFoundError:
            self._cut(target, f"no anchor leads to {target.version}, so nobody could join", anchor_bytes)
            return
        self._use(path)
        anchor, after = path.hops[0].edge, path.hops[1:]
        grown = bounded and path.bytes > JOIN_BOUND * anchor.bytes
        folded = anchor.bytes + estimate([hop.edge.bytes for hop in after])
        if grown and (len(after) == 1 or folded > _FOLD_BOUND * anchor.bytes):
            reason = f"joining takes {size(path.bytes)}, more than {JOIN_BOUND:g} times what its anchor takes, "
            reason += f"the {size(anchor.bytes)} of {anchor.target.version}"
            self._cut(target, reason, path.bytes - anchor_bytes)
        elif len(after) > 1 and (newcomers or grown):
            why = f"joining has grown to {size(path.bytes)}"
            if newcomers:
                why = f"{count(newcomers, 'newcomer joins', 'newcomers join')} by the anchor {anchor.target.version}"
            rest = Path(anchor.target, after, path.bytes - anchor.bytes)
            self._shorten(rest, target, why, urgent=True, readers=newcomers)

    def join_alone(self, reader: Reader) -> None:
        """See that there is a way from an anchor of the reader's own run."""
        run = reader.target.run
        abroad = {edge.manifest: None for edge in self._graph.edges() if edge.base is None and edge.target.run != run}
        try:
            self._use(self._graph.path(reader.target, left=abroad))
        except NotFoundError:
            reason = (
                f"{reader.name} cannot have what {run} forks, and no anchor of {run} leads to {reader.target.version}"
            )
            self._cut(reader.target, reason, float(self._budget.anchor))

    def lag(self, reader: Reader) -> bool:
        """Keep the way of a reader short, and see that there is one. False where it has to join like a newcomer."""
        if reader.held is None or reader.held == reader.target:
            return reader.held is not None
        try:
            path = self._graph.path(reader.target, {reader.held}, anchors=False, backwards=True)
        except NotFoundError:
            if self._budget.state is None or reader.held not in self._graph:
                return False
            reason = f"no deltas lead {reader.name} from {reader.held.version} to {reader.target.version}"
            room = self._budget.anchor
            self._encode(reader.held, reader.target, reason, room=room, saved=float(room), urgent=True)
            return True
        self._use(path)
        if len(path.hops) > MOST_HOPS:
            why = f"{reader.name} at {reader.held.version} is {count(len(path.hops), 'edge')} away"
            self._shorten(path, reader.target, why, urgent=True, readers=reader.count)
        return True

    def ladder(self, line: Line) -> None:
        """Fold the newest rungs of every size, where they are missing."""
        first, last = line[0][0], line[-1][0]
        span = 2
        while span <= last - first:
            top = last - last % span
            for end in range(top, top - _LOOK_BACK * span, -span):
                if end - span >= first:
                    self._rung(_at(line, end - span), _at(line, end), span)
            span *= 2

    def _rung(self, base: VersionId, target: VersionId, span: int) -> None:
        if base == target or any(edge.base == base for edge in self._graph.edges_to(target)):
            return
        try:
            path = self._graph.path(target, {base}, anchors=False)
        except NotFoundError:
            return
        if len(path.hops) > 1:
            self._shorten(path, target, f"{span} versions on the ladder", urgent=False, readers=1)

    def _use(self, path: Path) -> None:
        self.used |= {hop.edge.manifest for hop in path.hops}

    def _shorten(self, path: Path, target: VersionId, why: str, *, urgent: bool, readers: int) -> None:
        """Wish for one edge that does what a path does: folded where all of it folds, else encoded anew."""
        assert path.start is not None
        parts = tuple(hop.edge for hop in path.hops)
        sizes = [part.bytes for part in parts]
        if not urgent and estimate(sizes) > _WORTH * sum(sizes):
            return
        saved = float(max(readers, 1) * (sum(sizes) - estimate(sizes)))
        if all(part.foldable for part in parts) and not any(hop.inverse for hop in path.hops):
            reason = f"{why}; folds {count(len(parts), 'delta')} of {size(sum(sizes))}"
            fold = Fold(path.start, target, parts, reason)
            self._wish(_Wish(fold, work=sum(sizes), room=sum(sizes), saved=saved, urgent=urgent))
        else:
            reason = f"{why}; {count(len(parts), 'delta')} of {size(sum(sizes))} do not fold without weights"
            self._encode(path.start, target, reason, room=sum(sizes), saved=saved, urgent=urgent)

    def _encode(
        self, base: VersionId, target: VersionId, reason: str, *, room: int, saved: float, urgent: bool
    ) -> None:
        if (state := self._budget.state) is not None:
            encode = Encode(base, target, reason)
            self._wish(_Wish(encode, work=2 * state, room=room, saved=saved, urgent=urgent))

    def _cut(self, version: VersionId, reason: str, saved: float) -> None:
        if (state := self._budget.state) is not None:
            cut = CutAnchor(version, reason)
            self._wish(_Wish(cut, work=state, room=self._budget.anchor, saved=saved, urgent=True))

    def _wish(self, wish: _Wish) -> None:
        target = wish.action.version if isinstance(wish.action, CutAnchor) else wish.action.target
        same = self._wishes.setdefault((wish.base, target), wish)
        if same is not wish:
            same.saved += wish.saved
            same.urgent |= wish.urgent


def _within(graph: VersionGraph, line: Line, needs: _Needs, budget: Budget) -> Plan:
    """The wishes that the budget allows, the best first, and what is dropped because of its age or for their room."""
    wishes = needs.wishes()
    run = line[-1][1].run  # the graph of a fork holds edges of other runs too, which are not its own to drop
    derived = [edge for edge in graph.edges() if edge.derived and edge.target.run == run]
    kept = needs.used.union(*(wish.parts for wish in wishes))
    sequences = {version: sequence for sequence, version in line}
    drops = [
        Drop(edge, "nobody is on the way over it any more, and it is not on the ladder")
        for edge in derived
        if edge.manifest not in kept and edge.kind is not EdgeKind.ANCHOR and not _is_rung(edge, line, sequences)
    ]
    actions: list[tuple[Action, int]] = [(drop, 0) for drop in drops]
    room = _Room(graph, budget.disk, {drop.edge.manifest for drop in drops}, derived, needs.used)
    actions += [(drop, 0) for drop in room.make(0, None) or ()]
    work, put_off = 0, []
    for wish in wishes:
        if work >= budget.work:
            put_off.append(PutOff(wish.action, "all that may be read for now is spoken for"))
        elif room.dropped.intersection(wish.parts):
            put_off.append(PutOff(wish.action, "a part of it has just made room for something better"))
        elif (made := room.make(wish.room, None if wish.urgent else wish.base)) is None:
            put_off.append(PutOff(wish.action, f"it may take {size(wish.room)}, and {room.left()} are left on disk"))
        else:
            actions += [*((drop, 0) for drop in made), (wish.action, wish.work)]
            room.keep(wish.parts)
            work += wish.work
    return Plan(tuple(action for action, _ in actions), tuple(cost for _, cost in actions), tuple(put_off))


class _Room:
    """The disk that derived edges may take.

    What nobody needs now makes room: skip deltas, the furthest back first, and then anchors that others stand in for.
    """

    def __init__(
        self, graph: VersionGraph, disk: int | None, gone: set[Digest], derived: Sequence[Edge], used: set[Digest]
    ) -> None:
        self._graph = graph
        self._disk = disk
        self.dropped = gone
        left = [edge for edge in derived if edge.manifest not in gone]
        self._taken = sum(edge.bytes for edge in left)
        spare = [edge for edge in left if edge.manifest not in used] if disk is not None else []
        self._spare = sorted(spare, key=lambda edge: (edge.base is None, edge.base or edge.target))

    def left(self) -> str:
        return "all" if self._disk is None else size(max(self._disk - self._taken, 0))

    def keep(self, parts: Collection[Digest]) -> None:
        """These are to be folded: they make room for nothing."""
        self._spare = [edge for edge in self._spare if edge.manifest not in parts]

    def make(self, room: int, newer: VersionId | None) -> list[Drop] | None:
        """Take so much room; what has to go for it, or None if that is not enough. Nothing from `newer` on goes."""
        disk = self._disk
        if disk is None:
            return []
        over = self._taken + room - disk
        drops: list[Drop] = []
        for edge in self._spare:
            if over <= 0 or (newer is not None and (edge.base is None or edge.base >= newer)):
                break
            if edge.base is None and not self._stands_in(edge, drops):
                continue
            over -= edge.bytes
            drops.append(Drop(edge, f"{size(disk)} are for derived edges, and it is needed least"))
        if over > 0 and room:
            return None
        if drops:
            self.dropped |= {drop.edge.manifest for drop in drops}
            self._spare = [edge for edge in self._spare if edge.manifest not in self.dropped]
        self._taken += room - sum(drop.edge.bytes for drop in drops)
        return drops

    def _stands_in(self, anchor: Edge, drops: Sequence[Drop]) -> bool:
        """Whether what an anchor leads to can be reached without it, and without all that goes as well."""
        gone = [anchor.manifest, *self.dropped, *(drop.edge.manifest for drop in drops)]
        try:
            self._graph.path(anchor.target, left=dict.fromkeys(gone))
        except NotFoundError:
            return False
        return True


def _is_rung(edge: Edge, line: Line, sequences: Mapping[VersionId, int]) -> bool:
    base, target = -1 if edge.base is None else sequences.get(edge.base, -1), sequences.get(edge.target, -1)
    if not 0 <= base < target:
        return False
    span = target - base
    if span & (span - 1) == 0 and target % span == 0:
        return True
    # Where sequences are not on the line, a rung ends at the last version before a multiple.
    span = 2
    while (end := -(-target // span) * span) <= line[-1][0]:
        if end - span >= base and _at(line, end) == edge.target and _at(line, end - span) == edge.base:
            return True
        span *= 2
    return False


def _at(line: Line, sequence: int) -> VersionId:
    """The newest version of the line with this sequence or an older one. The line has one."""
    return line[bisect_right(line, sequence, key=itemgetter(0)) - 1][1]
