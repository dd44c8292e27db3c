"""The classes of the context coder: exponents of old lanes, and which of them to code together.

How likely a lane changes halves with each exponent, so lanes of like exponents are counted and coded
apart. The planner weighs what a class saves against what it costs, on a sample of the frame. Any table
that keeps the rules of `deltad.delta.coding` decodes; this one is chosen by integer arithmetic and
exactly rounded float64 alone, so that equal inputs give equal tables on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import Lanes, Mode, Segments
from deltad.delta.coding import BULK_CLASSES, MANTISSA_BITS, SMALL_CLASSES, exponents
from deltad.types import DType

I64 = npt.NDArray[np.int64]

RUN_LANES = 1024
SPARSEST = 64
_WHOLE_LANES = 1 << 18  # up to here, every lane of a frame is counted
BINS = 64
UNIT = 16  # fractional bits of a cost
SMALL_BITS, BULK_BITS = 800, 1500  # table entries, stream lengths, zstd headers of a class
# Encoding, in nanoseconds: a lane of a small class, and a bulk class for each lane of the frame.
SMALL_NS, BULK_NS_HUNDREDTHS = 12, 4
HUNDREDTH_BITS_PER_NS = {"fast": 30, "mid": 5, "dense": 1}
"""What a nanosecond of encoding is worth, in hundredths of a bit on the wire."""
NEVER = np.int64(1) << np.int64(61)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Sampled lanes by the exponent of the old lane, and how many of them changed. Shape [exponents] each."""

    lanes: I64
    changed: I64


@dataclass(frozen=True, slots=True)
class ClassTable:
    """A class table as a header holds it."""

    small: int
    starts: tuple[int, ...]
    marked: int


def exponents_of(lanes: Lanes, dtype: DType) -> npt.NDArray[Any]:
    """The exponent of each lane, without its sign."""
    magnitude = lanes & lanes.dtype.type((1 << 8 * dtype.lane_bytes - 1) - 1)
    exponent: npt.NDArray[Any] = magnitude >> lanes.dtype.type(MANTISSA_BITS[dtype.name])
    return exponent


def classes_by_exponent(starts: tuple[int, ...], dtype: DType) -> npt.NDArray[np.uint8]:
    """The class of every exponent. Shape [exponents]."""
    return (np.searchsorted(np.array(starts), np.arange(exponents(dtype)), side="right") - 1).astype(np.uint8)


def run_stride(lanes: int) -> int:
    """Of a frame's runs of 1024 lanes, every how many-th is sampled, from the first on."""
    return min(SPARSEST, max(1, lanes // _WHOLE_LANES))


def sample(old: Segments, new: Segments, dtype: DType) -> Histogram:
    """Count the sampled runs of a frame. Runs are cut over the frame, not over its segments."""
    before, after = [], []
    period = RUN_LANES * run_stride(sum(segment.size for segment in old))
    first = 0
    for a, b in zip(old, new, strict=True):
        for start in range(first // period * period, first + a.size, period):
            run = slice(max(0, start - first), start + min(RUN_LANES, period) - first)
            if run.stop > 0:
                before.append(a[run])
                after.append(b[run])
        first += a.size
    was, now = np.concatenate(before), np.concatenate(after)
    by_exponent = exponents_of(was, dtype).astype(np.int64)
    size = exponents(dtype)
    return Histogram(
        np.bincount(by_exponent, minlength=size).astype(np.int64, copy=False),
        np.bincount(by_exponent[was != now], minlength=size).astype(np.int64, copy=False),
    )


def plan(histogram: Histogram, lanes: int, mode: Mode) -> ClassTable:
    """The cheapest classes for a frame of `lanes` lanes: bits on the wire plus encoding time, priced by `mode`.

    Small classes cost time for each lane, bulk ones for each lane of the frame. Both partitions of the
    exponents, and the exponent between them, are found by dynamic programming.
    """
    held = np.flatnonzero(histogram.lanes)
    if held.size == 0 or not histogram.changed.any():
        return ClassTable(0, (0,), 0)
    edges = held[-BINS:].astype(np.int64)  # more than that many are joined at the bottom, where lanes are rare
    edges[0] = 0
    n, m, cost_small, cost_bulk = _costs(histogram, edges, lanes, HUNDREDTH_BITS_PER_NS[mode])
    smalls = _partitions(cost_small, SMALL_CLASSES)
    # Read from the top down, the bulk classes are a prefix too.
    bulks = _partitions(cost_bulk[::-1, ::-1].T, BULK_CLASSES)
    bins = edges.size
    total = smalls.cost.min(axis=0)[:bins] + bulks.cost[1:].min(axis=0)[::-1][:bins]
    border = int(total.argmin())
    small = smalls.cuts(int(smalls.cost[:, border].argmin()), border)
    bulk = [bins - cut for cut in bulks.cuts(1 + int(bulks.cost[1:, bins - border].argmin()), bins - border)]
    cuts = [*small, *reversed(bulk)]  # cuts within [0, border), then within [border, bins)
    starts = sorted({0, border, *cuts} - {bins})
    return _table(starts, border, edges, n, m)


def _table(starts: list[int], border: int, edges: I64, n: I64, m: I64) -> ClassTable:
    small = sum(start < border for start in starts)
    marked = 0
    for index in range(small):
        low, high = starts[index], starts[index + 1]
        if 2 * (m[high] - m[low]) > n[high] - n[low]:
            marked |= 1 << index
    return ClassTable(small, tuple(int(edges[start]) for start in starts), marked)


def _costs(histogram: Histogram, edges: I64, lanes: int, price: int) -> tuple[I64, I64, I64, I64]:
    """Running counts at bin edges, shape [bins + 1], and the cost of every class [i, j), shape [bins + 1] squared."""
    exponent = np.arange(histogram.lanes.size, dtype=np.int64)
    changed = histogram.changed
    n, m, first, second = (
        np.append(np.concatenate([[0], np.cumsum(counts)])[edges], counts.sum())
        for counts in (histogram.lanes, changed, changed * exponent, changed * exponent * exponent)
    )
    count: I64 = n[None, :] - n[:, None]
    moved: I64 = m[None, :] - m[:, None]
    valid = np.triu(np.ones(count.shape, bool), 1)
    count, moved = np.where(valid, count, 0), np.where(valid, moved, 0)
    # n·h(m/n) for the positions, and for the values what lanes of mixed scales cost beyond those of one.
    bits: I64 = count * _log2(count) - moved * _log2(moved) - (count - moved) * _log2(count - moved)
    per = np.maximum(moved, 1).astype(np.float64)
    mean = np.where(valid, first[None, :] - first[:, None], 0).astype(np.float64) / per
    square = np.where(valid, second[None, :] - second[:, None], 0).astype(np.float64) / per
    spread = np.sqrt(np.maximum(square - mean * mean, 0.0))
    mixed = ((1.0 + spread * 0.5) * (1 << UNIT)).astype(np.int64)
    bits += moved * (_log2(mixed) - (UNIT << UNIT))
    scale = (lanes << 8) // int(n[-1])
    slow = count * ((SMALL_NS * price << UNIT) // 100)
    small: I64 = ((bits + slow) * scale >> 8) + (SMALL_BITS << UNIT)
    bulk: I64 = (bits * scale >> 8) + (BULK_BITS << UNIT) + ((lanes * BULK_NS_HUNDREDTHS * price << UNIT) // 10_000)
    return n, m, np.where(valid, small, NEVER), np.where(valid, bulk, NEVER)


@dataclass(frozen=True, slots=True)
class _Partitions:
    """`cost[k, j]`: the cheapest way to cut the first j bins into k classes; `last[k, j]` is where its last begins."""

    cost: I64
    last: I64

    def cuts(self, classes: int, end: int) -> list[int]:
        """Where the classes of the first `end` bins begin, ascending."""
        found = []
        for k in range(classes, 0, -1):
            end = int(self.last[k, end])
            found.append(end)
        return found[::-1]


def _partitions(cost: I64, most: int) -> _Partitions:
    bins = cost.shape[0]
    by_end = np.ascontiguousarray(cost.T)
    best = np.full((most + 1, bins), NEVER, np.int64)
    last = np.zeros((most + 1, bins), np.int64)
    best[0, 0] = 0
    for k in range(1, most + 1):
        total = best[k - 1] + by_end
        last[k] = total.argmin(axis=1)
        best[k] = np.minimum(total.min(axis=1), NEVER)
    return _Partitions(best, last)


def _log2(numbers: I64) -> I64:
    """The binary logarithm with 16 fractional bits, rounded down twice, from integers alone; 0 for 0."""
    x = np.maximum(numbers, 1)
    whole = np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1
    fraction = (x << np.maximum(UNIT - whole, 0) >> np.maximum(whole - UNIT, 0)) - (1 << UNIT)
    logarithm: I64 = (whole << UNIT) + log2_of_fractions()[fraction]
    return logarithm


@lru_cache(maxsize=1)
def log2_of_fractions() -> I64:
    """The logarithms of 1 to 2, in steps of 2^-16. Squaring a number tells the bits of its logarithm one by one."""
    x = np.arange(1 << UNIT, dtype=np.uint64) + np.uint64(1 << UNIT) << np.uint64(31 - UNIT)
    result = np.zeros(1 << UNIT, np.int64)
    for _ in range(UNIT):
        x = x * x >> np.uint64(31)
        carry = x >> np.uint64(32)
        x = x >> carry
        result = result << 1 | carry.astype(np.int64)
    return result
