"""A flipped bit in a mirror, in changed and in unchanged weights alike, is found, named and healed (P16, P10)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.checkpoint.safetensors import read_header
from deltad.delta.backend import choose
from deltad.store.edge_chunks import chunks_of
from deltad.store.mirror import Mirror
from deltad.store.scrubber import Renewed, Scrubber
from deltad.store.store import Store
from deltad.types import Digest, Version
from tests.kit.checkpoints import MODEL, read_checkpoint
from tests.kit.recording_disk import RecordingDisk, place
from tests.kit.rot import flip
from tests.kit.trainer import RUN, VARIANT, Trainer
from tests.kit.weights import ArrayWeights


@pytest.fixture
def home() -> Iterator[Path]:
    """In memory where there is room for that."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture
def trainer(home: Path) -> Trainer:
    """Four versions, the third of them in the mirror."""
    trainer = Trainer(home)
    for number in range(4):
        trainer.step(number)
        if number == 2:
            trainer.mirror.advance(trainer.run.latest())
    return trainer


def third() -> ArrayWeights:
    """What the trainer's third version is."""
    return ArrayWeights.random(MODEL).changed(0.01, seed=1).changed(0.01, seed=2)


def shard(mirror: Mirror) -> Path:
    (generation,) = mirror.generations().values()
    (path,) = generation.glob("*.safetensors")
    return path


def flip_element(path: Path, tensor: str, element: int, bit: int = 0) -> None:
    """Flip one bit of a bf16 element of a tensor in a file."""
    with path.open("r+b", buffering=0) as file:
        header = read_header(file.fileno(), path.stat().st_size, f"{path}")
        (entry,) = (entry for entry in header.entries if entry.spec.name == tensor)
        file.seek(entry.offset + 2 * element)
        (byte,) = file.read(1)
        file.seek(entry.offset + 2 * element)
        file.write(bytes([byte ^ (1 << bit)]))


def scrub(store: Store, mirror: Mirror) -> list[Renewed]:
    """One pass; what was wrong in the mirror."""
    scrubber, found = Scrubber(store), []
    while (piece := scrubber.step([mirror])) is not None:
        found += [piece.renewed] if piece.renewed else []
    return found


def never_changed(trainer: Trainer, tensor: int) -> int:
    """An element that no delta changes."""
    first, last = ArrayWeights.random(MODEL), trainer.weights
    (same,) = (first.arrays[tensor] == last.arrays[tensor]).nonzero()
    return int(same[-1])


def test_a_mirror_that_is_whole_is_read_and_left_alone(trainer: Trainer) -> None:
    before = shard(trainer.mirror).stat()
    assert scrub(trainer.store, trainer.mirror) == []
    assert shard(trainer.mirror).stat().st_ino == before.st_ino


def test_a_bit_of_an_unchanged_weight_is_found_named_by_its_element_and_healed(trainer: Trainer) -> None:
    tensor, path = 3, shard(trainer.mirror)
    element = never_changed(trainer, tensor)
    flip_element(path, "layers.0.up.weight", element)
    damaged = path.read_bytes()
    with path.open("rb") as handed_out:
        (renewed,) = scrub(trainer.store, trainer.mirror)
        assert handed_out.read() == damaged, "what somebody has open is never written to"
    right = int(trainer.weights.arrays[tensor][element])
    where = [element // 24, element % 24]
    assert renewed.problem == ""
    assert renewed.wrong == (f"layers.0.up.weight: element {where} was 0x{right ^ 1:04x}, not 0x{right:04x}",)
    assert read_checkpoint(shard(trainer.mirror).parent).equals(third())
    assert scrub(trainer.store, trainer.mirror) == []


def test_many_elements_of_several_tensors_are_counted(trainer: Trainer) -> None:
    for element in range(20):
        flip_element(shard(trainer.mirror), "embed.weight", 5 * element)
    flip_element(shard(trainer.mirror), "layers.0.norm.weight", 23)
    (renewed,) = scrub(trainer.store, trainer.mirror)
    first, second = renewed.wrong
    assert first.startswith("embed.weight: element [0, 0] was ")
    assert first.endswith(" and 12 more")
    assert second.startswith("layers.0.norm.weight: element [23] was ")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damage_to_a_header_or_to_another_file_of_the_mirror_is_healed_too(trainer: Trainer, name: str) -> None:
    path = shard(trainer.mirror).parent / name
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    (renewed,) = scrub(trainer.store, trainer.mirror)
    assert renewed.problem == ""
    assert renewed.wrong
    assert read_checkpoint(path.parent).equals(third())


def test_a_mirror_whose_chain_is_damaged_too_is_told_of_tensor_by_tensor_and_kept(trainer: Trainer) -> None:
    manifest = trainer.run.read_manifest(trainer.run.record(Version(1, 1)).variants[0].edges[0])
    (chunk,) = chunks_of(trainer.store, manifest, trainer.mirror.layout(trainer.run.latest()))
    data = trainer.store.read(Digest(chunk.digest))
    flip(trainer.store, Digest(chunk.digest), 40)
    for tensor in ("embed.weight", "layers.0.up.weight"):
        flip_element(shard(trainer.mirror), tensor, 7)
    found = scrub(trainer.store, trainer.mirror)
    assert found[-1].wrong == ("embed.weight", "layers.0.up.weight")
    assert chunk.digest.hex() in found[-1].problem
    assert list(trainer.mirror.generations()) == [Version(1, 2)]
    trainer.store.put_chunk(data)
    (renewed,) = scrub(trainer.store, trainer.mirror)
    assert (len(renewed.wrong), renewed.problem) == (2, "")


def test_a_pass_that_was_cut_off_in_a_mirror_goes_on_at_its_tensor(trainer: Trainer) -> None:
    scrubber = Scrubber(trainer.store)
    while not ((key := scrubber.step([trainer.mirror]).key).startswith("4") and key.endswith("3")):
        pass
    scrubber.save()
    flip_element(shard(trainer.mirror), "embed.weight", 1)
    again = Scrubber(trainer.store)
    keys = []
    while (piece := again.step([trainer.mirror])) is not None:
        assert piece.renewed is None, "the tensors before were read"
        keys.append(piece.key[-1])
    assert keys[-2:] == ["3", "4"]


def test_a_power_cut_while_a_generation_is_made_anew_leaves_the_damaged_one_a_whole_one_or_none(
    trainer: Trainer, home: Path
) -> None:
    flip_element(shard(trainer.mirror), "layers.0.up.weight", 100)
    trainer.store.close()
    rotten = shard(trainer.mirror).read_bytes()
    disk = RecordingDisk(home / "store")
    store = Store.open(home / "store", files=disk)
    before = disk.memory.point
    Mirror(store, store.run(RUN), VARIANT, choose()).renew(Version(1, 2))
    disk.memory.mark("healed")
    tried, seen = 0, set()
    for cut in disk.power_cuts(since=before):
        place(cut, home / "store", home / "cut")
        again = Store.open(home / "cut")
        mirror = Mirror(again, again.run(RUN), VARIANT, choose())
        left = mirror.generations()
        damaged = left and shard(mirror).read_bytes() == rotten
        if left and not damaged:
            assert read_checkpoint(left[Version(1, 2)]).equals(third())
        seen.add("none" if not left else "damaged" if damaged else "whole")
        assert left or not cut.marks
        assert not (damaged and cut.marks)
        assert len(scrub(again, mirror)) == bool(damaged)
        newest = again.run(RUN).latest()
        assert read_checkpoint(mirror.advance(newest)).equals(trainer.weights)
        assert len(list((home / "cut" / "runs" / RUN / "mirror" / VARIANT).iterdir())) == 1
        again.close()
        shutil.rmtree(home / "cut")
        tried += 1
    print(f"the power was cut at {disk.memory.point - before} points of a renewal in {tried} ways: {seen}")
    assert tried > disk.memory.point - before > 20
    assert seen == {"none", "damaged", "whole"}
