"""The delta, measured: its bytes against what others ship and against its bound, and its rates against memory's.

All figures are ratios of things that ran side by side. A full run measures whole checkpoints from the cache of
`bench.pairs`; what is not there is made first by the command that the row names. A quick run measures the kept
slice: sizes on 4 M weights, where a frame's statistics cost more than they do in a large one; rates on several
copies of it, so that they do not fit a processor's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from bench import anchors, pairs, rivals, slices
from bench.frames import Frames, backend, checked, delta_bytes, encode_edge, full_digest
from bench.harness import ROOT, Measurement, Spec, median_of, skipped
from bench.pairs import FRESH, PAIRS, Pair, States
from bench.peers import Cwtrain, PeerMissingError
from bench.subject import Memory, Subject, write_checkpoint
from bench.timing import OWN_THREAD, RUNS, WALL, compare, halves, on_two_threads, rate_ratios, seconds
from deltad.checkpoint import open_checkpoint
from deltad.delta.backend import Backend, Mode
from deltad.delta.codec import apply_chunks, sum_weights

PATHS = (
    "deltad/delta",
    "deltad/checkpoint",
    "deltad/limits.py",
    *(
        f"bench/{name}"
        for name in (
            "anchors.py",
            "codec.py",
            "data",
            "frames.py",
            "memory.py",
            "pairs.py",
            "peer_cwtrain.py",
            "peers.py",
            "rivals.py",
            "simulated.py",
            "slices.py",
            "subject.py",
            "timing.py",
            "training.py",
            "undigested.py",
        )
    ),
)

RATES_PAIR = Pair("off-grid 1e-6, fresh Adam, step 8", FRESH, 7, 8)
QUICK_COPIES = 8

_MEAN, _WORST, _OFF_GRID = "geometric mean", "worst pair", "off-grid"
_MEMCPY = "memcpy, one thread"
_MODES: dict[Mode, str] = {"blind": "blind", "fast": "context fast", "mid": "context mid", "dense": "context dense"}


def _size(what: str, which: str, must: float | None = None, aim: float | None = None) -> Spec:
    return Spec(name=f"{what}, {which}", unit="×", direction="min", must=must, aim=aim)


def _rate(name: str, must: float | None = None, aim: float | None = None) -> Spec:
    return Spec(name=name, unit="×", direction="max", must=must, aim=aim)


SPECS = (
    _size("context dense / dense XOR", _MEAN, 0.30, 0.26),
    _size("context dense / dense XOR", _WORST, 0.36, 0.31),
    _size("context mid / dense XOR", _MEAN),
    _size("context mid / dense XOR", _WORST),
    _size("context fast / dense XOR", _MEAN, 0.38, 0.33),
    _size("context fast / dense XOR", _WORST, 0.42, 0.33),
    _size("blind / dense XOR, off-grid and simulated", _MEAN, 0.50, 0.45),
    _size("blind / dense XOR, off-grid and simulated", _WORST, 0.50, 0.45),
    _size("context dense / dense XOR", "8 steps at once"),
    _size("context dense / entropy bound", _MEAN, aim=1.05),
    _size("context dense / entropy bound", _WORST, aim=1.05),
    _size("XOR per tensor (slime) / dense XOR", _MEAN),
    _size("int32 gaps and values (vLLM, TRL) / dense XOR", _MEAN),
    _size("zstd --patch-from / dense XOR", "first 32 MiB"),
    *(_size(f"{_MODES[mode]} / all weights", _OFF_GRID) for mode in ("dense", "mid", "fast")),
    *anchors.SIZES,
    Spec(name=_MEMCPY, unit="GB/s", direction="max"),
    _rate("encode / memcpy, blind", 0.6, 0.9),
    _rate("encode / memcpy, context fast", 0.5, 0.85),
    _rate("encode / memcpy, context mid"),
    _rate("encode / memcpy, context dense", 0.35, 0.6),
    _rate("decode and apply / memcpy, blind", 1.0, 2.0),
    _rate("decode and apply / memcpy, context fast", 0.7, 1.2),
    _rate("decode and apply / memcpy, context mid"),
    _rate("decode and apply / memcpy, context dense", 0.45, 0.8),
    _rate("encode from files / in RAM, context fast", 0.7, 0.9),
    _rate("apply with digest / without, context fast", 0.75, 0.85),
    _rate("apply with digest / without, blind", 0.6, 0.75),
    _rate("full digest / memcpy", 1.0, 1.5),
    _rate("two threads / one, encode, over memcmp's", 0.85, 1.0),
    _rate("two threads / one, decode and apply, over memcmp's", 0.85, 1.0),
    *anchors.RATES,
    Spec(name="resident memory above baseline", unit="MiB", direction="min", must=128, aim=64),
    _rate("encode to files / cwtrain write_delta", 8, 15),
    _rate("apply from files / cwtrain apply_delta", 8, 20),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one pair takes, in bytes."""

    pair: Pair
    modes: dict[Mode, int]
    weights: int
    dense_xor: int
    tensor_xor: int
    sparse_int32: int
    bound: float

    def against_xor(self, mode: Mode) -> float:
        return self.modes[mode] / self.dense_xor

    def against_weights(self, mode: Mode) -> float:
        return self.modes[mode] / self.weights


def measure(quick: bool) -> Iterator[Measurement]:
    """All rows. Needs numba for the rates, and for sizes only time."""
    fast, why_not = fast_backend()
    yield from _sizes(fast or backend("numpy"), quick=quick)
    names = [spec.name for spec in SPECS[_first_rate() :]]
    try:
        states = _rates_states(quick=quick)
    except FileNotFoundError as error:
        why_not = why_not or str(error)
    if fast is None or why_not:
        yield from (skipped(name, why_not) for name in names)
        return
    subject = Subject.of(states)
    note = f"{states.pair.name}: {100 * states.density:.2f} % changed, {states.old.nbytes / 1e6:.0f} MB"
    yield from _memory_rates(subject, fast, note)
    yield from anchors.rates(subject, fast, note)
    yield from _digest_rates(subject, fast, quick=quick)
    yield from _thread_rates(subject, fast)
    with (
        tempfile.TemporaryDirectory(prefix="deltad-bench-") as cached,
        tempfile.TemporaryDirectory(prefix="deltad-bench-", dir=_in_memory(4 * states.old.nbytes)) as memory,
    ):
        yield from _file_rates(subject, fast, Path(cached), Path(memory))


def fast_backend() -> tuple[Backend | None, str]:
    """numba's backend, or why there is none."""
    try:
        return backend("numba"), ""
    except ImportError as error:
        return None, f"there is no numba backend here: {error}"


def _first_rate() -> int:
    return next(i for i, spec in enumerate(SPECS) if spec.direction == "max")


# Sizes.


def _sizes(coder: Backend, *, quick: bool) -> Iterator[Measurement]:
    is_there: Callable[[Pair], bool] = slices.kept if quick else lambda pair: pairs.made(pair.run)
    if not quick:
        pairs.make(pairs.SIMULATED)
    there = [pair for pair in PAIRS if is_there(pair)]
    missing = sorted({pair.run.name for pair in PAIRS if pair not in there})
    note = f"missing: {', '.join(missing)}; python -m bench.pairs make" if missing else ""
    if quick:
        note = f"slices of about 4 M weights{'; ' if note else ''}{note}"
    every = [_sizes_of(slices.load(pair) if quick else pairs.load(pair), coder) for pair in there]
    single = [sizes for sizes in every if sizes.pair.single]
    for mode in ("dense", "mid", "fast"):
        yield from _both(f"{_MODES[mode]} / dense XOR", single, partial(Sizes.against_xor, mode=mode), note)
    blind = [sizes for sizes in single if sizes.pair.run.kind in {"off-grid", "simulated"}]
    yield from _both("blind / dense XOR, off-grid and simulated", blind, lambda one: one.against_xor("blind"), note)
    gap = "context dense / dense XOR, 8 steps at once"
    several = [sizes for sizes in every if not sizes.pair.single]
    if several:
        yield Measurement(name=gap, value=several[0].against_xor("dense"), runs=1, note=several[0].pair.name)
    else:
        yield skipped(gap, note)
    yield from _both("context dense / entropy bound", single, lambda one: one.modes["dense"] / one.bound, note)
    ours_not = f"{note}; without names, shapes and checksums".lstrip("; ")
    for what, of in (
        ("XOR per tensor (slime) / dense XOR", lambda one: one.tensor_xor / one.dense_xor),
        ("int32 gaps and values (vLLM, TRL) / dense XOR", lambda one: one.sparse_int32 / one.dense_xor),
    ):
        yield _both(what, single, of, ours_not)[0]
    yield _patch_from(there, quick=quick)
    off_grid = [sizes for sizes in single if sizes.pair.run.kind == "off-grid"]
    for mode in ("dense", "mid", "fast"):
        share = partial(Sizes.against_weights, mode=mode)
        yield msgspec.structs.replace(
            _both("", off_grid, share, note)[0], name=f"{_MODES[mode]} / all weights, {_OFF_GRID}"
        )
    yield from anchors.sizes(slices.load(there[0]) if quick else pairs.load(there[0]), coder)


def _sizes_of(states: States, coder: Backend) -> Sizes:
    subject = Subject.of(states)
    old, new = subject.states.old, subject.states.new
    return Sizes(
        states.pair,
        {mode: delta_bytes(subject, coder, mode) for mode in get_args(Mode)},
        new.nbytes,
        rivals.dense_xor(old, new),
        rivals.tensor_xor(subject.states),
        rivals.sparse_int32(subject.states),
        rivals.bound(old, new),
    )


def _both(what: str, sizes: Sequence[Sizes], of: Callable[[Sizes], float], note: str) -> list[Measurement]:
    """The geometric mean, with the best and the worst as spread; and the worst, by name."""
    values = [of(one) for one in sizes]
    low, high = min(values), max(values)
    worst = sizes[values.index(high)].pair.name
    return [
        Measurement(
            name=f"{what}, {_MEAN}",
            value=statistics.geometric_mean(values),
            spread=(low, high),
            runs=len(values),
            note=f"{len(values)} pairs{'; ' if note else ''}{note}",
        ),
        Measurement(name=f"{what}, {_WORST}", value=high, runs=len(values), note=worst),
    ]


def _patch_from(there: Sequence[Pair], *, quick: bool) -> Measurement:
    name = "zstd --patch-from / dense XOR, first 32 MiB"
    states = slices.load(there[0]) if quick else pairs.load(there[0])
    old, new = (bits[: rivals.CHUNK_LANES] for bits in (states.old, states.new))
    try:
        patch = rivals.patch_from(old, new)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return skipped(name, str(error))
    return Measurement(name=name, value=patch / rivals.dense_xor(old, new), runs=1, note=f"{there[0].name}; level 1")


# Rates.


def _rates_states(*, quick: bool) -> States:
    return slices.tile(slices.load(RATES_PAIR), QUICK_COPIES) if quick else pairs.load(RATES_PAIR)


def _memory_rates(subject: Subject, coder: Backend, note: str) -> Iterator[Measurement]:
    """Encode, and decode with apply, on one thread and in memory."""
    target, weights = subject.copy_of_old()
    copy = partial(np.copyto, target, subject.states.old)
    copy()
    yield median_of(_MEMCPY, [target.nbytes / seconds(copy) / 1e9 for _ in range(RUNS)], note="bytes copied")
    for mode, what in _MODES.items():
        frames = Frames(subject.layout, coder, mode)
        encode = partial(frames.encode_all, subject.old, subject.new)
        yield median_of(f"encode / memcpy, {what}", rate_ratios(copy, encode), note=note)
        # The copy that the rate is against also brings the old state back.
        written = encode()
        ratios = rate_ratios(copy, partial(frames.apply_all, written, weights))
        if not np.array_equal(target, subject.states.new):
            raise ValueError(f"{what}: what was applied is not the new state")
        yield median_of(f"decode and apply / memcpy, {what}", ratios, note=note)


def _digest_rates(subject: Subject, coder: Backend, *, quick: bool) -> Iterator[Measurement]:
    target = subject.states.old.copy()
    copy = partial(np.copyto, target, subject.states.new)
    yield median_of("full digest / memcpy", rate_ratios(copy, full_digest(subject, coder)))
    modes: tuple[Mode, ...] = ("fast", "blind")
    if quick:
        reason = "needs kernels without the digest, whose compilation takes longer than a quick run has"
        yield from (skipped(f"apply with digest / without, {_MODES[mode]}", reason) for mode in modes)
        return
    from bench.undigested import undigested

    target, weights = subject.copy_of_old()
    with undigested() as without:
        for mode in modes:
            frames = Frames(subject.layout, coder, mode)
            bare = Frames(subject.layout, without, mode, digest=False)
            written = frames.encode_all(subject.old, subject.new)
            restore = partial(np.copyto, target, subject.states.old)
            ratios = []
            for _ in range(RUNS + 1):
                restore()
                slow = seconds(partial(bare.apply_all, written, weights))
                restore()
                ratios.append(slow / seconds(partial(frames.apply_all, written, weights)))
            yield median_of(f"apply with digest / without, {_MODES[mode]}", ratios[1:])


def _thread_rates(subject: Subject, coder: Backend) -> Iterator[Measurement]:
    """Whole edges, digest included, by as many threads as the row says."""
    old = subject.states.old
    target, weights = subject.copy_of_old()
    same = old.copy()
    sums = sum_weights(subject.layout, subject.old, coder)
    chunks = encode_edge(subject.layout, subject.old, subject.new, sums, coder)

    def encode(threads: int) -> None:
        encode_edge(subject.layout, subject.old, subject.new, sums, coder, threads=threads)

    def apply(threads: int) -> None:
        apply_chunks(chunks, subject.layout, weights, sums.copy(), coder, threads=threads)

    def memcmp(pool: ThreadPoolExecutor) -> float:
        one = seconds(partial(compare, old, same), WALL)
        parts = list(zip(halves(old), halves(same), strict=True))
        return one / seconds(partial(on_two_threads, pool, lambda pair: compare(*pair), parts), WALL)

    encoded, applied = [], []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(RUNS + 1):
            same_ratio = memcmp(pool)
            encoded.append(seconds(partial(encode, 1), WALL) / seconds(partial(encode, 2), WALL) / same_ratio)
            np.copyto(target, old)
            one = seconds(partial(apply, 1), WALL)
            np.copyto(target, old)
            applied.append(one / seconds(partial(apply, 2), WALL) / same_ratio)
    if not np.array_equal(target, subject.states.new):
        raise ValueError("what two threads applied is not the new state")
    note = "context fast, whole edges with their digest"
    yield median_of("two threads / one, encode, over memcmp's", encoded[1:], note=note)
    yield median_of("two threads / one, decode and apply, over memcmp's", applied[1:], note=note)


# Files.


def _in_memory(size: int) -> str | None:
    """A file system in memory, if there is one with room: then no disk's rate is part of what is written."""
    shared = Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 * size else None


def _file_rates(subject: Subject, coder: Backend, cached: Path, memory: Path) -> Iterator[Measurement]:
    """Checkpoints are in `cached`, a disk's file system, and in its page cache; what is written is in `memory`."""
    states = subject.states
    old, new = cached / "old", cached / "new"
    offset = write_checkpoint(states.tensors, states.old, old)
    write_checkpoint(states.tensors, states.new, new)
    os.sync()
    yield _encode_from_files(subject, coder, old, new)
    yield _resident_memory(old, new, coder)
    names = ("encode to files / cwtrain write_delta", "apply from files / cwtrain apply_delta")
    try:
        (memory / "peer").mkdir()
        with Cwtrain(old, new, memory / "peer") as peer:
            ours = Published(subject, coder, old, memory, offset)
            ours.write(old, new)
            written = [peer.write() / seconds(partial(ours.write, old, new), WALL) for _ in range(RUNS)]
            applied = [peer.apply() / seconds(ours.apply, WALL) for _ in range(RUNS)]
            if not ours.holds():
                raise ValueError("what was applied to the file is not the state that it should be")
            note = f"cwtrain {peer.version} with {peer.threads} threads, deltad with 2, context fast; "
            note += f"their delta takes {peer.delta_bytes / ours.size:.2f} times our bytes"
    except PeerMissingError as error:
        yield from (skipped(name, str(error)) for name in names)
        return
    yield median_of(names[0], written, note=note)
    yield median_of(names[1], applied, note="both check what they wrote; ours patches a mapped file in place")


def _encode_from_files(subject: Subject, coder: Backend, old: Path, new: Path) -> Measurement:
    frames = Frames(subject.layout, coder, "fast")
    with open_checkpoint(old) as base, open_checkpoint(new) as target:
        in_memory = partial(frames.encode_all, subject.old, subject.new)
        ratios = rate_ratios(in_memory, partial(frames.encode_all, base, target), clock=OWN_THREAD)
    return median_of("encode from files / in RAM, context fast", ratios, note="files in a disk's page cache")


def _resident_memory(old: Path, new: Path, coder: Backend) -> Measurement:
    name = "resident memory above baseline"
    above = []
    for mode in ("fast", "dense", "blind"):
        arguments = [sys.executable, "-m", "bench.memory", str(old), str(new), mode, coder.name]
        done = subprocess.run(arguments, check=True, capture_output=True, text=True, cwd=ROOT)
        found = json.loads(done.stdout)
        above.append((found["peak"] - found["baseline"]) / 2**20)
    return Measurement(
        name=name,
        value=max(above),
        spread=(min(above), max(above)),
        runs=len(above),
        note="the most of fast, dense and blind, one process each; checkpoint to chunks, digest included",
    )


class Published:
    """What stands on our side for cwtrain's `write_delta` and `apply_delta`, on two threads.

    Writing reads both checkpoints, encodes, sums all of the new state, and leaves named chunks in files. Applying
    reads those back, checks their names, patches a file that holds the old state, and compares the sums; then,
    the next time, one that leads back.
    """

    def __init__(self, subject: Subject, coder: Backend, old: Path, directory: Path, offset: int) -> None:
        self._layout = subject.layout
        self._coder = coder
        self._chunks = directory / "chunks"
        self._chunks.mkdir()
        shutil.copytree(old, directory / "mirror")
        path = directory / "mirror" / "model.safetensors"
        self._mirror = np.memmap(path, np.uint16, "r+", offset=offset)
        self._weights = Memory(subject.states.tensors, self._mirror)
        self._states = (subject.states.old, subject.states.new)
        self._sums = [sum_weights(self._layout, weights, coder) for weights in (subject.old, subject.new)]
        there = encode_edge(self._layout, subject.old, subject.new, self._sums[0], coder, threads=2)
        back = encode_edge(self._layout, subject.new, subject.old, self._sums[1], coder, threads=2)
        self._deltas = [self._store(f"{i}", chunks) for i, chunks in enumerate((there, back))]
        self._applied = 0
        self.size = sum(map(len, there))

    def write(self, old: Path, new: Path) -> None:
        with open_checkpoint(old) as base, open_checkpoint(new) as target:
            self._store("again", encode_edge(self._layout, base, target, self._sums[0], self._coder, threads=2))

    def apply(self) -> None:
        """Raises ValueError if a chunk is not what its name says, or leads to other sums than it should."""
        paths = self._deltas[self._applied % 2]
        sums = self._sums[self._applied % 2].copy()
        chunks = (checked(path.read_bytes(), bytes.fromhex(path.name)) for path in paths)
        apply_chunks(chunks, self._layout, self._weights, sums, self._coder, threads=2)
        self._applied += 1
        if not np.array_equal(sums, self._sums[self._applied % 2]):
            raise ValueError("expected the sums of the state that the delta leads to")

    def holds(self) -> bool:
        """Whether the mirror is the state that was applied last."""
        return bool(np.array_equal(self._mirror, self._states[self._applied % 2]))

    def _store(self, name: str, chunks: Sequence[bytes]) -> list[Path]:
        directory = self._chunks / name
        directory.mkdir(exist_ok=True)
        paths = []
        for data in chunks:
            path = directory / hashlib.sha256(data).hexdigest()
            path.write_bytes(data)
            paths.append(path)
        return paths
