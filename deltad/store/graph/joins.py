"""The cheapest way to every version from an anchor, all at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from deltad.store.graph.cells import weight_of
from deltad.store.graph.edge import Edge
from deltad.types import VersionId


def joins(edges: Iterable[Edge]) -> dict[VersionId, Edge]:
    """For each version that an anchor leads to, the last edge of its cheapest way from one.

    Walking on from that edge's base, and so on, comes to the anchor. Dijkstra's algorithm from all anchors.
    """
    onward: dict[VersionId | None, list[Edge]] = {}
    for edge in edges:
        onward.setdefault(edge.base, []).append(edge)
    queue = [(weight_of(edge.bytes), order, edge) for order, edge in enumerate(onward.get(None, ()))]
    heapify(queue)
    order = len(queue)
    found: dict[VersionId, Edge] = {}
    while queue:
        weight, _, edge = heappop(queue)
        if edge.target in found:
            continue
        found[edge.target] = edge
        for step in onward.get(edge.target, ()):
            order += 1
            heappush(queue, (weight + weight_of(step.bytes), order, step))
    return found
