"""Whether a backend is right: a small frame must come out, and come back, as the reference has it.

Asks nothing but the answers, and says in words which one was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from deltad.delta.backend import UNSIGNED, Backend, Lanes, Mode, Place
from deltad.delta.backend.numpy import NumpyBackend
from deltad.types import DTYPES, Difference, DType

_SEED = 0x5DEECE66D
_MODES: tuple[Mode, ...] = ("blind", "dense")


def flaw(backend: Backend, dtypes: Sequence[str] = ("BF16",)) -> str:
    """What is wrong with a backend's sums and frames of these dtypes; empty if nothing is.

    Has everything compiled or loaded that such frames need. Raises what the backend raises where it cannot run.
    """
    bytes_and_words: list[Lanes] = [np.arange(1000, dtype=np.uint8), np.arange(500, dtype=np.uint32)]
    places = [Place(_SEED, 65_001), Place(_SEED + 1, 3)]
    if not np.array_equal(backend.sum(bytes_and_words, places), NumpyBackend().sum(bytes_and_words, places)):
        return "its sums are wrong"
    types = [DTYPES[name] for name in dtypes]
    found = chain(
        (_frame_flaw(backend, dtype, mode) for dtype in types for mode in _MODES),
        (_packing_flaw(backend, dtype) for dtype in types),
    )
    return next(filter(None, found), "")


def _frame_flaw(backend: Backend, dtype: DType, mode: Mode) -> str:
    old, new = _sample_of(dtype)
    before, after = old.copy(), new.copy()
    places = [Place(_SEED, 11)]
    found = backend.encode([old], [new], places, dtype, mode)
    expected = NumpyBackend().encode([before], [after], places, dtype, mode)
    if found is None or expected is None:
        return f"it finds no change in {dtype.name}"
    same = found.coding == expected.coding and np.array_equal(found.sums, expected.sums)
    if not same or [bytes(stream) for stream in found.streams] != [bytes(stream) for stream in expected.streams]:
        return f"its {mode} frame of {dtype.name} is not numpy's"
    changes = backend.decode(found.coding, found.streams, [old], dtype)
    by_parts, at_once = old.copy(), old.copy()
    backend.apply(by_parts, changes, dtype, _SEED)
    backend.decode_apply(found.coding, found.sums[0], found.streams, [at_once], places, dtype)
    if not all(np.array_equal(lanes, after) for lanes in (by_parts, at_once)) or not np.array_equal(old, before):
        return f"it does not lead a {mode} frame of {dtype.name} to its target"
    return ""


def _packing_flaw(backend: Backend, dtype: DType) -> str:
    lanes = _sample_of(dtype)[0] >> UNSIGNED[dtype.lane_bytes](4)
    before = lanes.copy()
    streams = backend.pack([lanes], dtype)
    if [bytes(stream) for stream in streams] != [bytes(stream) for stream in NumpyBackend().pack([before], dtype)]:
        return f"its packed frame of {dtype.name} is not numpy's"
    if not np.array_equal(backend.unpack(streams, lanes.size, dtype), before) or not np.array_equal(lanes, before):
        return f"it does not unpack a frame of {dtype.name} to its lanes"
    return ""


def _sample_of(dtype: DType) -> tuple[Lanes, Lanes]:
    """Lanes of many exponents, the small ones of which change often."""
    rng = np.random.default_rng(_SEED)
    lane_type = UNSIGNED[dtype.lane_bytes]
    bits = 8 * dtype.lane_bytes
    old = rng.integers(0, 1 << bits, 20_001, dtype=np.uint64).astype(lane_type)
    magnitude = (old << lane_type(1)) >> lane_type(1)
    likely = 0.02 if dtype.difference is not Difference.LINE else np.exp2(-10.0 * (magnitude / 2.0 ** (bits - 1)))
    changed = rng.random(old.size) < likely
    return old, np.where(changed, old ^ rng.integers(1, 8, old.size).astype(lane_type), old)
