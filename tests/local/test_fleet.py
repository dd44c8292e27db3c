"""The counting rules on one host: who counts as verified, and how silence and lies are taken (P33)."""

from __future__ import annotations

import msgspec
import pytest

from deltad.client.messages import (
    RegisterRequest,
    ReplicaState,
    StateRequest,
)
from deltad.errors import ConflictError, LimitError, NotFoundError, ReplicaError, UsageError
from tests.kit.operations import RUN, root_for, version_info
from tests.local.fleets import (
    VERSIONS,
    make_fleet,
    only_replica,
    serving,
    state,
    v,
    verified,
    with_replica,
)


def test_a_living_replica_keeps_its_name_and_a_twin_is_told_where_it_lives() -> None:
    fleet = make_fleet()
    first = RegisterRequest("r0", RUN, "bf16", "http://10.0.0.1:8000", boot="one")
    twin = RegisterRequest("r0", RUN, "bf16", "http://10.0.0.2:8000", boot="two")
    fleet.register(first, 0.0)
    fleet.report_state("r0", state(ReplicaState.VERIFIED, 3), VERSIONS, 1.0)
    with pytest.raises(ConflictError, match=r"found another one of that name, at http://10\.0\.0\.1:8000"):
        fleet.register(twin, 2.0)
    assert serving(fleet, 3, 2.0) == ("a/r0",), "the first one is not touched"
    fleet.register(first, 3.0)
    fleet.register(twin, 3.0 + fleet.quiet_for + 1)
    assert fleet.registration("r0") == twin


@pytest.mark.parametrize("how", ["unregistered", "hung up", "same address"])
def test_a_restarted_replica_takes_its_name_over_at_once(how: str) -> None:
    fleet = make_fleet()
    fleet.register(RegisterRequest("r0", RUN, "bf16", "http://10.0.0.1:8000", boot="one"), 0.0)
    if how == "unregistered":
        fleet.unregister("r0")
    address = "http://10.0.0.1:8000" if how == "same address" else "http://10.0.0.1:8001"
    again = RegisterRequest("r0", RUN, "bf16", address, boot="two")
    fleet.register(again, 1.0, hung_up=how == "hung up")
    assert fleet.registration("r0") == again


def test_a_replica_that_read_its_version_back_counts_for_it_and_all_before() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    assert [verified(fleet, number) for number in (1, 2, 3, 4, 5)] == [1, 1, 1, 0, 0]
    assert serving(fleet, 3, 0.0) == ("a/r0",)


@pytest.mark.parametrize("which", ["registered", "committing", "committed", "rolled-back", "fenced"])
def test_no_state_but_verified_and_what_leaves_verified_weights_alone_counts(which: str) -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    fleet.report_state("r0", state(ReplicaState(which), 3), VERSIONS, 1.0)
    assert verified(fleet, 1, now=1.0) == 0
    assert only_replica(fleet, 1.0).state == which


@pytest.mark.parametrize("which", [ReplicaState.STAGING, ReplicaState.READY])
def test_staging_the_next_version_beside_verified_weights_keeps_them_verified(which: ReplicaState) -> None:
    fleet = with_replica(make_fleet(), state(which, 3))
    assert verified(fleet, 3) == 1
    fleet.report_state("r0", StateRequest(which, version=str(v(3))), VERSIONS, 1.0)
    assert verified(fleet, 3, now=1.0) == 0  # nothing was read back


def test_a_newer_epoch_serves_every_number_of_an_older_one() -> None:
    versions = [*VERSIONS, version_info(1, epoch=2)]
    fleet = with_replica(make_fleet())
    fleet.report_state("r0", StateRequest(ReplicaState.VERIFIED, "v000001@e2", root_for(1)), versions, 0.0)
    assert verified(fleet, 5, versions=versions) == 1
    assert only_replica(fleet, versions=versions).staleness == 0


def test_the_newest_version_is_meant_where_none_is_named() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    view = fleet.view(RUN, VERSIONS, 0.0)
    assert (view.version, view.verified, view.replicas) == ("v000005", 0, 1)
    empty = fleet.view(RUN, [], 0.0)
    assert (empty.version, empty.verified, empty.replicas) == ("", 0, 1)


def test_staleness_counts_the_versions_in_between_and_not_their_numbers() -> None:
    for number, behind in ((1, 3), (2, 2), (3, 1), (5, 0)):
        assert only_replica(with_replica(make_fleet(), state(ReplicaState.VERIFIED, number))).staleness == behind
    assert only_replica(with_replica(make_fleet())).staleness == 4


def test_staleness_counts_the_versions_that_were_passed_over_here() -> None:
    held = [msgspec.structs.replace(version_info(number), sequence=number) for number in (1, 33, 41)]
    for number, behind in ((1, 40), (33, 8), (41, 0)):
        fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, number))
        assert only_replica(fleet, versions=held).staleness == behind


def test_another_root_than_the_published_one_is_refused_and_takes_the_old_credit_away() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 2))
    assert verified(fleet, 2) == 1
    with pytest.raises(ReplicaError, match=root_for(3)) as caught:
        fleet.report_state("r0", state(ReplicaState.VERIFIED, 3, root=root_for(9)), VERSIONS, 1.0)
    assert root_for(9) in str(caught.value)
    assert verified(fleet, 1, now=1.0) == 0
    assert only_replica(fleet, 1.0).state is ReplicaState.UNKNOWN
    assert root_for(9) in only_replica(fleet, 1.0).error


def test_a_version_that_is_not_held_here_proves_nothing_until_it_is() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 7))
    assert verified(fleet, 1) == 0
    assert only_replica(fleet).state is ReplicaState.UNKNOWN
    assert "v000007 is not held" in only_replica(fleet).error
    assert verified(fleet, 7, versions=[*VERSIONS, version_info(7)]) == 1


def test_spellings_of_one_version_are_one_version() -> None:
    fleet = with_replica(make_fleet(), StateRequest(ReplicaState.VERIFIED, "3", root_for(3)))
    assert only_replica(fleet).version == "v000003"
    assert verified(fleet, 3) == 1
    with pytest.raises(ReplicaError):
        fleet.report_state("r0", StateRequest(ReplicaState.VERIFIED, "3", root_for(9)), VERSIONS, 0.0)


def test_a_silent_replica_becomes_unknown_and_any_sign_of_life_brings_its_last_word_back() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    assert verified(fleet, 3, now=120.0) == 1
    assert verified(fleet, 3, now=120.1) == 0
    assert only_replica(fleet, 120.1).state is ReplicaState.UNKNOWN
    fleet.heard("r0", 200.0)
    assert verified(fleet, 3, now=200.0) == 1


def test_a_replica_that_was_silent_for_very_long_is_forgotten_and_may_come_back() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    fleet.forget_silent(fleet.forget_after)
    assert fleet.is_registered("r0")
    fleet.forget_silent(fleet.forget_after + 1.0)
    assert not fleet.is_registered("r0")
    with_replica(fleet)
    assert fleet.is_registered("r0")


def test_registering_again_starts_anew() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    with_replica(fleet)
    assert verified(fleet, 1) == 0
    assert only_replica(fleet).state is ReplicaState.REGISTERED
    assert fleet.view(RUN, VERSIONS, 0.0).replicas == 1


def test_a_replica_that_left_is_gone_and_must_register_to_speak() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    assert fleet.is_registered("r0")
    fleet.unregister("r0")
    assert not fleet.is_registered("r0")
    assert fleet.view(RUN, VERSIONS, 0.0).replicas == 0
    for call in (
        lambda: fleet.unregister("r0"),
        lambda: fleet.registration("r0"),
        lambda: fleet.heard("r0", 0.0),
        lambda: fleet.report_state("r0", state(ReplicaState.READY), VERSIONS, 0.0),
    ):
        with pytest.raises(NotFoundError, match="register it again"):
            call()


@pytest.mark.parametrize(
    "request_",
    [
        StateRequest(ReplicaState.UNKNOWN),
        StateRequest(ReplicaState.VERIFIED),
        StateRequest(ReplicaState.VERIFIED, version="v000003"),
        StateRequest(ReplicaState.READY, root=root_for(3)),
        StateRequest(ReplicaState.READY, version="three"),
        StateRequest(ReplicaState.VERIFIED, version="v000003", root="00"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(request_: StateRequest) -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    with pytest.raises(UsageError):
        fleet.report_state("r0", request_, VERSIONS, 0.0)
    assert verified(fleet, 3) == 1


def test_registrations_are_checked_and_bounded() -> None:
    fleet = make_fleet()
    for bad in (
        RegisterRequest("R 0", RUN, "bf16"),
        RegisterRequest("r0", "../x", "bf16"),
        RegisterRequest("r0", RUN, ""),
        RegisterRequest("r0", RUN, "bf16", "x" * 501),
    ):
        with pytest.raises(UsageError):
            fleet.register(bad, 0.0)
    for place in range(4096):
        fleet.register(RegisterRequest(f"r{place}", RUN, "bf16"), 0.0)
    with pytest.raises(LimitError):
        fleet.register(RegisterRequest("one-more", RUN, "bf16"), 0.0)
    fleet.register(RegisterRequest("r0", RUN, "bf16"), 0.0)


def test_an_endless_error_text_is_cut() -> None:
    fleet = with_replica(make_fleet(), StateRequest(ReplicaState.FENCED, error="x" * 100_000))
    assert len(only_replica(fleet).error) == 500
