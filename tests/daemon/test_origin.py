"""Publishing from a checkpoint directory: what becomes durable, when the baseline moves, what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from deltad.daemon.break_even import may_win
from deltad.daemon.origin import Origin
from deltad.delta import FORMAT
from deltad.delta.backend import choose
from deltad.delta.codec import sum_weights
from deltad.delta.digest import root_of
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.manifest import EdgeKind
from deltad.errors import CheckpointChangedError, CheckpointError, ConflictError
from deltad.store.store import Store
from deltad.types import Version
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.rot import overwrite
from tests.kit.trainer import RUN, VARIANT, Trainer, edges_since
from tests.kit.weights import ArrayWeights


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_the_first_version_is_an_anchor_and_the_next_are_deltas(trainer: Trainer) -> None:
    for number in range(4):
        trainer.step(number)
    assert [trainer.kind(number) for number in range(4)] == [EdgeKind.ANCHOR] + [EdgeKind.DELTA] * 3
    assert trainer.export(Version(1, 3)).equals(trainer.weights)


def test_every_version_can_be_rebuilt_bit_for_bit(trainer: Trainer) -> None:
    published = {}
    for number in (0, 3, 4, 10):
        version = trainer.step(number, density=0.05 * number + 0.001)
        published[version] = trainer.weights
    for version, weights in published.items():
        assert trainer.export(version).equals(weights)
        assert trainer.run.record(version).variants[0].root == root_of(MODEL, sum_weights(MODEL, weights))


def test_the_same_bytes_under_the_same_number_are_published_once(trainer: Trainer) -> None:
    trainer.step(0)
    again = trainer.origin.publish(trainer.write(0), 0)
    assert again.already
    assert len(trainer.run.records()) == 1


def test_other_bytes_under_a_published_number_are_refused_and_change_nothing(trainer: Trainer) -> None:
    trainer.step(0)
    trainer.step(1)
    with pytest.raises(ConflictError, match="as published for r/v000001"):
        trainer.origin.publish(trainer.write(1, trainer.weights.changed(0.1, seed=99)), 1)
    assert trainer.run.latest().version == Version(1, 1)


def test_a_number_below_the_newest_is_refused_until_a_new_epoch_is_opened(trainer: Trainer) -> None:
    trainer.step(0)
    trainer.step(5)
    resumed = trainer.weights.changed(0.02, seed=77)
    with pytest.raises(ConflictError, match="new epoch"):
        trainer.origin.publish(trainer.write(3, resumed), 3)
    record = trainer.origin.publish(trainer.write(3, resumed), 3, new_epoch=True).record
    assert record.version == Version(2, 3)
    assert record.parent == Version(1, 5)
    assert trainer.export(Version(2, 3)).equals(resumed)


def test_a_new_epoch_that_is_asked_for_is_opened_with_the_bytes_of_an_older_version(trainer: Trainer) -> None:
    for number in (0, 3, 5):
        trainer.step(number)
        if number == 3:
            older = trainer.weights
    directory = trainer.write(3, older)
    known = trainer.origin.publish(directory, 3, epoch_on_conflict=True)
    assert known.already, "the same bytes contradict nothing"
    opened = trainer.origin.publish(directory, 3, new_epoch=True)
    assert (opened.already, opened.record.version) == (False, Version(2, 3))
    assert trainer.export(Version(2, 3)).equals(older)
    again = trainer.origin.publish(directory, 3, new_epoch=True)
    assert (again.already, again.record.version) == (True, Version(2, 3)), "it is the newest itself"


def test_a_version_that_was_let_go_is_not_published_again_unless_a_new_epoch_is_asked_for(trainer: Trainer) -> None:
    for number in (0, 2, 4, 6, 8):
        trainer.step(number)
    trainer.run.sift(lambda held: [found.record.version for found in held if found.record.version.number == 4])
    for number in (3, 4, 5):
        directory = trainer.write(number, trainer.weights.changed(0.02, seed=number))
        for on_conflict in (False, True):
            with pytest.raises(ConflictError, match=rf"found {number}, where versions lay .* let go.*--new-epoch"):
                trainer.origin.publish(directory, number, epoch_on_conflict=on_conflict)
    assert trainer.run.latest().version == Version(1, 8)
    never = trainer.write(7, trainer.weights.changed(0.02, seed=7))
    assert trainer.origin.publish(never, 7, epoch_on_conflict=True).record.version == Version(2, 7)
    asked = trainer.write(4, trainer.weights.changed(0.02, seed=4))
    assert trainer.origin.publish(asked, 4, new_epoch=True).record.version == Version(3, 4)


def test_a_new_epoch_that_is_asked_for_is_opened_at_a_higher_number_too(trainer: Trainer) -> None:
    trainer.step(0)
    assert trainer.origin.publish(trainer.write(9), 9, new_epoch=True).record.version == Version(2, 9)


def test_unchanged_weights_give_an_empty_delta(trainer: Trainer) -> None:
    trainer.step(0)
    record = trainer.origin.publish(trainer.write(1), 1).record
    manifest = trainer.run.read_manifest(record.variants[0].edges[0])
    assert (manifest.changed, manifest.pages, manifest.chunk_bytes) == (0, (), 0)
    assert trainer.export(Version(1, 1)).equals(trainer.weights)


def test_changing_nearly_everything_gives_an_anchor_and_says_why(trainer: Trainer) -> None:
    trainer.step(0)
    record = trainer.origin.publish(trainer.write(1, ArrayWeights.random(MODEL, seed=5)), 1).record
    assert trainer.kind(1) is EdgeKind.ANCHOR
    assert "break-even" in trainer.run.read_manifest(record.variants[0].edges[0]).reason


def test_an_anchor_is_cut_where_it_is_smaller_than_the_delta_and_says_so(tmp_path: Path) -> None:
    layout = Layout(FORMAT, (TensorSpec("w", "BF16", (300, 500)),), MODEL.files)
    store = Store.open(tmp_path / "store")
    origin = Origin(store, RUN, VARIANT, choose())
    weights = ArrayWeights.bell(layout, seed=1)
    origin.publish(write_checkpoint(tmp_path / "step_0", weights, layout=layout), 0)
    origin.publish(write_checkpoint(tmp_path / "step_1", ArrayWeights.bell(layout, seed=2), layout=layout), 1)
    manifest = store.run(RUN).read_manifest(store.run(RUN).latest().variants[0].edges[0])
    assert manifest.kind is EdgeKind.ANCHOR
    assert manifest.chunk_bytes < 0.7 * layout.weight_bytes
    assert "break-even: the delta takes" in manifest.reason


def test_a_delta_that_is_smaller_than_the_anchor_is_kept_however_much_changed(tmp_path: Path) -> None:
    layout = Layout(FORMAT, (TensorSpec("w", "F32", (300, 500)),), MODEL.files)
    store = Store.open(tmp_path / "store")
    origin = Origin(store, RUN, VARIANT, choose())
    first = ArrayWeights.random(layout, seed=1)
    second = first.copy()
    second.arrays[0][:105_000] ^= np.random.default_rng(2).integers(1, 1 << 32, 105_000, np.uint32)
    for number, weights in enumerate((first, second)):
        origin.publish(write_checkpoint(tmp_path / f"step_{number}", weights, layout=layout), number)
    manifest = store.run(RUN).read_manifest(store.run(RUN).latest().variants[0].edges[0])
    assert may_win(manifest.chunk_bytes, layout.weight_bytes), "it was compared"
    assert (manifest.kind, manifest.reason) == (EdgeKind.DELTA, "")


def test_a_tensor_that_is_added_gives_an_anchor_and_says_which(trainer: Trainer) -> None:
    trainer.step(0)
    wider = Layout(1, (*MODEL.tensors, TensorSpec("value_head", "BF16", (3,))), MODEL.files)
    weights = ArrayWeights([*trainer.weights.arrays, np.zeros(3, np.uint16)])
    record = trainer.origin.publish(write_checkpoint(trainer.checkpoints / "wider", weights, layout=wider), 1).record
    assert trainer.kind(1) is EdgeKind.ANCHOR
    assert "value_head" in trainer.run.read_manifest(record.variants[0].edges[0]).reason


def test_a_checkpoint_of_another_model_is_refused_by_name(trainer: Trainer) -> None:
    trainer.step(0)
    other = Layout(1, (TensorSpec("transformer.h.0.attn", "BF16", (8, 8)),), MODEL.files)
    directory = write_checkpoint(trainer.checkpoints / "other", ArrayWeights.random(other), layout=other)
    with pytest.raises(CheckpointError, match="another one"):
        trainer.origin.publish(directory, 1)
    assert trainer.run.latest().version == Version(1, 0)


def test_a_checkpoint_without_its_config_is_refused_and_told_what_to_do(trainer: Trainer) -> None:
    trainer.step(0)
    directory = trainer.write(1)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected config\.json .* found none; copy the config\.json") as caught:
        trainer.origin.publish(directory, 1)
    assert str(caught.value).startswith(f"{directory}: ")
    assert trainer.run.latest().version == Version(1, 0)


def test_how_a_trainer_cuts_its_files_does_not_matter(trainer: Trainer) -> None:
    trainer.step(0)
    cut = write_checkpoint(trainer.checkpoints / "cut", trainer.weights, shard_bytes=1500)
    assert len(list(cut.glob("*.safetensors"))) > 2
    record = trainer.origin.publish(cut, 1).record
    assert trainer.run.read_manifest(record.variants[0].edges[0]).changed == 0


def test_the_baseline_outlives_a_checkpoint_that_the_trainer_prunes(trainer: Trainer) -> None:
    trainer.step(0)
    shutil.rmtree(trainer.checkpoints)
    trainer.step(1)
    assert trainer.kind(1) is EdgeKind.DELTA
    assert trainer.export(Version(1, 1)).equals(trainer.weights)
    assert trainer.mirror.generations() == {}, "the kept files were enough"


def test_a_baseline_that_was_overwritten_in_place_is_rebuilt_from_the_store(trainer: Trainer) -> None:
    trainer.step(0)
    (kept,) = (trainer.checkpoints / "step_000000").glob("*.safetensors")
    status = kept.stat()
    with kept.open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"\x55\x55")
    os.utime(kept, ns=(status.st_atime_ns, status.st_mtime_ns))  # as an unlucky copy would leave it
    trainer.step(1)
    assert trainer.kind(1) is EdgeKind.DELTA
    assert trainer.export(Version(1, 1)).equals(trainer.weights)
    assert list(trainer.mirror.generations()) == [Version(1, 0)]


def test_a_lost_baseline_is_rebuilt_from_the_store(trainer: Trainer) -> None:
    trainer.step(0)
    shutil.rmtree(trainer.run.directory / "baseline")
    trainer.step(1)
    assert trainer.export(Version(1, 1)).equals(trainer.weights)


def test_an_anchor_is_cut_where_the_baseline_cannot_be_rebuilt_at_all(trainer: Trainer) -> None:
    trainer.step(0)
    shutil.rmtree(trainer.run.directory / "baseline")
    manifest = trainer.run.read_manifest(trainer.run.latest().variants[0].edges[0])
    for digest in trainer.store.objects.sizes():
        if trainer.store.size(digest) > manifest.chunk_bytes // 2:
            overwrite(trainer.store, digest, b"rot")
    trainer.step(1)
    assert trainer.kind(1) is EdgeKind.ANCHOR
    assert trainer.export(Version(1, 1)).equals(trainer.weights)


def test_equal_weights_are_the_newest_version_again_where_numbers_are_only_counted(trainer: Trainer) -> None:
    trainer.step(0)
    again = trainer.origin.publish(trainer.write(1), 1, if_changed=True)
    assert again.already
    assert again.record.version == Version(1, 0)
    changed = trainer.origin.publish(trainer.write(1, trainer.weights.changed(0.1, seed=6)), 1, if_changed=True)
    assert changed.record.version == Version(1, 1)


def test_a_checkpoint_that_changes_while_it_is_read_is_not_published(trainer: Trainer) -> None:
    trainer.step(0)
    directory = trainer.write(1, trainer.weights.changed(0.1, seed=3))

    class Meddler:
        """A store that lets the trainer overwrite its checkpoint in the middle of a publish."""

        def __init__(self, store: Store) -> None:
            self._store = store

        def __getattr__(self, name: str) -> object:
            return getattr(self._store, name)

        def put(self, data: bytes) -> object:
            (weights,) = directory.glob("*.safetensors")
            weights.write_bytes(weights.read_bytes())
            return self._store.put(data)

    origin = Origin(Meddler(trainer.store), RUN, VARIANT, choose())  # type: ignore[arg-type]
    with pytest.raises(CheckpointChangedError):
        origin.publish(directory, 1)
    assert trainer.run.latest().version == Version(1, 0)
    trainer.step(1)
    assert trainer.export(Version(1, 1)).equals(trainer.weights)


def test_fp32_checkpoints_are_published_as_bf16_where_that_is_asked_for(tmp_path: Path) -> None:
    layout = Layout(1, (TensorSpec("w", "F32", (50, 4)), TensorSpec("steps", "I64", (1,))), MODEL.files)
    store = Store.open(tmp_path / "store")
    origin = Origin(store, RUN, VARIANT, choose(), publish_as="bf16")
    first = ArrayWeights([np.linspace(-1, 1, 200, dtype=np.float32).view(np.uint32), np.array([7], np.uint64)])
    second = first.copy()
    second.arrays[0][:3] += 1  # below half a bf16 step: invisible after rounding
    second.arrays[0][50:53] += 1 << 16  # a whole bf16 step
    for number, weights in enumerate((first, second)):
        origin.publish(write_checkpoint(tmp_path / f"step_{number}", weights, layout=layout), number)
    manifest = store.run(RUN).read_manifest(store.run(RUN).latest().variants[0].edges[0])
    assert (manifest.kind, manifest.changed) == (EdgeKind.DELTA, 3)


def test_the_mirror_advances_without_changing_any_version(trainer: Trainer) -> None:
    published = {}
    for number in range(5):
        version = trainer.step(number)
        published[version] = trainer.weights
        if number in (1, 3):
            trainer.mirror.advance(trainer.run.latest())
    assert list(trainer.mirror.generations()) == [Version(1, 3)]
    assert edges_since(trainer.mirror, trainer.run.latest(), trainer.store) == 1
    for version, weights in published.items():
        assert trainer.export(version).equals(weights)


def test_a_damaged_generation_is_let_go_and_the_version_rebuilt_from_its_edges(trainer: Trainer) -> None:
    trainer.step(0)
    generation = trainer.mirror.advance(trainer.run.latest())
    trainer.step(1)
    (file,) = generation.glob("*.safetensors")
    with file.open("r+b") as handle:
        handle.seek(-7, 2)
        handle.write(b"\xaa")
    assert trainer.export(Version(1, 1)).equals(trainer.weights)
    assert trainer.mirror.generations() == {}


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json"])
def test_a_generation_that_does_not_open_any_more_is_let_go(trainer: Trainer, damaged: str) -> None:
    trainer.step(0)
    generation = trainer.mirror.advance(trainer.run.latest())
    trainer.step(1)
    (generation / damaged).write_bytes(b"\xff" * 20)
    assert trainer.export(Version(1, 1)).equals(trainer.weights)


def test_a_layout_that_is_damaged_on_disk_is_mended_by_the_next_publish(trainer: Trainer) -> None:
    trainer.step(0)
    overwrite(trainer.store, trainer.run.latest().variants[0].layout, b"rot")
    trainer.step(1)
    assert trainer.kind(1) is EdgeKind.DELTA
    assert trainer.export(Version(1, 1)).equals(trainer.weights)


def test_an_export_touches_nothing_but_its_own_directory(trainer: Trainer) -> None:
    trainer.step(0)
    beside = trainer.exports / "model.partial"
    beside.mkdir(parents=True)
    (beside / "notes").write_text("mine")
    trainer.mirror.export(trainer.run.latest(), trainer.exports / "model")
    assert sorted(entry.name for entry in trainer.exports.iterdir()) == ["model", "model.partial"]
    assert (beside / "notes").read_text() == "mine"


def test_an_export_that_an_engine_has_mapped_stays_the_same_while_ten_versions_pass(trainer: Trainer) -> None:
    trainer.step(0)
    directory = trainer.exports / "live"
    trainer.mirror.export(trainer.run.latest(), directory)
    (file,) = directory.glob("*.safetensors")
    mapped = np.memmap(file, np.uint8, "r")
    before = bytes(mapped)
    for number in range(1, 11):
        trainer.step(number)
        trainer.mirror.advance(trainer.run.latest())
    assert bytes(mapped) == before
