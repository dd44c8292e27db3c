"""A look at a store tells what it takes, whoever holds it, whatever is damaged, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from deltad.delta.manifest import EdgeKind
from deltad.store.derived import DerivedEdge
from deltad.store.look import Look, look
from deltad.store.store import STORE_FORMAT, Store
from deltad.types import Digest, Version
from tests.kit.memory_disk import MemoryDisk
from tests.kit.versions import Lineage

STORE = Path("/store")


def filled(disk: MemoryDisk, lineage: Lineage) -> Store:
    store = Store.open(STORE, files=disk)
    lineage.fill(store)
    return store


def lineage_of(count: int) -> Lineage:
    lineage = Lineage(tensors=2)
    for number in range(count):
        lineage.publish(anchor=number == 0)
    return lineage


def test_the_newest_versions_are_told_with_what_they_take_while_a_daemon_holds_the_store() -> None:
    disk, lineage = MemoryDisk(), lineage_of(3)
    store = filled(disk, lineage)
    before = disk.tree()
    found = look(STORE, files=disk)
    assert disk.tree() == before
    assert found.format == f"deltad store {STORE_FORMAT}\n"
    assert found.pack_bytes > 0
    (run,) = found.runs
    assert (run.run, run.held, run.unreadable) == ("policy", 3, 0)
    assert run.weight_bytes == lineage.versions[0].layout.weight_bytes
    assert run.created == tuple(version.record.created_ns / 1e9 for version in lineage.versions)
    sizes = [sum(len(version.objects[digest]) for digest in own) for version, own in objects_of(lineage)]
    assert (*run.anchors, *run.deltas) == tuple(sizes)
    assert store.runs() == ["policy"]


def objects_of(lineage: Lineage) -> list[tuple[object, set[Digest]]]:
    """Each version with its own manifest, pages and chunks: all but the layout and files that every version has."""
    shared = set.intersection(*(set(version.objects) for version in lineage.versions))
    return [(version, set(version.objects) - shared) for version in lineage.versions]


def test_what_is_damaged_or_lost_is_counted_and_the_rest_is_told() -> None:
    disk, lineage = MemoryDisk(), lineage_of(3)
    filled(disk, lineage)
    manifest = lineage.versions[1].record.variants[0].edges[0].manifest.hex()
    tree = {path: data for path, data in disk.tree().items() if not path.endswith(manifest[2:])}
    (newest,) = [path for path in tree if path.endswith("v000003.record")]
    (run,) = look(STORE, files=MemoryDisk({**tree, newest: b"rot"})).runs
    assert (run.held, run.unreadable, len(run.anchors), len(run.deltas)) == (3, 2, 1, 0)


def test_an_edge_that_was_never_pulled_is_no_damage_where_another_leads_to_the_version() -> None:
    disk, lineage = MemoryDisk(), lineage_of(3)
    store = filled(disk, lineage)
    edge = lineage.versions[1].record.variants[0].edges[0]
    derived = DerivedEdge("bf16", EdgeKind.ANCHOR, None, Version(1, 2), b"m" * 32, 1, 1, ())
    entry = {f"/store/runs/{store.runs()[0]}/edges/{'6d' * 32}.edge": msgspec.json.encode(derived)}
    tree = {path: data for path, data in disk.tree().items() if not path.endswith(edge.manifest.hex()[2:])}
    directory: dict[str, bytes | None] = {f"/store/runs/{store.runs()[0]}/edges": None}
    (run,) = look(STORE, files=MemoryDisk({**tree, **directory, **entry})).runs
    assert run.unreadable == 0


def test_what_is_no_store_is_told_by_its_names_and_nothing_is_read_in_it() -> None:
    disk = MemoryDisk({"/store": None, "/store/thesis.tex": b"x", "/store/runs": None, "/store/runs/r": None})
    assert look(STORE, files=disk) == Look(names=("runs", "thesis.tex"))
    assert look(STORE / "nothing", files=disk) == Look()
