"""The mirror rebuilds a version bit for bit, whatever coders its chain was published in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deltad.checkpoint.directory import open_checkpoint
from deltad.checkpoint.writer import CheckpointWriter
from deltad.delta import FORMAT
from deltad.delta.backend import Mode, choose
from deltad.delta.codec import apply_chunks, sum_weights
from deltad.delta.coding import Coder
from deltad.delta.emit import FrameWriter
from deltad.delta.encoding import encode as manifest_bytes
from deltad.delta.encoding import sha256
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.manifest import ChunkRef, decode_manifest, make_pages
from deltad.delta.weights import read_segments
from deltad.errors import IntegrityError
from deltad.limits import Limits
from deltad.store.disk import Disk, Entry, remove_tree
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import Digest, Variant
from tests.kit.deltas import MODES
from tests.kit.derived import Derived, edge_of, skip_delta
from tests.kit.rot import flip
from tests.kit.trainer import edges_since
from tests.kit.versions import Lineage, Published, forge
from tests.kit.weights import ArrayWeights


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_of_deltas_is_written_on_top_of_each_other(tmp_path: Path, mode: Mode) -> None:
    lineage = Lineage(mode=mode)
    for _ in range(3):
        lineage.publish()
    store = Store.open(tmp_path / "store")
    lineage.fill(store)
    newest = lineage.versions[-1]
    mirror = Mirror(store, store.run(lineage.run), Variant("bf16"), choose())
    assert mirror.export(newest.record, tmp_path / "export") == newest.record.variants[0].root
    with open_checkpoint(tmp_path / "export") as found:
        for i, spec in enumerate(newest.layout.tensors):
            assert np.array_equal(found.lanes(i, 0, spec.lanes), newest.weights.arrays[i]), spec.name
    store.close()


def test_a_chain_of_mixed_coders_is_rebuilt_from_a_generation_too(tmp_path: Path) -> None:
    lineage = Lineage(limits=Limits())
    store = Store.open(tmp_path / "store")
    for mode in ("blind", "dense", "blind", "fast"):
        lineage.mode = mode
        lineage.publish()
    lineage.fill(store)
    mirror = Mirror(store, store.run(lineage.run), Variant("bf16"), choose())
    mirror.advance(lineage.versions[1].record)
    newest = lineage.versions[-1].record
    assert edges_since(mirror, newest, store) == 2
    assert mirror.verify(newest, tmp_path / "scratch") == (newest.variants[0].root, [])
    store.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_frame_over_columns_lands_on_a_file_beside_what_the_file_held(tmp_path: Path, mode: Mode) -> None:
    """This build cuts frames by rows alone; another one may cut them by columns."""
    layout = Layout(FORMAT, (TensorSpec("w", "BF16", (64, 48)),))
    rects = (Rect(0, (4, 8), (50, 16)), Rect(0, (0, 40), (64, 8)))
    before = ArrayWeights.random(layout)
    after = before.changed(0.1)
    old, new = read_segments(before, rects, layout), read_segments(after, rects, layout)
    frames = FrameWriter(layout, choose(), mode, Limits())
    encoded = frames.encode(rects, old, new)
    assert encoded is not None
    frame = frames.coded(rects, old, new, encoded)
    assert frame.coding.coder is (Coder.BLIND if mode == "blind" else Coder.CONTEXT)
    with CheckpointWriter(tmp_path / "w", layout) as writer:
        writer.lanes(0, 0, before.arrays[0].size)[:] = before.arrays[0]
        sums = sum_weights(layout, before)
        apply_chunks([frame.data], layout, writer, sums, choose())
        found = writer.lanes(0, 0, before.arrays[0].size).copy()
        assert np.array_equal(sums, sum_weights(layout, writer))
    expected = before.arrays[0].reshape(64, 48).copy()
    for columns in np.s_[4:54, 8:24], np.s_[:, 40:48]:
        expected[columns] = after.arrays[0].reshape(64, 48)[columns]
    assert np.array_equal(found, expected.reshape(-1))


def test_a_delta_that_another_build_cut_by_columns_is_applied_by_itself(tmp_path: Path) -> None:
    lineage = Lineage(limits=Limits(), tensors=1, elements=64 * 64)
    versions = [lineage.publish() for _ in range(3)]
    cut = cut_by_columns(versions[2], versions[1].weights)
    store = Store.open(tmp_path / "store")
    for version in (*versions[:2], cut):
        version.commit_into(store)
    mirror = Mirror(store, store.run(lineage.run), Variant("bf16"), choose())
    assert mirror.verify(cut.record, tmp_path / "scratch") == (cut.record.variants[0].root, [])
    mirror.advance(versions[0].record)
    assert mirror.verify(cut.record, tmp_path / "scratch") == (cut.record.variants[0].root, [])
    store.close()


def cut_by_columns(published: Published, base: ArrayWeights) -> Published:
    """The same version, whose delta has a frame for each half of the columns."""
    layout, (variant,) = published.layout, published.record.variants
    frames = FrameWriter(layout, choose(), "blind", Limits())
    rows, columns = layout.tensors[0].shape
    data = b""
    for start in (0, columns // 2):
        rects = (Rect(0, (0, start), (rows, columns // 2)),)
        old, new = read_segments(base, rects, layout), read_segments(published.weights, rects, layout)
        encoded = frames.encode(rects, old, new)
        assert encoded is not None
        data += frames.coded(rects, old, new, encoded).data
    (page,) = make_pages([ChunkRef(sha256(data), len(data), 0, 0)])
    (edge,) = variant.edges
    manifest = decode_manifest(published.objects[Digest(edge.manifest)])
    manifest = msgspec.structs.replace(manifest, pages=(page[0],), chunk_bytes=len(data))
    encoded_manifest = manifest_bytes(manifest)
    edge = msgspec.structs.replace(edge, manifest=sha256(encoded_manifest), size=len(encoded_manifest))
    objects = {sha256(part): part for part in (data, page[1], encoded_manifest, layout.encode())}
    objects |= {
        digest: part for digest, part in published.objects.items() if digest in {f.digest for f in layout.files}
    }
    forged = forge(published, variants=(msgspec.structs.replace(variant, edges=(edge,)),))
    return replace(forged, objects=objects, chunks=frozenset({sha256(data)}))


def test_a_damaged_generation_is_noticed_and_the_version_built_from_its_anchor(tmp_path: Path) -> None:
    lineage = Lineage(limits=Limits(), mode="dense")
    for _ in range(3):
        lineage.publish()
    store = Store.open(tmp_path / "store")
    lineage.fill(store)
    mirror = Mirror(store, store.run(lineage.run), Variant("bf16"), choose())
    (shard,) = mirror.advance(lineage.versions[1].record).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 0x40
    shard.write_bytes(data)
    newest = lineage.versions[-1].record
    assert mirror.export(newest, tmp_path / "export") == newest.variants[0].root
    assert mirror.generations() == {}
    store.close()


def test_a_generation_stays_until_the_version_was_built_without_it(tmp_path: Path) -> None:
    lineage = Lineage(limits=Limits())
    for _ in range(3):
        lineage.publish()
    store = Store.open(tmp_path / "store")
    lineage.fill(store)
    mirror = Mirror(store, store.run(lineage.run), Variant("bf16"), choose())
    mirror.advance(lineage.versions[1].record)
    newest = lineage.versions[2]
    (chunk, *_) = edge_of(newest).chunks
    flip(store, chunk, 70)
    with pytest.raises(IntegrityError):
        mirror.export(newest.record, tmp_path / "export")
    assert list(mirror.generations()) == [lineage.versions[1].version]
    store.close()


def test_a_derived_edge_that_leads_elsewhere_is_gone_round(tmp_path: Path) -> None:
    lineage = Lineage(limits=Limits())
    for _ in range(5):
        lineage.publish()
    store = Store.open(tmp_path / "store")
    lineage.fill(store)
    right, other = (skip_delta(lineage.versions[:n], limits=Limits()) for n in (5, 4))
    pages = {"pages": other.manifest.pages, "chunk_bytes": other.manifest.chunk_bytes}
    manifest = msgspec.structs.replace(right.manifest, **pages)
    data = manifest_bytes(manifest)
    ref = msgspec.structs.replace(right.ref, manifest=sha256(data), size=len(data))
    Derived(manifest, ref, {**other.objects, sha256(data): data}, other.chunks).add_to(store)
    mirror = Mirror(store, store.run(lineage.run), Variant("bf16"), choose())
    first, newest = lineage.versions[0], lineage.versions[4]
    mirror.advance(first.record)
    assert edges_since(mirror, newest.record, store) == 1, "it is the cheapest way"
    assert mirror.export(newest.record, tmp_path / "export") == newest.record.variants[0].root
    assert list(mirror.generations()) == [first.version], "which is whole, and stays"
    store.close()


class Vanishing(Disk):
    """Once it is armed, a directory is gone as soon as it was looked at: so it looks when another thread is quicker."""

    armed: Path | None = None

    def entries(self, path: Path) -> list[Entry]:
        found = super().entries(path)
        if self.armed is not None and self.armed.parent == path:
            self.armed = remove_tree(self.armed)
        return found


def test_a_generation_that_goes_while_it_is_renewed_is_built_all_the_same(tmp_path: Path) -> None:
    lineage, disk = Lineage(limits=Limits()), Vanishing()
    version = lineage.publish()
    store = Store.open(tmp_path / "store", files=disk)
    lineage.fill(store)
    mirror = Mirror(store, store.run(lineage.run), Variant("bf16"), choose())
    disk.armed = mirror.advance(version.record)
    assert mirror.renew(version.version)
    assert disk.armed is None
    assert list(mirror.check(version.version))[-1].wrong == ""
    store.close()
