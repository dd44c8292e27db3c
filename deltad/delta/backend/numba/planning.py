"""The planner of `deltad.delta.classes`, compiled: its sample of a frame, and the choice of classes from it.

Equal to the reference in every histogram and every table; by numpy they would take as long as the coding of a
frame. Sums of integers and comparisons come in another order, and nothing else does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import Mode
from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    differing,
    lane_width,
    leading,
    load64,
    load_lane,
    lowest,
    prefetch,
)
from deltad.delta.backend.numba.compiling import kernel, part
from deltad.delta.backend.numba.job import (
    EXPONENTS,
    LANES,
    MANTISSA,
    NEW,
    OLD,
    SAMPLE_PERIOD,
    SAMPLE_RUN,
    SEGMENT_COLUMNS,
    SEGMENT_COUNT,
    SEGMENTS,
    Job,
    like,
)
from deltad.delta.classes import (
    BINS,
    BULK_BITS,
    BULK_NS_HUNDREDTHS,
    HUNDREDTH_BITS_PER_NS,
    NEVER,
    RUN_LANES,
    SMALL_BITS,
    SMALL_NS,
    UNIT,
    ClassTable,
    Histogram,
    log2_of_fractions,
    run_stride,
)
from deltad.delta.coding import BULK_CLASSES, SMALL_CLASSES, exponents

Int = Any
"""A signed 64-bit integer, inside a kernel."""

_0, _1, _2, _3, _4, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 63, 64))
_SEGMENT_BYTES = np.uint64(8 * SEGMENT_COLUMNS)
_ONE = 1 << UNIT
_MOST = SMALL_CLASSES + BULK_CLASSES
_TABLES = 4


def sample(job: Job, lanes: int) -> Histogram:
    """Equal to `deltad.delta.classes.sample`, of the `lanes` lanes that a job is about."""
    job.words[SAMPLE_PERIOD], job.words[SAMPLE_RUN] = RUN_LANES * run_stride(lanes), RUN_LANES
    counted = np.zeros((_TABLES, exponents(job.dtype)), np.uint32)
    changed = np.zeros(exponents(job.dtype), np.int64)
    count_sample(job.address, like(job.dtype), counted, changed)
    return Histogram(counted.sum(axis=0, dtype=np.int64), changed)


def plan(histogram: Histogram, lanes: int, mode: Mode) -> ClassTable:
    """Equal to `deltad.delta.classes.plan`."""
    starts = np.zeros(_MOST, np.int64)
    small, count, marked = choose(
        histogram.lanes, histogram.changed, lanes, HUNDREDTH_BITS_PER_NS[mode], _fractions(), starts
    )
    return ClassTable(int(small), tuple(starts[:count].tolist()), int(marked))


@cache
def _fractions() -> npt.NDArray[np.uint16]:
    return log2_of_fractions().astype(np.uint16)


@part
def _count(lanes: Word, first: Word, end: Word, how: tuple[Word, Word], tables: Array, like: Array) -> None:
    """Count lanes by exponent. Four tables, so that lanes of one exponent need not wait for each other."""
    shift, kept = how
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
    j = first
    while j + _4 <= end:
        a[(load_lane(lanes, j, like) >> shift) & kept] += 1
        b[(load_lane(lanes, j + _1, like) >> shift) & kept] += 1
        c[(load_lane(lanes, j + _2, like) >> shift) & kept] += 1
        d[(load_lane(lanes, j + _3, like) >> shift) & kept] += 1
        j += _4
    while j < end:
        a[(load_lane(lanes, j, like) >> shift) & kept] += 1
        j += _1


@part
def _count_run(
    old: Word, new: Word, lanes: Word, ahead: Word, how: tuple[Word, Word], tables: Array, changed: Array, like: Array
) -> None:
    """Count lanes of a run, while the run that is `ahead` bytes further on is fetched."""
    shift, kept = how
    width = lane_width(like)
    for first in range(_0, lanes, _64):
        before, after = old + first * width, new + first * width
        count = min(_64, lanes - first)
        for line in range(_0, _64 * width, _64):
            prefetch(before + ahead + line)
            prefetch(after + ahead + line)
        _count(before, _0, count, how, tables, like)
        if count == _64:
            mask = differing(before, after, like)
            while mask != _0:
                changed[(load_lane(before, lowest(mask), like) >> shift) & kept] += 1
                mask &= mask - _1
        else:
            for j in range(count):
                lane = load_lane(before, j, like)
                changed[(lane >> shift) & kept] += np.int64(lane != load_lane(after, j, like))


@kernel
def count_sample(job: Word, like: Array, tables: Array, changed: Array) -> None:
    """Count the sampled lanes of the frame by exponent in `tables`, shape [4, exponents], and those that changed."""
    how = load64(job, MANTISSA), load64(job, EXPONENTS)
    width, period, run = lane_width(like), load64(job, SAMPLE_PERIOD), load64(job, SAMPLE_RUN)
    first = np.uint64(0)
    for i in range(load64(job, SEGMENT_COUNT)):
        segment = load64(job, SEGMENTS) + i * _SEGMENT_BYTES
        old, new, lanes = load64(segment, OLD), load64(segment, NEW), load64(segment, LANES)
        at = np.uint64(0)
        while at < lanes:
            within_period = (first + at) % period
            if within_period >= run:
                at += period - within_period
                continue
            count = min(lanes - at, run - within_period)
            _count_run(old + at * width, new + at * width, count, period * width, how, tables, changed, like)
            at += count
        first += lanes


@part
def _log2(number: Int, fractions: Array) -> Int:
    number = max(number, 1)
    whole = np.int64(_63 - leading(np.uint64(number)))
    return (whole << UNIT) + fractions[(number << max(UNIT - whole, 0) >> max(whole - UNIT, 0)) - _ONE]


@part
def _bits(count: Int, moved: Int, first: Int, second: Int, fractions: Array) -> Int:
    """What a class of so many sampled lanes takes; `first` and `second` are moments of its changed exponents."""
    still = count - moved
    bits = count * _log2(count, fractions) - moved * _log2(moved, fractions) - still * _log2(still, fractions)
    per = np.float64(max(moved, 1))
    mean, square = np.float64(first) / per, np.float64(second) / per
    spread = np.sqrt(max(square - mean * mean, 0.0))
    mixed = np.int64((1.0 + spread * 0.5) * np.float64(_ONE))
    return bits + moved * (_log2(mixed, fractions) - (UNIT << UNIT))


@part
def _running(counts: Array, edges: Array, bins: Int, power: Int) -> Array:
    """Sums of counts before each edge, and of all; each count times its exponent to a power."""
    sums = np.zeros(bins + 1, np.int64)
    total, at = np.int64(0), 0
    for exponent in range(counts.size):
        if at < bins and edges[at] == exponent:
            sums[at] = total
            at += 1
        total += counts[exponent] * np.int64(exponent) ** power
    sums[bins] = total
    return sums


@part
def _cut(cost: Array, bins: Int, best: Array, last: Array) -> None:
    """`best[k, j]`: the cheapest way to cut the first j bins into k classes; `last[k, j]` is where its last begins."""
    best[:] = NEVER
    best[0, 0] = 0
    for k in range(1, best.shape[0]):
        for j in range(1, bins + 1):
            for i in range(j):
                total = best[k - 1, i] + cost[i, j]
                if total < best[k, j]:
                    best[k, j] = total
                    last[k, j] = i


@part
def _cheapest(best: Array, least: Int, end: Int) -> Int:
    """How many classes the first `end` bins are best cut into, at least `least`."""
    found = least
    for k in range(least, best.shape[0]):
        if best[k, end] < best[found, end]:
            found = k
    return found


@kernel
def choose(
    lanes_by: Array, changed_by: Array, lanes: Int, price: Int, fractions: Array, starts: Array
) -> tuple[Int, Int, Int]:
    """Fill in where classes start; returns how many are small, how many there are, and the polarities."""
    starts[0] = 0
    edges = np.zeros(BINS, np.int64)
    bins = 0
    for exponent in range(lanes_by.size):
        bins += lanes_by[exponent] != 0
    if bins == 0 or not changed_by.any():
        return 0, 1, 0
    skip = max(bins - BINS, 0)
    bins -= skip
    at = 0
    for exponent in range(lanes_by.size):
        if lanes_by[exponent] != 0:
            if at >= skip:
                edges[at - skip] = exponent
            at += 1
    edges[0] = 0
    n, m = _running(lanes_by, edges, bins, 0), _running(changed_by, edges, bins, 0)
    first, second = _running(changed_by, edges, bins, 1), _running(changed_by, edges, bins, 2)
    scale = (lanes << 8) // n[bins]
    small, bulk = np.full((bins + 1, bins + 1), NEVER), np.full((bins + 1, bins + 1), NEVER)
    per_lane = (SMALL_NS * price << UNIT) // 100
    per_bulk = (BULK_BITS << UNIT) + ((lanes * BULK_NS_HUNDREDTHS * price << UNIT) // 10_000)
    for i in range(bins):
        for j in range(i + 1, bins + 1):
            count = n[j] - n[i]
            bits = _bits(count, m[j] - m[i], first[j] - first[i], second[j] - second[i], fractions)
            small[i, j] = ((bits + count * per_lane) * scale >> 8) + (SMALL_BITS << UNIT)
            bulk[bins - j, bins - i] = (bits * scale >> 8) + per_bulk  # read from the top down, they are a prefix too
    best_small, last_small = np.zeros((2, SMALL_CLASSES + 1, bins + 1), np.int64)
    best_bulk, last_bulk = np.zeros((2, BULK_CLASSES + 1, bins + 1), np.int64)
    _cut(small, bins, best_small, last_small)
    _cut(bulk, bins, best_bulk, last_bulk)
    border, cheapest = 0, NEVER
    for j in range(bins):
        total = best_small[_cheapest(best_small, 0, j), j] + best_bulk[_cheapest(best_bulk, 1, bins - j), bins - j]
        if total < cheapest:
            border, cheapest = j, total
    smalls = _cheapest(best_small, 0, border)
    bulks = _cheapest(best_bulk, 1, bins - border)
    end, marked = border, 0
    for k in range(smalls, 0, -1):
        begin = last_small[k, end]
        if 2 * (m[end] - m[begin]) > n[end] - n[begin]:
            marked |= 1 << (k - 1)
        starts[k - 1] = edges[begin]
        end = begin
    end = bins - border
    for k in range(bulks, 0, -1):
        starts[smalls + bulks - k] = edges[bins - end]
        end = last_bulk[k, end]
    return smalls, smalls + bulks, marked
