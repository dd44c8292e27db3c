"""The cheapest path through a version graph: what is preferred, what is never done, and what is said in vain."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.coding import Coder
from deltad.delta.manifest import EdgeKind
from deltad.errors import NotFoundError
from deltad.store.graph import Edge, Path, VersionGraph
from deltad.types import Digest, VersionId
from tests.kit.graphs import edge, graph, plainly, told, version

V = [version(number) for number in range(12)]
CHAIN = [edge(None, V[0], 1000), *(edge(V[i], V[i + 1]) for i in range(8))]


def test_a_path_leads_from_the_nearest_version_that_is_held() -> None:
    path = graph(CHAIN).path(V[8], {V[2], V[5]})
    assert (path.start, told(path), path.bytes) == (V[5], ["5 → 6", "6 → 7", "7 → 8"], 300)


def test_what_is_held_needs_nothing() -> None:
    assert graph(CHAIN).path(V[3], {V[3]}) == Path(V[3], (), 0)


def test_a_newcomer_begins_with_the_anchor_that_makes_it_cheapest() -> None:
    anchors = [edge(None, V[3], 900), edge(None, V[6], 1150)]
    path = graph([*CHAIN, *anchors]).path(V[8])
    assert (path.start, told(path), path.bytes) == (None, ["anchor 6", "6 → 7", "7 → 8"], 1350)
    assert told(graph([*CHAIN, *anchors[:1]]).path(V[8]))[0] == "anchor 3"


def test_a_skip_delta_is_taken_where_it_has_fewer_bytes() -> None:
    skip = edge(V[4], V[8], 250, kind=EdgeKind.SKIP_DELTA)
    assert told(graph([*CHAIN, skip]).path(V[8], {V[3]})) == ["3 → 4", "4 → 8"]
    dear = edge(V[4], V[8], 401, kind=EdgeKind.SKIP_DELTA)
    assert "4 → 8" not in told(graph([*CHAIN, dear]).path(V[8], {V[3]}))


def test_of_equal_bytes_the_path_with_fewer_hops_is_taken() -> None:
    skip = edge(V[6], V[8], 200, kind=EdgeKind.SKIP_DELTA)
    assert told(graph([*CHAIN, skip]).path(V[8], {V[6]})) == ["6 → 8"]


def test_of_equal_paths_the_one_from_the_newer_version_is_taken() -> None:
    edges = [edge(V[1], V[9], 50), edge(V[3], V[9], 50), edge(V[2], V[9], 50)]
    assert graph(edges).path(V[9], {V[1], V[2], V[3]}).start == V[3]


def test_of_equal_paths_one_from_the_same_run_and_from_what_is_held_is_preferred() -> None:
    later = version(9, run="other")
    assert graph([edge(later, V[8], 50), edge(V[3], V[8], 50)]).path(V[8], {later, V[3]}).start == V[3]
    anchor, first = edge(None, V[7], 1000), edge(V[6], V[7])
    left: dict[Digest, int | None] = {anchor.manifest: 0, first.manifest: 0}
    assert graph([anchor, first, edge(V[7], V[8])]).path(V[8], {V[6]}, left=left).start == V[6]


def test_an_anchor_is_never_fetched_where_deltas_lead_from_what_is_held() -> None:
    cheap = edge(None, V[8], 10)
    assert told(graph([*CHAIN, cheap]).path(V[8], {V[0]}))[0] == "0 → 1"
    assert told(graph([*CHAIN, cheap]).path(V[8], {V[9]})) == ["anchor 8"]


def test_an_anchor_that_is_here_already_is_as_good_as_a_version_that_is_held() -> None:
    anchor = edge(None, V[7], 1000)
    path = graph([*CHAIN, anchor]).path(V[8], {V[0]}, left={anchor.manifest: 0})
    assert (path.start, told(path), path.bytes) == (None, ["anchor 7", "7 → 8"], 100)


def test_what_is_fetched_in_part_costs_what_is_left() -> None:
    skip = edge(V[4], V[8], 1000, kind=EdgeKind.SKIP_DELTA)
    assert told(graph([*CHAIN, skip]).path(V[8], {V[4]}, left={skip.manifest: 399})) == ["4 → 8"]


def test_an_edge_that_cannot_be_had_is_gone_round() -> None:
    skip = edge(V[4], V[8], 300, kind=EdgeKind.SKIP_DELTA)
    path = graph([*CHAIN, skip]).path(V[8], {V[4]}, left={skip.manifest: None})
    assert told(path) == ["4 → 5", "5 → 6", "6 → 7", "7 → 8"]


def test_without_anchors_none_is_taken() -> None:
    with pytest.raises(NotFoundError, match="begins at policy/v000000, to which nothing leads but an anchor"):
        graph(CHAIN).path(V[8], anchors=False)


def test_a_rollback_walks_blind_deltas_backwards_and_no_others() -> None:
    there = [edge(V[4], V[5]), edge(V[5], V[6])]
    assert told(graph(there).path(V[4], {V[6]}, backwards=True)) == ["6 → 5", "5 → 4"]
    for coder in (Coder.CONTEXT, Coder.PACKED):
        with pytest.raises(NotFoundError):
            graph([there[0], edge(V[5], V[6], coder=coder)]).path(V[4], {V[6]}, backwards=True)
    with pytest.raises(NotFoundError):
        graph(there).path(V[4], {V[6]})


def test_an_edge_that_leads_back_is_walked_like_any_other() -> None:
    back = edge(V[6], V[4], 70, derived=True)
    path = graph([edge(V[4], V[5]), edge(V[5], V[6]), back]).path(V[4], {V[6]}, backwards=True)
    assert (told(path), [hop.inverse for hop in path.hops]) == (["6 → 4"], [False])


def test_a_resumed_run_is_followed_back_to_where_it_parted_and_forth_again() -> None:
    again = version(4, epoch=2)
    path = graph([*CHAIN, edge(V[3], again)]).path(again, {V[5]}, backwards=True)
    assert told(path) == ["5 → 4", "4 → 3", "3 → 4"]
    assert [hop.inverse for hop in path.hops] == [True, True, False]


def test_a_fork_is_reached_from_the_other_runs_version() -> None:
    fork = version(0, run="fork")
    path = graph([*CHAIN, edge(V[3], fork, 40)]).path(fork, {V[2]})
    assert (path.start, path.bytes, path.hops[-1].base) == (V[2], 140, V[3])


@pytest.mark.parametrize("starts", [set(), {V[9]}])
def test_what_is_missing_is_said(starts: set[VersionId]) -> None:
    edges = [one for one in CHAIN if one.target != V[4]]
    with pytest.raises(NotFoundError, match="begins at policy/v000004, to which nothing leads") as error:
        graph(edges).path(V[8], starts, anchors=False)
    assert str(error.value).startswith("a path to policy/v000008 variant bf16")
    with pytest.raises(NotFoundError, match=r"v000011 variant bf16: no such version here"):
        graph(edges).path(V[11])
    with pytest.raises(NotFoundError, match="1 edge cannot be had"):
        graph(CHAIN).path(V[8], starts, left={CHAIN[4].manifest: None}, anchors=False)


def test_a_version_without_edges_is_known_and_cannot_be_reached() -> None:
    lonely = VersionGraph("bf16")
    lonely.add_version(V[3])
    assert V[3] in lonely
    with pytest.raises(NotFoundError, match="nothing leads to it"):
        lonely.path(V[3])


def test_deltas_from_a_version_that_was_removed_still_serve_whoever_holds_it() -> None:
    changed = graph(CHAIN)
    changed.remove_version(V[3])
    assert V[3] not in changed
    assert told(changed.path(V[5], {V[3]})) == ["3 → 4", "4 → 5"]
    with pytest.raises(NotFoundError):
        changed.path(V[5], {V[2]})
    changed.remove(CHAIN[4].manifest)
    assert [one.target for one in changed.edges()] == [one.target for one in CHAIN if one.target not in {V[3], V[4]}]
    assert changed.versions() == [v for v in V[:9] if v != V[3]]


def test_an_edge_says_what_may_be_done_with_it() -> None:
    coders = {coder: edge(V[0], V[1], coder=coder) for coder in Coder}
    assert {coder for coder, one in coders.items() if one.foldable} == {Coder.RAW, Coder.BLIND, Coder.PACKED}
    assert {coder for coder, one in coders.items() if one.invertible} == {Coder.BLIND}
    anchor = edge(None, V[0])
    assert not anchor.foldable
    assert not anchor.invertible


@pytest.mark.parametrize(
    ("kind", "base", "size"),
    [(EdgeKind.ANCHOR, V[0], 9), (EdgeKind.DELTA, None, 9), (EdgeKind.DELTA, V[1], 9), (EdgeKind.DELTA, V[0], 0)],
)
def test_an_edge_that_cannot_be_is_refused(kind: EdgeKind, base: VersionId | None, size: int) -> None:
    with pytest.raises(ValueError, match=f"{kind} to policy/v000001"):
        Edge(kind, base, V[1], Digest(bytes(32)), 1, size)


NAMES = (
    [version(n) for n in range(6)] + [version(n, epoch=2) for n in (3, 4)] + [version(n, run="fork") for n in (0, 1)]
)
ENDS = st.sampled_from(NAMES)


@st.composite
def edges_of(draw: st.DrawFn) -> list[Edge]:
    """Any edges between a few versions: also back in time, several between two, and more anchors than one."""
    made = []
    for i in range(draw(st.integers(1, 25))):
        base, target = draw(st.none() | ENDS), draw(ENDS)
        if base != target:
            coder = draw(st.sampled_from([Coder.BLIND, Coder.CONTEXT]))
            made.append(edge(base, target, draw(st.integers(1, 9)), coder=coder, name=i))
    return made


@given(
    edges=edges_of(),
    target=ENDS,
    starts=st.sets(ENDS, max_size=4),
    partly=st.dictionaries(st.integers(0, 24), st.none() | st.integers(0, 9)),
    cell_versions=st.integers(1, 12),
    anchors=st.booleans(),
    backwards=st.booleans(),
    data=st.data(),
)
def test_no_path_is_cheaper_than_the_one_that_is_found(
    *,
    edges: list[Edge],
    target: VersionId,
    starts: set[VersionId],
    partly: dict[int, int | None],
    cell_versions: int,
    anchors: bool,
    backwards: bool,
    data: st.DataObject,
) -> None:
    # Edges come and go, and questions are asked in between, so that what is kept of older answers is tried too.
    changed = graph([], cell_versions=cell_versions)
    for one in edges:
        changed.add(one)
        if data.draw(st.booleans()):
            _ask(changed, target, starts, {}, anchors=anchors, backwards=backwards)
    gone = data.draw(st.sets(st.integers(0, len(edges) - 1))) if edges else set()
    for i in gone:
        changed.remove(edges[i].manifest)
    left = {edges[i].manifest: cost for i, cost in partly.items() if i < len(edges)}
    _ask(changed, target, starts, left, anchors=anchors, backwards=backwards)


@pytest.mark.parametrize("seed", range(12))
def test_nor_while_edges_of_a_ladder_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    names = [version(number) for number in range(40)]
    edges = [edge(None, names[i], rng.randint(500, 900)) for i in range(0, 40, 6)]
    for level in range(5):
        spans = [(i, i + (1 << level)) for i in range(0, 40 - (1 << level), 1 << level)]
        # As many bytes as their parts, or fewer: then many paths are equal, but for their hops.
        edges += (edge(names[i], names[j], 10 * rng.choice((1 << level, level + 1))) for i, j in spans)
    changing = graph([], cell_versions=rng.choice((4, 5, 8)))
    for place, name in enumerate(rng.sample(names, 30)):
        # Any sequences do, in any order; what was not added before is placed by its number.
        changing.add_version(name, rng.choice((name.version.number, place)))
    for _ in range(60):
        one = rng.choice(edges)
        if changing.edge(one.manifest) is None:
            changing.add(one)
        else:
            changing.remove(one.manifest)
        left = {rng.choice(edges).manifest: rng.choice((None, 0, 5)) for _ in range(rng.choice((0, 0, 2)))}
        starts = {rng.choice(names) for _ in range(rng.choice((0, 1, 2)))}
        _ask(changing, rng.choice(names), starts, left, anchors=rng.random() < 0.7, backwards=rng.random() < 0.5)


def test_nor_in_a_large_graph_with_a_ladder_and_gaps() -> None:
    rng = random.Random(5)
    names = [version(number) for number in range(1500)]
    edges = [edge(None, names[i], rng.randint(5_000, 9_000)) for i in range(0, 1500, 300)]
    for level in range(9):
        edges += (
            edge(names[i], names[i + (1 << level)], rng.randint(80, 120) * (level + 1))
            for i in range(0, 1500 - (1 << level), 1 << level)
            if rng.random() < 0.97
        )
    large = graph(edges, cell_versions=64)
    for _ in range(12):
        target, starts = rng.choice(names), {rng.choice(names)}
        left = {rng.choice(edges).manifest: rng.choice((None, 0, 50)) for _ in range(20)}
        _ask(large, target, starts, left, anchors=True, backwards=rng.random() < 0.5)


def _ask(
    asked: VersionGraph,
    target: VersionId,
    starts: set[VersionId],
    left: dict[Digest, int | None],
    *,
    anchors: bool,
    backwards: bool,
) -> None:
    expected = plainly(list(asked.edges()), target, starts, left, anchors=anchors, backwards=backwards)
    try:
        path = asked.path(target, starts, left=left, anchors=anchors, backwards=backwards)
    except NotFoundError:
        assert expected is None
        return
    assert (path.bytes, len(path.hops), path.start) == expected
    at = path.start
    for hop in path.hops:
        assert hop.base == at
        at = hop.target
    assert at == target
    assert path.bytes == sum(left.get(hop.edge.manifest, hop.edge.bytes) or 0 for hop in path.hops)
    assert backwards or not any(hop.inverse for hop in path.hops)
    assert asked.edge(path.hops[-1].edge.manifest) is not None if path.hops else True
