"""The cheapest ways from anchors, all at once, are those that a path would be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.manifest import EdgeKind
from deltad.errors import NotFoundError
from deltad.store.graph import Edge, VersionGraph, joins
from deltad.types import Digest, RunId, Version, VersionId

ids = st.builds(VersionId, st.just(RunId("r")), st.builds(Version, st.integers(1, 2), st.integers(0, 5)))


@given(st.lists(st.tuples(st.none() | ids, ids, st.integers(1, 9)), max_size=30))
def test_a_join_is_as_cheap_as_the_cheapest_path_from_an_anchor(
    drawn: list[tuple[VersionId | None, VersionId, int]],
) -> None:
    graph = VersionGraph("bf16")
    for number, (base, target, weight) in enumerate(drawn):
        if base != target:
            kind = EdgeKind.ANCHOR if base is None else EdgeKind.DELTA
            graph.add(Edge(kind, base, target, Digest(number.to_bytes(32)), 1, weight))
    found = joins(graph.edges())
    for version in graph.versions():
        try:
            path = graph.path(version)
        except NotFoundError:
            assert version not in found
            continue
        total, hops, at = 0, 0, version
        while at is not None:
            total, hops, at = total + found[at].bytes, hops + 1, found[at].base
        assert (total, hops) == (path.bytes, len(path.hops))
