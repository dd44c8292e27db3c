"""SIGKILL at every file operation of a publish, a mirror advance and an export (P5, P6, P9, P29).

Whatever is left opens by itself: nothing acknowledged is lost, nothing partial is visible, and the same
work done again converges.
"""

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
from tests.kit.checkpoints import read_checkpoint
from tests.kit.killing import dies_at
from tests.kit.trainer import RUN, VARIANT, Trainer
from tests.kit.weights import ArrayWeights


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room for that: a killed process loses nothing that it has written."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def prepared(tmp_path: Path) -> tuple[Path, Path, dict[Version, ArrayWeights]]:
    """A closed store with versions 0 and 1, a checkpoint of version 2, and the weights of all three."""
    trainer = Trainer(tmp_path / "before")
    weights = {}
    for number in (0, 1):
        version = trainer.step(number)
        weights[version] = trainer.weights
    after = trainer.weights.changed(0.03, seed=2)
    weights[Version(1, 2)] = after
    checkpoint = trainer.write(2, after)
    trainer.store.close()
    return tmp_path / "before" / "store", checkpoint, weights


def check_all(store: Store, weights: dict[Version, ArrayWeights], scratch: Path) -> set[Version]:
    """Every version that is visible is whole; returns them."""
    run = store.run(RUN)
    mirror = Mirror(store, run, VARIANT, choose())
    visible = set()
    for record in run.records():
        directory = scratch / str(record.version)
        mirror.export(record, directory)
        assert read_checkpoint(directory).equals(weights[record.version])
        visible.add(record.version)
    return visible


def test_a_publish_that_is_killed_anywhere_leaves_the_old_version_or_the_new_one(tmp_path: Path) -> None:
    before, checkpoint, weights = prepared(tmp_path)
    old, new = {Version(1, 0), Version(1, 1)}, set(weights)
    outcomes = []
    operation = 0
    killed = True
    while killed:
        operation += 1
        path = tmp_path / f"store-{operation}"
        shutil.copytree(before, path, symlinks=True)

        def publish(path: Path = path) -> None:
            Origin(Store.open(path), RUN, VARIANT, choose()).publish(checkpoint, 2)

        killed = dies_at(operation, publish)
        store = Store.open(path)
        visible = check_all(store, weights, tmp_path / f"exports-{operation}")
        assert visible in (old, new)
        outcomes.append(visible == new)
        Origin(store, RUN, VARIANT, choose()).publish(checkpoint, 2)
        assert {record.version for record in store.run(RUN).records()} == new
        assert list(store.scratch.iterdir()) == []
        store.close()
        shutil.rmtree(path)
    print(f"killed a publish at {operation - 1} points; {sum(outcomes)} left the new version")
    assert operation > 20
    assert outcomes == sorted(outcomes), "once the new version is visible it stays so"
    assert not outcomes[0]
    assert outcomes[-1]


def test_a_mirror_advance_that_is_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    before, _, weights = prepared(tmp_path)
    operation = 0
    killed = True
    while killed:
        operation += 1
        path = tmp_path / f"store-{operation}"
        shutil.copytree(before, path, symlinks=True)

        def advance(path: Path = path) -> None:
            store = Store.open(path)
            run = store.run(RUN)
            mirror = Mirror(store, run, VARIANT, choose())
            mirror.advance(run.record(Version(1, 0)))
            mirror.advance(run.record(Version(1, 1)))

        killed = dies_at(operation, advance)
        store = Store.open(path)
        mirror = Mirror(store, store.run(RUN), VARIANT, choose())
        for generation, directory in mirror.generations().items():
            assert read_checkpoint(directory).equals(weights[generation])
        mirror.advance(store.run(RUN).record(Version(1, 1)))
        assert list(mirror.generations()) == [Version(1, 1)]
        assert [entry.name for entry in (path / "runs" / RUN / "mirror" / VARIANT).iterdir()] == ["e000001-v000001"]
        check_all(store, weights, tmp_path / f"exports-{operation}")
        store.close()
        shutil.rmtree(path)
    print(f"killed a mirror advance at {operation - 1} points")
    assert operation > 20


def test_an_export_that_is_killed_anywhere_is_absent_or_whole(tmp_path: Path) -> None:
    before, _, weights = prepared(tmp_path)
    operation = 0
    killed = True
    while killed:
        operation += 1
        directory = tmp_path / f"export-{operation}"

        def export(directory: Path = directory) -> None:
            store = Store.open(before)
            run = store.run(RUN)
            Mirror(store, run, VARIANT, choose()).export(run.record(Version(1, 1)), directory)

        killed = dies_at(operation, export)
        assert not directory.exists() or read_checkpoint(directory).equals(weights[Version(1, 1)])
        if not directory.exists():
            assert not dies_at(10_000, export)
        assert read_checkpoint(directory).equals(weights[Version(1, 1)])
    print(f"killed an export at {operation - 1} points")
    assert operation > 15
