"""What the numba backend owes beyond being equal: any memory, any thread, any processor, and no slow start."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deltad.delta.backend import UNSIGNED, EncodedFrame, Lanes, Mode, Place, choose
from deltad.delta.backend.numpy import NumpyBackend
from deltad.errors import ConfigError, FormatError, IntegrityError
from deltad.types import DTYPES

numba = pytest.importorskip("numba", exc_type=ImportError)

from deltad.delta.backend.numba.bits import select_by_counting  # noqa: E402
from deltad.delta.backend.numba.compiling import kernel  # noqa: E402
from deltad.delta.backend.numba.engine import NumbaBackend  # noqa: E402

BF16 = DTYPES["BF16"]
BACKEND = NumbaBackend()
REFERENCE = NumpyBackend()
MODES: tuple[Mode, ...] = ("blind", "fast", "dense")
ROOT = Path(__file__).parents[2]


def weights(size: int, seed: int = 0) -> tuple[Lanes, Lanes]:
    """bfloat16 lanes of a bell and, as training changes them, small ones more often than large ones."""
    rng = np.random.default_rng(seed)
    old = rng.normal(0, 0.02, size).astype(np.float32)
    new = old + rng.normal(0, 1e-5, size).astype(np.float32)
    before, after = ((bits.view(np.uint32) >> 16).astype(np.uint16) for bits in (old, new))
    return before, after


def plain(frame: EncodedFrame | None) -> list[bytes]:
    assert frame is not None
    return [bytes(stream) for stream in frame.streams]


class Fenced:
    """Memory between two pages that nobody may touch: what ends at its end is never read beyond."""

    def __init__(self, size: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        self._pages = -(-size // page)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        whole = (self._pages + 2) * page
        start = libc.mmap(None, whole, 0, 0x22, -1, 0)
        assert libc.mprotect(start + page, whole - 2 * page, 3) == 0
        held = (ctypes.c_uint8 * (whole - 2 * page)).from_address(start + page)
        self.bytes = np.frombuffer(held, np.uint8)

    def at_the_end(self, data: np.ndarray) -> np.ndarray:
        view = self.bytes[self.bytes.size - data.nbytes :].view(data.dtype)
        view[:] = data
        return view

    def at_the_start(self, data: np.ndarray) -> np.ndarray:
        view = self.bytes[: data.nbytes].view(data.dtype)
        view[:] = data
        return view


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 63, 65, 8191, 8193, 70_001])
def test_nothing_is_touched_before_or_behind_the_lanes_and_streams(size: int, mode: Mode) -> None:
    before, after = weights(size)
    after[-1] ^= 1
    places = [Place(5, 3)]
    for cut in (Fenced.at_the_end, Fenced.at_the_start):
        old, new = cut(Fenced(before.nbytes), before), cut(Fenced(before.nbytes), after)
        frame = BACKEND.encode([old], [new], places, BF16, mode)
        assert plain(frame) == plain(REFERENCE.encode([before], [after], places, BF16, mode))
        assert frame is not None
        fenced = [cut(Fenced(len(data)), np.frombuffer(data, np.uint8)) for data in plain(frame)]
        changes = BACKEND.decode(frame.coding, fenced, [old], BF16)
        assert np.array_equal(changes.positions, np.flatnonzero(before != after))
        BACKEND.decode_apply(frame.coding, frame.sums[0], fenced, [old], places, BF16)
        assert np.array_equal(old, after)
        assert np.array_equal(BACKEND.sum([old], places), REFERENCE.sum([after], places))


@pytest.mark.parametrize("mode", MODES)
def test_no_stream_of_any_bytes_reaches_outside(mode: Mode) -> None:
    rng = np.random.default_rng(1)
    before, after = weights(20_000)
    places = [Place(5, 3)]
    frame = REFERENCE.encode([before], [after], places, BF16, mode)
    assert frame is not None
    target = Fenced(before.nbytes).at_the_end(before)
    for _ in range(300):
        streams = [bytearray(stream) for stream in frame.streams]
        for stream in rng.choice(len(streams), 2):
            for at in rng.integers(0, max(1, len(streams[stream])), 4):
                if streams[stream]:
                    streams[stream][at] = rng.choice([0, 1, 0x7F, 0xFF, rng.integers(256)])
        fenced = [Fenced(len(data)).at_the_end(np.frombuffer(bytes(data), np.uint8)) for data in streams]
        try:
            BACKEND.decode_apply(frame.coding, frame.sums[0], fenced, [target], places, BF16)
        except (FormatError, IntegrityError):
            assert np.array_equal(target, before)
        else:
            target[:] = before


@pytest.mark.parametrize("size", [1, 300, 4095, 4097, 16_391])
def test_packing_touches_nothing_before_or_behind_the_lanes_and_streams(size: int) -> None:
    lanes, _ = weights(size)
    expected = REFERENCE.pack([lanes], BF16)
    for cut in (Fenced.at_the_end, Fenced.at_the_start):
        assert BACKEND.pack([cut(Fenced(lanes.nbytes), lanes)], BF16) == expected
        fenced = [cut(Fenced(len(data)), np.frombuffer(data, np.uint8)) for data in expected]
        assert np.array_equal(BACKEND.unpack(fenced, size, BF16), lanes)


def test_no_packed_stream_of_any_bytes_reaches_outside() -> None:
    rng = np.random.default_rng(1)
    lanes, _ = weights(20_000)
    kept = [bytes(stream) for stream in REFERENCE.pack([lanes], BF16)][3:]
    assert [len(stream) for stream in kept[:2]] == [128, 10], "the plane of the exponents is coded"
    for _ in range(300):
        streams = [bytearray(stream) for stream in kept]
        for at in rng.integers(0, len(streams[2]), 6):
            streams[2][at : at + 200] = bytes([rng.choice([0, 0x55, 0xFF, rng.integers(256)])]) * len(
                streams[2][at : at + 200]
            )
        fenced = [Fenced(len(data)).at_the_end(np.frombuffer(bytes(data), np.uint8)) for data in streams]
        with pytest.raises(FormatError):
            BACKEND.unpack(fenced, lanes.size, DTYPES["U8"])


@pytest.mark.parametrize("mode", MODES)
def test_lanes_of_a_mapped_file_are_read_where_they_lie(mode: Mode) -> None:
    before, after = weights(30_000)
    odd = [np.frombuffer(b"\0" + lanes.tobytes(), np.uint16, offset=1) for lanes in (before, after)]
    assert not odd[0].flags.aligned
    assert not odd[0].flags.writeable
    places = [Place(5, 3)]
    found = BACKEND.encode([odd[0]], [odd[1]], places, BF16, mode)
    assert plain(found) == plain(REFERENCE.encode([before], [after], places, BF16, mode))
    assert BACKEND.pack([odd[0]], BF16) == REFERENCE.pack([before], BF16)


@pytest.mark.parametrize("name", ["BF16", "F64", "I8"])
@pytest.mark.parametrize("mode", MODES)
def test_buffers_grow_with_what_a_frame_needs(name: str, mode: Mode) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(2)
    old, new = (
        rng.integers(0, 256, 200_000 * dtype.lane_bytes, dtype=np.uint8).view(UNSIGNED[dtype.lane_bytes])
        for _ in range(2)
    )
    places = [Place(1, 0), Place(2, 9)]
    cut = ([lanes[:60_000], lanes[60_000:]] for lanes in (old, new))
    before, after = cut
    found = BACKEND.encode(before, after, places, dtype, mode)
    assert plain(found) == plain(REFERENCE.encode(before, after, places, dtype, mode))
    assert found is not None
    BACKEND.decode_apply(found.coding, found.sums.sum(axis=0, dtype=np.uint64), found.streams, before, places, dtype)
    assert np.array_equal(old, new)


def test_threads_work_on_frames_side_by_side() -> None:
    frames = [weights(200_000 + 17 * seed, seed) for seed in range(12)]

    def coded(pair: tuple[Lanes, Lanes]) -> list[bytes]:
        old, new = pair[0].copy(), pair[1]
        frame = BACKEND.encode([old], [new], [Place(1, 0)], BF16, "dense")
        assert frame is not None
        BACKEND.decode_apply(frame.coding, frame.sums[0], frame.streams, [old], [Place(1, 0)], BF16)
        assert np.array_equal(old, new)
        return plain(frame)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(coded, frames)) == [coded(pair) for pair in frames]


def test_the_portable_way_to_select_a_bit_is_right() -> None:
    @kernel
    def positions(masks: np.ndarray, ranks: np.ndarray, found: np.ndarray) -> None:
        for j in range(masks.size):
            found[j] = select_by_counting(masks[j], ranks[j])

    rng = np.random.default_rng(4)
    masks = rng.integers(1, 2**64, 500, dtype=np.uint64) & rng.integers(0, 2**64, 500, dtype=np.uint64) | np.uint64(1)
    masks[:2] = 2**64 - 1, 1 << 63
    set_bits = [[q for q in range(64) if int(mask) >> q & 1] for mask in masks]
    ranks = np.array([rng.integers(len(bits)) for bits in set_bits], np.uint64)
    found = np.zeros(500, np.uint64)
    positions(masks, ranks, found)
    assert found.tolist() == [bits[rank] for bits, rank in zip(set_bits, ranks.tolist(), strict=True)]


WARM = """
import os, resource, signal
if "FULL_DISK" in os.environ:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
from deltad.delta.backend.numba.proof import proven
print(proven()[1])
if "WARM" in os.environ:
    from deltad.delta.backend.numba.proof import warm
    warm(["BF16"])
from deltad.delta.backend.numba import sums
print(sum(sums.sum_runs.stats.cache_hits.values()), sum(sums.sum_runs.stats.cache_misses.values()))
"""


def started(root: Path, cache: Path, **environment: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", WARM], cwd=root, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def test_a_processor_without_wide_vectors_and_pdep_makes_the_same_frames(tmp_path: Path) -> None:
    finding, _ = started(ROOT, tmp_path, NUMBA_CPU_NAME="generic", WARM="1")
    assert finding.endswith("without PDEP")


def test_a_second_start_compiles_nothing_until_the_sources_change(tmp_path: Path) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    shutil.copytree(ROOT / "deltad", root / "deltad", ignore=shutil.ignore_patterns("__pycache__"))
    assert started(root, cache)[1] == "0 1"
    assert started(root, cache)[1] == "1 0"
    # The kernel is in another module, which numba by itself would look at alone.
    changed = root / "deltad/delta/backend/numba/bits.py"
    changed.write_text(changed.read_text() + "\n# changed\n")
    assert started(root, cache)[1] == "0 1"


def test_kernels_that_the_disk_has_no_room_for_work_all_the_same(tmp_path: Path) -> None:
    finding, cached = started(ROOT, tmp_path, FULL_DISK="1")
    assert "works here" in finding
    assert cached == "0 1"


def test_without_numba_numpy_is_taken_and_a_daemon_says_why() -> None:
    script = (
        "import sys, time; sys.modules['numba'] = None\n"
        "from deltad.delta.backend import choose\n"
        "from deltad.delta.backend.choice import candidates, probe\n"
        "from deltad.errors import ConfigError\n"
        "print(choose().name)\n"
        "print(probe('auto', candidates(0, 2 << 30), clock=time.monotonic, on_switch=print).reason)\n"
        "try: choose('numba')\n"
        "except ConfigError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    name, reason, refusal = done.stdout.splitlines()
    assert name == "numpy"
    assert "numba does not work here: it cannot be imported" in reason
    assert refusal.startswith("[backend] kind = 'numba': expected numba that works here")


def test_a_cheap_choice_takes_numba_where_it_works() -> None:
    assert isinstance(choose(), NumbaBackend)
    assert isinstance(choose("numba"), NumbaBackend)
    assert choose("numpy").name == "numpy"
    with pytest.raises(ConfigError, match="auto, cupy, numba or numpy"):
        choose("cuda")


def test_positions_beyond_the_target_are_refused_before_anything_is_written() -> None:
    before, after = weights(5000)
    frame = BACKEND.encode([before], [after], [Place(1, 0)], BF16, "blind")
    assert frame is not None
    changes = BACKEND.decode(frame.coding, frame.streams, None, BF16)
    short = before[: int(changes.positions[-1])].copy()
    kept = short.copy()
    with pytest.raises(ValueError, match="positions"):
        BACKEND.apply(short, changes, BF16, 1)
    assert np.array_equal(short, kept)
