"""Runs that fork other runs: committed, found, and what keeps the other run's versions for as long as it is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deltad.delta.record import decode_record
from deltad.errors import FormatError, IntegrityError, NotFoundError
from deltad.store.garbage import GRACE_SECONDS, Collected, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import Version, VersionId, parse_run
from tests.kit.memory_disk import MemoryDisk
from tests.kit.versions import SMALL_CHUNKS, Lineage, Published, forge
from tests.kit.whole import read_version, whole_versions

STORE = Path("/store")
LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)
OTHER, FORK = parse_run("policy"), parse_run("fork")


def lineages() -> tuple[Lineage, Lineage]:
    """A run of eight versions, the fifth an anchor too, and one of three that forks its third."""
    other = Lineage(limits=LIMITS, tensors=2)
    for number in range(8):
        other.publish(anchor=number == 4)
    fork = Lineage("fork", limits=LIMITS, tensors=2, seed=3, forks=other.versions[2])
    for number in range(3):
        fork.publish(anchor=number == 2)
    return other, fork


OTHERS, FORKS = lineages()


class Place:
    """A store in memory that has been open for long."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.now = 1000.0
        self.disk = disk or MemoryDisk()
        self.store = Store.open(STORE, limits=LIMITS, files=self.disk, clock=lambda: self.now)

    def reopened(self) -> Place:
        self.store.close()
        again = Place(self.disk)
        again.now += GRACE_SECONDS + LEASE_SECONDS
        return again

    def commit(self, *versions: Published) -> Place:
        for version in versions:
            version.commit_into(self.store)
        self.now += GRACE_SECONDS + LEASE_SECONDS
        return self

    def collect(self, **versions: int) -> Collected:
        """Keep so many versions of each run that is named."""
        return collect(self.store, {parse_run(run): Retention(versions=count) for run, count in versions.items()})

    def way(self, version: Published) -> list[str]:
        """The path to a version from an anchor."""
        run = self.store.run(version.run)
        return [str(hop.record.id) for hop in run.path(run.record(version.version), "bf16").hops]


def numbers(store: Store, lineage: Lineage) -> list[int]:
    return [version.number for version in whole_versions(store, lineage.versions[0].run)]


def test_the_way_to_a_fork_leads_over_the_other_run() -> None:
    place = Place().commit(*OTHERS.versions, *FORKS.versions[:2])
    across = ["policy/v000001", "policy/v000002", "policy/v000003", "fork/v000001", "fork/v000002"]
    assert place.way(FORKS.versions[1]) == across
    run = place.store.run(FORK)
    path = run.path(
        run.record(Version(1, 2)), "bf16", elsewhere=[VersionId(OTHER, Version(1, 2)), VersionId(OTHER, Version(1, 7))]
    )
    assert path.start == VersionId(OTHER, Version(1, 2))
    assert len(path.hops) == 3
    assert place.way(FORKS.versions[1]) == across, "as long as nothing changes"
    assert place.reopened().way(FORKS.versions[1]) == across


def test_an_edge_that_the_other_run_gets_later_leads_to_the_fork_too() -> None:
    place = Place().commit(*OTHERS.versions, FORKS.versions[0])
    assert len(place.way(FORKS.versions[0])) == 4
    skip = OTHERS.skip(OTHERS.versions[0], OTHERS.versions[2])
    skip.put_into(place.store)
    place.store.run(OTHER).add_edge(skip.manifest)
    assert place.way(FORKS.versions[0]) == ["policy/v000001", "policy/v000003", "fork/v000001"]
    place.store.run(OTHER).drop_edges([skip.manifest])
    assert len(place.way(FORKS.versions[0])) == 4


def test_a_fork_is_not_committed_without_its_base_and_says_which_it_is() -> None:
    place = Place()
    FORKS.versions[0].put_into(place.store)
    with pytest.raises(NotFoundError, match="delta on v000003 of run policy, which is not held"):
        place.store.run(FORK).commit(FORKS.versions[0].data)
    place.commit(*OTHERS.versions[:2])
    with pytest.raises(NotFoundError, match="delta on v000003 of run policy, which is not held"):
        place.store.run(FORK).commit(FORKS.versions[0].data)
    place.commit(OTHERS.versions[2], FORKS.versions[0])
    read_version(place.store, FORKS.versions[0].record)


def test_an_anchor_leads_to_a_fork_where_the_other_run_is_not_held() -> None:
    fork = Lineage("fork", limits=LIMITS, tensors=2, seed=3, forks=OTHERS.versions[2])
    place = Place().commit(fork.publish(anchor=True), fork.publish())
    assert place.way(fork.versions[1]) == ["fork/v000001", "fork/v000002"]


def test_what_a_fork_starts_from_is_kept_and_told_why() -> None:
    place = Place().commit(*OTHERS.versions, *FORKS.versions[:2])
    collected = place.collect(policy=2)
    assert numbers(place.store, OTHERS) == [1, 2, 3, 5, 6, 7, 8]
    why = {found.thing: found.why for found in collected.versions}
    assert why["policy/v000003"] == "the base of fork/v000001"
    assert why["policy/v000002"] == "on the path to v000003"
    again = place.reopened()
    again.collect(policy=2)
    assert numbers(again.store, OTHERS) == [1, 2, 3, 5, 6, 7, 8], "a restart does not forget it"
    assert len(again.way(FORKS.versions[1])) == 5


def test_what_a_fork_started_from_goes_once_the_fork_needs_it_no_more() -> None:
    place = Place().commit(*OTHERS.versions, *FORKS.versions)
    place.collect(policy=2, fork=1)
    assert numbers(place.store, FORKS) == [3], "its anchor"
    place.collect(policy=2, fork=1)
    assert numbers(place.store, OTHERS) == [5, 6, 7, 8]
    assert place.way(FORKS.versions[2]) == ["fork/v000003"]


def test_a_commit_that_fails_keeps_nothing_of_the_other_run() -> None:
    place = Place().commit(*OTHERS.versions)
    with pytest.raises(NotFoundError):
        place.store.run(FORK).commit(FORKS.versions[0].data)
    place.collect(policy=2)
    assert numbers(place.store, OTHERS) == [5, 6, 7, 8]


def test_a_fork_that_contradicts_its_base_is_refused() -> None:
    place = Place().commit(*OTHERS.versions)
    FORKS.versions[0].put_into(place.store)
    edges = [msgspec.structs.replace(edge, base=Version(1, 4)) for edge in FORKS.versions[0].record.variants[0].edges]
    variant = msgspec.structs.replace(FORKS.versions[0].record.variants[0], edges=tuple(edges))
    lying = forge(FORKS.versions[0], parent=Version(1, 4), variants=(variant,))
    with pytest.raises(IntegrityError, match="base: expected v000004, found v000003"):
        place.store.run(FORK).commit(lying.data)
    within = Lineage("fork", limits=LIMITS, tensors=2)
    within.publish()
    claims = forge(within.publish(), parent_run="policy", parent=Version(1, 3))
    place.commit(within.versions[0])
    claims.put_into(place.store)
    with pytest.raises(IntegrityError, match="base's run: expected policy, found fork"):
        place.store.run(FORK).commit(claims.data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parent_run": "../../other"}, "run id"),
        ({"parent_run": "fork"}, "a parent of another run"),
        ({"parent": None}, "a parent of another run"),
    ],
)
def test_a_record_of_a_fork_names_another_run_and_its_version(changes: dict[str, object], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        decode_record(forge(FORKS.versions[0], **changes).data)


def test_a_power_cut_while_a_fork_begins_and_the_other_run_is_collected_leaves_the_fork_whole() -> None:
    """At every operation, in every way that a disk may forget."""
    other = Lineage(limits=LIMITS, tensors=2)
    for number in range(3):
        other.publish(anchor=number == 2)
    fork = Lineage("fork", limits=LIMITS, tensors=2, seed=3, forks=other.versions[1])
    fork.publish()
    fork.publish(anchor=True)
    before = Place().commit(*other.versions)
    before.store.close()
    place = Place(MemoryDisk(before.disk.tree()))
    since = place.disk.point
    place.commit(*fork.versions)
    place.disk.mark("committed")
    place.collect(policy=1, fork=1)
    place.disk.mark("the fork's first version is gone")
    place.collect(policy=1, fork=1)
    place.store.close()
    tried = 0
    for cut in place.disk.power_cuts(since):
        again = Place(cut.disk)
        seen = numbers(again.store, fork) if FORK in again.store.held_runs() else []
        possible = [[], [1], [1, 2]] if not cut.marks else [[1, 2], [2]] if len(cut.marks) == 1 else [[2]]
        assert seen in possible
        for number in seen:
            assert again.way(fork.versions[number - 1])[-1] == f"fork/v{number:06d}"
        held = numbers(again.store, other)
        assert held == [1, 2, 3] if 1 in seen else held in ([1, 2, 3], [3])
        again.store.close()
        tried += 1
    print(f"the power was cut in {tried} ways")
    assert tried > place.disk.point - since
