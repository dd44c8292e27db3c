"""A disk that is full or broken at any operation of a publish, a mirror advance and an export (P6, P12, P13, P29).

The refusal is an error that says so, or nothing that anybody needs; what was there stays; and the same deed works
once the disk does. Publishes into the store and collections are refused in `test_power_cut.py`, where power cuts
follow.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltad.daemon.origin import Origin
from deltad.delta.backend import choose
from deltad.errors import DeltadError, StoreError, StoreFullError
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import Version
from tests.kit.checkpoints import read_checkpoint
from tests.kit.refusing_disk import RefusingDisk
from tests.kit.trainer import RUN, VARIANT, Trainer
from tests.kit.weights import ArrayWeights
from tests.kit.whole import whole_versions

NEVER = range(0)
WAYS = [
    pytest.param(errno.ENOSPC, True, id="disk full from then on"),
    pytest.param(errno.EIO, False, id="input/output error once"),
]
if os.environ.get("DELTAD_TEST_FULL") == "1":
    WAYS += [
        pytest.param(errno.ENOSPC, False, id="disk full once"),
        pytest.param(errno.EIO, True, id="input/output error from then on"),
    ]


@pytest.fixture
def home() -> Iterator[Path]:
    """In memory where there is room for that."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture
def weights(home: Path) -> dict[Version, ArrayWeights]:
    """Two versions in the store `home/before`, the first of them in its mirror; and the weights of each."""
    trainer = Trainer(home)
    weights = {}
    for number in (0, 1):
        version = trainer.step(number)
        weights[version] = trainer.weights
    trainer.mirror.advance(trainer.run.records()[0])
    trainer.store.close()
    (home / "store").rename(home / "before")
    return weights


def mirror_of(store: Store) -> Mirror:
    return Mirror(store, store.run(RUN), VARIANT, choose())


def refuse_everywhere(
    home: Path, code: int, lasting: bool, deed: Callable[[Store], object], what: str
) -> Iterator[Store]:
    """After every refusal, and once after none, the store on a disk that works again."""
    operation = refused = 0
    while True:
        operation += 1
        shutil.rmtree(home / "store", ignore_errors=True)
        shutil.copytree(home / "before", home / "store", symlinks=True)
        disk = RefusingDisk(code, NEVER)
        store = Store.open(home / "store", files=disk)
        first = disk.operations + operation
        disk.refuse(range(first, 10_000 if lasting else first + 1))
        found: DeltadError | None = None
        try:
            deed(store)
        except (StoreError, StoreFullError) as error:
            found = error
            refused += 1
        assert found is None or isinstance(found, StoreFullError) == (code == errno.ENOSPC)
        reached = disk.operations >= first
        store.close()
        again = Store.open(home / "store")
        yield again
        again.close()
        if not reached:
            break
    print(f"{refused} of {operation - 1} operations of {what} were refused with an error")
    assert operation - 1 >= refused > 10


@pytest.mark.parametrize(("code", "lasting"), WAYS)
def test_a_publish_that_is_refused_anywhere_leaves_the_old_version_or_the_new_one(
    home: Path, weights: dict[Version, ArrayWeights], code: int, lasting: bool
) -> None:
    trainer = Trainer(home / "elsewhere")
    checkpoint = trainer.write(2, weights[Version(1, 1)].changed(0.02, seed=5))
    old = list(weights)

    def publish(store: Store) -> None:
        Origin(store, RUN, VARIANT, choose()).publish(checkpoint, 2)

    for store in refuse_everywhere(home, code, lasting, publish, "a publish"):
        assert whole_versions(store, RUN)[:2] == old
        publish(store)
        assert whole_versions(store, RUN) == [*old, Version(1, 2)]


@pytest.mark.parametrize(("code", "lasting"), WAYS)
def test_a_mirror_advance_that_is_refused_anywhere_keeps_a_whole_generation(
    home: Path, weights: dict[Version, ArrayWeights], code: int, lasting: bool
) -> None:
    newest = Version(1, 1)

    def advance(store: Store) -> Path:
        return mirror_of(store).advance(store.run(RUN).record(newest))

    for store in refuse_everywhere(home, code, lasting, advance, "a mirror advance"):
        generations = mirror_of(store).generations()
        assert generations
        for version, directory in generations.items():
            assert read_checkpoint(directory).equals(weights[version])
        directory = advance(store)
        assert read_checkpoint(directory).equals(weights[newest])
        assert list(directory.parent.iterdir()) == [directory]


@pytest.mark.parametrize(("code", "lasting"), WAYS)
@pytest.mark.parametrize("number", [0, 1], ids=["copied from the mirror", "built"])
def test_an_export_that_is_refused_anywhere_is_absent_or_whole(
    home: Path, weights: dict[Version, ArrayWeights], code: int, lasting: bool, number: int
) -> None:
    exports = home / "exports"

    def export(store: Store) -> None:
        shutil.rmtree(exports, ignore_errors=True)
        exports.mkdir()
        mirror_of(store).export(store.run(RUN).record(Version(1, number)), exports / "live")

    for store in refuse_everywhere(home, code, lasting, export, "an export"):
        found = exports / "live"
        assert not found.exists() or read_checkpoint(found).equals(weights[Version(1, number)])
        export(store)
        assert read_checkpoint(found).equals(weights[Version(1, number)])
