"""What the policy folds, cuts and drops, for whom, and what it says about it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from deltad.delta.coding import Coder
from deltad.delta.manifest import EdgeKind
from deltad.store.graph import (
    Action,
    Budget,
    CutAnchor,
    Drop,
    Edge,
    Encode,
    Fold,
    Plan,
    Reader,
    VersionGraph,
    line_to,
    plan,
)
from deltad.store.graph.policy import estimate
from deltad.store.graph.simulate import Outcome, Scenario, simulate
from tests.kit.graphs import edge, graph, version

FREE = Budget(disk=None, work=10**12, state=20_000, anchor=10_000)


def chain(number: int, *, coder: Coder = Coder.BLIND, anchor: int = 10_000) -> list[Edge]:
    return [
        edge(None, version(0), anchor),
        *(edge(version(i), version(i + 1), coder=coder) for i in range(number)),
    ]


def decide(edges: Sequence[Edge], *readers: Reader, budget: Budget = FREE) -> Plan:
    """The plan for versions 0 to n, whose sequences are their numbers."""
    made = graph(edges)
    newest = max(made.versions())
    return plan(made, line_to(made, newest, {v: v.version.number for v in made.versions()}), readers, budget)


def spans(actions: Sequence[Action]) -> list[tuple[int, int]]:
    made = [action for action in actions if isinstance(action, Fold | Encode)]
    return [(action.base.version.number, action.target.version.number) for action in made]


def skip(base: int, target: int, size: int = 150) -> Edge:
    return edge(version(base), version(target), size, kind=EdgeKind.SKIP_DELTA, derived=True)


def obey(made: VersionGraph, planned: Plan) -> None:
    """Do what was decided, with the sizes that were estimated."""
    for action in planned.actions:
        match action:
            case Drop(gone):
                made.remove(gone.manifest)
            case CutAnchor(target):
                made.add(edge(None, target, FREE.anchor, derived=True, name="cut"))
            case Fold(base, target, parts):
                assert all(made.edge(part.manifest) for part in parts), "no part was dropped before it was folded"
                made.add(skip(base.version.number, target.version.number, estimate([part.bytes for part in parts])))
            case Encode(base, target):
                made.add(skip(base.version.number, target.version.number))


def test_rungs_stand_between_multiples_of_their_span() -> None:
    assert sorted(spans(decide(chain(8)).actions)) == [(0, 4), (0, 8), (4, 6), (4, 8), (6, 8)]
    assert sorted(spans(decide(chain(7)).actions)) == [(0, 4), (2, 4), (4, 6)]


def test_a_rung_that_stands_is_not_folded_again() -> None:
    assert (4, 8) not in spans(decide([*chain(8), skip(4, 8, 150)]).actions)
    assert (4, 8) not in spans(decide([*chain(8), skip(4, 8, 5000)]).actions), "nor if it came out larger than hoped"


def test_a_rung_that_would_save_next_to_nothing_is_not_folded() -> None:
    assert (0, 2) in spans(decide([edge(None, version(0)), *chain(2)[1:]]).actions)
    deltas = [edge(version(0), version(1), 1000), edge(version(1), version(2), 1)]
    assert spans(decide([edge(None, version(0)), *deltas, edge(None, version(2))]).actions) == []


def test_any_version_reaches_any_later_one_over_few_edges_by_the_ladder_alone() -> None:
    made = graph(chain(0), cell_versions=64)
    for number in range(1, 201):
        made.add(edge(version(number - 1), version(number)))
        line = [(i, version(i)) for i in range(number + 1)]
        obey(made, plan(made, line, [], Budget(None, 10**12, None, 10_000)))
    hops = [len(made.path(version(200), {version(held)}, anchors=False).hops) for held in range(200)]
    assert max(hops) <= 2 * (200).bit_length()
    assert sum(hops) / len(hops) < 8


def test_a_ladder_skips_sequences_that_are_not_on_the_line() -> None:
    made = graph(chain(6))
    again = version(4, epoch=2)
    made.add(edge(version(3), again))
    line = line_to(made, again, {**{version(i): i for i in range(7)}, again: 7})
    assert line == [*((i, version(i)) for i in range(4)), (7, again)]
    made.add(edge(again, version(5, epoch=2)))
    line.append((8, version(5, epoch=2)))
    folds = [action for action in plan(made, line, [], FREE).actions if isinstance(action, Fold)]
    found = {(fold.base, fold.target) for fold in folds}
    assert found == {(version(i), version(5, epoch=2)) for i in (0, 3)} | {(version(0), version(3))}
    for fold in folds:
        made.add(edge(fold.base, fold.target, kind=EdgeKind.SKIP_DELTA, derived=True))
    made.add(edge(None, line[-1][1]))
    assert plan(made, line, [], FREE).actions == ()


def test_the_line_goes_over_a_skip_delta_where_there_is_nothing_else() -> None:
    made = graph([edge(None, version(0)), skip(0, 4), edge(version(4), version(5))])
    assert line_to(made, version(5), {version(i): i for i in range(6)}) == [(i, version(i)) for i in (0, 4, 5)]


def test_the_line_to_a_resumed_epoch_leads_over_the_version_that_it_was_made_from() -> None:
    made = graph(chain(6))
    again = version(4, epoch=2)
    made.add(edge(version(3), again))
    made.add(edge(version(5), again))  # for those that are at the version that was left behind
    sequences = {**{version(i): i for i in range(7)}, again: 7}
    line = line_to(made, again, sequences, {again: version(3)})
    assert line == [*((i, version(i)) for i in range(4)), (7, again)]
    elsewhere = line_to(made, again, sequences, {again: version(9)})
    assert [at for at, _ in elsewhere] == [0, 1, 2, 3, 4, 5, 7], "one that is not held here is gone round"


def test_a_reader_far_behind_gets_a_skip_delta_of_its_own() -> None:
    planned = decide(chain(9), Reader("tokyo", version(0), version(9)))
    first = planned.actions[0]
    assert isinstance(first, Fold)
    assert (first.base, first.target, len(first.parts)) == (version(0), version(9), 9)
    assert first.reason == "tokyo at v000000 is 9 edges away; folds 9 deltas of 900 B"
    assert (1, 9) not in spans(decide(chain(9), Reader("tokyo", version(1), version(9))).actions)


def test_what_several_readers_wait_for_comes_first() -> None:
    two, three = Reader("two", version(1), version(12), count=2), Reader("three", version(2), version(12))
    once = Budget(None, 1, None, 10_000)
    assert spans(decide(chain(12), two, three, budget=once).actions) == [(1, 12)]
    assert spans(decide(chain(12), two, three, three, three, budget=once).actions) == [(2, 12)]


def test_what_a_way_back_is_made_of_does_not_fold() -> None:
    first = decide(chain(9), Reader("tokyo", version(9), version(0))).actions[0]
    assert isinstance(first, Encode)
    assert (first.base, first.target) == (version(9), version(0))


def test_a_newcomer_needs_one_anchor_and_one_skip_delta() -> None:
    planned = decide(chain(3), Reader("oslo", None, version(3), count=2))
    first = planned.actions[0]
    assert (spans([first]), first.reason) == (  # type: ignore[union-attr]
        [(0, 3)],
        "2 newcomers join by the anchor v000000; folds 3 deltas of 300 B",
    )
    assert (0, 3) not in spans(decide(chain(3)).actions)
    held_back = decide(chain(6), Reader("oslo", None, version(3)))
    assert spans(held_back.actions[:1]) == [(0, 3)]


def test_a_reader_on_its_way_to_a_version_that_is_not_here_is_passed_over() -> None:
    elsewhere = (Reader("oslo", None, version(40)), Reader("tokyo", version(0), version(40)))
    assert decide(chain(9), *elsewhere) == decide(chain(9))


def test_what_does_not_fold_is_encoded_anew_where_there_is_a_mirror() -> None:
    edges = chain(9, coder=Coder.CONTEXT)
    reader = Reader("tokyo", version(0), version(9))
    first = decide(edges, reader).actions[0]
    assert isinstance(first, Encode)
    assert "9 deltas of 900 B do not fold without weights" in first.reason
    assert decide(edges, reader, budget=Budget(None, 10**12, None, 10_000)).actions == ()


def test_a_reader_that_no_delta_leads_back_gets_one() -> None:
    back = Reader("tokyo", version(3), version(1))
    assert (3, 1) in spans(decide(chain(3, coder=Coder.CONTEXT), back).actions)
    assert (3, 1) not in spans(decide(chain(3), back).actions)


def test_an_anchor_is_cut_when_joining_has_grown_beyond_its_bound_and_not_before() -> None:
    grown = [*chain(2, anchor=300), skip(0, 2, 151)]
    (cut,) = [action for action in decide(grown).actions if isinstance(action, CutAnchor)]
    assert cut.version == version(2)
    assert cut.reason == "joining takes 451 B, more than 1.5 times what its anchor takes, the 300 B of v000000"
    assert not any(isinstance(action, CutAnchor) for action in decide([*chain(2, anchor=302), skip(0, 2, 151)]).actions)


def test_no_anchor_is_cut_of_an_older_version() -> None:
    edges = [*chain(3, anchor=300), skip(0, 2, 151), edge(None, version(3), 300)]
    planned = decide(edges, Reader("oslo", None, version(2)))
    assert not any(isinstance(action, CutAnchor) for action in planned.actions)


def test_before_an_anchor_is_cut_what_follows_the_last_one_is_folded() -> None:
    planned = decide(chain(6, anchor=1000), budget=FREE)
    assert not any(isinstance(action, CutAnchor) for action in planned.actions)
    assert (0, 6) in spans(planned.actions)
    assert planned.actions[0].reason.startswith("joining has grown to 1.56 KiB")


def test_a_run_without_an_anchor_gets_one() -> None:
    assert any(isinstance(action, CutAnchor) for action in decide(chain(3)[1:]).actions)


def test_a_skip_delta_goes_when_nobody_is_on_the_way_over_it() -> None:
    edges = [*chain(9), edge(None, version(9), 900), skip(0, 9)]
    (drop,) = [action for action in decide(edges).actions if isinstance(action, Drop)]
    assert (drop.edge, drop.reason) == (edges[-1], "nobody is on the way over it any more, and it is not on the ladder")
    on_the_way = Reader("tokyo", version(0), version(9))
    assert not any(isinstance(action, Drop) for action in decide(edges, on_the_way).actions)


def test_nothing_goes_that_is_just_being_folded() -> None:
    made = graph([*chain(8), skip(1, 4, 110), edge(None, version(8), 900)])
    line = [(i, version(i)) for i in range(9)]
    planned = plan(made, line, [], FREE)
    assert any(skip(1, 4, 110) in fold.parts for fold in planned.actions if isinstance(fold, Fold))
    obey(made, planned)
    assert skip(1, 4, 110) in [drop.edge for drop in plan(made, line, [], FREE).actions if isinstance(drop, Drop)]


def test_what_has_made_room_is_not_folded_after_all() -> None:
    edges = [*chain(20), skip(0, 4), edge(None, version(20), 900)]
    planned = decide(edges, Reader("tokyo", version(10), version(20)), budget=Budget(1000, 10**12, None, 10_000))
    assert Drop(skip(0, 4), "1000 B are for derived edges, and it is needed least") in planned.actions
    whys = {(put.action.base, put.action.target): put.why for put in planned.put_off if isinstance(put.action, Fold)}
    assert whys[version(0), version(8)] == "a part of it has just made room for something better"


@pytest.mark.parametrize("seed", range(60))
def test_nothing_that_is_to_be_folded_makes_room_for_something_else(seed: int) -> None:
    """A daemon drops first of all."""
    rng = random.Random(seed)
    last = rng.randint(8, 24)
    spans = {(base, rng.randint(base + 2, last)) for base in rng.sample(range(last - 2), rng.randint(1, 6))}
    skips = [skip(base, target, rng.choice([80, 110, 150, 250, 400])) for base, target in spans]
    edges = [*chain(last), *skips, edge(None, version(last), 900, name="newest")]
    readers = [Reader(f"region {at}", version(rng.randrange(last)), version(last)) for at in range(rng.randint(0, 3))]
    planned = decide(edges, *readers, budget=Budget(rng.randrange(100, 3000), 10**12, None, 10_000))
    dropped = {action.edge.manifest for action in planned.actions if isinstance(action, Drop)}
    parts = {part.manifest for action in planned.actions if isinstance(action, Fold) for part in action.parts}
    assert dropped.isdisjoint(parts)


def test_what_a_record_lists_is_never_dropped() -> None:
    listed = edge(version(0), version(5), kind=EdgeKind.SKIP_DELTA)
    tight = Budget(0, 10**12, None, 10_000)
    assert not any(isinstance(action, Drop) for action in decide([*chain(9), listed], budget=tight).actions)


def test_an_older_anchor_makes_room_only_if_what_it_leads_to_can_be_reached_without_it() -> None:
    older, newer = (edge(None, version(n), 10_000, derived=True) for n in (4, 8))
    tight, roomy = (Budget(disk, 0, None, 10_000) for disk in (10_000, 20_000))
    for edges, budget, gone in (
        ([*chain(9), older, newer], tight, [older]),
        ([*chain(9), older, newer], roomy, []),
        ([*chain(9)[5:], older, newer], tight, []),
    ):
        drops = [action.edge for action in decide(edges, budget=budget).actions if isinstance(action, Drop)]
        assert drops == gone


def test_the_disk_is_never_planned_beyond_its_budget_and_the_furthest_back_makes_room() -> None:
    edges = [*chain(16), skip(0, 4), skip(4, 8), skip(8, 12), edge(None, version(16), 900)]
    planned = decide(edges, budget=Budget(500, 10**12, None, 10_000))
    drops = [action.edge for action in planned.actions if isinstance(action, Drop)]
    folds = [action for action in planned.actions if isinstance(action, Fold)]
    taken = 450 - sum(one.bytes for one in drops) + sum(part.bytes for fold in folds for part in fold.parts)
    assert 0 < taken <= 500
    assert drops == edges[17 : 17 + len(drops)]
    assert drops
    assert all("left on disk" in put.why or "made room" in put.why for put in planned.put_off)
    assert planned.put_off


def test_no_more_is_begun_once_the_work_is_spoken_for() -> None:
    planned = decide(chain(8), budget=Budget(None, 300, None, 10_000))
    assert planned.work == sum(part.bytes for a in planned.actions if isinstance(a, Fold) for part in a.parts)
    assert 300 <= planned.work < 300 + 800
    assert {put.why for put in planned.put_off} == {"all that may be read for now is spoken for"}
    assert decide(chain(8), budget=Budget(None, 0, None, 10_000)).actions == ()


def test_whoever_waits_comes_before_the_ladder() -> None:
    planned = decide(chain(16), Reader("tokyo", version(1), version(16)), budget=Budget(None, 1, None, 10_000))
    assert spans(planned.actions) == [(1, 16)]


WEEKS = Scenario(hours=400, state=5 * 10**9, anchor=3 * 10**9, keep=100, joining=0.05, rolling_back=0.01, seed=3)
YEAR = Scenario(state=13 << 30, anchor=9 << 30, delta=80 << 20, disk=64 << 30, work=4 << 30)
TIGHT = Scenario(seed=2, disk=25 * 10**9, work=10**9, readers=12, leaving=0.1, away=100.0)
FULL = os.environ.get("DELTAD_TEST_FULL") == "1"


@pytest.fixture(scope="module", params=[WEEKS, *([YEAR] if FULL else ())], ids=lambda scenario: f"{scenario.hours} h")
def churned(request: pytest.FixtureRequest) -> Outcome:
    return simulate(request.param)


def test_whatever_readers_do_the_budgets_hold(churned: Outcome) -> None:
    assert churned.most_derived <= churned.scenario.disk
    assert churned.work <= churned.granted + churned.scenario.state


def test_whatever_they_do_every_reader_always_reaches_its_target_over_few_edges(churned: Outcome) -> None:
    assert churned.most_lag > 60
    assert churned.most_hops <= 8


def test_whatever_they_do_joins_are_bounded_and_no_anchor_is_fetched_twice(churned: Outcome) -> None:
    assert churned.joins > churned.scenario.readers
    assert churned.most_join <= 1.6 * churned.scenario.anchor
    assert churned.most_join_hops <= 2
    assert churned.again == 0
    assert 0 < churned.made["CutAnchor"] < churned.scenario.hours / 20


@pytest.mark.skipif(not FULL, reason="takes minutes: run `make test-full`")
def test_budgets_that_are_too_small_for_a_short_way_hold_all_the_same() -> None:
    ended = simulate(TIGHT)
    assert ended.most_derived <= TIGHT.disk
    assert ended.work <= ended.granted + 2 * TIGHT.state
    assert ended.again == 0


def test_a_simulation_is_the_same_every_time() -> None:
    scenario = Scenario(hours=60, seed=5)
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario) != simulate(Scenario(hours=60, seed=6))


def test_versions_that_are_not_kept_leave_the_graph() -> None:
    ended = simulate(Scenario(hours=150, keep=20, anchor=500_000_000, state=700_000_000, disk=3_000_000_000))
    assert ended.made["CutAnchor"] > 3
    assert ended.stored_edges < 100


def test_a_region_that_cannot_have_what_a_fork_starts_from_gets_an_anchor_of_the_fork() -> None:
    base, fork = version(1), version(0, run="fork")
    edges = [*chain(1), edge(base, fork, 100)]
    made = graph(edges)
    line = line_to(made, fork, {fork: 1})
    alone, joining = Reader("a region", None, fork, alone=True), Reader("a region", None, fork)
    assert not any(isinstance(action, CutAnchor) for action in plan(made, line, [joining], FREE).actions)
    (cut,) = plan(made, line, [alone], FREE).actions
    assert isinstance(cut, CutAnchor)
    assert (cut.version, "cannot have what fork forks" in cut.reason) == (fork, True)
    made.add(edge(None, fork, FREE.anchor, derived=True, name="cut"))
    assert plan(made, line, [alone], FREE).actions == ()
