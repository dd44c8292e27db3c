"""What engines are handed: whole, immutable, and sharing its blocks with the mirror where the file system can (P29)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltad.checkpoint.writer import CheckpointWriter
from deltad.delta.backend import choose
from deltad.delta.layout import Layout, TensorSpec
from deltad.store.disk import DISK
from deltad.store.mirror import LONG_WALK, Mirror
from deltad.store.store import Store
from deltad.types import RunId, Version
from tests.kit.checkpoints import CONFIG, MODEL, read_checkpoint
from tests.kit.trainer import VARIANT, Trainer
from tests.kit.versions import Lineage
from tests.kit.weights import ArrayWeights

MIB = 1 << 20
MAKERS = {"btrfs": ["mkfs.btrfs", "-q"], "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"]}


@pytest.fixture(params=MAKERS)
def reflinking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, in a file, that shares blocks between files."""
    command = MAKERS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed; with it, exports are tried on a file system that shares blocks")
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(400 * MIB)
    subprocess.run([*command, str(image)], check=True, capture_output=True)
    mount = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"a {request.param} image cannot be mounted, which takes root and loop devices: {mount.stderr}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def used(path: Path) -> int:
    """Bytes in use on a file system, all that was written being there."""
    subprocess.run(["sync", "-f", str(path)], check=True)
    usage = shutil.disk_usage(path)
    return usage.total - usage.free


LARGE = Layout(0, (TensorSpec("w", "BF16", (6 * MIB,)),), MODEL.files)
"""12 MiB of weights."""


def lay_down(directory: Path, weights: ArrayWeights) -> None:
    with CheckpointWriter(directory, LARGE) as writer:
        writer.put(0, 0, weights.arrays[0])
        writer.write_file("config.json", CONFIG)
        writer.finish()


def test_exports_share_the_blocks_of_the_mirror_and_stay_the_same_while_ten_versions_pass(reflinking: Path) -> None:
    trainer = Trainer(reflinking)
    weights = ArrayWeights.random(LARGE)

    def publish(number: int) -> Version:
        lay_down(trainer.checkpoints / str(number), weights)
        version = trainer.origin.publish(trainer.checkpoints / str(number), number).record.version
        shutil.rmtree(trainer.checkpoints / str(number))
        return version

    publish(0)
    weights = weights.changed(0.001, seed=1)
    newest = trainer.run.record(publish(1))
    trainer.mirror.export(newest, trainer.exports / "first")
    before = used(reflinking)
    trainer.mirror.export(newest, trainer.exports / "second")
    assert used(reflinking) - before < MIB, "an export took blocks of its own"
    (file,) = (trainer.exports / "first").glob("*.safetensors")
    mapped = np.memmap(file, np.uint8, "r")
    held = bytes(mapped)
    for number in range(2, 12):
        weights = weights.changed(0.001, seed=number)
        version = publish(number)
        trainer.mirror.export(trainer.run.record(version), trainer.exports / str(number))
    assert bytes(mapped) == held
    assert read_checkpoint(trainer.exports / "11").equals(weights)
    assert list(trainer.mirror.generations()) == [version]
    trainer.store.close()


def test_where_blocks_cannot_be_shared_a_generation_is_copied_and_the_mirror_stays(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    if DISK.reflink(trainer.write(0) / "config.json", tmp_path / "probe"):
        pytest.skip("the file system of temporary files shares blocks; the other test covers it")
    first = trainer.run.record(trainer.step(0))
    generation = trainer.mirror.advance(first)
    trainer.mirror.export(first, tmp_path / "copy")
    assert read_checkpoint(tmp_path / "copy").equals(trainer.weights)
    for path in generation.iterdir():
        copy = tmp_path / "copy" / path.name
        assert copy.read_bytes() == path.read_bytes()
        assert copy.stat().st_ino != path.stat().st_ino
    second = trainer.run.record(trainer.step(1))
    trainer.mirror.export(second, tmp_path / "built")
    assert read_checkpoint(tmp_path / "built").equals(trainer.weights)
    assert list(trainer.mirror.generations()) == [first.version]
    trainer.store.close()


def test_a_damaged_generation_is_not_handed_out_as_it_is(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    version = trainer.run.record(trainer.step(0))
    (shard,) = trainer.mirror.advance(version).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    trainer.mirror.export(version, tmp_path / "export")
    assert read_checkpoint(tmp_path / "export").equals(trainer.weights)
    trainer.store.close()


def test_the_mirror_is_due_once_a_reader_had_a_long_way(tmp_path: Path) -> None:
    lineage = Lineage(density=0.002)
    for _ in range(LONG_WALK + 1):
        lineage.publish()
    store = Store.open(tmp_path / "store")
    lineage.fill(store)
    newest = lineage.versions[-1].record
    mirror = Mirror(store, store.run(RunId(lineage.run)), VARIANT, choose())
    assert not mirror.is_due(newest)
    mirror.verify(newest, tmp_path / "scratch")
    assert mirror.is_due(newest)
    mirror.advance(newest)
    assert not mirror.is_due(newest)
    store.close()


def test_the_mirror_is_due_once_the_deltas_take_as_much_as_the_weights(tmp_path: Path) -> None:
    lineage = Lineage(density=0.2)
    first = lineage.publish()
    store = Store.open(tmp_path / "store")
    first.commit_into(store)
    run = store.run(RunId(lineage.run))
    mirror = Mirror(store, run, VARIANT, choose())
    mirror.advance(first.record)
    taken = 0
    while taken < first.layout.weight_bytes:
        newest = lineage.versions[-1].record
        assert not mirror.is_due(newest)
        version = lineage.publish()
        version.commit_into(store)
        (edge,) = version.record.variants[0].edges
        taken += edge.size + run.read_manifest(edge).chunk_bytes
    assert len(lineage.versions) > 3
    assert mirror.is_due(lineage.versions[-1].record)
    store.close()
