"""The target of a run is durable, and keeps the version that it names."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from deltad.errors import FormatError, StoreError, StoreFullError
from deltad.protocol.target import EVERYONE, Targets
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import RunId, Version
from tests.kit.memory_disk import MemoryDisk
from tests.kit.versions import Lineage

STORE = Path("/store")
RUN = RunId("policy")
MOVES = [Version(1, 1), None]


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(tensors=2)
    for number in range(1, 7):
        lineage.publish(anchor=number == 5)
    return lineage


def hold(version: Version | None, fleet: str = EVERYONE, why: str = ""):
    return lambda now: now.say(version, fleet, by="root", why=why, when=1.0, daemon="a")


def held(store: Store) -> Version | None:
    said = store.run(RUN).targets().held("a")
    return None if said is None else said.version


def test_a_target_outlives_the_daemon_with_who_and_why_and_so_does_its_history(
    tmp_path: Path, lineage: Lineage
) -> None:
    store = Store.open(tmp_path / "store")
    lineage.fill(store)
    assert store.run(RUN).move_target(hold(Version(1, 2), why="bad reward"))
    assert store.run(RUN).move_target(hold(Version(1, 1)))
    assert not store.run(RUN).move_target(hold(Version(1, 1)))
    before = store.run(RUN).targets()
    store.close()
    again = Store.open(tmp_path / "store")
    assert again.run(RUN).targets() == before
    assert [(said.version, said.why) for said in before.history] == [(Version(1, 2), "bad reward"), (Version(1, 1), "")]
    again.close()


def test_a_target_may_be_heard_of_before_any_version_is_here(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    store.run(RUN).move_target(hold(Version(1, 7)))
    store.close()
    again = Store.open(tmp_path / "store")
    assert held(again) == Version(1, 7)
    again.close()


@pytest.mark.parametrize("rot", [b"", b"{", b'{"heard": [{}]}', b'{"heard": 7}', b"\xff"])
def test_a_damaged_target_stops_the_start_by_name_since_nobody_can_say_what_to_serve(
    tmp_path: Path, rot: bytes
) -> None:
    store = Store.open(tmp_path / "store")
    store.run(RUN).move_target(hold(Version(1, 7)))
    store.close()
    (tmp_path / "store" / "runs" / RUN / "target").write_bytes(rot)
    with pytest.raises(FormatError, match="runs/policy/target"):
        Store.open(tmp_path / "store")


@pytest.mark.parametrize("versions", [0, 1], ids=["before any version", "beside versions"])
def test_a_power_cut_at_any_moment_leaves_the_target_before_or_the_one_after(lineage: Lineage, versions: int) -> None:
    disk = MemoryDisk()
    store = Store.open(STORE, files=disk)
    for published in lineage.versions[:versions]:
        published.commit_into(store)
    since = disk.point
    for version in MOVES:
        store.run(RUN).move_target(hold(version))
        disk.mark("durable")
    store.close()
    expected = [None, *MOVES]
    tried = again = 0
    for cut in disk.power_cuts(since):
        done = sum(mark == "durable" for mark in cut.marks)
        opened = Store.open(STORE, files=cut.disk)
        sequence = opened.run(RUN).targets().sequence
        assert sequence in (done, done + 1)
        assert held(opened) == expected[sequence]
        assert len(opened.run(RUN).targets().history) == sequence, "what stands and its history come together"
        cut.disk.mark("shown")
        healed = cut.disk.point
        opened.close()
        for second in cut.disk.power_cuts(until=healed):
            shown = Store.open(STORE, files=second.disk).run(RUN).targets().sequence
            assert shown == sequence if second.marks else shown in (done, done + 1)
            again += 1
        tried += 1
    print(f"the power was cut at {disk.point - since} points in {tried} ways, {again} times again while healing")
    assert tried > disk.point - since
    assert again >= tried


def test_what_a_start_shows_after_a_daemon_died_in_a_move_is_there_for_good() -> None:
    """A daemon that dies leaves what it did not sync in the system's memory, where the next one sees it."""
    shown = set()
    for operation in range(1, 20):
        disk = MemoryDisk()
        store = Store.open(STORE, files=disk)
        since = disk.operations.total()
        disk.refuse(errno.EIO, range(since + operation, since + 10_000))
        with contextlib.suppress(StoreError):
            store.run(RUN).move_target(hold(Version(1, 7)))
        disk.refuse(0, range(0))
        store.close()
        found = held(Store.open(STORE, files=disk))
        disk.mark("shown")
        assert {held(Store.open(STORE, files=cut.disk)) for cut in disk.power_cuts(since=disk.point)} == {found}
        shown.add(found)
    assert shown == {None, Version(1, 7)}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
def test_a_move_that_the_disk_refuses_moves_nothing_and_works_when_it_can(lineage: Lineage, code: int) -> None:
    disk = MemoryDisk()
    store = Store.open(STORE, files=disk)
    lineage.versions[0].commit_into(store)
    store.run(RUN).move_target(hold(Version(1, 1)))
    before = disk.operations.total()
    disk.refuse(code, range(before, before + 10_000))
    with pytest.raises((StoreError, StoreFullError)):
        store.run(RUN).move_target(hold(None))
    assert held(store) == Version(1, 1)
    disk.refuse(0, range(0))
    assert store.run(RUN).move_target(hold(None))
    store.close()
    assert held(Store.open(STORE, files=disk)) is None


def test_a_held_version_and_the_way_to_it_stay_and_the_reason_is_told(tmp_path: Path, lineage: Lineage) -> None:
    now = [0.0]
    store = Store.open(tmp_path / "store", clock=lambda: now[0])
    lineage.fill(store)
    store.run(RUN).move_target(hold(Version(1, 2), "far-away", why="its users wait"))
    now[0] += LEASE_SECONDS + GRACE_SECONDS
    found = collect(store, {RUN: Retention(versions=1)})
    whys = {explained.thing: explained.why for explained in found.versions if explained.kept}
    assert whys == {
        "policy/v000001": "on the path to v000002",
        "policy/v000002": "the fleet of far-away is held at it by root at a: its users wait",
        "policy/v000005": "on the path to v000006",
        "policy/v000006": "the newest version",
    }
    store.run(RUN).move_target(hold(None))
    collect(store, {RUN: Retention(versions=1)})
    assert [record.version.number for record in store.run(RUN).records()] == [5, 6]
    store.close()


def test_no_collection_may_choose_a_version_that_a_fleet_is_held_at(tmp_path: Path, lineage: Lineage) -> None:
    store = Store.open(tmp_path / "store")
    lineage.fill(store)
    store.run(RUN).move_target(hold(Version(1, 2)))
    with pytest.raises(ValueError, match="held at v000002"):
        store.run(RUN).sift(lambda candidates: [Version(1, 1), Version(1, 2)])
    assert len(store.run(RUN).records()) == 6
    store.close()


def test_a_move_that_is_refused_by_its_rule_writes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")

    def refuse(now: Targets) -> Targets:
        raise FormatError("target", found="nonsense")

    with pytest.raises(FormatError):
        store.run(RUN).move_target(refuse)
    assert not (tmp_path / "store" / "runs" / RUN / "target").exists()
    store.close()
