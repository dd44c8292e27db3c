"""Who counts as serving what it should, while fleets are held (P31, P33), and how the target is asked for."""

from __future__ import annotations

import pytest

from deltad.client.messages import (
    Act,
    RegionReport,
    RegisterRequest,
    ReplicaReport,
    ReplicaState,
    RunReport,
    StateRequest,
    Target,
    TargetRequest,
    TargetsReply,
)
from deltad.errors import DeltadError, FormatError, NotFoundError, UsageError
from deltad.local.fleet import Fleet, Standing
from deltad.types import Version
from tests.kit.operations import RUN, LocalDaemon, root_for, version_info

VERSIONS = [version_info(number) for number in range(1, 6)]
HELD = Target("v000003", "", "root (uid 0)", "bad", 1_700_000_000.0, "a", 7)


def fleet_with(**serves: int) -> Fleet:
    """A fleet whose replicas have read these versions back."""
    fleet = Fleet("a", "boot-1", fresh_for=30.0, quiet_for=120.0)
    for name, number in serves.items():
        fleet.register(RegisterRequest(name, RUN, "bf16"), 0.0)
        state = StateRequest(ReplicaState.VERIFIED, str(Version(1, number)), root_for(number))
        fleet.report_state(name, state, VERSIONS, 0.0)
    return fleet


def below(number: int, target: Target | None) -> RegionReport:
    replica = ReplicaReport("r9", RUN, "bf16", ReplicaState.VERIFIED, str(Version(1, number)), root_for(number))
    return RegionReport("b", "boot-9", 1, {RUN: RunReport("v000005", replicas=(replica,), target=target)})


def test_while_held_those_at_the_target_count_and_neither_older_nor_newer_ones() -> None:
    fleet = fleet_with(old=2, held=3, ahead=5)
    view = fleet.view(RUN, VERSIONS, 0.0, target=HELD)
    assert (view.version, view.verified, view.replicas, view.target) == ("v000003", 1, 3, HELD)
    free = fleet.view(RUN, VERSIONS, 0.0)
    assert (free.version, free.verified, free.target) == ("v000005", 1, None)


def test_a_version_that_is_asked_for_counts_as_ever_whatever_is_held() -> None:
    fleet = fleet_with(old=2, held=3, ahead=5)
    assert fleet.view(RUN, VERSIONS, 0.0, version=Version(1, 3), target=HELD).verified == 2
    assert fleet.view(RUN, VERSIONS, 0.0, version=Version(1, 5), target=HELD).verified == 1


def test_a_region_below_counts_by_what_its_own_fleet_should_serve() -> None:
    fleet = fleet_with(here=5)
    for number, target, expected in ((5, None, 2), (3, None, 1), (3, HELD, 2), (5, HELD, 1)):
        fleet = fleet_with(here=5)
        fleet.receive(below(number, target), 0.0)
        assert fleet.view(RUN, VERSIONS, 0.0).verified == expected
    fleet.receive(below(3, HELD), 0.0)
    assert fleet.view(RUN, VERSIONS, 31.0).verified == 1, "a region that fell silent proves nothing"


def test_staleness_stays_the_distance_to_the_newest_while_held() -> None:
    [region] = fleet_with(r0=3).view(RUN, VERSIONS, 0.0, target=HELD).regions
    assert region.report.runs[RUN].replicas[0].staleness == 2


def test_a_report_upstream_says_where_the_fleet_is_held() -> None:
    report = fleet_with(r0=3).region_report({RUN: Standing(VERSIONS, target=HELD)}, 0.0)
    assert report.runs[RUN].target == HELD
    above = Fleet("up", "boot-2")
    above.receive(report, 0.0)
    assert above.view(RUN, VERSIONS, 0.0).verified == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": ""},
        {"version": "../v1"},
        {"version": "3"},
        {"why": "x" * 501},
        {"by": "x" * 501},
        {"daemon": "x" * 501},
        {"fleet": "x" * 501},
    ],
)
def test_a_region_whose_target_is_malformed_is_refused_whole(wrong: dict[str, str]) -> None:
    fleet = fleet_with()
    with pytest.raises(FormatError):
        fleet.receive(below(3, Target(**{"version": "v000003", **wrong})), 0.0)
    assert fleet.regions({}, 0.0) == ()


# The routes.


async def test_a_move_reaches_the_daemon_and_what_stands_comes_back(daemon: LocalDaemon) -> None:
    daemon.add(1, 2)
    request = TargetRequest(Act.HOLD, "v000001", "b", "because")
    reply = await daemon.ask(daemon.client.move_target, RUN, request)
    assert daemon.operations.moved[0][0] == request
    assert reply.changed
    assert reply.target is not None
    assert reply.target.by == daemon.operations.moved[0][1] != ""
    daemon.operations.standing = TargetsReply(RUN, HELD, (HELD,), (HELD,))
    assert await daemon.ask(daemon.client.targets, RUN) == daemon.operations.standing
    view = await daemon.ask(daemon.client.fleet, RUN)
    assert (view.version, view.target) == ("v000003", HELD)


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (TargetRequest(Act.HOLD, "vX"), UsageError),
        (TargetRequest(Act.HOLD, fleet="../b"), UsageError),
        (TargetRequest(Act.HOLD, why="x" * 257), UsageError),
    ],
)
async def test_a_move_that_cannot_be_meant_is_refused_before_the_daemon_sees_it(
    daemon: LocalDaemon, request_: TargetRequest, kind: type[DeltadError]
) -> None:
    with pytest.raises(kind):
        await daemon.ask(daemon.client.move_target, RUN, request_)
    assert daemon.operations.moved == []


async def test_the_target_of_an_unknown_run_is_not_found(daemon: LocalDaemon) -> None:
    for call in (
        lambda: daemon.client.targets("other"),
        lambda: daemon.client.move_target("other", TargetRequest(Act.HOLD)),
    ):
        with pytest.raises(NotFoundError):
            await daemon.ask(call)
