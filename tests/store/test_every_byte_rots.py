"""A bit flips anywhere in any file of a store: the scrub finds it and it is healed, or a start names it (P16)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deltad.delta.backend import choose
from deltad.errors import DeltadError
from deltad.store.mirror import Mirror
from deltad.store.scrubber import Scrubber
from deltad.store.store import Store
from deltad.types import Variant
from tests.kit.checkpoints import read_checkpoint
from tests.kit.versions import SMALL_CHUNKS, Lineage
from tests.kit.whole import whole_versions

LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)
STEP = 211 if os.environ.get("DELTAD_TEST_FULL") else 2477
"""Bytes between two that are tried; a prime, so that they fall everywhere in a page."""


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for _ in range(3):
        lineage.publish()
    return lineage


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, lineage: Lineage) -> Path:
    """A store with three versions, and a mirror of the second."""
    home = tmp_path_factory.mktemp("sound") / "store"
    store = Store.open(home, limits=LIMITS)
    lineage.fill(store)
    mirror_of(store, lineage).advance(lineage.versions[1].record)
    store.close()
    return home


def mirror_of(store: Store, lineage: Lineage) -> Mirror:
    return Mirror(store, store.run(lineage.versions[0].run), Variant("bf16"), choose())


def files_of(home: Path) -> list[str]:
    """All that is stored for good."""
    found = (path.relative_to(home) for path in sorted(home.rglob("*")) if path.is_file())
    return [f"{path}" for path in found if path.parts[0] not in ("lock", "tmp", "exports")]


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """In memory where there is room for that."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


def test_a_bit_that_flips_in_any_file_is_healed_or_named(sound: Path, lineage: Lineage, elsewhere: Path) -> None:
    tried = refused = 0
    for name in files_of(sound):
        size = (sound / name).stat().st_size
        for at in {*range(0, size, STEP), size - 1}:
            home = elsewhere / "store"
            shutil.copytree(sound, home)
            refused += rots(home, name, at, lineage)
            shutil.rmtree(home)
            tried += 1
    print(f"a bit was flipped in {tried} places of {len(files_of(sound))} files; {refused} stopped the next start")
    assert tried > 50
    assert refused == 2, "FORMAT alone, at its two ends"


def rots(home: Path, name: str, at: int, lineage: Lineage) -> bool:
    """Flip a bit while a daemon runs, and see it healed; True if it is the next start that names the file."""
    store = Store.open(home, limits=LIMITS)
    mirror, (second,) = mirror_of(store, lineage), [lineage.versions[1]]
    path = home / name
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)
    scrubber = Scrubber(store)
    while (piece := scrubber.step([mirror])) is not None:
        assert piece.renewed is None or not piece.renewed.problem
    for version in lineage.versions:
        version.put_into(store)
    store.close()
    if name == "FORMAT":
        with pytest.raises(DeltadError, match="FORMAT"):
            Store.open(home, limits=LIMITS)
        return True
    again = Store.open(home, limits=LIMITS)
    assert whole_versions(again, lineage.versions[0].run) == [version.version for version in lineage.versions]
    assert [record.encode() for record in again.run(second.run).records()] == [v.data for v in lineage.versions]
    (generation,) = mirror_of(again, lineage).generations().values()
    assert read_checkpoint(generation).equals(second.weights)
    again.close()
    return False
