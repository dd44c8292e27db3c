"""The power fails during a whole publish, a mirror advance and an export, at every operation (P5, P10, P29)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.daemon.origin import Origin
from deltad.delta.backend import choose
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import Version
from tests.kit.checkpoints import read_checkpoint, write_checkpoint
from tests.kit.recording_disk import RecordingDisk, place
from tests.kit.trainer import RUN, VARIANT, Trainer
from tests.kit.weights import ArrayWeights
from tests.kit.whole import whole_versions


@pytest.fixture
def home() -> Iterator[Path]:
    """In memory where there is room for that."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture
def weights(home: Path) -> dict[Version, ArrayWeights]:
    """Three versions in the store `home/store`, the first of them in its mirror; and the weights of each."""
    trainer = Trainer(home)
    weights = {}
    for number in range(3):
        version = trainer.step(number)
        weights[version] = trainer.weights
    trainer.mirror.advance(trainer.run.records()[0])
    trainer.store.close()
    return weights


def mirror_of(store: Store) -> Mirror:
    return Mirror(store, store.run(RUN), VARIANT, choose())


def test_a_power_cut_during_a_publish_from_a_checkpoint_leaves_the_old_version_or_the_new_one(
    home: Path, weights: dict[Version, ArrayWeights]
) -> None:
    checkpoint = write_checkpoint(home / "step_3", weights[Version(1, 2)].changed(0.02, seed=9))
    disk = RecordingDisk(home / "store")
    store = Store.open(home / "store", files=disk)
    before, old = disk.memory.point, list(weights)
    published = Origin(store, RUN, VARIANT, choose()).publish(checkpoint, 3).record
    disk.memory.mark("published")
    new = [*old, published.version]
    tried = 0
    for cut in disk.power_cuts(since=before):
        place(cut, home / "store", home / "cut")
        again = Store.open(home / "cut")
        assert whole_versions(again, RUN) in ((new,) if cut.marks else (old, new))
        record = Origin(again, RUN, VARIANT, choose()).publish(checkpoint, 3).record
        assert record.variants == published.variants
        assert whole_versions(again, RUN) == new
        again.close()
        shutil.rmtree(home / "cut")
        tried += 1
    print(f"the power was cut at {disk.memory.point - before} points of a publish in {tried} ways")
    assert tried > disk.memory.point - before > 20


def test_a_power_cut_during_a_mirror_advance_leaves_whole_generations(
    home: Path, weights: dict[Version, ArrayWeights]
) -> None:
    disk = RecordingDisk(home / "store")
    store = Store.open(home / "store", files=disk)
    before = disk.memory.point
    newest = store.run(RUN).records()[-1]
    mirror_of(store).advance(newest)
    disk.memory.mark("advanced")
    tried = 0
    for cut in disk.power_cuts(since=before):
        place(cut, home / "store", home / "cut")
        again = Store.open(home / "cut")
        mirror = mirror_of(again)
        generations = mirror.generations()
        assert newest.version in generations if cut.marks else generations
        for version, directory in generations.items():
            assert read_checkpoint(directory).equals(weights[version])
        assert read_checkpoint(mirror.advance(newest)).equals(weights[newest.version])
        assert [entry.name for entry in (home / "cut" / "runs" / RUN / "mirror" / VARIANT).iterdir()] == [
            "e000001-v000002"
        ]
        again.close()
        shutil.rmtree(home / "cut")
        tried += 1
    print(f"the power was cut at {disk.memory.point - before} points of a mirror advance in {tried} ways")
    assert tried > disk.memory.point - before > 20


def test_a_power_cut_during_an_export_leaves_it_absent_or_whole(
    home: Path, weights: dict[Version, ArrayWeights]
) -> None:
    exports = home / "elsewhere"
    exports.mkdir()
    disk = RecordingDisk(home)
    store = Store.open(home / "store", files=disk)
    before = disk.memory.point
    newest = store.run(RUN).records()[-1]
    mirror_of(store).export(newest, exports / "live")
    disk.memory.mark("handed out")
    tried = whole = 0
    for cut in disk.power_cuts(since=before):
        place(cut, home, home / "cut")
        found = home / "cut" / "elsewhere" / "live"
        assert found.exists() or not cut.marks
        if found.exists():
            assert read_checkpoint(found).equals(weights[newest.version])
            whole += 1
        shutil.rmtree(home / "cut")
        tried += 1
    print(f"the power was cut at {disk.memory.point - before} points of an export in {tried} ways; {whole} whole")
    assert tried > disk.memory.point - before > 10
    assert 0 < whole < tried
