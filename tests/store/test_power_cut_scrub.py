"""The power fails while damage is set aside and healed, at every operation (P10, P16).

What is left is as before the scrub came, known as damaged, or healed; never damaged and taken for healed.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from deltad.delta.encoding import sha256
from deltad.errors import NotFoundError, StoreError, StoreFullError
from deltad.store.scrubber import Scrubber
from deltad.store.store import Store
from deltad.types import Digest
from tests.kit.memory_disk import MemoryDisk
from tests.kit.versions import SMALL_CHUNKS, Lineage, Published
from tests.kit.whole import whole_versions

STORE = Path("/store")
LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for _ in range(2):
        lineage.publish()
    return lineage


def opened(disk: MemoryDisk) -> Store:
    return Store.open(STORE, limits=LIMITS, files=disk)


def rotten(version: Published) -> tuple[dict[str, bytes | None], list[Digest]]:
    """A store with this version in which a chunk of a full pack, one of the last pack, and a manifest are damaged."""
    disk = MemoryDisk()
    store = opened(disk)
    version.commit_into(store)
    chunks = [digest for digest in version.objects if digest in version.chunks]
    damaged = [chunks[0], chunks[-2], Digest(version.record.variants[0].edges[0].manifest)]
    tree = dict(disk.tree())
    for digest in damaged:
        extent = store.objects.extent(digest)
        data = bytearray(tree[str(extent.path)] or b"")
        data[extent.offset + 9] ^= 16
        tree[str(extent.path)] = bytes(data)
    store.close()
    return tree, damaged


def scrub(store: Store) -> None:
    scrubber = Scrubber(store, wall=lambda: 1.0)
    while scrubber.step([]) is not None:
        pass
    scrubber.save()


def heal(store: Store, version: Published) -> None:
    for digest in store.objects.quarantine.damaged():
        (store.put_chunk if digest in version.chunks else store.put)(version.objects[digest])


def state(store: Store, digest: Digest) -> str:
    """`known`, `unknown` damage, or `whole`. What is not held is known to be damaged."""
    if digest in store.objects.quarantine:
        with pytest.raises(NotFoundError):
            store.open_object(digest)
        return "known"
    with store.open_object(digest) as reader:
        return "whole" if sha256(reader.read(reader.size, 0)) == digest else "unknown"


def check(disk: MemoryDisk, version: Published, damaged: list[Digest], marks: tuple[str, ...]) -> set[str]:
    """Look at what is left, then scrub and heal it to the end."""
    store = opened(disk)
    states = {state(store, digest) for digest in damaged}
    if "healed" in marks:
        assert states == {"whole"}
    elif "scrubbed" in marks:
        assert "unknown" not in states
    scrub(store)
    heal(store, version)
    assert whole_versions(store, version.run) == [version.version]
    assert store.objects.quarantine.damaged() == []
    store.close()
    again = opened(MemoryDisk(disk.tree()))
    assert whole_versions(again, version.run) == [version.version]
    assert again.objects.quarantine.damaged() == []
    return states


def test_a_power_cut_while_damage_is_set_aside_and_healed_leaves_it_known_or_healed(lineage: Lineage) -> None:
    version = lineage.versions[0]
    tree, damaged = rotten(version)
    disk = MemoryDisk(tree)
    store = opened(disk)
    before = disk.point
    scrub(store)
    disk.mark("scrubbed")
    heal(store, version)
    disk.mark("healed")
    tried, seen = 0, set()
    for cut in disk.power_cuts(since=before):
        seen |= check(cut.disk, version, damaged, cut.marks)
        tried += 1
    print(f"the power was cut at {disk.point - before} points of a scrub that heals in {tried} ways")
    assert tried > disk.point - before > 20
    assert seen == {"known", "unknown", "whole"}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["disk full", "input/output error"])
def test_a_scrub_that_is_refused_anywhere_serves_nothing_damaged_and_goes_on_once_it_may(
    lineage: Lineage, code: int, lasting: bool
) -> None:
    version = lineage.versions[0]
    tree, damaged = rotten(version)
    disk = MemoryDisk(tree)
    store = opened(disk)
    opening = disk.operations.total()
    scrub(store)
    heal(store, version)
    operations, refused = disk.operations.total(), 0
    for operation in range(opening + 1, operations + 1):
        disk = MemoryDisk(tree)
        store = opened(disk)
        disk.refuse(code, range(operation, operations * 10 if lasting else operation + 1))
        scrub(store)
        assert "unknown" not in {state(store, digest) for digest in damaged}
        try:
            heal(store, version)
        except (StoreError, StoreFullError):
            refused += 1
        assert "unknown" not in {state(store, digest) for digest in damaged}
        disk.refuse(0, range(0))
        store.close()
        check(MemoryDisk(disk.tree()), version, damaged, ())
    print(f"{operations - opening} operations of a scrub that heals were refused, {refused} of them told of")
    assert refused > 3
