"""What encoding and decoding share: masks of 64 lanes, and the indices of their bits, in the scratch."""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    below,
    differing,
    keep_apart,
    lane_width,
    load32,
    load64,
    load_lane,
    lowest,
    ones,
    store32,
    store64,
    store_lane,
    within,
)
from deltad.delta.backend.numba.compiling import part, phase
from deltad.delta.backend.numba.job import (
    ADJUST,
    BUSY,
    BUSY_ROW,
    CLASS_BUSY,
    CLASS_COLUMNS,
    CLASS_COUNT,
    CLASSES,
    DIFFER,
    FIRST,
    MASK_ROW,
    MEMBERS,
    POPULATIONS,
    ROWS,
    SMALL,
    SMALL_SPAN,
    SPAN,
    START_ROW,
    STARTS,
)

_0, _1, _2, _6, _7, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 6, 7, 63, 64))
_CHUNK = np.uint64(8)
_CLASS_BYTES = np.uint64(8 * CLASS_COLUMNS)


@part
def tail_of(lanes: Word) -> tuple[Word, Word]:
    """The groups of so many lanes, and the mask of those in the last one."""
    return (lanes + _63) >> _6, below(((lanes - _1) & _63) + _1)


@part
def find_busy(masks: Word, groups: Word, busy: Word) -> None:
    """The bits of `busy` say which groups have a mask that is not empty."""
    for first in range(_0, groups, _64):
        bits = np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            bits |= np.uint64(load64(masks, g) != _0) << (g & _63)
        store64(busy, first >> _6, bits)


@phase
def indices(masks: Word, groups: Word, busy: Word, found: Word) -> Word:
    """The positions of all set bits in busy groups, ascending; returns their number."""
    keep_apart()
    count = np.uint64(0)
    for word in range((groups + _63) >> _6):
        bits = load64(busy, word)
        while bits != _0:
            g = (word << _6) + lowest(bits)
            bits &= bits - _1
            mask, base = load64(masks, g), g << _6
            beyond = count + ones(mask)
            store32(found, count, base + lowest(mask))
            mask &= mask - _1
            store32(found, count + _1, base + lowest(mask))
            mask &= mask - _1
            count += _2
            while count < beyond:
                store32(found, count, base + lowest(mask))
                mask &= mask - _1
                count += _1
            count = beyond
    return count


@part
def _classify(lanes: Word, first: Word, end: Word, row: Word, mine: Word, scratch: Word, like: Array) -> None:
    """One class over some groups: masks of its members, the ranks that groups start with, who differs."""
    members = scratch + np.uint64(MEMBERS) + row * np.uint64(MASK_ROW)
    starts = scratch + np.uint64(STARTS) + row * np.uint64(START_ROW)
    differ, populations = scratch + np.uint64(DIFFER), scratch + np.uint64(POPULATIONS)
    lowest_magnitude, span = load64(mine, FIRST), load64(mine, SPAN)
    stride = lane_width(like) << _6
    population = load64(populations, row)
    bits = np.uint64(0)
    for g in range(first, end):
        mask = within(lanes + g * stride, lowest_magnitude, span, like)
        store64(members, g, mask)
        store32(starts, g, population)
        population += ones(mask)
        bits |= np.uint64(mask & load64(differ, g) != _0) << (g & _63)
    store64(populations, row, population)
    _add_busy(scratch + np.uint64(CLASS_BUSY) + row * np.uint64(BUSY_ROW), first, bits)


@part
def _select_small(lanes: Word, first: Word, end: Word, row: Word, span: Word, scratch: Word, like: Array) -> None:
    """The lanes of small classes in some groups: their masks, their number, and which groups have any."""
    members, populations = scratch + np.uint64(MEMBERS) + row * np.uint64(MASK_ROW), scratch + np.uint64(POPULATIONS)
    stride = lane_width(like) << _6
    population = load64(populations, row)
    bits = np.uint64(0)
    for g in range(first, end):
        mask = within(lanes + g * stride, _0, span, like)
        store64(members, g, mask)
        population += ones(mask)
        bits |= np.uint64(mask != _0) << (g & _63)
    store64(populations, row, population)
    _add_busy(scratch + np.uint64(CLASS_BUSY) + row * np.uint64(BUSY_ROW), first, bits)


@part
def _add_busy(busy: Word, first: Word, bits: Word) -> None:
    store64(busy, first >> _6, load64(busy, first >> _6) | bits)


@part
def _compare(old: Word, new: Word, first: Word, end: Word, scratch: Word, like: Array) -> None:
    differ = scratch + np.uint64(DIFFER)
    stride = lane_width(like) << _6
    bits = np.uint64(0)
    for g in range(first, end):
        mask = differing(old + g * stride, new + g * stride, like)
        store64(differ, g, mask)
        bits |= np.uint64(mask != _0) << (g & _63)
    _add_busy(scratch + np.uint64(BUSY), first, bits)


@part
def _cut_row(masks: Word, last: Word, tail: Word, busy: Word) -> Word:
    """Mask the last group; returns how many lanes it loses."""
    mask = load64(masks, last)
    store64(masks, last, mask & tail)
    store64(busy, last >> _6, load64(busy, last >> _6) & ~(np.uint64(mask & tail == _0) << (last & _63)))
    return ones(mask & ~tail)


@phase
def scan(job: Word, old: Word, new: Word, lanes: Word, scratch: Word, like: Array) -> None:
    """All masks of a block: what differs, unless `new` is 0, and the members of every bulk class, and small lanes.

    The one pass that waits for memory, so all that needs lanes is done in it, a few groups at a time.
    """
    keep_apart()
    groups, tail = tail_of(lanes)
    small, bulk = load64(job, SMALL), load64(job, CLASS_COUNT) - load64(job, SMALL)
    mine = load64(job, CLASSES) + small * _CLASS_BYTES
    context = load64(job, ADJUST) != _0
    for row in range(np.uint64(ROWS)):
        store64(scratch + np.uint64(POPULATIONS), row, _0)
    for word in range(np.uint64((ROWS + 2) * BUSY_ROW // 8)):
        store64(scratch + np.uint64(BUSY), word, _0)
    for first in range(_0, groups, _CHUNK):
        end = min(groups, first + _CHUNK)
        if new != _0:
            _compare(old, new, first, end, scratch, like)
        if context:
            for row in range(bulk):
                _classify(old, first, end, row, mine + row * _CLASS_BYTES, scratch, like)
            if small != _0:
                _select_small(old, first, end, bulk, load64(job, SMALL_SPAN), scratch, like)
    last = groups - _1
    _cut_row(scratch + np.uint64(DIFFER), last, tail, scratch + np.uint64(BUSY))
    for row in range(bulk + np.uint64(small != _0)):
        lost = _cut_row(
            scratch + np.uint64(MEMBERS) + row * np.uint64(MASK_ROW),
            last,
            tail,
            scratch + np.uint64(CLASS_BUSY) + row * np.uint64(BUSY_ROW),
        )
        populations = scratch + np.uint64(POPULATIONS)
        store64(populations, row, load64(populations, row) - lost)


@phase
def compare(old: Word, new: Word, count: Word, scratch: Word, like: Array) -> None:
    """The masks of what differs in lanes that are in a cache."""
    keep_apart()
    groups, tail = tail_of(count)
    busy = scratch + np.uint64(BUSY)
    for first in range(_0, groups, _64):
        store64(busy, first >> _6, _0)
        _compare(old, new, first, min(groups, first + _64), scratch, like)
    _cut_row(scratch + np.uint64(DIFFER), groups - _1, tail, busy)


@phase
def scan_class(lanes: Word, count: Word, mine: Word, scratch: Word, like: Array) -> Word:
    """The masks of one class, in the first row, over lanes that have been compared; returns its population."""
    keep_apart()
    groups, tail = tail_of(count)
    store64(scratch + np.uint64(POPULATIONS), _0, _0)
    for word in range(np.uint64(BUSY_ROW // 8)):
        store64(scratch + np.uint64(CLASS_BUSY), word, _0)
    for first in range(_0, groups, _64):
        _classify(lanes, first, min(groups, first + _64), _0, mine, scratch, like)
    lost = _cut_row(scratch + np.uint64(MEMBERS), groups - _1, tail, scratch + np.uint64(CLASS_BUSY))
    return load64(scratch + np.uint64(POPULATIONS), _0) - lost


@phase
def gather(lanes: Word, found: Word, count: Word, into: Word, like: Array) -> None:
    """The lanes at the indices found, one after the other."""
    keep_apart()
    for j in range(count):
        store_lane(into, j, load_lane(lanes, load32(found, j), like), like)
