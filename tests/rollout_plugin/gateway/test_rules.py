"""The pure rules of the gateway: which version will do, who answers, who may begin, which tokens count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.client.messages import ReplicaState
from deltad.errors import DeltadError, UsageError
from deltad.types import Version, parse_version
from rollout_plugin.gateway.admission import Admission, BusyError, Pace
from rollout_plugin.gateway.course import Course, Segment
from rollout_plugin.gateway.roster import Member, Roster, pick, roster_of
from rollout_plugin.gateway.wanted import OnSwap, Wanted, WeightVersion, parse_wanted
from rollout_plugin.messages import StreamLine
from tests.rollout_plugin.gateway.stubs import Stage, StubReplica


def member(name: str, number: int = 1, *, staleness: int = 0, proven: bool = True, near: bool = True) -> Member:
    return Member(name, f"http://{name}", Version(1, number), staleness, proven, near)


def test_a_request_may_bound_the_version_from_below_exactly_or_by_its_age() -> None:
    assert Wanted().takes(Version(1, 3), 9)
    assert Wanted(least=Version(1, 3)).takes(Version(1, 3), 9)
    assert not Wanted(least=Version(1, 3)).takes(Version(1, 2), 0)
    assert not Wanted(exact=Version(1, 3)).takes(Version(1, 4), 0)
    assert Wanted(max_staleness=2).takes(Version(1, 1), 2)
    assert not Wanted(max_staleness=2).takes(Version(1, 1), 3)


def test_a_newer_epoch_is_newer_whatever_its_number() -> None:
    assert parse_wanted(WeightVersion(min="v000009")).takes(parse_version("v000003@e2"), 0)


def test_the_gateways_own_bound_on_staleness_holds_beside_the_requests() -> None:
    assert parse_wanted(WeightVersion(max_staleness=5), 2).max_staleness == 2
    assert parse_wanted(WeightVersion(max_staleness=1), 2).max_staleness == 1
    assert parse_wanted(WeightVersion(), 2).max_staleness == 2


@pytest.mark.parametrize(
    "asked", [WeightVersion(exact="v1", min="v1"), WeightVersion(exact="v1", max_staleness=0), WeightVersion(min="new")]
)
def test_a_contradiction_is_refused(asked: WeightVersion) -> None:
    with pytest.raises(UsageError):
        parse_wanted(asked)


def test_near_replicas_go_before_far_ones_and_those_at_rest_before_those_that_swap() -> None:
    far, swapping, near = member("a", near=False), member("b", proven=False), member("c")
    assert Roster((far, swapping, near)).fit(Wanted()) == (near,)
    assert Roster((far, swapping, near)).fit(Wanted(), {"c"}) == (swapping,)
    assert Roster((far, swapping, near)).fit(Wanted(), {"b", "c"}) == (far,)
    assert Roster((far, member("d", 2, near=False))).fit(Wanted(least=Version(1, 2))) == (member("d", 2, near=False),)


@pytest.mark.parametrize("state", list(ReplicaState))
def test_only_replicas_that_were_read_back_or_swap_are_on_the_roster(state: ReplicaState) -> None:
    stub = StubReplica("r", state=state, address="http://r")
    members = roster_of(Stage((stub,)).view(), "bf16").members
    serve = {"verified", "staging", "ready", "committing", "committed"}
    assert bool(members) == (state.value in serve)
    assert roster_of(Stage((stub,)).view(), "fp8").members == ()


def test_prompts_that_begin_alike_meet_the_same_replica_until_it_has_more_than_its_share() -> None:
    fit = [member(name) for name in "abcd"]
    prompt = list(range(300))
    first = pick(fit, prompt, {})
    assert pick(fit, [*prompt[:256], 7, 8, 9], {}) == first
    assert pick(fit, prompt, {first.name: 1}) == first
    assert pick(fit, prompt, {first.name: 9}) != first


def test_prompts_spread_over_replicas_and_move_little_when_one_goes() -> None:
    fit = [member(name) for name in "abcd"]
    before = {at: pick(fit, [at], {}) for at in range(400)}
    counts = [sum(chosen == one for chosen in before.values()) for one in fit]
    assert min(counts) > 50
    after = {at: pick(fit[1:], [at], {}) for at in range(400)}
    assert all(after[at] == chosen for at, chosen in before.items() if chosen != fit[0])


@given(loads=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50)), prompt=st.lists(st.integers(0, 9)))
def test_no_replica_gets_more_than_its_share(loads: dict[str, int], prompt: list[int]) -> None:
    fit = [member(name) for name in "abcd"]
    chosen = pick(fit, prompt, loads)
    assert loads.get(chosen.name, 0) <= 1.25 * (sum(loads.values()) + 1) / 4 + 1 or loads.get(chosen.name, 0) < 4


def test_no_more_run_and_wait_than_may() -> None:
    admission = Admission(most_running=2, most_waiting=1)
    admission.begin()
    assert admission.why_not(0) == ""
    admission.begin()
    assert "2 requests are running" in admission.why_not(0)
    admission.queue()
    with pytest.raises(BusyError):
        admission.queue()
    admission.end(answered=True)
    assert admission.why_not(0) == ""


def test_rollouts_stop_running_ahead_of_the_trainer_at_the_bound_and_go_on_with_the_next_version() -> None:
    admission = Admission(most_running=99, most_waiting=9, pace=Pace(batch=4, bound=1))
    for _ in range(8):
        assert admission.why_not(10) == ""
        admission.begin()
        admission.end(answered=True)
    assert "8 rollouts have begun" in admission.why_not(10)
    assert admission.why_not(11) == ""
    admission.begin(4)
    assert admission.why_not(11) != ""
    admission.end(4, answered=False)
    assert admission.why_not(11) == ""


def tokens(version: str, *values: int, sample: int = 0) -> StreamLine:
    return StreamLine(sample, values, (-1.0,) * len(values), version)


def test_an_answer_that_keeps_going_over_a_swap_shows_who_gave_which_token() -> None:
    course = Course(Wanted(), n=1, most=5)
    course.take(tokens("v000001", 1, 2), [0])
    course.take(tokens("v000002", 3), [0])
    course.take(StreamLine(ended=(True,)), [0])
    (track,) = course.tracks
    assert track.token_ids == [1, 2, 3]
    assert track.segments == [Segment("v000001", 0, 2), Segment("v000002", 2, 3)]
    assert track.finish == "stop"


def test_an_answer_that_aborts_at_a_swap_holds_the_old_versions_tokens_alone() -> None:
    course = Course(Wanted(on_swap=OnSwap.ABORT), n=1, most=5)
    course.take(tokens("v000001", 1, 2), [0])
    (last,) = course.take(tokens("v000002", 3), [0])
    assert (last.token_ids, last.finish) == ((), "abort")
    assert course.take(tokens("v000002", 4), [0]) == []
    assert course.is_over([0])
    assert course.tracks[0].token_ids == [1, 2]


def test_an_answer_that_resumes_drops_what_came_over_the_old_cache_and_is_open_again() -> None:
    course = Course(Wanted(on_swap=OnSwap.RESUME), n=1, most=5)
    course.take(tokens("v000001", 1, 2), [0])
    assert course.take(tokens("v000002", 3), [0]) == []
    assert course.is_over([0])
    assert course.open([0]) == [0]
    assert (course.left(0), course.least) == (3, Version(1, 2))
    course.take(tokens("v000002", 7, 8, 9), [0])
    assert course.tracks[0].segments == [Segment("v000001", 0, 2), Segment("v000002", 2, 5)]


def test_an_exact_version_that_is_gone_before_the_first_token_is_another_replicas_matter() -> None:
    course = Course(Wanted(exact=Version(1, 1)), n=1, most=5)
    with pytest.raises(DeltadError) as caught:
        course.take(tokens("v000002", 1), [0])
    assert caught.value.retryable
    course.take(tokens("v000001", 1), [0])
    (last,) = course.take(tokens("v000002", 2), [0])
    assert last.finish == "abort"


def test_a_cut_takes_back_what_was_not_given_away() -> None:
    course = Course(Wanted(), n=1, most=9)
    course.take(tokens("v000001", 1, 2), [0])
    course.take(tokens("v000002", 3, 4), [0])
    course.cut(0, 2, "stop")
    assert course.tracks[0].token_ids == [1, 2]
    assert course.tracks[0].segments == [Segment("v000001", 0, 2)]


@given(data=st.data(), on_swap=st.sampled_from(OnSwap), n=st.integers(1, 3), most=st.integers(1, 12))
def test_whatever_comes_in_whatever_pieces_each_sample_is_gapless_and_its_segments_cover_it(
    data: st.DataObject, on_swap: OnSwap, n: int, most: int
) -> None:
    """Legs of any replicas, with swaps and cuts anywhere; each goes on where the course says."""
    course = Course(Wanted(on_swap=on_swap), n=n, most=most)
    version = 1
    given: list[list[int]] = [[] for _ in range(n)]
    for _ in range(50):
        samples = course.open(range(n))
        if not samples:
            break
        samples = samples if not any(given) else samples[:1]
        come = len(course.tracks[samples[0]].token_ids)
        for at in range(come, most):
            version += data.draw(st.booleans())
            lines = [tokens(f"v{version:06}", at, sample=place) for place in range(len(samples))]
            for line in lines:
                for piece in course.take(line, samples):
                    given[piece.sample] += piece.token_ids
            if course.is_over(samples) or data.draw(st.booleans()):
                break
        else:
            course.take(StreamLine(ended=(False,) * len(samples)), samples)
    for sample, track in enumerate(course.tracks):
        assert track.token_ids == list(range(len(track.token_ids))) == given[sample]
        assert len(track.logprobs) == len(track.token_ids) <= most
        edges = [(segment.start, segment.end) for segment in track.segments]
        assert [start for start, _ in edges] == [0, *(end for _, end in edges)][: len(edges)]
        assert not edges or edges[-1][1] == len(track.token_ids)
        assert on_swap is not OnSwap.ABORT or len(track.segments) <= 1
