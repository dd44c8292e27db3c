"""The power fails at every operation, in every way that a disk may forget: P5, P6, P9 to P13.

On a file system in memory (`tests/kit/memory_disk.py`). What a power cut leaves opens by itself: what was
acknowledged is there, what is visible is whole, and the same work done again ends as if nothing had happened.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from deltad.errors import StoreError, StoreFullError
from deltad.limits import Limits
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.pins import Pin
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import Version
from tests.kit.memory_disk import MemoryDisk
from tests.kit.versions import SMALL_CHUNKS, Lineage, Published
from tests.kit.whole import whole_versions

STORE = Path("/store")
LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)
"""Packs so small that a version of three chunks fills more than one."""


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for _ in range(4):
        lineage.publish()
    return lineage


def opened(disk: MemoryDisk, limits: Limits = LIMITS) -> Store:
    return Store.open(STORE, limits=limits, files=disk)


def holding(versions: list[Published]) -> MemoryDisk:
    """A disk with these versions, all of it durable."""
    disk = MemoryDisk()
    store = opened(disk)
    for version in versions:
        version.commit_into(store)
    store.close()
    return MemoryDisk(disk.tree())


def survives(disk: MemoryDisk, before: list[Published], added: list[Published], since: int = 0) -> None:
    """Every state that a power cut may leave shows `before` and what of `added` was marked, all of it whole.

    So does every state that a second power cut leaves while the first is healed; and what a start has shown
    once is there for good.
    """
    run, expected = added[0].run, [version.version for version in [*before, *added]]
    tried = again = 0
    for cut in disk.power_cuts(since):
        store = opened(cut.disk)
        visible = whole_versions(store, run)
        done = len(before) + sum(mark == "durable" for mark in cut.marks)
        assert visible in (expected[:done], expected[: done + 1]), f"after {cut.point} operations"
        cut.disk.mark("shown")
        healed = cut.disk.point
        for version in added:
            version.commit_into(store)
        assert whole_versions(store, run) == expected
        store.close()
        tried += 1
        for second in cut.disk.power_cuts(until=healed):
            shown = whole_versions(opened(second.disk), run)
            assert shown == visible if second.marks else shown in (expected[:done], expected[: done + 1])
            again += 1
    print(f"the power was cut at {disk.point - since} points in {tried} ways, and {again} times again while healing")
    assert tried > disk.point - since
    assert again > tried


def test_a_power_cut_during_the_very_first_start_and_publish(lineage: Lineage) -> None:
    disk = MemoryDisk()
    store = opened(disk)
    lineage.versions[0].commit_into(store)
    disk.mark("durable")
    survives(disk, [], lineage.versions[:1])


def test_a_power_cut_during_publishes_onto_what_is_there(lineage: Lineage) -> None:
    disk = holding(lineage.versions[:1])
    store = opened(disk)
    for version in lineage.versions[1:3]:
        version.commit_into(store)
        disk.mark("durable")
    survives(disk, lineage.versions[:1], lineage.versions[1:3])


def test_a_power_cut_takes_no_pin_that_was_acknowledged_and_invents_none(lineage: Lineage) -> None:
    """One that is taken away may come back: it keeps too much, and nothing too little."""
    disk = holding(lineage.versions[:2])
    run = opened(disk).run(lineage.versions[0].run)
    first, second = Version(1, 1), Version(1, 2)
    for version in (first, second):
        run.pin(version, Pin("ana", f"for {version}"))
        disk.mark(f"pinned {version}")
    run.unpin(first)
    disk.mark("unpinned")
    tried = 0
    for cut in disk.power_cuts():
        pins = opened(cut.disk).run(lineage.versions[0].run).pins()
        acknowledged = {version for version in (first, second) if f"pinned {version}" in cut.marks}
        if len(acknowledged) == 2:
            acknowledged.discard(first)  # its end may have begun
        assert acknowledged <= pins.keys() <= {first, second}
        assert all(pin == Pin("ana", f"for {version}") for version, pin in pins.items())
        tried += 1
    assert tried > 20


def test_a_power_cut_during_pulls_whose_objects_come_in_any_order(lineage: Lineage) -> None:
    disk = holding(lineage.versions[:1])
    store = opened(disk)
    for version in lineage.versions[1:3]:
        for digest, data in sorted(version.objects.items()):
            put = store.put_chunk if digest in version.chunks else store.put
            put(data)
        store.run(version.run).commit(version.data)
        disk.mark("durable")
    survives(disk, lineage.versions[:1], lineage.versions[1:3])


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
def test_an_operation_that_fails_anywhere_is_an_error_and_never_counts_as_done(
    lineage: Lineage, code: int, lasting: bool
) -> None:
    """After the refusal the same publish works, and what it acknowledges survives a power cut then and there."""
    first, second = lineage.versions[:2]
    before = holding([first]).tree()
    operations = operations_of(before, second)
    refused = tried = 0
    for operation in range(1, operations + 1):
        disk = MemoryDisk(before)
        disk.refuse(code, range(operation, operations * 10 if lasting else operation + 1))
        refused += publish_is_refused(disk, second)
        disk.refuse(0, range(0))
        assert whole_versions(opened(MemoryDisk(disk.tree())), first.run)[:1] == [first.version]
        for cut in disk.power_cuts(since=disk.point):
            assert whole_versions(opened(cut.disk), first.run)[:1] == [first.version]
        second.commit_into(opened(disk))
        for cut in disk.power_cuts(since=disk.point):
            assert whole_versions(opened(cut.disk), first.run) == [first.version, second.version]
            tried += 1
    print(f"{refused} of {operations} operations were refused, each followed by power cuts, {tried} altogether")
    assert operations >= refused > operations // 2
    assert tried >= operations


def collected(disk: MemoryDisk) -> Store:
    """Open a store, let the time go by after which things may go, and keep the newest version alone."""
    now = [0.0]
    store = Store.open(STORE, limits=LIMITS, files=disk, clock=lambda: now[0])
    now[0] += LEASE_SECONDS + GRACE_SECONDS
    disk.mark("collecting")
    collect(store, {store.runs()[0]: Retention(versions=1)})
    return store


@pytest.fixture(scope="module")
def long_lineage() -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for number in range(6):
        lineage.publish(anchor=number == 3)
    return lineage


def test_a_power_cut_during_a_collection_leaves_all_versions_or_those_that_are_kept(long_lineage: Lineage) -> None:
    *held, late = long_lineage.versions
    disk = holding(held)
    before = disk.point
    collected(disk)
    disk.mark("durable")
    everything, kept = [v.version for v in held], [v.version for v in held[3:]]
    tried = halfway = twice = 0
    for cut in disk.power_cuts(since=before):
        store = opened(cut.disk)
        visible = whole_versions(store, late.run)
        assert visible in ((kept,) if "durable" in cut.marks else (everything, kept))
        halfway += visible == kept and "durable" not in cut.marks
        store.close()
        for second in cut.disk.power_cuts():
            assert whole_versions(opened(second.disk), late.run) in ((kept,) if visible == kept else (everything, kept))
            twice += 1
        again = collected(cut.disk)
        assert whole_versions(again, late.run) == kept
        assert {digest for version in held[3:] for digest in version.objects} >= set(again.objects.sizes())
        late.commit_into(again)
        assert whole_versions(again, late.run) == [*kept, late.version]
        again.close()
        tried += 1
    print(
        f"the power was cut at {disk.point - before} points of a collection in {tried} ways, {halfway} of them "
        f"halfway, and {twice} times again while healing"
    )
    assert tried > disk.point - before
    assert halfway > 20
    assert twice > tried


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
def test_a_collection_that_is_refused_anywhere_takes_nothing_that_is_kept(
    long_lineage: Lineage, code: int, lasting: bool
) -> None:
    *held, late = long_lineage.versions
    before = holding(held).tree()
    everything, kept = [v.version for v in held], [v.version for v in held[3:]]
    disk = MemoryDisk(before)
    collected(disk)
    operations, refused = disk.operations.total(), 0
    for operation in range(1, operations + 1):
        disk = MemoryDisk(before)
        disk.refuse(code, range(operation, operations * 10 if lasting else operation + 1))
        try:
            collected(disk).close()
        except (StoreError, StoreFullError):
            refused += 1
        disk.refuse(0, range(0))
        for cut in disk.power_cuts(since=disk.point):
            assert whole_versions(opened(cut.disk), late.run) in (everything, kept)
        disk = MemoryDisk(disk.tree())
        again = collected(disk)
        assert whole_versions(again, late.run) == kept
        late.commit_into(again)
        assert whole_versions(again, late.run) == [*kept, late.version]
    print(f"{refused} of {operations} operations of a collection were refused")
    assert operations >= refused > operations // 2


def test_a_disk_that_is_full_to_the_last_byte_is_made_room_on(long_lineage: Lineage) -> None:
    *held, late = long_lineage.versions
    disk = holding(held)
    now = [0.0]
    store = Store.open(STORE, limits=LIMITS, files=disk, clock=lambda: now[0])
    now[0] += LEASE_SECONDS + GRACE_SECONDS
    disk.refuse(errno.ENOSPC, range(1, 10_000), kinds=("create", "write", "mkdir"))
    before = store.used_bytes()
    with pytest.raises(StoreFullError):
        late.commit_into(store)
    start = disk.point
    collect(store, {late.run: Retention(versions=1)})
    assert store.used_bytes() < before
    everything = [version.version for version in held]
    seen = {tuple(whole_versions(opened(cut.disk), late.run)) for cut in disk.power_cuts(since=start)}
    assert seen == {tuple(everything), *(tuple(everything[:n]) + tuple(everything[3:]) for n in range(3))}
    disk.refuse(0, range(0))
    late.commit_into(store)


def operations_of(before: dict[str, bytes | None], version: Published) -> int:
    """How many operations it takes to open a store and publish a version into it."""
    disk = MemoryDisk(before)
    version.commit_into(opened(disk))
    return disk.operations.total()


def publish_is_refused(disk: MemoryDisk, version: Published) -> bool:
    """Open the store and publish; True if that ended with an error, as it may, and as nothing else may."""
    store = None
    try:
        store = opened(disk)
        version.commit_into(store)
    except (StoreError, StoreFullError):
        return True
    finally:
        if store is not None:
            store.close()
    return False
