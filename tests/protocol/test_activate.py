"""The life of a replica, event by event."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.client.messages import NextReply, ReplicaState, Seconds, Step
from deltad.errors import BaseMismatchError, ReplicaError
from deltad.protocol.activate import (
    FIRST_DELAY,
    LONGEST_DELAY,
    RESTING,
    TRANSITIONS,
    Activation,
    Ask,
    Broken,
    Cause,
    Commit,
    CommitBegun,
    Committed,
    Decision,
    Event,
    Fence,
    Offered,
    ReadBack,
    ReadWeights,
    Registered,
    Report,
    RolledBack,
    Serve,
    Serving,
    Staged,
    StageExport,
    StageFailed,
    StageSteps,
    Unfit,
    check_chain,
)
from deltad.types import Digest, Version

ROOTS = [Digest(bytes([n]) * 32) for n in range(8)]


def version(number: int) -> Version:
    return Version(1, number)


def step(base: int, number: int) -> Step:
    return Step(
        version=str(version(number)),
        root=ROOTS[number].hex(),
        base=str(version(base)),
        base_root=ROOTS[base].hex(),
        manifest="00" * 32,
    )


def offer_delta(*numbers: int) -> Offered:
    steps = tuple(step(a, b) for a, b in pairwise(numbers))
    return Offered(NextReply(target=str(version(numbers[-1])), steps=steps))


def offer_export(number: int) -> Offered:
    return Offered(NextReply(target=str(version(number)), reload=True))


def fresh() -> Activation:
    return Activation(random.Random(1))


def staged(number: int) -> Staged:
    return Staged(version(number), ROOTS[number], seconds=1.0)


def run(machine: Activation, *events: Event) -> tuple[Decision, ...]:
    """The decisions of the last event."""
    decisions: tuple[Decision, ...] = ()
    for event in events:
        decisions = machine.handle(event)
    return decisions


def serving(number: int = 0) -> Activation:
    machine = fresh()
    run(
        machine,
        Registered(),
        offer_export(number),
        staged(number),
        CommitBegun(),
        Committed(0.5),
        ReadBack(ROOTS[number], 0.25),
    )
    assert machine.state is ReplicaState.VERIFIED
    return machine


def fenced(number: int = 0) -> Activation:
    machine = serving(number)
    run(machine, offer_delta(number, number + 1), staged(number + 1), CommitBegun(), Broken("lost a write"))
    assert machine.state is ReplicaState.FENCED
    return machine


def reported(decisions: tuple[Decision, ...]) -> Report:
    (report,) = (d for d in decisions if isinstance(d, Report))
    return report


def asked(decisions: tuple[Decision, ...]) -> Ask:
    assert isinstance(decisions[-1], Ask)
    return decisions[-1]


def test_a_newcomer_registers_loads_an_export_and_is_verified_only_after_reading_it_back() -> None:
    machine = fresh()
    report, ask = machine.handle(Registered())
    assert isinstance(report, Report)
    assert report.state.state is ReplicaState.REGISTERED
    assert ask == Ask(None)

    report, todo = machine.handle(offer_export(3))
    assert isinstance(report, Report)
    assert (report.state.state, report.state.version) == (ReplicaState.STAGING, "")
    assert todo == StageExport(version(3))

    report, todo = machine.handle(staged(3))
    assert todo == Commit()
    assert machine.state is ReplicaState.READY
    assert reported(machine.handle(CommitBegun())).state.state is ReplicaState.COMMITTING

    report, todo = machine.handle(Committed(0.5))
    assert isinstance(report, Report)
    assert todo == ReadWeights()
    assert (report.state.state, report.state.version, report.state.root) == (ReplicaState.COMMITTED, "v000003", "")

    serve, report, ask = machine.handle(ReadBack(ROOTS[3], 0.25))
    assert serve == Serve(version(3))
    assert isinstance(report, Report)
    assert report.state.state is ReplicaState.VERIFIED
    assert report.state.root == ROOTS[3].hex()
    assert report.state.seconds == Seconds(stage=1.0, pause=0.5, verify=0.25)
    assert ask == Ask(version(3), 0.0)


def test_deltas_are_staged_in_order_and_the_version_served_stays_reported_until_the_commit() -> None:
    machine = serving(0)
    report, todo = machine.handle(offer_delta(0, 1, 2))
    assert isinstance(report, Report)
    assert todo == StageSteps((step(0, 1), step(1, 2)))
    assert (report.state.version, report.state.root) == ("v000000", ROOTS[0].hex())
    run(machine, staged(2), CommitBegun(), Committed(0.0), ReadBack(ROOTS[2], 0.0))
    assert machine.serving == Serving(version(2), ROOTS[2], read=True)


def test_nothing_new_means_asking_again_at_once() -> None:
    assert serving(2).handle(Offered(NextReply())) == (Ask(version(2), 0.0),)
    assert fresh().handle(Offered(NextReply())) == (Ask(None, 0.0),)


def test_a_delta_on_another_base_is_refused_and_nothing_is_staged() -> None:
    machine = serving(2)
    decisions = machine.handle(offer_delta(1, 3))
    assert not [d for d in decisions if isinstance(d, StageSteps | StageExport)]
    report = reported(decisions).state
    assert (report.state, report.version, report.root) == (ReplicaState.VERIFIED, "v000002", ROOTS[2].hex())
    assert "delta v000001 → v000003: expected to start from v000002" in report.error
    assert FIRST_DELAY / 2 <= asked(decisions).delay <= FIRST_DELAY


def test_a_gap_inside_the_chain_is_refused() -> None:
    with pytest.raises(BaseMismatchError, match="v000003 → v000004"):
        check_chain((step(1, 2), step(3, 4)), Serving(version(1), ROOTS[1]), "v000004")


def test_a_chain_that_ends_elsewhere_is_refused() -> None:
    with pytest.raises(BaseMismatchError, match="they end at v000002"):
        check_chain((step(1, 2),), Serving(version(1), ROOTS[1]), "v000004")


def test_a_delta_for_a_replica_that_serves_nothing_is_refused() -> None:
    machine = fresh()
    decisions = machine.handle(offer_delta(0, 1))
    assert machine.state is ReplicaState.REGISTERED
    assert "expected to start from nothing" in reported(decisions).state.error


def test_a_target_that_is_no_version_is_refused() -> None:
    decisions = serving(1).handle(Offered(NextReply(target="newest", reload=True)))
    assert "'newest'" in reported(decisions).state.error


@pytest.mark.parametrize("before", [fresh, serving, fenced])
def test_staging_that_fails_leaves_the_replica_where_it_was(before: object) -> None:
    machine: Activation = before()  # type: ignore[operator]
    state, served = machine.state, machine.serving
    decisions = run(machine, offer_export(5), StageFailed("the daemon went away"))
    assert (machine.state, machine.serving) == (state, served)
    assert reported(decisions).state.error == "the daemon went away"
    assert asked(decisions).delay > 0


def test_a_commit_that_was_undone_is_read_back_and_serves_the_version_before() -> None:
    machine = serving(1)
    report, todo = run(machine, offer_delta(1, 2), staged(2), CommitBegun(), RolledBack("sums differ"))
    assert isinstance(report, Report)
    assert todo == ReadWeights()
    assert (report.state.state, report.state.version, report.state.root) == (ReplicaState.ROLLED_BACK, "v000001", "")
    decisions = machine.handle(ReadBack(ROOTS[1], 0.1))
    assert decisions[0] == Serve(version(1))
    now = reported(decisions).state
    assert (now.state, now.version, now.root, now.error) == (
        ReplicaState.VERIFIED,
        "v000001",
        ROOTS[1].hex(),
        "sums differ",
    )
    assert asked(decisions).after == version(1)
    assert asked(decisions).delay > 0


def test_the_error_is_forgotten_once_a_version_is_verified() -> None:
    machine = serving(1)
    run(machine, offer_delta(1, 2), StageFailed("cut off"))
    decisions = run(machine, offer_delta(1, 2), staged(2), CommitBegun(), Committed(0.0), ReadBack(ROOTS[2], 0.0))
    assert reported(decisions).state.error == ""
    assert asked(decisions).delay == 0


def test_a_commit_that_cannot_be_undone_fences() -> None:
    machine = serving(1)
    decisions = run(machine, offer_delta(1, 2), staged(2), CommitBegun(), Broken("a write failed"))
    assert decisions[0] == Fence("a write failed")
    report = reported(decisions).state
    assert (report.state, report.version, report.root) == (ReplicaState.FENCED, "", "")
    assert asked(decisions).after is None


def test_a_first_load_that_fails_has_nothing_to_roll_back_to() -> None:
    machine = fresh()
    decisions = run(machine, offer_export(1), staged(1), CommitBegun(), RolledBack("out of memory"))
    assert decisions[0] == Fence("out of memory")


@pytest.mark.parametrize("last", [Committed(0.0), RolledBack("sums differ")])
def test_weights_that_read_back_wrong_are_fenced_and_healed_by_a_whole_checkpoint(last: Event) -> None:
    machine = serving(1)
    decisions = run(machine, offer_delta(1, 2), staged(2), CommitBegun(), last, ReadBack(ROOTS[7], 0.0))
    assert isinstance(decisions[0], Fence)
    assert "expected root" in decisions[0].reason
    assert reported(decisions).state.state is ReplicaState.FENCED

    decisions = machine.handle(offer_export(2))
    assert decisions[-1] == StageExport(version(2))
    run(machine, staged(2), CommitBegun(), Committed(0.0), ReadBack(ROOTS[2], 0.0))
    assert machine.state is ReplicaState.VERIFIED


@pytest.mark.parametrize("last", [Committed(0.0), RolledBack("sums differ")])
def test_weights_that_cannot_be_read_back_are_fenced(last: Event) -> None:
    machine = serving(1)
    decisions = run(machine, offer_delta(1, 2), staged(2), CommitBegun(), last, Broken("a parameter was moved"))
    assert decisions[0] == Fence("a parameter was moved")


def test_a_whole_checkpoint_that_reads_back_wrong_is_not_loaded_again() -> None:
    machine = fresh()
    run(machine, offer_export(1), staged(1), CommitBegun(), Committed(0.0), ReadBack(ROOTS[7], 0.0))
    reason = machine.error
    (ask,) = machine.handle(offer_export(1))
    assert isinstance(ask, Ask)
    assert ask.delay > 0
    assert (machine.state, machine.error) == (ReplicaState.FENCED, reason)
    assert machine.handle(offer_export(2))[-1] == StageExport(version(2))


def test_a_version_that_does_not_fit_the_engine_leaves_the_one_before_verified_until_another_one_comes() -> None:
    """P32: nothing was written, so what is served is as true as before."""
    machine = serving(1)
    decisions = run(machine, offer_export(2), Unfit("another layout"))
    assert not [d for d in decisions if isinstance(d, Fence)]
    report = reported(decisions).state
    assert (report.state, report.version, report.root, report.error) == (
        ReplicaState.VERIFIED,
        "v000001",
        ROOTS[1].hex(),
        "another layout",
    )
    (declined,) = machine.handle(offer_export(2))
    assert isinstance(declined, Ask)
    assert (declined.after, declined.delay > 0) == (version(1), True)
    assert machine.handle(offer_delta(1, 3))[-1] == StageSteps((step(1, 3),))


@pytest.mark.parametrize("before", [fresh, fenced])
def test_a_version_that_does_not_fit_fences_a_replica_that_has_nothing_else_to_serve(before: object) -> None:
    machine: Activation = before()  # type: ignore[operator]
    decisions = run(machine, offer_export(2), Unfit("another layout"))
    assert decisions[0] == Fence("another layout")
    assert len(machine.handle(offer_export(2))) == 1
    assert machine.handle(offer_export(3))[-1] == StageExport(version(3))


def test_a_whole_checkpoint_that_could_not_be_copied_is_asked_for_again() -> None:
    machine = serving(1)
    decisions = run(machine, offer_export(2), staged(2), CommitBegun(), Broken("no such file"))
    assert decisions[0] == Fence("no such file")
    assert machine.handle(offer_export(2))[-1] == StageExport(version(2))


def test_a_whole_checkpoint_that_was_copied_and_has_another_root_is_given_up() -> None:
    machine = serving(1)
    run(machine, offer_export(2), staged(2), CommitBegun(), Broken("another root", wrong_root=True))
    (declined,) = machine.handle(offer_export(2))
    assert isinstance(declined, Ask)
    assert machine.handle(offer_export(3))[-1] == StageExport(version(3))


def test_tries_that_fail_are_spaced_further_and_further_apart() -> None:
    machine = serving(1)
    delays = [asked(run(machine, offer_delta(1, 2), StageFailed("cut off"))).delay for _ in range(40)]
    assert delays[0] < delays[2] < delays[4]
    assert max(delays) <= LONGEST_DELAY
    assert min(delays[-10:]) >= LONGEST_DELAY / 2


def test_a_version_that_was_given_up_is_declined_at_growing_intervals_until_another_one_is_taken() -> None:
    machine = serving(1)
    run(machine, offer_delta(1, 2), Unfit("another layout"))
    delays = [asked(machine.handle(offer_delta(1, 2))).delay for _ in range(40)]
    assert delays[0] <= FIRST_DELAY
    assert delays[0] < delays[2] < delays[4]
    assert min(delays[-10:]) >= LONGEST_DELAY / 2
    run(machine, offer_delta(1, 3), Unfit("yet another layout"))
    assert asked(machine.handle(offer_delta(1, 3))).delay <= FIRST_DELAY


def test_registering_again_repeats_what_is_true_now() -> None:
    machine = serving(4)
    decisions = machine.handle(Registered())
    assert reported(decisions).state == machine.report()
    assert machine.report().root == ROOTS[4].hex()
    assert asked(decisions) == Ask(version(4))


def test_an_event_that_cannot_happen_is_refused_and_changes_nothing() -> None:
    machine = serving(1)
    before = machine.report()
    for event in (Committed(0.0), CommitBegun(), staged(2), RolledBack(""), Broken(""), ReadBack(ROOTS[1], 0.0)):
        with pytest.raises(ReplicaError, match="found state verified"):
            machine.handle(event)
    assert machine.report() == before


def test_every_state_but_unknown_can_be_left() -> None:
    assert set(TRANSITIONS) == set(ReplicaState) - {ReplicaState.UNKNOWN}
    reachable = {to for row in TRANSITIONS.values() for to in row.values() if to} | {ReplicaState.REGISTERED}
    assert reachable == set(TRANSITIONS)
    assert {state for state, row in TRANSITIONS.items() if Cause.OFFER_TAKEN in row} == set(RESTING)


_events = st.one_of(
    st.builds(Registered),
    st.just(Offered(NextReply())),
    st.builds(offer_export, st.integers(0, 7)),
    st.builds(offer_delta, st.integers(0, 7), st.integers(0, 7)),
    st.builds(staged, st.integers(0, 7)),
    st.just(StageFailed("x")),
    st.just(Unfit("x")),
    st.just(CommitBegun()),
    st.just(Committed(0.0)),
    st.just(RolledBack("x")),
    st.just(Broken("x")),
    st.builds(ReadBack, st.sampled_from(ROOTS), st.just(0.0)),
)


@given(st.lists(_events, max_size=60))
def test_whatever_happens_verified_means_read_back_and_fenced_means_serving_nothing(events: list[Event]) -> None:
    machine = fresh()
    last_read: Digest | None = None
    for event in events:
        try:
            machine.handle(event)
        except ReplicaError:
            continue
        if isinstance(event, ReadBack):
            last_read = event.root
        report = machine.report()
        if report.state is ReplicaState.VERIFIED:
            assert last_read is not None
            assert report.root == last_read.hex()
        if report.state is ReplicaState.FENCED:
            assert (report.version, report.root) == ("", "")
        if report.state is ReplicaState.COMMITTED:
            assert report.root == ""
