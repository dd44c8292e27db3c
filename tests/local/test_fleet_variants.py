"""Replicas of different precisions of one version: each is held to the root of its own (P33)."""

from __future__ import annotations

import msgspec
import pytest

from deltad.client.messages import RegionView, RegisterRequest, ReplicaState, StateRequest
from deltad.errors import ReplicaError
from deltad.local.fleet import Fleet
from deltad.ops.overview import published_roots
from deltad.types import Version
from tests.kit.operations import RUN, root_for, version_info

NARROW_ROOT = root_for(77)
VERSIONS = [msgspec.structs.replace(version_info(1), others={"fp8": NARROW_ROOT})]


def verified(root: str) -> StateRequest:
    return StateRequest(ReplicaState.VERIFIED, version="v000001", root=root)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet("a", "boot-1")
    for variant in ("bf16", "fp8", "fp4"):
        fleet.register(RegisterRequest(f"replica-{variant}", RUN, variant, f"{variant}:8000"), 0.0)
    return fleet


def test_replicas_of_each_variant_count_by_the_root_of_their_own(fleet: Fleet) -> None:
    fleet.report_state("replica-bf16", verified(root_for(1)), VERSIONS, 0.0)
    fleet.report_state("replica-fp8", verified(NARROW_ROOT), VERSIONS, 0.0)
    assert fleet.view(RUN, VERSIONS, 0.0, version=Version(1, 1)).verified == 2


def test_the_root_of_another_variant_proves_nothing(fleet: Fleet) -> None:
    with pytest.raises(ReplicaError, match=NARROW_ROOT):
        fleet.report_state("replica-fp8", verified(root_for(1)), VERSIONS, 0.0)
    with pytest.raises(ReplicaError, match="v000001 has no variant fp4"):
        fleet.report_state("replica-fp4", verified(NARROW_ROOT), VERSIONS, 0.0)
    assert fleet.view(RUN, VERSIONS, 0.0, version=Version(1, 1)).verified == 0


def test_an_overview_knows_the_roots_of_all_variants(fleet: Fleet) -> None:
    (region,) = fleet.view(RUN, VERSIONS, 0.0).regions
    runs = {RUN: msgspec.structs.replace(region.report.runs[RUN], versions=tuple(VERSIONS))}
    roots = published_roots([RegionView(msgspec.structs.replace(region.report, runs=runs), 0.0, True)])
    assert roots == {(RUN, "bf16", "v000001"): root_for(1), (RUN, "fp8", "v000001"): NARROW_ROOT}
