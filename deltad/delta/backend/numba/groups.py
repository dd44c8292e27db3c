"""What encoding and decoding share: masks of 64 lanes, and the indices of their bits, in the scratch."""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
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
from deltad.delta.backend.numba.job import MEMBERS, STARTS

_0, _1, _2, _6 = (np.uint64(n) for n in (0, 1, 2, 6))


@part
def busy_groups(masks: Word, groups: Word, busy: Word) -> Word:
    """The groups whose mask is not empty, ascending, into `busy`; returns their number."""
    count = np.uint64(0)
    for g in range(groups):
        store32(busy, count, g)
        count += np.uint64(load64(masks, g) != _0)
    return count


@phase
def indices(masks: Word, busy: Word, used: Word, found: Word) -> Word:
    """The positions of all set bits in the first `used` busy groups, ascending; returns their number."""
    count = np.uint64(0)
    for j in range(used):
        g = load32(busy, j)
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
def gather(lanes: Word, found: Word, count: Word, into: Word, like: Array) -> None:
    """The lanes at the indices found, one after the other."""
    for j in range(count):
        store_lane(into, j, load_lane(lanes, load32(found, j), like), like)
