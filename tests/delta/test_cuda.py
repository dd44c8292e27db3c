"""What the CUDA backend owes beyond being equal: any order of threads, no step outside, arrays left where they lie,
a source that NVIDIA's compiler takes, and a way out when the GPU is gone.

That its kernels are equal to the reference is in `test_backends.py` and in the vectors, run on the host.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deltad.delta.backend import UNSIGNED, Changes, EncodedFrame, Lanes, Mode, Place
from deltad.delta.backend.cuda import open_backend
from deltad.delta.backend.cuda.device import check_free
from deltad.delta.backend.cuda.engine import CudaBackend
from deltad.delta.backend.cuda.source import OPTIONS, kernels, pack, text
from deltad.delta.backend.numpy import NumpyBackend
from deltad.errors import DeviceError
from deltad.types import DTYPES
from tests.kit import nvrtc
from tests.kit.failing_device import FailingDevice
from tests.kit.host_device import ORDERS, SANITIZED, HostDevice, OnDevice, built, compiler, sanitizer

BF16 = DTYPES["BF16"]
REFERENCE = NumpyBackend()
MODES: tuple[Mode, ...] = ("blind", "fast", "dense")
ROOT = Path(__file__).parents[2]
PLACES = [Place(5, 3), Place(6, 77_777), Place(7, 0)]

on_host = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: with g++ the kernels run on the host")


def weights(seed: int, width: int = 2) -> tuple[list[Lanes], list[Lanes]]:
    """Three segments of a bell and, as training changes them, small lanes more often than large ones."""
    rng = np.random.default_rng(seed)
    old, new = [], []
    for size in (1, 6000, 2049):
        base = rng.normal(0, 0.02, size).astype(np.float32)
        moved = base + rng.normal(0, 2e-4, size).astype(np.float32)
        shift = 32 - 8 * min(4, width)
        pair = [(lanes.view(np.uint32) >> shift).astype(UNSIGNED[width]) for lanes in (base, moved)]
        old.append(pair[0] << (32 if width == 8 else 0))
        new.append(pair[1] << (32 if width == 8 else 0))
    return old, new


def encoded(backend: CudaBackend | NumpyBackend, old: list[Lanes], new: list[Lanes], mode: Mode) -> EncodedFrame:
    dtype = DTYPES[{1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}[old[0].itemsize]]
    frame = backend.encode(old, new, PLACES, dtype, mode)
    assert frame is not None
    return frame


def check_of(frame: EncodedFrame) -> np.ndarray:
    return frame.sums.sum(axis=0, dtype=np.uint64)


def plain(frame: EncodedFrame) -> list[bytes]:
    return [bytes(stream) for stream in frame.streams]


def on_device(lanes: Lanes) -> Lanes:
    return lanes.copy().view(OnDevice)


@on_host
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_threads_and_blocks_changes_nothing(order: str, width: int, mode: Mode) -> None:
    backend = CudaBackend(HostDevice(order))
    old, new = weights(1, width)
    found, expected = (encoded(b, old, new, mode) for b in (backend, REFERENCE))
    assert plain(found) == plain(expected)
    assert np.array_equal(found.sums, expected.sums)
    target = [lanes.copy() for lanes in old]
    dtype = DTYPES[{1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}[width]]
    sums = backend.decode_apply(found.coding, check_of(found), found.streams, target, PLACES, dtype)
    assert all(np.array_equal(a, b) for a, b in zip(target, new, strict=True))
    assert np.array_equal(sums, expected.sums)


@on_host
@pytest.mark.parametrize("mode", MODES)
def test_lanes_on_the_device_are_read_and_written_where_they_lie(mode: Mode) -> None:
    device = HostDevice()
    backend = CudaBackend(device)
    old, new = weights(2)
    expected = encoded(REFERENCE, old, new, mode)
    before, after = ([on_device(lanes) for lanes in side] for side in (old, new))
    device.uploaded.clear()
    found = encoded(backend, before, after, mode)
    assert plain(found) == plain(expected)
    assert device.uploaded_bytes < sum(lanes.nbytes for lanes in old), "tables travel, lanes do not"
    backend.decode_apply(found.coding, check_of(found), found.streams, before, PLACES, BF16)
    assert all(np.array_equal(a, b) for a, b in zip(before, new, strict=True))
    places = [Place(9, 0), Place(10, 1), Place(11, 32_765)]
    assert np.array_equal(backend.sum(after, places), REFERENCE.sum(new, places))


@on_host
def test_a_frame_of_the_host_and_the_device_is_put_together() -> None:
    backend = CudaBackend(HostDevice())
    old, new = weights(3)
    mixed = [old[0].copy(), on_device(old[1]), old[2].copy()]
    found = encoded(backend, mixed, new, "fast")
    assert plain(found) == plain(encoded(REFERENCE, old, new, "fast"))
    backend.decode_apply(found.coding, check_of(found), found.streams, mixed, PLACES, BF16)
    assert all(np.array_equal(a, b) for a, b in zip(mixed, new, strict=True))


@on_host
@pytest.mark.parametrize("step", [1, 3])
def test_changes_are_applied_to_lanes_on_the_device_at_any_step(step: int) -> None:
    backend = CudaBackend(HostDevice())
    old, new = weights(4)
    frame = REFERENCE.encode(old[1:2], new[1:2], PLACES[:1], BF16, "blind")
    assert frame is not None
    changes = REFERENCE.decode(frame.coding, frame.streams, None, BF16)
    memory = np.full(old[1].size * step, 7, np.uint16).view(OnDevice)
    target = memory[::step]
    target[:] = old[1]
    replaced, share = backend.apply(target, changes, BF16, 11)
    assert np.array_equal(target, new[1])
    assert np.array_equal(replaced, old[1][changes.positions])
    assert np.array_equal(share, REFERENCE.apply(old[1].copy(), changes, BF16, 11)[1])
    assert (memory.reshape(-1, step)[:, 1:] == 7).all(), "what lies between is not touched"


@on_host
def test_positions_beyond_the_target_are_refused_before_anything_is_written() -> None:
    backend = CudaBackend(HostDevice())
    target = on_device(np.arange(10, dtype=np.uint16))
    kept = target.copy()
    for positions in ([3, 10], [-1, 3]):
        changes = Changes(np.array(positions), np.ones(2, np.uint16))
        with pytest.raises(ValueError, match="positions"):
            backend.apply(target, changes, BF16, 1)
    assert np.array_equal(target, kept)


@on_host
def test_lanes_travel_in_batches_with_kernels_in_between() -> None:
    device = HostDevice()
    old = [np.zeros(9 << 20, np.uint16), np.ones(100, np.uint16)]
    new = [lanes.copy() for lanes in old]
    for at in (0, (4 << 20) - 1, 4 << 20, (9 << 20) - 1):
        new[0][at] = 5
    new[1][99] = 5
    frame = CudaBackend(device).encode(old, new, PLACES[:2], BF16, "blind")
    expected = REFERENCE.encode(old, new, PLACES[:2], BF16, "blind")
    assert frame is not None
    assert expected is not None
    assert plain(frame) == plain(expected)
    assert np.array_equal(frame.sums, expected.sums)
    order = [step for step in device.steps if step in ("lanes", "collect_2")]
    assert order == ["lanes", "lanes", "collect_2"] * 3


@on_host
@pytest.mark.parametrize("mode", ["blind", "dense"])
def test_a_gpu_that_goes_away_leaves_the_frame_to_another_backend(mode: Mode) -> None:
    old, new = weights(5)
    frame = encoded(REFERENCE, old, new, mode)
    survived, lasts = False, 0
    while not survived:
        target = [lanes.copy() for lanes in old]
        backend = CudaBackend(FailingDevice(lasts))
        try:
            backend.decode_apply(frame.coding, check_of(frame), frame.streams, target, PLACES, BF16)
            survived = True
        except DeviceError:
            assert all(np.array_equal(a, b) for a, b in zip(target, old, strict=True))
            REFERENCE.decode_apply(frame.coding, check_of(frame), frame.streams, target, PLACES, BF16)
        assert all(np.array_equal(a, b) for a, b in zip(target, new, strict=True))
        lasts += 1
    assert lasts > 5, "there are launches to fail in"


@on_host
def test_a_gpu_that_goes_away_while_encoding_says_so() -> None:
    old, new = weights(5)
    for lasts in range(8):
        with pytest.raises(DeviceError, match="nothing answers"):
            encoded(CudaBackend(FailingDevice(lasts)), old, new, "dense")


@on_host
def test_threads_share_a_device() -> None:
    from concurrent.futures import ThreadPoolExecutor

    backend = CudaBackend(HostDevice())
    pairs = [weights(seed) for seed in range(6)]

    def streams(pair: tuple[list[Lanes], list[Lanes]]) -> list[bytes]:
        return plain(encoded(backend, *pair, "dense"))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(streams, pairs))
    assert found == [plain(encoded(REFERENCE, *pair, "dense")) for pair in pairs]


HOSTILE = """
import sys
import numpy as np
from deltad.delta.backend import Place
from deltad.delta.backend.cuda.engine import CudaBackend
from deltad.delta.coding import check_coding, check_lengths
from deltad.errors import FormatError, IntegrityError
from tests.delta.test_cuda import BF16, MODES, PLACES, REFERENCE, check_of, encoded, plain, weights
from tests.kit.host_device import SANITIZED, HostDevice

backend, rng, refused = CudaBackend(HostDevice("scattered", *SANITIZED)), np.random.default_rng(1), 0
for mode in MODES:
    old, new = weights(6)
    frame = encoded(backend, old, new, mode)
    assert plain(frame) == plain(encoded(REFERENCE, old, new, mode))
    backend.sum([new[1].view(np.uint8)[1:]], [Place(5, 65_533)])
    for _ in range(int(sys.argv[1])):
        streams = [bytearray(stream) for stream in plain(frame)]
        for which in rng.choice(len(streams), 2):
            stream = streams[which]
            for at in rng.integers(0, max(1, len(stream)), 4 if stream else 0):
                stream[at] = rng.choice([0, 1, 0x7F, 0xFF, rng.integers(256)])
            if rng.integers(3) == 0:
                del stream[len(stream) - 4 * int(rng.integers(1, 3)) :]
        base = [rng.permutation(lanes) for lanes in old] if rng.integers(2) else [lanes.copy() for lanes in old]
        kept = [lanes.copy() for lanes in base]
        try:
            check_lengths(frame.coding, BF16, [len(stream) for stream in streams])
            backend.decode(frame.coding, streams, base, BF16)
            backend.decode_apply(frame.coding, check_of(frame), streams, base, PLACES, BF16)
        except (FormatError, IntegrityError):
            refused += 1
            assert all(np.array_equal(a, b) for a, b in zip(base, kept))
print(refused)
"""


@on_host
@pytest.mark.skipif(sanitizer() is None, reason="no address sanitizer: with g++'s libasan kernels run under it")
def test_no_stream_and_no_base_makes_a_kernel_step_outside() -> None:
    """Every buffer is an allocation of its own, and a step outside ends the process with a report."""
    built(*SANITIZED)
    rounds = 300 if os.environ.get("DELTAD_TEST_FULL") else 25
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(sanitizer())}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"
    command = [sys.executable, "-c", HOSTILE, str(rounds)]
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > rounds


@pytest.mark.skipif(nvrtc.library() is None, reason="no NVRTC: with `pip install nvidia-cuda-nvrtc` this compiles")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_for_the_gpus_that_there_are(architecture: str) -> None:
    cubin = nvrtc.compiled(text(), *OPTIONS, f"--gpu-architecture={architecture}")
    assert cubin.startswith(b"\x7fELF")
    missing = [name for name in kernels() if f".text.{name}\0".encode() not in cubin]
    assert not missing


@pytest.mark.skipif(nvrtc.library() is None, reason="no NVRTC: with `pip install nvidia-cuda-nvrtc` this compiles")
def test_a_kernel_that_does_not_compile_is_told_with_its_line() -> None:
    broken = text().replace("struct Tiling {", "struct Tiling { Segment nowhere();;; oops", 1)
    with pytest.raises(nvrtc.CompileError, match=r"lanes\.cuh\(\d+\): error"):
        nvrtc.compiled(broken, *OPTIONS, "--gpu-architecture=sm_90")


def test_barriers_stand_between_phases_and_nothing_counts_on_warps() -> None:
    code = "\n".join(line.partition("//")[0] for line in text().splitlines())
    assert code.count("__syncthreads") == 1
    assert not re.findall(r"__shfl\w*|__ballot\w*|__syncwarp|__activemask|warpSize|volatile|\basm\b", code)


def test_arguments_that_a_kernel_does_not_have_never_reach_it() -> None:
    fields = {"numbers": 1, "which": 2, "count": 3, "out": 4}
    assert pack("pick_words", fields).tolist() == [1, 2, 3, 4]
    with pytest.raises(TypeError, match="out"):
        pack("pick_words", {"numbers": 1, "which": 2, "count": 3})
    with pytest.raises(TypeError, match="base is 2 words, not 1"):
        pack("sum_bytes", {"data": 1, "offset": 0, "size": 1, "keys": 1, "base": 1, "sums": 1})


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DeviceError, match="GPU 4711"):
        open_backend(4711)


def test_a_device_that_another_process_fills_is_not_taken() -> None:
    check_free("GPU 0", 100, 200, 100)
    with pytest.raises(DeviceError, match="expected 101 bytes of memory free, found 100 of 200; another process"):
        check_free("GPU 0", 100, 200, 101)
