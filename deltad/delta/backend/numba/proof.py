"""Whether the numba backend works on this machine, and having it compiled before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from deltad.delta.backend import Place
from deltad.delta.backend.numba.bits import FAST_DEPOSIT
from deltad.delta.backend.numba.compiling import numba
from deltad.delta.backend.numba.engine import NumbaBackend
from deltad.delta.backend.proof import flaw
from deltad.delta.digest import sum_bytes

_SEED = 0x5DEECE66D


def proven() -> tuple[NumbaBackend | None, str]:
    """The backend if it sums like the reference, and what was found. Compiles one kernel, or loads it.

    Raises whatever numba does where it cannot compile.
    """
    if sys.byteorder != "little":
        return None, "its kernels are for little-endian processors"
    backend = NumbaBackend()
    data = np.arange(1000, dtype=np.uint8)
    if not np.array_equal(backend.sum([data], [Place(_SEED, 65_001)])[0], sum_bytes(data, 65_001, _SEED)):
        return None, "its sums are wrong"
    return backend, f"numba {numba.__version__} works here" + ("" if FAST_DEPOSIT else ", without PDEP")


def warm(dtypes: Sequence[str] = ("BF16",)) -> None:
    """Have every kernel for these dtypes compiled, or loaded from the cache, and prove it against the reference.

    Takes a few seconds a lane width at first, and about a second for all of them from the cache. Raises
    AssertionError where a frame comes out other than the reference's.
    """
    if wrong := flaw(NumbaBackend(), dtypes):
        raise AssertionError(f"numba: {wrong}")
