"""What is foreign, missing, newer, read-only or from a wrong clock: a named error, and nothing touched or guessed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.delta.backend import choose
from deltad.errors import DeltadError, FormatError, IntegrityError, StoreError
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.mirror import Mirror
from deltad.store.pins import Pin
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import Variant, Version
from tests.kit.memory_disk import MemoryDisk
from tests.kit.trainer import Trainer
from tests.kit.versions import Lineage, Published, forge
from tests.kit.whole import whole_versions

STORE = Path("/store")
Tree = dict[str, bytes | None]


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage()
    for _ in range(3):
        lineage.publish()
    return lineage


@pytest.fixture
def tree(lineage: Lineage) -> Tree:
    """A store with three versions, of which one is pinned."""
    disk = MemoryDisk()
    store = Store.open(STORE, files=disk)
    lineage.fill(store)
    store.run(lineage.versions[0].run).pin(Version(1, 1), Pin("ana", ""))
    store.close()
    return disk.tree()


def refused(tree: Tree, kind: type[DeltadError], *words: str) -> None:
    """Opening the store is refused by an error of this kind with all the words, and changes nothing."""
    disk = MemoryDisk(tree)
    with pytest.raises(kind) as caught:
        Store.open(STORE, files=disk)
    for word in words:
        assert word in str(caught.value)
    assert disk.tree() == tree


# Foreign files.


@pytest.mark.parametrize(
    "name",
    ["packs/notes.txt", "objects/notes.txt", "runs/No Run", "runs/policy/records/notes.txt", "runs/policy/pins/a.txt"],
)
def test_a_foreign_file_within_the_store_is_named_and_left_there(tree: Tree, name: str) -> None:
    refused({**tree, f"/store/{name}": b"mine"}, FormatError, f"/store/{name}")


def test_a_foreign_file_among_objects_stops_a_collection_before_anything_goes(tree: Tree, lineage: Lineage) -> None:
    shard = next(path for path, data in tree.items() if data is None and path.startswith("/store/objects/"))
    now = [0.0]
    disk = MemoryDisk({**tree, f"{shard}/notes.txt": b"mine"})
    store = Store.open(STORE, files=disk, clock=lambda: now[0])
    now[0] += LEASE_SECONDS + GRACE_SECONDS
    objects = {path for path in disk.tree() if path.startswith(("/store/objects/", "/store/packs/"))}
    with pytest.raises(FormatError, match=r"notes\.txt.*a foreign file"):
        collect(store, {lineage.versions[0].run: Retention(versions=1)})
    assert objects <= set(disk.tree())


@pytest.mark.parametrize("name", ["lock", "tmp/thesis.tex", "tmp/0123"])
def test_what_only_looks_like_the_beginning_of_a_store_is_left_alone(name: str) -> None:
    tree: Tree = {"/store": None, f"/store/{name}": b"all my work"}
    if "/" in name:
        tree["/store/tmp"] = None
    refused(tree, FormatError, f"'{name}' and no FORMAT file")


@pytest.mark.parametrize("left", [b"", b"712\n", b"\0\0\0\0"])
def test_what_a_first_start_left_that_was_cut_off_is_gone_on_with(left: bytes) -> None:
    tree: Tree = {"/store": None, "/store/lock": left, "/store/tmp": None, f"/store/tmp/{'0a' * 16}": b"delt"}
    Store.open(STORE, files=MemoryDisk(tree)).close()


def test_a_new_file_system_of_its_own_can_be_a_store() -> None:
    Store.open(STORE, files=MemoryDisk({"/store": None, "/store/lost+found": None})).close()


def test_a_mirror_that_advances_removes_its_own_generations_and_nothing_beside_them(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.step(0)
    mirror = Mirror(trainer.store, trainer.run, Variant("bf16"), choose())
    beside = mirror.advance(trainer.run.latest()).parent
    (beside / "my-copy").mkdir()
    (beside / "my-copy" / "weights").write_bytes(b"mine")
    (beside / ".e000001-v000000.0123456789abcdef0123456789abcdef").mkdir()
    (beside / "e000001-v000000.removed").mkdir()
    trainer.step(1)
    mirror.advance(trainer.run.latest())
    assert sorted(path.name for path in beside.iterdir()) == ["e000001-v000001", "my-copy"]
    assert (beside / "my-copy" / "weights").read_bytes() == b"mine"


# Missing files.


def without(tree: Tree, *starts: str) -> Tree:
    return {path: data for path, data in tree.items() if not path.startswith(starts)}


def test_a_store_without_its_format_file_is_not_guessed_to_be_one(tree: Tree) -> None:
    refused(without(tree, "/store/FORMAT"), FormatError, "no FORMAT file")


def test_a_run_whose_records_are_gone_is_not_taken_for_a_new_one(tree: Tree) -> None:
    refused(without(tree, "/store/runs/policy/records"), IntegrityError, "/store/runs/policy/latest", "v000003")
    refused(without(tree, "/store/runs/policy/records/e000001-v000003"), IntegrityError, "/store/runs/policy/latest")


def test_a_pack_that_is_gone_while_its_index_is_there_is_named(tree: Tree) -> None:
    name = "/store/packs/p00000009-0123456789abcdef"
    refused({**tree, f"{name}.index": b"x"}, IntegrityError, f"{name}.pack", "missing")


def test_a_missing_object_is_named_by_whoever_needs_it_and_other_versions_are_whole(
    tree: Tree, lineage: Lineage
) -> None:
    last = lineage.versions[2].record.variants[0].edges[0].manifest
    store = Store.open(STORE, files=MemoryDisk(without(tree, f"/store/objects/{last.hex()[:2]}/{last.hex()[2:]}")))
    run = store.run(lineage.versions[0].run)
    with pytest.raises(DeltadError, match=last.hex()):
        run.read_manifest(run.latest().variants[0].edges[0])
    assert run.read_manifest(run.record(Version(1, 2)).variants[0].edges[0]).chunk_bytes > 0


# Newer ones.


@pytest.mark.parametrize("line", [b"deltad store 3\n", b"deltad store 2", b"deltad store 2\nmore", b""])
def test_a_format_line_that_is_not_ours_to_the_byte_is_refused(tree: Tree, line: bytes) -> None:
    refused({**tree, "/store/FORMAT": line}, FormatError, "/store/FORMAT", "use that version, or another directory")


def test_a_record_that_asks_for_a_newer_reader_is_named_with_its_file(tree: Tree, lineage: Lineage) -> None:
    newer = forge(lineage.versions[2], least_reader=99)
    path = "/store/runs/policy/records/e000001-v000003.record"
    refused({**tree, path: newer.data}, FormatError, path, "99")


# A disk that may not be written.


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A store on a file system that is mounted read-only."""
    (tmp_path / "real").mkdir()
    at = tmp_path / "store"
    Store.open(tmp_path / "real" / "store").close()
    at.mkdir()
    mount = subprocess.run(["mount", "--bind", str(tmp_path / "real"), str(at)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(at)], check=True)
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def test_a_read_only_disk_is_told_with_what_to_do(read_only: Path) -> None:
    for path in (read_only / "store", read_only / "new"):
        with pytest.raises(StoreError, match=rf"{path}.*Read-only file system .*mount it for writing"):
            Store.open(path)
    assert os.listdir(read_only) == ["store"]


def test_a_disk_that_becomes_read_only_takes_nothing_and_goes_on_when_it_can_be_written(
    tree: Tree, lineage: Lineage
) -> None:
    disk = MemoryDisk(tree)
    store = Store.open(STORE, files=disk)
    run, more = lineage.versions[0].run, lineage_with_one_more(lineage)
    disk.refuse(errno.EROFS, range(1, 1 << 30))
    with pytest.raises(StoreError, match="Read-only file system"):
        more.commit_into(store)
    with pytest.raises(StoreError, match="Read-only file system"):
        store.run(run).pin(Version(1, 2), Pin("ana", ""))
    with pytest.raises(StoreError, match="Read-only file system"):
        store.run(run).unpin(Version(1, 1))
    assert list(store.run(run).pins()) == [Version(1, 1)]
    assert whole_versions(store, run) == [version.version for version in lineage.versions[:3]]
    disk.refuse(0, range(0))
    more.commit_into(store)
    assert whole_versions(store, run)[-1] == more.version


def lineage_with_one_more(lineage: Lineage) -> Published:
    """The version after those of the lineage that everybody shares."""
    longer = Lineage()
    for _ in range(4):
        longer.publish()
    assert longer.versions[2].data == lineage.versions[2].data
    return longer.versions[3]


# A clock that jumped.


def test_versions_of_a_clock_far_ahead_or_behind_are_versions_like_any_other(lineage: Lineage) -> None:
    store = Store.open(STORE, files=MemoryDisk())
    forged = [forge(v, created_ns=at) for v, at in zip(lineage.versions, (2**62, 0, -(2**62)), strict=True)]
    for version in forged:
        version.commit_into(store)
    run = lineage.versions[0].run
    assert whole_versions(store, run) == [version.version for version in forged]
    assert store.run(run).latest() == forged[-1].record


def test_how_long_a_version_is_kept_does_not_depend_on_the_wall_clock() -> None:
    now = [0.0]
    disk, lineage = MemoryDisk(), Lineage()
    store = Store.open(STORE, files=disk, clock=lambda: now[0])
    for created in (2**62, 0, 10**18):
        forge(lineage.publish(anchor=True), created_ns=created).commit_into(store)
    run = lineage.versions[0].run
    now[0] += LEASE_SECONDS + 1
    assert [found.kept for found in collect(store, {run: Retention(seconds=3600)}).versions] == [True] * 3
    now[0] += 3600
    assert [found.kept for found in collect(store, {run: Retention(seconds=3600)}).versions] == [False, False, True]
