"""What encoding and decoding share: masks of 64 lanes, and the indices of their bits, in the scratch."""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
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
from deltad.delta.backend.numba.job import BUSY, MEMBERS, STARTS

_0, _1, _2, _6, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 6, 63, 64))


@part
def find_busy(masks: Word, groups: Word, busy: Word) -> None:
    """The bits of `busy` say which groups have a mask that is not empty."""
    for first in range(_0, groups, _64):
        bits = np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            bits |= np.uint64(load64(masks, g) != _0) << (g & _63)
        store64(busy, first >> _6, bits)


@part
def cut_tail(masks: Word, groups: Word, tail: Word, busy: Word) -> Word:
    """Mask the last group by `tail`; returns what its mask loses."""
    last, word = groups - _1, (groups - _1) >> _6
    mask = load64(masks, last)
    store64(masks, last, mask & tail)
    store64(busy, word, load64(busy, word) & ~(np.uint64(mask & tail == _0) << (last & _63)))
    return mask & ~tail


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


@phase
def members_of(lanes: Word, groups: Word, tail: Word, first: Word, span: Word, scratch: Word, like: Array) -> Word:
    """Masks of the lanes whose magnitude is in a class, and the rank in it that each group starts with.

    Returns the class's population. `tail` masks the last group.
    """
    keep_apart()
    members, starts = scratch + np.uint64(MEMBERS), scratch + np.uint64(STARTS)
    stride = lane_width(like) << _6
    population = np.uint64(0)
    for g in range(groups - _1):
        mask = within(lanes + g * stride, first, span, like)
        store64(members, g, mask)
        store32(starts, g, population)
        population += ones(mask)
    mask = within(lanes + (groups - _1) * stride, first, span, like) & tail
    store64(members, groups - _1, mask)
    store32(starts, groups - _1, population)
    return population + ones(mask)


@phase
def other_members(groups: Word, tail: Word, scratch: Word) -> Word:
    """Turn the masks of the only bulk class into those of the small lanes; returns their number."""
    keep_apart()
    members, busy = scratch + np.uint64(MEMBERS), scratch + np.uint64(BUSY)
    population = np.uint64(0)
    for first in range(_0, groups, _64):
        bits = np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            mask = ~load64(members, g)
            store64(members, g, mask)
            population += ones(mask)
            bits |= np.uint64(mask != _0) << (g & _63)
        store64(busy, first >> _6, bits)
    return population - ones(cut_tail(members, groups, tail, busy))


@phase
def small_members(lanes: Word, groups: Word, tail: Word, span: Word, scratch: Word, like: Array) -> Word:
    """Masks of the lanes whose magnitude is below `span`, and which groups have any; returns their number."""
    keep_apart()
    members, busy = scratch + np.uint64(MEMBERS), scratch + np.uint64(BUSY)
    stride = lane_width(like) << _6
    population = np.uint64(0)
    for first in range(_0, groups, _64):
        bits = np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            mask = within(lanes + g * stride, _0, span, like)
            store64(members, g, mask)
            population += ones(mask)
            bits |= np.uint64(mask != _0) << (g & _63)
        store64(busy, first >> _6, bits)
    return population - ones(cut_tail(members, groups, tail, busy))


@phase
def gather(lanes: Word, found: Word, count: Word, into: Word, like: Array) -> None:
    """The lanes at the indices found, one after the other."""
    keep_apart()
    for j in range(count):
        store_lane(into, j, load_lane(lanes, load32(found, j), like), like)
