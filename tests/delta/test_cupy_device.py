"""How the CUDA backend drives CuPy: what is queued, what waits for what, and how failures come out.

CuPy is `tests.kit.lazy_cupy`: it does everything as late as CUDA may. What it cannot show, `bench/gpu_check.py` does.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deltad.delta.backend import Backend, EncodedFrame, Lanes, Mode, Place
from deltad.delta.backend.cuda import open_backend
from deltad.delta.backend.numpy import NumpyBackend
from deltad.errors import DeviceError, FormatError
from deltad.types import DTYPES
from tests.kit.host_device import compiler
from tests.kit.lazy_cupy import LazyCupy, OnGpu

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: with g++ the kernels run on the host")

BF16 = DTYPES["BF16"]
REFERENCE = NumpyBackend()
MODES: tuple[Mode, ...] = ("blind", "fast")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> LazyCupy:
    return installed(monkeypatch, LazyCupy())


def installed(monkeypatch: pytest.MonkeyPatch, module: LazyCupy) -> LazyCupy:
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def weights(size: int, seed: int) -> tuple[list[Lanes], list[Lanes], list[Place]]:
    """Two segments, and what training makes of them."""
    rng = np.random.default_rng(seed)
    old = rng.normal(0, 0.02, size).astype(np.float32)
    new = old + rng.normal(0, 1e-6, size).astype(np.float32)
    before, after = ((lanes.view(np.uint32) >> 16).astype(np.uint16) for lanes in (old, new))
    cut = size // 3
    return [before[:cut], before[cut:]], [after[:cut], after[cut:]], [Place(1, 0), Place(2, 5)]


def coded(backend: Backend, seed: int, mode: Mode, size: int = 30_000) -> list[bytes]:
    """Encode, decode, apply and sum with a backend; the streams."""
    old, new, places = weights(size, seed)
    frame = backend.encode(old, new, places, BF16, mode)
    assert frame is not None
    changes = backend.decode(frame.coding, frame.streams, old, BF16)
    assert np.array_equal(changes.positions, np.flatnonzero(np.concatenate(old) != np.concatenate(new)))
    target = [lanes.copy() for lanes in old]
    backend.decode_apply(frame.coding, check_of(frame), frame.streams, target, places, BF16)
    assert all(np.array_equal(a, b) for a, b in zip(target, new, strict=True))
    assert np.array_equal(backend.sum(new, places), REFERENCE.sum(new, places))
    return [bytes(stream) for stream in frame.streams]


def check_of(frame: EncodedFrame) -> np.ndarray:
    return frame.sums.sum(axis=0, dtype=np.uint64)


@pytest.mark.parametrize("mode", MODES)
def test_frames_one_after_the_other_come_out_right_whatever_is_still_queued(cupy: LazyCupy, mode: Mode) -> None:
    backend = open_backend()
    for seed, size in enumerate((30_000, 30_000, 200, 70_000, 30_000)):
        assert coded(backend, seed, mode, size) == coded(REFERENCE, seed, mode, size)


def test_a_frame_of_many_stages_waits_for_each_before_it_is_filled_again(cupy: LazyCupy) -> None:
    backend = open_backend()
    old, new, places = weights(18 << 20, 9)
    found, expected = (b.encode(old, new, places, BF16, "blind") for b in (backend, REFERENCE))
    assert found is not None
    assert expected is not None
    assert [bytes(stream) for stream in found.streams] == [bytes(stream) for stream in expected.streams]
    assert np.array_equal(found.sums, expected.sums)
    carriers = cupy.carriers[-8:]
    assert carriers == carriers[:2] * 4, "two stages take turns"
    assert carriers[0] != carriers[1]


def test_threads_work_on_frames_side_by_side(cupy: LazyCupy) -> None:
    backend = open_backend()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: coded(backend, seed, "fast"), range(12)))
    assert found == [coded(REFERENCE, seed, "fast") for seed in range(12)]


def test_lanes_on_the_gpu_have_been_written_when_the_call_returns(cupy: LazyCupy) -> None:
    backend = open_backend()
    old, new, places = weights(30_000, 2)
    frame = REFERENCE.encode(old, new, places, BF16, "fast")
    assert frame is not None
    target = [lanes.copy().view(OnGpu) for lanes in old]
    backend.decode_apply(frame.coding, check_of(frame), frame.streams, target, places, BF16)
    assert all(np.array_equal(a, b) for a, b in zip(target, new, strict=True))


def test_an_array_of_another_gpu_is_refused(cupy: LazyCupy) -> None:
    backend = open_backend(3)
    with pytest.raises(DeviceError, match=r"expected one on Lazy \(GPU 3\), found one on GPU 0"):
        backend.sum([np.zeros(8, np.uint8).view(OnGpu)], [Place(1, 0)])


def test_a_refused_frame_leaves_the_device_usable(cupy: LazyCupy) -> None:
    backend = open_backend()
    old, new, places = weights(30_000, 3)
    frame = REFERENCE.encode(old, new, places, BF16, "fast")
    assert frame is not None
    for _ in range(5):
        with pytest.raises(FormatError):
            backend.decode(frame.coding, [b"\xff" * len(stream) for stream in frame.streams], old, BF16)
    assert coded(backend, 3, "fast") == coded(REFERENCE, 3, "fast")


def test_a_gpu_that_another_process_fills_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, LazyCupy(free=1 << 20))
    with pytest.raises(DeviceError, match="found 1048576 of 34359738368; another process fills it"):
        open_backend()


def test_memory_stays_within_the_limit_and_what_frames_left_is_given_back_first(cupy: LazyCupy) -> None:
    backend = open_backend(0, 2 << 20)
    for size in (20_000, 21_000, 60_000, 61_000, 5000, 62_000, 63_000):
        assert coded(backend, size, "blind", size) == coded(REFERENCE, size, "blind", size)
    with pytest.raises(DeviceError, match="expected room within 2097152 bytes"):
        coded(backend, 1, "blind", 2_000_000)
    assert coded(backend, 1, "blind") == coded(REFERENCE, 1, "blind")


def test_every_failure_of_cuda_comes_out_as_a_device_error_with_nothing_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = installed(monkeypatch, LazyCupy())
    backend = open_backend()
    old, new, places = weights(5000, 4)
    frame = REFERENCE.encode(old, new, places, BF16, "fast")
    assert frame is not None
    failures = 0
    for calls in range(200):
        target = [lanes.copy() for lanes in old]
        cupy.calls = calls
        try:
            backend.decode_apply(frame.coding, check_of(frame), frame.streams, target, places, BF16)
        except DeviceError:
            assert all(np.array_equal(a, b) for a, b in zip(target, old, strict=True))
            failures += 1
        else:
            break
    assert 30 < failures < 200
