"""Ratios of two things that are timed side by side, so that what else the machine does falls on both."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

RUNS = 7

Clock = Callable[[], float]
OWN_THREAD: Clock = time.thread_time
"""CPU time of the calling thread: for work on one thread, whatever the others do."""
WALL: Clock = time.perf_counter

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.restype = ctypes.c_int


def rate_ratios(
    reference: Callable[[], object], measured: Callable[[], object], *, runs: int = RUNS, clock: Clock = OWN_THREAD
) -> list[float]:
    """How many times the rate of `reference` the rate of `measured` is, in each of `runs` pairs of runs.

    Both are run once before, so that no first use is measured.
    """
    reference()
    measured()
    return [seconds(reference, clock) / seconds(measured, clock) for _ in range(runs)]


def seconds(work: Callable[[], object], clock: Clock = OWN_THREAD) -> float:
    """How long `work` takes once, never zero."""
    begun = clock()
    work()
    return max(clock() - begun, 1e-9)


def compare(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
    """memcmp of two equal arrays, all of it; releases the interpreter. Raises ValueError if they differ."""
    if _libc.memcmp(one.ctypes.data, other.ctypes.data, one.nbytes):
        raise ValueError("expected equal arrays: memcmp ends where they differ")


def on_two_threads(pool: ThreadPoolExecutor, work: Callable[[Any], object], parts: Sequence[Any]) -> None:
    """`work` on every part, by the two threads of `pool`."""
    for _ in pool.map(work, parts):
        pass


def halves(array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Two views that are half of the array each."""
    return np.array_split(array, 2)
