"""Whether the numba backend works on this machine, and having it compiled before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from deltad.delta.backend import UNSIGNED, Lanes, Mode, Place
from deltad.delta.backend.numba.bits import FAST_DEPOSIT
from deltad.delta.backend.numba.compiling import numba
from deltad.delta.backend.numba.engine import NumbaBackend
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.digest import sum_bytes
from deltad.types import DTYPES, Difference, DType

_SEED = 0x5DEECE66D


def proven() -> tuple[NumbaBackend | None, str]:
    """The backend if it sums like the reference, and what was found. Compiles one kernel, or loads it.

    Raises whatever numba does where it cannot compile.
    """
    if sys.byteorder != "little":
        return None, "its kernels are for little-endian processors"
    backend = NumbaBackend()
    data = np.arange(1000, dtype=np.uint8)
    if not np.array_equal(backend.sum(data, 65_001, _SEED), sum_bytes(data, 65_001, _SEED)):
        return None, "its sums are wrong"
    return backend, f"numba {numba.__version__} works here" + ("" if FAST_DEPOSIT else ", without PDEP")


def warm(dtypes: Sequence[str] = ("BF16",)) -> None:
    """Have every kernel for these dtypes compiled, or loaded from the cache, and prove it against the reference.

    Takes a few seconds a lane width at first, and about a second for all of them from the cache. Raises
    AssertionError where a frame comes out other than the reference's.
    """
    for name in dtypes:
        for mode in ("blind", "dense"):
            _prove(DTYPES[name], mode)
        _prove_packing(DTYPES[name])


def _prove(dtype: DType, mode: Mode) -> None:
    backend, reference = NumbaBackend(), NumpyBackend()
    old, new = _sample_of(dtype)
    places = [Place(_SEED, 11)]
    found = backend.encode([old], [new], places, dtype, mode)
    expected = reference.encode([old], [new], places, dtype, mode)
    if found is None or expected is None:
        raise AssertionError(f"numba: no change found in {dtype.name}")
    same = found.coding == expected.coding and np.array_equal(found.sums, expected.sums)
    if not same or [bytes(stream) for stream in found.streams] != [bytes(stream) for stream in expected.streams]:
        raise AssertionError(f"numba: another {mode} frame of {dtype.name} than numpy's")
    changes = backend.decode(found.coding, found.streams, [old], dtype)
    by_parts, at_once = old.copy(), old.copy()
    backend.apply(by_parts, changes, dtype, _SEED)
    backend.decode_apply(found.coding, found.sums[0], found.streams, [at_once], places, dtype)
    if not (np.array_equal(by_parts, new) and np.array_equal(at_once, new)):
        raise AssertionError(f"numba: a {mode} frame of {dtype.name} is not decoded to its target")


def _prove_packing(dtype: DType) -> None:
    backend = NumbaBackend()
    lanes = _sample_of(dtype)[0] >> UNSIGNED[dtype.lane_bytes](4)
    streams = backend.pack([lanes], dtype)
    if [bytes(stream) for stream in streams] != [bytes(stream) for stream in NumpyBackend().pack([lanes], dtype)]:
        raise AssertionError(f"numba: another packed frame of {dtype.name} than numpy's")
    if not np.array_equal(backend.unpack(streams, lanes.size, dtype), lanes):
        raise AssertionError(f"numba: a packed frame of {dtype.name} is not unpacked to its lanes")


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
