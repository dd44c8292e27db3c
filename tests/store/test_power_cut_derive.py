"""The power fails while deltas are folded and an anchor is cut, at every operation (P5, P10, P12, P13).

What is left is whole: the edge is in the catalogue with all that it names, or it is not there and some objects lie
unused. The same edge made again ends as if nothing had happened.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deltad.delta.backend import choose
from deltad.errors import StoreError, StoreFullError
from deltad.store.derive import Deriver
from deltad.store.derived import DerivedEdge
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import RunId, Variant
from tests.kit.memory_disk import MemoryDisk
from tests.kit.recording_disk import RecordingDisk, place
from tests.kit.versions import SMALL_CHUNKS, Lineage
from tests.kit.whole import whole_versions

STORE = Path("/store")
LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=1)
    for _ in range(4):
        lineage.publish()
    return lineage


@pytest.fixture
def home() -> Iterator[Path]:
    """In memory where there is room for that."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


def opened(disk: MemoryDisk) -> Store:
    return Store.open(STORE, limits=LIMITS, files=disk)


def filled(lineage: Lineage) -> dict[str, bytes | None]:
    """What a disk holds with all versions on it."""
    disk = MemoryDisk()
    store = opened(disk)
    lineage.fill(store)
    store.close()
    return disk.tree()


def deriver(store: Store, run: RunId) -> Deriver:
    records, variant = store.run(run), Variant("bf16")
    return Deriver(store, records, variant, Mirror(store, records, variant, choose()), choose())


def fold_all(store: Store, lineage: Lineage) -> DerivedEdge:
    first, last = lineage.versions[0], lineage.versions[-1]
    made = deriver(store, first.run).make_edge(first.version, last.version)
    assert made.folded or made.how == "made before"
    return made.edge


def shown(store: Store, lineage: Lineage) -> list[DerivedEdge]:
    """The derived edges that a store shows, after reading all that leads over them."""
    run = lineage.versions[0].run
    assert whole_versions(store, run) == [version.version for version in lineage.versions]
    edges = store.run(run).derived()
    for edge in edges:
        assert edge.ref in store.run(run).edges(edge.target, edge.variant), "it is in the catalogue, and whole"
    return edges


def test_a_power_cut_during_a_fold_leaves_the_edge_whole_or_not_at_all(lineage: Lineage) -> None:
    disk = MemoryDisk(filled(lineage))
    store = opened(disk)
    before = disk.point
    edge = fold_all(store, lineage)
    disk.mark("made")
    tried = 0
    for cut in disk.power_cuts(since=before):
        store = opened(cut.disk)
        found = shown(store, lineage)
        assert found == [edge] if cut.marks else found in ([], [edge])
        cut.disk.mark("shown")
        assert fold_all(store, lineage) == edge
        store.close()
        for second in cut.disk.power_cuts(since=cut.disk.point):
            assert shown(opened(second.disk), lineage) == [edge]
        tried += 1
    print(f"the power was cut at {disk.point - before} points of a fold in {tried} ways")
    assert tried > disk.point - before > 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
def test_a_fold_that_is_refused_anywhere_shows_no_half_of_an_edge_and_can_be_made_again(
    lineage: Lineage, code: int
) -> None:
    before = filled(lineage)
    disk = MemoryDisk(before)
    edge = fold_all(opened(disk), lineage)
    operations, refused = disk.operations.total(), 0
    for operation in range(1, operations + 1):
        disk = MemoryDisk(before)
        disk.refuse(code, range(operation, operation + 1))
        try:
            store = opened(disk)
            fold_all(store, lineage)
        except (StoreError, StoreFullError):
            refused += 1
        else:
            store.close()
        disk.refuse(0, range(0))
        for cut in disk.power_cuts(since=disk.point):
            store = opened(cut.disk)
            assert shown(store, lineage) in ([], [edge])
            assert fold_all(store, lineage) == edge
    print(f"{refused} of {operations} operations of a fold were refused")
    assert operations >= refused > operations // 2


def test_a_power_cut_while_an_anchor_is_cut_leaves_it_whole_or_not_at_all(lineage: Lineage, home: Path) -> None:
    run, newest = lineage.versions[0].run, lineage.versions[-1].version
    store = Store.open(home / "store", limits=LIMITS)
    lineage.fill(store)
    store.close()
    disk = RecordingDisk(home / "store")
    store = Store.open(home / "store", limits=LIMITS, files=disk)
    before = disk.memory.point
    edge = deriver(store, run).cut_anchor(newest, "for newcomers").edge
    disk.memory.mark("made")
    tried = 0
    for cut in disk.power_cuts(since=before):
        place(cut, home / "store", home / "cut")
        again = Store.open(home / "cut", limits=LIMITS)
        found = shown(again, lineage)
        assert found == [edge] if cut.marks else found in ([], [edge])
        assert deriver(again, run).cut_anchor(newest, "for newcomers").edge == edge
        assert shown(again, lineage) == [edge]
        again.close()
        shutil.rmtree(home / "cut")
        tried += 1
    print(f"the power was cut at {disk.memory.point - before} points of a cut in {tried} ways")
    assert tried > disk.memory.point - before > 20
