"""Interim: replaced by branch graph5 at the merge."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from deltad.delta.manifest import EdgeKind
from deltad.errors import NotFoundError
from deltad.types import RunId, Version, VersionId


@dataclass(frozen=True, slots=True, order=True)
class Node:
    run: RunId
    version: Version

    def __str__(self) -> str:
        return str(VersionId(self.run, self.version))


@dataclass(frozen=True, slots=True)
class Edge:
    kind: EdgeKind
    base: Node | None
    target: Node
    manifest: bytes
    size: int
    bytes: int
    foldable: bool = True
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Path:
    start: Node | None
    hops: tuple[Edge, ...]


class VersionGraph:
    def __init__(self) -> None:
        self._into: dict[Node, list[Edge]] = {}
        self._joins: dict[Node, Edge] | None = None

    def add(self, edge: Edge) -> None:
        into = self._into.setdefault(edge.target, [])
        if all(known.manifest != edge.manifest for known in into):
            into.append(edge)
        self._joins = None

    def path(
        self,
        target: Node,
        starts: Collection[Node] = (),
        *,
        cost: Callable[[Edge], int] = lambda edge: edge.bytes,
        anchors: bool = True,
    ) -> Path:
        for allowed in (False, True) if anchors else (False,):
            tie = itertools.count()
            queue: list[tuple[int, int, int, Node | None, tuple[Edge, ...]]] = [(0, 0, next(tie), target, ())]
            done: set[Node | None] = set()
            while queue:
                total, hops, _, at, way = heapq.heappop(queue)
                if at is None or at in starts:
                    return Path(at, way)
                if at in done:
                    continue
                done.add(at)
                for edge in self._into.get(at, ()):
                    if edge.base is not None or allowed:
                        heapq.heappush(queue, (total + cost(edge), hops + 1, next(tie), edge.base, (edge, *way)))
        raise NotFoundError(
            f"a path to {target}",
            expected="deltas from a version that is held" + (", or an anchor" if anchors else ""),
            found="nothing that leads there",
        )

    def join(self, node: Node) -> Edge | None:
        if self._joins is None:
            self._joins = self._join_all()
        return self._joins.get(node)

    def _join_all(self) -> dict[Node, Edge]:
        out: dict[Node | None, list[Edge]] = {}
        for into in self._into.values():
            for edge in into:
                out.setdefault(edge.base, []).append(edge)
        joins: dict[Node, Edge] = {}
        tie = itertools.count()
        queue = [(edge.bytes, 1, next(tie), edge) for edge in out.get(None, ())]
        heapq.heapify(queue)
        while queue:
            total, hops, _, edge = heapq.heappop(queue)
            if edge.target in joins:
                continue
            joins[edge.target] = edge
            for onward in out.get(edge.target, ()):
                heapq.heappush(queue, (total + onward.bytes, hops + 1, next(tie), onward))
        return joins
