"""Edges that no record names: kept, found, followed, and let go of with the versions that they join."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deltad.delta.encoding import encode, sha256
from deltad.delta.manifest import EdgeKind, decode_manifest
from deltad.errors import ConflictError, FormatError, IntegrityError, NotFoundError
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.retention import Retention
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import Digest, Version
from tests.kit.memory_disk import MemoryDisk
from tests.kit.versions import SMALL_CHUNKS, Lineage, Skip
from tests.kit.whole import read_version, whole_versions

STORE = Path("/store")
LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for _ in range(8):
        lineage.publish()
    return lineage


@pytest.fixture(scope="module")
def skip(lineage: Lineage) -> Skip:
    """From the first version to the seventh."""
    return lineage.skip(lineage.versions[0], lineage.versions[6])


def opened(disk: MemoryDisk) -> Store:
    return Store.open(STORE, limits=LIMITS, files=disk)


def full(lineage: Lineage, skip: Skip, disk: MemoryDisk | None = None) -> tuple[Store, RunStore]:
    store = opened(disk or MemoryDisk())
    lineage.fill(store)
    skip.put_into(store)
    run = store.run(lineage.versions[0].run)
    run.add_edge(skip.manifest)
    return store, run


def way(run: RunStore, target: int, *held: int) -> list[tuple[int | None, int]]:
    """The path to a version as (base, target) numbers."""
    path = run.path(run.record(Version(1, target)), "bf16", [Version(1, number) for number in held])
    return [(hop.edge.base and hop.edge.base.number, hop.record.version.number) for hop in path.hops]


def test_the_path_leads_over_a_derived_edge_where_that_is_cheaper(lineage: Lineage, skip: Skip) -> None:
    _, run = full(lineage, skip)
    assert way(run, 8, 1) == [(1, 7), (7, 8)]
    assert way(run, 8) == [(None, 1), (1, 7), (7, 8)]
    assert way(run, 3, 1) == [(1, 2), (2, 3)]
    assert way(run, 8, 7) == [(7, 8)]


def test_derived_edges_survive_a_restart(lineage: Lineage, skip: Skip) -> None:
    disk = MemoryDisk()
    store, run = full(lineage, skip, disk)
    edges = run.derived()
    store.close()
    run = opened(disk).run(run.run)
    assert run.derived() == edges
    assert edges[0].kind is EdgeKind.SKIP_DELTA
    assert edges[0].total_bytes == skip.bytes
    assert way(run, 8, 1) == [(1, 7), (7, 8)]


def test_a_version_is_committed_over_a_derived_edge_without_those_in_between(lineage: Lineage, skip: Skip) -> None:
    store = opened(MemoryDisk())
    run = store.run(lineage.versions[0].run)
    lineage.versions[0].commit_into(store)
    for digest in (lineage.versions[6].layout.digest, *(f.digest for f in lineage.versions[6].layout.files)):
        store.put(lineage.versions[6].objects[Digest(digest)])
    skip.put_into(store)
    with pytest.raises(NotFoundError, match="v000006, which is not held"):
        run.commit(lineage.versions[6].data)
    assert run.commit(lineage.versions[6].data, [skip.manifest])
    assert [record.version.number for record in run.records()] == [1, 7]
    assert way(run, 7) == [(None, 1), (1, 7)]
    lineage.versions[7].commit_into(store)
    assert whole_versions(store, run.run) == [Version(1, number) for number in (1, 7, 8)]


def test_versions_that_a_skip_delta_passes_over_are_not_kept_for_the_sake_of_later_ones(
    lineage: Lineage, skip: Skip
) -> None:
    now = 0.0
    store = Store.open(STORE, limits=LIMITS, files=MemoryDisk(), clock=lambda: now)
    lineage.fill(store)
    skip.put_into(store)
    run = store.run(lineage.versions[0].run)
    run.add_edge(skip.manifest)
    now += GRACE_SECONDS + LEASE_SECONDS
    collect(store, {run.run: Retention(versions=2)})
    assert whole_versions(store, run.run) == [Version(1, number) for number in (1, 7, 8)]
    now += GRACE_SECONDS + LEASE_SECONDS
    collect(store, {run.run: Retention(versions=2)})
    assert read_version(store, run.record(Version(1, 8))) >= set(skip.objects)


def test_an_edge_goes_with_the_version_that_it_starts_from_and_its_objects_follow(lineage: Lineage) -> None:
    now = 0.0
    store = Store.open(STORE, limits=LIMITS, files=MemoryDisk(), clock=lambda: now)
    lineage.fill(store)
    run = store.run(lineage.versions[0].run)
    skip, anchor = (lineage.skip(lineage.versions[base], lineage.versions[6]) for base in (3, 6))
    for made in (skip, anchor):
        made.put_into(store)
        run.add_edge(made.manifest)
    now += GRACE_SECONDS + LEASE_SECONDS
    collect(store, {run.run: Retention(versions=2)})
    assert [edge.manifest for edge in run.derived()] == [anchor.manifest]
    assert way(run, 8) == [(None, 7), (7, 8)]
    assert not store.objects.is_held(skip.manifest)
    assert store.objects.is_held(anchor.manifest)


def test_what_is_dropped_is_not_followed_any_more(lineage: Lineage, skip: Skip) -> None:
    disk = MemoryDisk()
    store, run = full(lineage, skip, disk)
    assert way(run, 7, 1) == [(1, 7)]
    run.drop_edges([skip.manifest])
    assert way(run, 7, 1) == [(number, number + 1) for number in range(1, 7)]
    store.close()
    assert opened(disk).run(run.run).derived() == []


@pytest.mark.parametrize("change", ["target", "root", "variant", "base root"])
def test_an_edge_that_contradicts_its_records_is_not_taken(lineage: Lineage, skip: Skip, change: str) -> None:
    store = opened(MemoryDisk())
    lineage.fill(store)
    run = store.run(lineage.versions[0].run)
    manifest = decode_manifest(skip.objects[skip.manifest])
    other = msgspec.structs.replace(manifest.target, root=bytes(32))
    wrong = {
        "target": {"target": msgspec.structs.replace(manifest.target, version=Version(1, 6))},
        "root": {"target": other},
        "variant": {"variant": "fp8"},
        "base root": {"base": msgspec.structs.replace(manifest.base, root=bytes(32))},
    }[change]
    data = encode(msgspec.structs.replace(manifest, **wrong))
    skip.put_into(store)
    store.put(data)
    with pytest.raises((IntegrityError, FormatError)):
        run.add_edge(sha256(data))
    assert run.derived() == []


def test_an_edge_that_is_held_in_part_is_not_taken(lineage: Lineage, skip: Skip) -> None:
    for missing in skip.objects.keys() - {skip.manifest}:
        store = opened(MemoryDisk())
        lineage.fill(store)
        if any(missing in version.objects for version in lineage.versions):
            continue
        replace(skip, objects={d: data for d, data in skip.objects.items() if d != missing}).put_into(store)
        with pytest.raises(NotFoundError, match="held whole"):
            store.run(lineage.versions[0].run).add_edge(skip.manifest)


def test_a_foreign_file_in_the_catalogue_stops_the_start_and_is_named(lineage: Lineage, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", limits=LIMITS)
    lineage.versions[0].commit_into(store)
    directory = store.run(lineage.versions[0].run).directory / "edges"
    store.close()
    directory.mkdir()
    (directory / "thesis.tex").write_text("x")
    with pytest.raises(FormatError, match=r"thesis\.tex"):
        Store.open(tmp_path / "s", limits=LIMITS)


def test_a_power_cut_leaves_a_derived_edge_whole_or_absent(lineage: Lineage, skip: Skip) -> None:
    disk = MemoryDisk()
    store = opened(disk)
    lineage.fill(store)
    store.close()
    disk = MemoryDisk(disk.tree())
    store, run = opened(disk), lineage.versions[0].run
    since = disk.point
    skip.put_into(store)
    store.run(run).add_edge(skip.manifest)
    disk.mark("durable")
    store.run(run).drop_edges([skip.manifest])
    tried = 0
    for cut in disk.power_cuts(since):
        again = opened(cut.disk)
        left = [edge.manifest for edge in again.run(run).derived()]
        assert left in ([], [skip.manifest])
        assert len(whole_versions(again, run)) == 8
        assert way(again.run(run), 7, 1)[0] in ((1, 7), (1, 2))
        again.close()
        tried += 1
    print(f"the power was cut in {tried} ways")
    assert tried


def test_a_power_cut_in_a_commit_over_a_derived_edge_leaves_the_version_whole_or_absent(
    lineage: Lineage, skip: Skip
) -> None:
    disk = MemoryDisk()
    store, run = opened(disk), lineage.versions[0].run
    lineage.versions[0].commit_into(store)
    for data in (*skip.objects.values(), *lineage.versions[6].objects.values()):
        store.put(data)
    since = disk.point
    store.run(run).commit(lineage.versions[6].data, [skip.manifest])
    disk.mark("durable")
    tried = 0
    for cut in disk.power_cuts(since):
        again = opened(cut.disk)
        seen = whole_versions(again, run)
        assert seen == [Version(1, 1), Version(1, 7)] or (seen == [Version(1, 1)] and not cut.marks)
        if len(seen) == 1:
            assert again.run(run).derived() == []
        assert again.run(run).commit(lineage.versions[6].data, [skip.manifest]) == (len(seen) == 1)
        assert whole_versions(again, run) == [Version(1, 1), Version(1, 7)]
        again.close()
        tried += 1
    print(f"the power was cut in {tried} ways")
    assert tried


def test_an_edge_without_which_nothing_leads_to_a_version_is_not_dropped(lineage: Lineage, skip: Skip) -> None:
    store = opened(MemoryDisk())
    run = store.run(lineage.versions[0].run)
    lineage.versions[0].commit_into(store)
    for data in (*skip.objects.values(), *lineage.versions[6].objects.values()):
        store.put(data)
    run.commit(lineage.versions[6].data, [skip.manifest])
    with pytest.raises(ConflictError, match="another way to that version"):
        run.drop_edges([skip.manifest])
    assert way(run, 7) == [(None, 1), (1, 7)]
    anchor = lineage.skip(lineage.versions[6], lineage.versions[6])
    anchor.put_into(store)
    run.add_edge(anchor.manifest)
    with pytest.raises(ConflictError):
        run.drop_edges([skip.manifest, anchor.manifest])
    run.drop_edges([skip.manifest])
    assert way(run, 7) == [(None, 7)]


def test_an_edge_with_a_damaged_chunk_is_not_walked_until_it_is_healed(lineage: Lineage, skip: Skip) -> None:
    store, run = full(lineage, skip)
    assert way(run, 7, 1) == [(1, 7)]
    chunk = next(digest for digest in skip.objects if digest in skip.chunks)
    store.objects.quarantine.add(chunk, "where it lay", b"")
    assert way(run, 7, 1) == [(base, base + 1) for base in range(1, 7)]
    store.put_chunk(skip.objects[chunk])
    assert way(run, 7, 1) == [(1, 7)]


def test_a_lost_chunk_of_an_edge_is_heard_of_by_the_graph_of_a_run_that_was_asked_before(
    lineage: Lineage, skip: Skip
) -> None:
    store, run = full(lineage, skip)
    assert run.join(Version(1, 7), "bf16").base.version == Version(1, 1)  # type: ignore[union-attr]
    chunk = next(digest for digest in skip.objects if digest in skip.chunks)
    store.objects.quarantine.add(chunk, "where it lay", b"")
    assert run.join(Version(1, 7), "bf16").base.version == Version(1, 6)  # type: ignore[union-attr]
