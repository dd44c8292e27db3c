"""Is the CUDA backend right on this GPU, and how fast is it? `python bench/gpu_check.py [--device N] [--json PATH]`

One GPU, at most four minutes, no installation beyond NumPy and CuPy. First frames of fresh random data are compared
with the numpy reference, stream by stream; the first difference ends the check. Then come rates, as shares of
what this GPU and its link copy in the same run; `--only-check` leaves them out, as under compute-sanitizer. Ends
with 0 when everything was right, 1 when something was not, and 69 where there is no GPU to check.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
    import msgspec  # noqa: F401
except ImportError:
    # The codec's modules declare what they store with it; a check stores nothing, so declarations are enough.
    stand_in = types.ModuleType("msgspec")
    stand_in.Struct = type("Struct", (), {"__init_subclass__": classmethod(lambda _, **_options: None)})  # type: ignore[attr-defined]
    stand_in.field = lambda **_options: None  # type: ignore[attr-defined]
    stand_in.msgpack = types.SimpleNamespace(Encoder=object)  # type: ignore[attr-defined]
    sys.modules["msgspec"] = stand_in

from bench.gpu_rows import Rows, report  # noqa: E402
from deltad.delta.backend import UNSIGNED, EncodedFrame, Lanes, Mode, Place  # noqa: E402
from deltad.delta.backend.cuda import open_backend  # noqa: E402
from deltad.delta.backend.numpy import NumpyBackend  # noqa: E402
from deltad.delta.coding import exponents  # noqa: E402
from deltad.errors import DeltadError, DeviceError, FormatError, IntegrityError  # noqa: E402
from deltad.types import DTYPES, DType  # noqa: E402

REFERENCE = NumpyBackend()
MODES: tuple[Mode, ...] = ("blind", "fast", "mid", "dense")
CHECKED = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U16", "I32", "U64", "F4", "C64")
MEMORY = 8 << 30
LARGE = 1 << 28  # lanes of the frame that rates are measured on: half a GiB of bf16, many times the caches
PART = 1 << 24  # lanes of it that are drawn; and of a frame of the host, 32 MiB of bf16
LATEST = 200.0  # seconds after which nothing new is begun
RUNS = 7


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description="Check the CUDA backend on one GPU, and measure it.")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "gpu.json", metavar="PATH")
    parser.add_argument(
        "--only-check", action="store_true", help="compare with the reference, measure and write nothing"
    )
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        backend = open_backend(options.device, MEMORY)
    except DeviceError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return error.exit_code
    print(backend.device.name, flush=True)
    rows = Rows(started + LATEST)
    seed = time.time_ns()
    cupy = importlib.import_module("cupy")
    try:
        with cupy.cuda.Device(options.device):
            check(backend, cupy, rows, np.random.default_rng(seed))
            if options.only_check:
                print(f"everything was right; seed {seed}")
                return 0
            measure(backend, cupy, rows)
    except (AssertionError, DeltadError) as error:
        print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(report(rows, options.json, backend.device.name, f"seed {seed}"))
    return 0


def random_pair(rng: np.random.Generator, dtype: DType, size: int) -> tuple[Lanes, Lanes]:
    """Lanes of which some change: floats of a bell by small steps, a few lanes to anything; others as they come."""
    kind = UNSIGNED[dtype.lane_bytes]
    old = rng.integers(0, 256, size * dtype.lane_bytes, dtype=np.uint8).view(kind).copy()
    if dtype.name in ("BF16", "F32"):
        bell = rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
        old = (bell >> (32 - 8 * dtype.lane_bytes)).astype(kind)
    new = old.copy()
    density = rng.choice([0.0005, 0.01, 0.2, 0.9])
    at = np.flatnonzero(rng.random(size) < density)
    new[at] += rng.integers(0, rng.choice([3, 40]), at.size).astype(kind)
    wild = rng.integers(0, size, max(1, size // 5000))
    new[wild] = rng.integers(0, 256, wild.size * dtype.lane_bytes, dtype=np.uint8).view(kind)
    return old, new


def check(backend: Any, cupy: Any, rows: Rows, rng: np.random.Generator, largest: int = 300_000) -> None:
    """Every width, difference and mode against the reference: encoding, decoding, applying, sums; damaged streams."""
    frames = 0
    for name in CHECKED:
        dtype = DTYPES[name]
        for mode in MODES if exponents(dtype) else MODES[:1]:
            sizes = [1, int(rng.integers(1, 3000)), int(rng.integers(largest // 3, largest))]
            old, new = (list(side) for side in zip(*(random_pair(rng, dtype, n) for n in sizes), strict=True))
            places = [Place(int(rng.integers(2**63)), int(rng.integers(10**6))) for _ in sizes]
            expected = REFERENCE.encode(old, new, places, dtype, mode)
            on_device = [[cupy.asarray(lanes) for lanes in side] for side in (old, new)]
            cupy.cuda.Device().synchronize()
            for before, after in ((old, new), on_device):
                found = backend.encode(before, after, places, dtype, mode)
                check_equal(f"{name}, {mode}", found, expected)
            if expected is None:
                continue
            total = expected.sums.sum(axis=0, dtype=np.uint64)
            changes = backend.decode(expected.coding, expected.streams, old, dtype)
            wanted = REFERENCE.decode(expected.coding, expected.streams, old, dtype)
            assert np.array_equal(changes.positions, wanted.positions), f"{name}, {mode}: decoded positions"
            assert np.array_equal(changes.differences, wanted.differences), f"{name}, {mode}: decoded differences"
            damaged = [bytearray(stream) for stream in expected.streams]
            for stream in damaged:
                if stream:
                    stream[int(rng.integers(len(stream)))] ^= 1 << int(rng.integers(8))
            check_refusal(f"{name}, {mode}", backend, expected, damaged, old, dtype)
            for target in ([lanes.copy() for lanes in old], on_device[0]):
                backend.decode_apply(expected.coding, total, expected.streams, target, places, dtype)
                for lanes, wanted_lanes in zip(target, new, strict=True):
                    here = lanes if isinstance(lanes, np.ndarray) else lanes.get()
                    assert np.array_equal(here, wanted_lanes), f"{name}, {mode}: applied lanes"
            for lanes in (new, on_device[1]):
                assert np.array_equal(backend.sum(lanes, places), REFERENCE.sum(new, places)), f"{name}: sums"
            frames += 1
    check_threads(backend, rng, largest)
    check_torch(backend, cupy, rng)
    rows.add("frames equal to the reference", [float(frames)], note=f"{len(CHECKED)} dtypes, all modes, host and GPU")


def check_equal(what: str, found: EncodedFrame | None, expected: EncodedFrame | None) -> None:
    """Raises AssertionError unless two frames are equal to the last bit."""
    if found is None or expected is None:
        assert found is expected, f"{what}: changes found, or not"
        return
    assert found.coding == expected.coding, f"{what}: {found.coding} instead of {expected.coding}"
    assert np.array_equal(found.changed, expected.changed), f"{what}: counts"
    assert np.array_equal(found.sums, expected.sums), f"{what}: sums"
    for number, (mine, theirs) in enumerate(zip(found.streams, expected.streams, strict=True)):
        assert bytes(mine) == bytes(theirs), f"{what}: stream {number}"


def check_refusal(  # noqa: PLR0917
    what: str, backend: Any, frame: EncodedFrame, streams: list[bytearray], old: list[Lanes], dtype: DType
) -> None:
    """Raises AssertionError unless damaged streams are refused, or read, as the reference does."""
    found = []
    for reader in (backend, REFERENCE):
        try:
            changes = reader.decode(frame.coding, streams, old, dtype)
            found.append((changes.positions.tobytes(), changes.differences.tobytes()))
        except FormatError:
            found.append((b"refused", b""))
    assert found[0] == found[1], f"{what}: damaged streams"


def check_threads(backend: Any, rng: np.random.Generator, size: int) -> None:
    """Frames of several threads at once, lanes of the host: they share copies, memory and streams."""
    pairs = [random_pair(rng, DTYPES["BF16"], size) for _ in range(8)]
    arguments = ([Place(1, 0)], DTYPES["BF16"], "fast")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda pair: backend.encode([pair[0]], [pair[1]], *arguments), pairs))
    for frame, (old, new) in zip(found, pairs, strict=True):
        check_equal("threads", frame, REFERENCE.encode([old], [new], *arguments))


def check_torch(backend: Any, cupy: Any, rng: np.random.Generator) -> None:
    """Where torch is installed: weights that it holds are read in place."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    old, new = random_pair(rng, DTYPES["BF16"], 50_000)
    tensors = [torch.from_numpy(lanes.view(np.int16)).view(torch.bfloat16).cuda() for lanes in (old, new)]
    torch.cuda.synchronize()
    lanes = [cupy.from_dlpack(tensor.view(torch.int16)).view(cupy.uint16) for tensor in tensors]
    arguments = ([Place(1, 0)], DTYPES["BF16"], "fast")
    found = backend.encode([lanes[0]], [lanes[1]], *arguments)
    check_equal("torch", found, REFERENCE.encode([old], [new], *arguments))


def measure(backend: Any, cupy: Any, rows: Rows, lanes: int = LARGE, part: int = PART) -> None:
    """Rates of copies, then of the codec on lanes of the GPU and of the host."""
    dtype, places = DTYPES["BF16"], [Place(7, 0)]
    old_part, new_part = trained(np.random.default_rng(1), part)
    old, new = cupy.empty(lanes, np.uint16), cupy.empty(lanes, np.uint16)
    fill(cupy, old, old_part)
    fill(cupy, new, new_part)
    copy, up = copies(cupy, rows, old, new)
    for mode in ("blind", "fast", "dense"):
        frames: list[EncodedFrame] = []
        encode = partial(encode_into, frames, backend, [old], [new], places, dtype, mode)
        rates = [old.nbytes / s / (copy / 2) for s in timed(rows, encode)]
        rows.add(f"encode {mode}, lanes on the GPU / (copy / 2)", rates, note=by_kernel(backend, cupy, rows, encode))
        if frames:
            apply = partial(apply_in_place, backend, frames[-1], old, places, dtype)
            seconds = timed(rows, apply, before=partial(fill, cupy, old, old_part))
            if seconds:
                assert np.array_equal(old[-part:].get(), new_part), "applied lanes of a large frame"
            rates = [old.nbytes / s / 1e9 for s in seconds]
            rows.add(f"decode and apply {mode}, lanes on the GPU", rates, note=by_kernel(backend, cupy, rows, apply))
            fill(cupy, old, old_part)
    rates = [new.nbytes / s / (copy / 2) for s in timed(rows, lambda: backend.sum([new], places))]
    rows.add("digest, lanes on the GPU / (copy / 2)", rates, note="a copy reads and writes, a digest reads")
    for mode in ("blind", "fast"):
        seconds = timed(rows, partial(backend.encode, [old_part], [new_part], places, dtype, mode))
        rates = [old_part.nbytes / s / (up / 2) for s in seconds]
        note = f"a frame of {old_part.nbytes >> 20} MiB"
        rows.add(f"encode {mode}, lanes of the host / (host to GPU / 2)", rates, note=note)
    seconds = timed(rows, lambda: backend.sum([new_part], places))
    rows.add("digest, lanes of the host / host to GPU", [new_part.nbytes / s / up for s in seconds])


def fill(cupy: Any, lanes: Any, part: Lanes) -> None:
    """Lanes of the GPU that repeat a part."""
    for first in range(0, lanes.size, part.size):
        lanes[first : first + part.size].set(part)
    cupy.cuda.Device().synchronize()


def encode_into(frames: list[EncodedFrame], backend: Any, *arguments: Any) -> None:
    """Encode a frame, and keep it as the only one."""
    frames[:] = [backend.encode(*arguments)]


def apply_in_place(backend: Any, frame: EncodedFrame, lanes: Any, places: list[Place], dtype: DType) -> None:
    """Decode a frame and write it into lanes of the GPU."""
    total = frame.sums.sum(axis=0, dtype=np.uint64)
    backend.decode_apply(frame.coding, total, frame.streams, [lanes], places, dtype)


def trained(rng: np.random.Generator, size: int) -> tuple[Lanes, Lanes]:
    """bf16 weights of a bell and, as a step of training changes them, about 0.7 % of them, small ones more often."""
    old = rng.normal(0, 0.02, size).astype(np.float32)
    new = old + rng.normal(0, 4e-7, size).astype(np.float32)
    before, after = ((lanes.view(np.uint32) >> 16).astype(np.uint16) for lanes in (old, new))
    return before, after


def copies(cupy: Any, rows: Rows, old: Any, new: Any) -> tuple[float, float]:
    """Bytes a second of a copy within the GPU (read and written), and from pinned host memory to it."""
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    other, size = cupy.empty_like(old), old.nbytes
    piece = min(2 * PART, size)
    pinned = cupy.cuda.alloc_pinned_memory(piece)

    def copied(into: int, source: int, count: int, kind: int, times: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                runtime.memcpyAsync(into, source, count, kind, stream.ptr)
            stream.synchronize()

        return run

    inside = timed(rows, copied(other.data.ptr, new.data.ptr, size, runtime.memcpyDeviceToDevice, 4))
    up = timed(rows, copied(other.data.ptr, pinned.ptr, piece, runtime.memcpyHostToDevice, 8))
    down = timed(rows, copied(pinned.ptr, other.data.ptr, piece, runtime.memcpyDeviceToHost, 8))
    rows.add("copy within the GPU, read and written", [8 * size / s / 1e9 for s in inside])
    rows.add("copy from pinned host memory to the GPU", [8 * piece / s / 1e9 for s in up])
    rows.add("copy from the GPU to pinned host memory", [8 * piece / s / 1e9 for s in down])
    return 8 * size / statistics.median(inside), 8 * piece / statistics.median(up)


def timed(rows: Rows, run: Callable[[], object], before: Callable[[], object] | None = None) -> list[float]:
    """Seconds of some runs after two that are not counted; of none when it is late. `before` is not counted either."""
    found = []
    for turn in range(-2, RUNS):
        if rows.late():
            return found
        if before is not None:
            before()
        begun = time.perf_counter()
        run()
        if turn >= 0:
            found.append(time.perf_counter() - begun)
    return found


def by_kernel(backend: Any, cupy: Any, rows: Rows, run: Callable[[], object]) -> str:
    """What the kernels of a run took, by events around each: of one more run, which is not counted."""
    if rows.late():
        return ""
    device = backend.device
    launch, spans = device.launch, []

    def recorded(kernel: str, blocks: int, words: Any) -> None:
        events = [cupy.cuda.Event(), cupy.cuda.Event()]
        device.stream.record(events[0])
        launch(kernel, blocks, words)
        device.stream.record(events[1])
        spans.append((kernel, events))

    device.launch = recorded
    try:
        run()
    except IntegrityError:
        pass  # what is applied twice does not fit, and was not written; its kernels ran
    finally:
        del device.launch
    cupy.cuda.Device().synchronize()
    took: dict[str, float] = {}
    for kernel, (begun, ended) in spans:
        took[kernel] = took.get(kernel, 0.0) + cupy.cuda.get_elapsed_time(begun, ended)
    ranked = sorted(took.items(), key=lambda item: -item[1])
    return "kernels: " + ", ".join(f"{kernel} {ms:.2f} ms" for kernel, ms in ranked[:8])


if __name__ == "__main__":
    sys.exit(main())
