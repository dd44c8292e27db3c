"""What the tests of a fleet share: versions, replicas and reports, and who counts as verified."""

from __future__ import annotations

from collections.abc import Sequence

from deltad.client.messages import (
    PROVEN,
    RegionReport,
    RegisterRequest,
    ReplicaReport,
    ReplicaState,
    RunReport,
    StateRequest,
    VersionInfo,
)
from deltad.local.fleet import Fleet, Standing
from deltad.types import Version, parse_version
from tests.kit.operations import RUN, root_for, version_info

VERSIONS = [version_info(number) for number in (1, 2, 3, 5)]


STANDINGS = {RUN: Standing(VERSIONS)}


def v(number: int) -> Version:
    return Version(1, number)


def make_fleet(name: str = "a", boot: str = "boot-1") -> Fleet:
    return Fleet(name, boot, fresh_for=30.0, quiet_for=120.0)


def state(which: ReplicaState, number: int = 0, *, root: str | None = None) -> StateRequest:
    if not number:
        return StateRequest(which)
    return StateRequest(which, version=str(v(number)), root=root_for(number) if root is None else root)


def with_replica(fleet: Fleet, request: StateRequest | None = None, *, name: str = "r0", now: float = 0.0) -> Fleet:
    fleet.register(RegisterRequest(name, RUN, "bf16", "10.0.0.1:8000"), now)
    if request is not None:
        fleet.report_state(name, request, VERSIONS, now)
    return fleet


def verified(fleet: Fleet, number: int, now: float = 0.0, versions: Sequence[VersionInfo] = VERSIONS) -> int:
    view = fleet.view(RUN, versions, now, version=v(number))
    assert view.verified == len(serving(fleet, number, now, versions))
    return view.verified


def serving(fleet: Fleet, number: int, now: float = 0.0, versions: Sequence[VersionInfo] = VERSIONS) -> tuple[str, ...]:
    """The replicas that are shown as proven at version `number` or a newer one, as `daemon/replica`."""
    return tuple(
        f"{region.report.daemon}/{replica.replica}"
        for region in fleet.view(RUN, versions, now).regions
        for replica in region.report.runs[RUN].replicas
        if replica.state in PROVEN and replica.root and parse_version(replica.version) >= v(number)
    )


def only_replica(fleet: Fleet, now: float = 0.0, versions: Sequence[VersionInfo] = VERSIONS) -> ReplicaReport:
    [replica] = [
        replica for region in fleet.view(RUN, versions, now).regions for replica in region.report.runs[RUN].replicas
    ]
    return replica


def report_from(
    daemon: str = "b",
    *,
    boot: str = "boot-b",
    sequence: int = 1,
    below: tuple[RegionReport, ...] = (),
    number: int = 3,
    which: ReplicaState = ReplicaState.VERIFIED,
    root: str | None = None,
) -> RegionReport:
    replica = ReplicaReport(
        "r0", RUN, "bf16", which, version=str(v(number)), root=root_for(number) if root is None else root
    )
    return RegionReport(daemon, boot, sequence, {RUN: RunReport(str(v(number)), "", (replica,))}, below)
