"""Keeping the checkpoint that was published last: it survives pruning, and is never believed once it was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deltad.checkpoint import drop_replaced, keep_baseline, open_baseline, open_checkpoint
from tests.checkpoint.shards import bf16, write_sharded, write_single

FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = write_sharded(tmp_path / "step_1" / "actor" / "huggingface", [{"a": bf16(9)}, {"b": bf16(9, seed=1)}])
    (directory / "config.json").write_text("{}")
    (directory / "training_args.bin").write_bytes(b"pickle")
    for path in directory.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return tmp_path / "step_1"


def keep(directory: Path, kept: Path, version: str = "v000001") -> bool:
    with open_checkpoint(directory) as checkpoint:
        return keep_baseline(checkpoint, kept, version)


def test_a_baseline_outlives_the_trainers_pruning_bit_for_bit(directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "store" / "baseline"
    assert keep(directory, kept)
    shutil.rmtree(directory)
    baseline = open_baseline(kept, "v000001")
    assert baseline is not None
    with baseline:
        assert [spec.name for spec in baseline.layout.tensors] == ["a", "b"]
        assert baseline.lanes(1, 0, 9).tobytes() == bf16(9, seed=1)[2]
        assert [file.name for file in baseline.layout.files] == ["config.json"]
        baseline.check_unchanged()
    assert not (kept / "training_args.bin").exists()


def test_what_a_baseline_replaces_stays_until_it_is_dropped_and_is_never_opened(
    directory: Path, tmp_path: Path
) -> None:
    kept, before = tmp_path / "baseline" / "bf16", (directory / "actor/huggingface" / FIRST).stat().st_nlink
    for version in ("v000001", "v000002"):
        assert keep(directory, kept, version)
    assert (directory / "actor/huggingface" / FIRST).stat().st_nlink == before + 2
    assert open_baseline(kept, "v000001") is None
    assert keep(directory, kept, "v000003")
    assert (directory / "actor/huggingface" / FIRST).stat().st_nlink == before + 2, "one at most"
    drop_replaced(kept)
    assert [path.name for path in kept.parent.iterdir()] == ["bf16"]


def test_no_byte_is_copied(directory: Path, tmp_path: Path) -> None:
    assert keep(directory, tmp_path / "kept")
    assert os.path.samefile(directory / "actor/huggingface" / FIRST, tmp_path / "kept" / FIRST)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(path.read_bytes())  # the very same bytes: who wrote them is enough to not believe the file


SPOILED: dict[str, Callable[[Path, Path], object]] = {
    "the trainer overwrote a file in place": lambda source, kept: overwrite(source / FIRST),
    "a kept file was cut short": lambda source, kept: os.truncate(kept / FIRST, 50),
    "a kept file is gone": lambda source, kept: (kept / FIRST).unlink(),
    "a kept file was replaced": lambda source, kept: (
        shutil.copy2(kept / FIRST, kept / "new"),
        os.replace(kept / "new", kept / FIRST),
    ),
    "the config was overwritten": lambda source, kept: (source / "config.json").write_text("[]"),
    "a weight file was added": lambda source, kept: (kept / "model.safetensors").write_bytes(b""),
    "the record is gone": lambda source, kept: (kept / "kept.json").unlink(),
    "the record is torn": lambda source, kept: os.truncate(kept / "kept.json", 30),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_it_is_believed_only_while_every_file_is_as_it_was_kept(
    directory: Path, tmp_path: Path, spoil: Callable[[Path, Path], object]
) -> None:
    kept = tmp_path / "kept"
    assert keep(directory, kept)
    spoil(directory / "actor/huggingface", kept)
    assert open_baseline(kept, "v000001") is None


def test_it_is_opened_only_as_the_version_that_it_is(directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert open_baseline(kept, "v000001") is None
    assert keep(directory, kept)
    assert open_baseline(kept, "v000002") is None


def test_the_next_one_replaces_it(directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert keep(directory, kept)
    write_single(tmp_path / "step_2", {"c": bf16(3)})
    assert keep(tmp_path / "step_2", kept, "v000002")
    assert open_baseline(kept, "v000001") is None
    baseline = open_baseline(kept, "v000002")
    assert baseline is not None
    with baseline:
        assert [spec.name for spec in baseline.layout.tensors] == ["c"]
    assert not (kept / FIRST).exists()


def test_one_that_was_half_kept_when_the_daemon_was_killed_is_not_opened_and_is_replaced(
    directory: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    os.link(directory / "actor/huggingface" / FIRST, kept / FIRST)
    assert open_baseline(kept, "v000001") is None
    assert keep(directory, kept)


def test_floats_of_a_baseline_are_rounded_like_those_of_the_checkpoint(tmp_path: Path) -> None:
    write_single(tmp_path / "step_1", {"w": ("F32", [4], bytes(range(16)))})
    assert keep(tmp_path / "step_1", tmp_path / "kept")
    baseline = open_baseline(tmp_path / "kept", "v000001", publish_as="bf16")
    assert baseline is not None
    with baseline, open_checkpoint(tmp_path / "step_1", publish_as="bf16") as checkpoint:
        assert baseline.layout == checkpoint.layout


def test_nothing_is_kept_of_a_checkpoint_that_is_gone_or_another_by_now(directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with open_checkpoint(directory) as checkpoint:
        overwrite(directory / "actor/huggingface" / FIRST)
        assert not keep_baseline(checkpoint, kept, "v000001")
        shutil.rmtree(directory)
        assert not keep_baseline(checkpoint, kept, "v000001")
    assert not kept.exists()


def test_nothing_is_kept_where_files_cannot_be_linked(directory: Path) -> None:
    other_file_system = Path("/dev/shm")
    if other_file_system.stat().st_dev == directory.stat().st_dev:
        pytest.skip("needs two file systems: run pytest with --basetemp on another one than /dev/shm")
    kept = other_file_system / f"deltad-test-{os.getpid()}"
    try:
        assert not keep(directory, kept)
        assert not kept.exists()
    finally:
        shutil.rmtree(kept, ignore_errors=True)
