"""Windows of weight files: nobody changes what is on loan (P2), and memory is bounded (P25)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from deltad.checkpoint import open_checkpoint
from deltad.checkpoint.windows import Arena, WeightFile, Window
from deltad.errors import CheckpointChangedError, CheckpointError

MIB = 1 << 20
PATIENCE = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four MiB in which every eight bytes are others."""
    found = tmp_path / "weights"
    found.write_bytes(np.arange(4 * MIB // 8, dtype=np.uint64).tobytes())
    return found


@contextmanager
def lending(path: Path) -> Iterator[WeightFile]:
    with FileIO(path) as file:
        weights = WeightFile(file, path)
        yield weights
        weights.close()


def in_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WRITE = """
import os, sys
if sys.argv[2] == "truncate":
    os.truncate(sys.argv[1], 4096)
else:
    with open(sys.argv[1], "r+b") as file:
        file.write(b"!" * (4 << 20))
"""


@pytest.mark.parametrize("how", ["truncate", "overwrite"])
def test_whoever_writes_to_a_file_waits_until_its_windows_are_back(path: Path, how: str) -> None:
    path.write_bytes(np.arange(16 * MIB // 8, dtype=np.uint64).tobytes())  # more than is mapped ahead
    before = path.read_bytes()
    arena = Arena()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    try:
        with lending(path) as weights:
            first, second = weights.borrow(100, MIB, arena), weights.borrow(12 * MIB, MIB, arena)
            assert first.mapped
            assert second.mapped
            writer = in_child(WRITE, path, how)
            assert signal.sigtimedwait({signal.SIGURG}, PATIENCE), "the kernel tells of a writer that waits"
            weights.give_back(first)
            # A window that is asked for while a writer waits makes it wait no longer.
            third = weights.borrow(6 * MIB, MIB, arena)
            assert not third.mapped
            assert second.bytes.tobytes() == before[12 * MIB : 13 * MIB]
            assert third.bytes.tobytes() == before[6 * MIB : 7 * MIB]
            assert path.read_bytes() == before
            assert writer.poll() is None
            weights.give_back(second)
            assert writer.communicate(timeout=PATIENCE) == ("", "")
            assert writer.returncode == 0
            assert path.read_bytes() != before
            assert third.bytes.tobytes() == before[6 * MIB : 7 * MIB], "what was read is memory of the reader's own"
            weights.give_back(third)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGURG})


def test_a_file_that_was_cut_short_is_not_lent_beyond_its_end(path: Path) -> None:
    arena = Arena()
    with lending(path) as weights:
        weights.give_back(weights.borrow(0, 4 * MIB, arena))
        os.truncate(path, 2 * MIB + 10)
        with pytest.raises(CheckpointChangedError, match="the end of the file"):
            weights.borrow(2 * MIB, MIB, arena)
        rest = weights.borrow(MIB, MIB + 10, arena)
        assert rest.bytes.tobytes() == path.read_bytes()[MIB:]
        weights.give_back(rest)


def test_a_file_that_someone_has_open_for_writing_is_read_and_mapped_once_it_is_closed(path: Path) -> None:
    arena = Arena()
    with lending(path) as weights:
        with path.open("r+b"):
            window = weights.borrow(8, MIB, arena)
            assert not window.mapped
            assert window.bytes.tobytes() == path.read_bytes()[8 : 8 + MIB]
            weights.give_back(window)
        window = weights.borrow(8, MIB, arena)
        assert window.mapped
        assert window.bytes.tobytes() == path.read_bytes()[8 : 8 + MIB]
        weights.give_back(window)


def test_a_file_that_is_closed_keeps_nobody_waiting_for_what_was_never_given_back(path: Path) -> None:
    with lending(path) as weights:
        assert weights.borrow(0, MIB, Arena()).mapped
    os.truncate(path, 0)


def test_windows_of_several_threads_are_lent_and_given_back_apart(path: Path) -> None:
    arena = Arena()
    with lending(path) as weights, ThreadPoolExecutor(1) as other:
        mine = weights.borrow(0, MIB, arena)
        theirs = other.submit(weights.borrow, MIB, MIB, Arena()).result()
        weights.give_back(mine)
        assert theirs.bytes.tobytes() == path.read_bytes()[MIB : 2 * MIB]
        other.submit(weights.give_back, theirs).result()
        with path.open("r+b"):
            pass  # nobody holds a lease any more, or this would wait for it


def test_an_arena_is_used_again_and_what_does_not_fit_has_memory_of_its_own() -> None:
    arena = Arena()
    first, second = arena.take(MIB), arena.take(MIB)
    assert not np.shares_memory(first.bytes, second.bytes)
    first.bytes[:] = 1
    second.bytes[:] = 2
    arena.put_back(second.start)
    again = arena.take(MIB)
    assert np.shares_memory(again.bytes, second.bytes), "the last one is free at once"
    arena.put_back(first.start)
    other = arena.take(MIB)
    assert not np.shares_memory(other.bytes, again.bytes)
    assert not np.shares_memory(other.bytes, first.bytes), "what is below the last one waits for it"
    arena.put_back(again.start)
    arena.put_back(other.start)
    assert np.shares_memory(arena.take(MIB).bytes, first.bytes)
    large = arena.take(128 * MIB)
    assert large == Window(large.bytes)
    assert large.bytes.size == 128 * MIB


def test_a_file_that_cannot_be_read_is_an_error(path: Path) -> None:
    with FileIO(path, "a") as file, pytest.raises(CheckpointError, match="something readable"):
        WeightFile(file, path).borrow(0, MIB, Arena())


# Whole edges, in a process that must not die.

ENCODE = """
import itertools, signal, sys
from pathlib import Path
from deltad.checkpoint import open_checkpoint
from deltad.delta.backend import choose
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.errors import BaseMismatchError, CheckpointError

which, mapped = sys.argv[3], sys.argv[4] == "mapped"
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})

class Pausing:
    # Has its file changed while the second window is on loan.
    def __init__(self, weights):
        self.weights, self.lent = weights, itertools.count(1)

    def lanes(self, *span):
        lanes = self.weights.lanes(*span)
        if next(self.lent) == 2:
            print("lent", flush=True)
            if mapped:
                signal.sigtimedwait({signal.SIGURG}, 10)  # the kernel tells of a writer that waits
            else:
                sys.stdin.readline()
        return lanes

    def release(self, *span):
        self.weights.release(*span)

backend = choose("numpy")
with open_checkpoint(Path(sys.argv[1])) as base, open_checkpoint(Path(sys.argv[2])) as target:
    sums = sum_weights(base.layout, base, backend, threads=2)
    ends = {"base": base, "target": target}
    ends[which] = Pausing(ends[which])
    try:
        while True:
            encoder = EdgeEncoder(
                target.layout, ends["target"], backend, base=ends["base"], base_sums=sums, threads=2
            )
            for chunk in encoder.chunks():
                pass
            target.check_unchanged()
            base.check_unchanged()
    except (CheckpointError, BaseMismatchError) as error:
        print(type(error).__name__, flush=True)
"""


def sparse_checkpoint(directory: Path, lanes: int) -> Path:
    """One F16 tensor of zeros that takes no room; returns its file."""
    directory.mkdir()
    header = json.dumps({"x": {"dtype": "F16", "shape": [lanes], "data_offsets": [0, 2 * lanes]}}).encode()
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2 * lanes)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"!" * MIB)


def shrink_and_grow(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 4096)
    os.truncate(path, size)


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut short": lambda path: os.truncate(path, 4096),
    "overwritten": overwrite,
    "cut short and grown again": shrink_and_grow,
}


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("which", ["base", "target"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_encoder_survives_whatever_is_done_to_its_files(
    tmp_path: Path, change: Callable[[Path], None], which: str, mapped: bool
) -> None:
    files = {name: sparse_checkpoint(tmp_path / name, 32 * MIB) for name in ("base", "target")}
    with files[which].open("rb" if mapped else "r+b"):  # open for writing: there is no lease to be had
        encoder = in_child(ENCODE, tmp_path / "base", tmp_path / "target", which, "mapped" if mapped else "read")
        assert encoder.stdout
        assert encoder.stdout.readline() == "lent\n"
        change(files[which])
        out, err = encoder.communicate("\n", timeout=PATIENCE)
    assert (encoder.returncode, err) == (0, "")
    assert out in {"CheckpointChangedError\n", "BaseMismatchError\n"}


GROWTH = """
import json, resource, sys
from pathlib import Path
from deltad.checkpoint import open_checkpoint
from deltad.delta.backend import choose
from deltad.delta.codec import EdgeEncoder, sum_weights

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

backend = choose("numpy")
for name in sys.argv[2:]:
    with open_checkpoint(Path(sys.argv[1], name, "base")) as base, open_checkpoint(Path(sys.argv[1], name)) as target:
        sums = sum_weights(base.layout, base, backend, threads=2)
        before = peak()
        encoder = EdgeEncoder(target.layout, target, backend, base=base, base_sums=sums, threads=2)
        for chunk in encoder.chunks():
            pass
        assert sum(spec.bytes for spec in target.layout.tensors) == int(name) << 20
    print(json.dumps(peak() - before))
"""


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_memory_does_not_grow_with_the_model_on_two_threads(tmp_path: Path, mapped: bool) -> None:
    small, large = 64, 256
    files = []
    for size in (small, large):
        files.append(sparse_checkpoint(tmp_path / f"{size}", size * MIB // 2))
        files.append(sparse_checkpoint(tmp_path / f"{size}" / "base", size * MIB // 2))
    held = [path.open("r+b") for path in files] if not mapped else []
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path), str(small), str(large)],
        capture_output=True,
        text=True,
        check=True,
        timeout=4 * PATIENCE,
    )
    for file in held:
        file.close()
    first, more = map(json.loads, done.stdout.split())
    assert first < 128 * MIB
    assert more < 16 * MIB, "a model four times as large needs what the small one needed"


def test_a_checkpoint_is_rounded_without_holding_it_in_full_precision(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(1_500_000).astype(np.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [values.size], "data_offsets": [0, values.nbytes]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    with open_checkpoint(tmp_path, publish_as="bf16") as checkpoint:
        one, other = checkpoint.lanes(0, 0, 1_000_000), checkpoint.lanes(0, 400_000, 1_100_000)
        assert np.array_equal(one[400_000:], other[:600_000])
        bits = values.view(np.uint32)
        assert np.array_equal(one, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)[:1_000_000])
        checkpoint.release(0, 400_000, 1_100_000)
        checkpoint.release(0, 0, 1_000_000)
        again = checkpoint.lanes(0, 0, 1_000_000)
        assert np.shares_memory(one, again)
