"""The codec bench measures what its rows say: whole deltas, both ways, and it stops when a result is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import anchors, codec, frames, harness, slices
from bench.codec import Published, Sizes
from bench.frames import Frames, checked, delta_bytes, full_digest
from bench.pairs import PAIRS, Bits, Extent, States
from bench.peers import Cwtrain, PeerMissingError
from bench.subject import Subject, write_checkpoint
from deltad.checkpoint import open_checkpoint
from deltad.delta.backend import Backend, Mode, Place

MODES: tuple[Mode, ...] = ("blind", "fast", "mid", "dense")


@pytest.fixture(scope="module")
def backend() -> Backend:
    return frames.backend("numpy")


@pytest.fixture
def subject() -> Subject:
    """Three tensors, of which one does not change."""
    rng = np.random.default_rng(3)
    old = (rng.standard_normal(30_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[:20_000] += (rng.random(20_000) < 0.02).astype(np.uint16)
    return Subject.of(
        States(PAIRS[0], (Extent("a", (100, 100)), Extent("b", (10_000,)), Extent("c", (10_000,))), old, new)
    )


@pytest.mark.parametrize("mode", MODES)
def test_all_frames_lead_from_the_old_state_to_the_new(subject: Subject, backend: Backend, mode: Mode) -> None:
    cut = Frames(subject.layout, backend, mode, frame_bytes=8192)
    assert len(cut.rects) > 3
    target, weights = subject.copy_of_old()
    cut.apply_all(cut.encode_all(subject.old, subject.new), weights)
    assert np.array_equal(target, subject.states.new)
    assert not np.array_equal(subject.states.old, subject.states.new)


@pytest.mark.parametrize("mode", MODES)
def test_a_deltas_bytes_include_more_than_its_frames(subject: Subject, backend: Backend, mode: Mode) -> None:
    alone = sum(map(len, Frames(subject.layout, backend, mode).encode_all(subject.old, subject.new)))
    # At least the sums of three tensors, two roots and the layout's digest.
    assert alone + 3 * 16 + 3 * 32 < delta_bytes(subject, backend, mode) < alone + 2000


def test_the_full_digest_covers_every_weight(subject: Subject, backend: Backend) -> None:
    summed: list[int] = []

    class Counting:
        def sum(self, lanes: Sequence[Bits], places: Sequence[Place]) -> None:
            summed.extend(segment.nbytes for segment in lanes)

    full_digest(subject, Counting())()  # type: ignore[arg-type]
    assert sum(summed) == subject.states.new.nbytes


def test_a_chunk_that_is_not_what_its_name_says_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        checked(b"these", bytes(32))


def test_a_pair_in_files_is_the_pair_in_memory(subject: Subject, tmp_path: Path) -> None:
    offset = write_checkpoint(subject.states.tensors, subject.states.new, tmp_path / "new")
    with open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.layout.tensors == subject.layout.tensors
        assert np.array_equal(checkpoint.lanes(1, 5, 100), subject.new.lanes(1, 5, 100))
    mapped = np.memmap(tmp_path / "new" / "model.safetensors", np.uint16, "r", offset=offset)
    assert np.array_equal(mapped, subject.states.new)


def test_ours_goes_there_and_back_in_files(subject: Subject, backend: Backend, tmp_path: Path) -> None:
    offset = write_checkpoint(subject.states.tensors, subject.states.old, tmp_path / "old")
    write_checkpoint(subject.states.tensors, subject.states.new, tmp_path / "new")
    (tmp_path / "memory").mkdir()
    ours = Published(subject, backend, tmp_path / "old", tmp_path / "memory", offset)
    ours.write(tmp_path / "old", tmp_path / "new")
    assert ours.holds()
    for _ in range(3):
        ours.apply()
        assert ours.holds()
    names = [{path.name for path in (tmp_path / "memory" / "chunks" / name).iterdir()} for name in ("0", "again", "1")]
    assert names[0] == names[1] != names[2]


def test_a_peer_that_is_not_installed_is_missing_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(PeerMissingError, match="make venv-peers"):
        Cwtrain(tmp_path, tmp_path, tmp_path, python=tmp_path / "python")


def test_a_peer_that_ends_is_missing_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(PeerMissingError, match=r"cwtrain ended: .*cwtrain"):
        Cwtrain(tmp_path, tmp_path, tmp_path, python=Path(sys.executable))


def test_an_anchor_is_written_and_read_back_and_its_bytes_set_against_others(
    subject: Subject, backend: Backend
) -> None:
    of_all, of_planes = anchors.sizes(subject.states, backend)
    assert of_all.value is not None
    assert of_planes.value is not None
    assert 0.6 < of_all.value < 0.8
    assert of_all.value * subject.states.new.nbytes == pytest.approx(
        of_planes.value * anchors.zstd_planes(subject.states.new)
    )
    rows = list(anchors.rates(subject, backend, "a note"))
    assert [row.name for row in rows] == [spec.name for spec in anchors.RATES]
    assert all(row.value is not None for row in rows)


def test_the_worst_pair_is_named_and_the_mean_is_geometric() -> None:
    def sizes(pair: int, dense: int) -> Sizes:
        return Sizes(PAIRS[pair], {"dense": dense}, 1000, 100, 1, 1, 1.0)

    mean, worst = codec._both("x", [sizes(0, 10), sizes(1, 40)], lambda one: one.against_xor("dense"), "a note")
    assert (mean.name, mean.value, mean.spread, mean.runs) == ("x, geometric mean", pytest.approx(0.2), (0.1, 0.4), 2)
    assert mean.note == "2 pairs; a note"
    assert (worst.name, worst.value, worst.note) == ("x, worst pair", 0.4, PAIRS[1].name)


def test_memory_is_measured_in_a_process_of_its_own(subject: Subject, tmp_path: Path) -> None:
    write_checkpoint(subject.states.tensors, subject.states.old, tmp_path / "old")
    write_checkpoint(subject.states.tensors, subject.states.new, tmp_path / "new")
    arguments = [sys.executable, "-m", "bench.memory", str(tmp_path / "old"), str(tmp_path / "new"), "dense", "numpy"]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, cwd=harness.ROOT)
    found = json.loads(done.stdout)
    assert 0 < found["baseline"] <= found["peak"]


def test_what_is_measured_is_named_by_the_paths_that_make_a_result_stale() -> None:
    assert all((harness.ROOT / path).exists() for path in codec.PATHS)
    loaded = {f"bench/{Path(module).name}" for module in _imported_from_bench()}
    assert loaded - {"bench/__init__.py", "bench/__main__.py", "bench/harness.py", "bench/readme.py"} <= set(
        codec.PATHS
    )


def _imported_from_bench() -> set[str]:
    code = "import bench.codec, sys; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('bench.')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=harness.ROOT)
    return set(done.stdout.split())


def test_the_kept_slice_is_small_and_every_pair_is_in_it() -> None:
    assert sum(path.stat().st_size for path in slices.DATA.iterdir()) < 24 << 20
    for pair in PAIRS:
        assert slices.kept(pair), pair.name
        states = slices.load(pair)
        assert 3_500_000 < states.old.size < 4_500_000
        assert sum(extent.lanes for extent in states.tensors) == states.old.size
        assert 0.0002 < states.density < 0.03, pair.name


@pytest.mark.skipif(os.environ.get("DELTAD_TEST_FULL") != "1", reason="takes most of a minute: run `make test-full`")
def test_a_quick_run_measures_more_than_half_of_the_rows() -> None:
    rows = harness.judge(codec.SPECS, codec.measure(quick=True))
    assert 2 * sum(row.value is not None for row in rows) > len(rows)
    assert all(row.skipped for row in rows if row.value is None)
