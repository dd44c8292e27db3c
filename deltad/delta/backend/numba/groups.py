"""What encoding and decoding share: records of 64 lanes, and the indices of bits in them, in the scratch.

A group of 64 lanes has one record of 64 bytes, a line of the cache: the mask of what differs, a mask of picked
lanes, the masks of four classes, and the rank in each class that the group starts with. All that is known of a
group is written once, while its lanes are read, and in one place: reading lanes from memory is what coding
waits for, and must not wait for anything itself.
"""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    at_least,
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
    BORDERS,
    BULK_RANKS,
    BUSY,
    DIFFER,
    EXPONENTS,
    MANTISSA,
    MEMBERS,
    PICKED,
    PICKED_BUSY,
    RECORDS,
    STARTS,
)

_0, _1, _2, _3, _4, _6, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 6, 63, 64))
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@part
def tail_of(lanes: Word) -> Word:
    """The mask of the last group of so many lanes, of which there is at least one."""
    return below(((lanes - _1) & _63) + _1)


@part
def mask_at(masks: Word, group: Word) -> Word:
    """One mask of a group; `masks` is where the first record has it."""
    return load64(masks, group << _3)


@part
def put_mask(masks: Word, group: Word, mask: Word) -> None:
    store64(masks, group << _3, mask)


@part
def start_at(starts: Word, group: Word) -> Word:
    """One rank that a group starts with; `starts` is where the first record has it."""
    return load32(starts, group << _4)


@part
def put_start(starts: Word, group: Word, rank: Word) -> None:
    store32(starts, group << _4, rank)


@part
def _cut_tail(masks: Word, group: Word, tail: Word, busy: Word) -> None:
    """Take what is beyond the last lane from a mask of the last group."""
    mask, word = mask_at(masks, group) & tail, group >> _6
    put_mask(masks, group, mask)
    store64(busy, word, load64(busy, word) & ~(np.uint64(mask == _0) << (group & _63)))


Ranks = tuple[Word, Word, Word, Word]
Sorting = tuple[Word, Word, Word, Word, Word, Word]


@part
def _sorting(job: Word) -> Sorting:
    """How lanes become exponents, and the borders of the bulk classes: read once, before anything is written."""
    borders = job + (BORDERS << _3)
    return (
        load64(job, MANTISSA),
        load64(job, EXPONENTS),
        load64(borders, _0),
        load64(borders, _1),
        load64(borders, _2),
        load64(borders, _3),
    )


@part
def _ranks_so_far(job: Word) -> Ranks:
    ranks = job + (BULK_RANKS << _3)
    return load64(ranks, _0), load64(ranks, _1), load64(ranks, _2), load64(ranks, _3)


@part
def _sort_group(lanes: Word, record: Word, sorting: Sorting, ranks: Ranks, like: Array) -> tuple[Word, Ranks]:
    """Put the lanes of a group into the bulk classes; returns the mask of all others, and the ranks after it."""
    shift, kept, border_a, border_b, border_c, border_d = sorting
    a, b, c, d = at_least(lanes, shift, kept, border_a, border_b, border_c, border_d, like)
    members, starts = record + np.uint64(MEMBERS), record + np.uint64(STARTS)
    store64(members, _0, a ^ b)
    store64(members, _1, b ^ c)
    store64(members, _2, c ^ d)
    store64(members, _3, d)
    store32(starts, _0, ranks[0])
    store32(starts, _1, ranks[1])
    store32(starts, _2, ranks[2])
    store32(starts, _3, ranks[3])
    store64(record + np.uint64(PICKED), _0, ~a)
    return ~a, (ranks[0] + ones(a ^ b), ranks[1] + ones(b ^ c), ranks[2] + ones(c ^ d), ranks[3] + ones(d))


@part
def _end_sorting(job: Word, ranks: Ranks, groups: Word, tail: Word, scratch: Word) -> None:
    """Keep the ranks for the next block; nothing beyond the last lane counts."""
    kept, records = job + (BULK_RANKS << _3), scratch + np.uint64(RECORDS)
    store64(kept, _0, ranks[0])
    store64(kept, _1, ranks[1])
    store64(kept, _2, ranks[2])
    store64(kept, _3, ranks[3])
    if tail == _ALL:
        return
    last = records + ((groups - _1) << _6)
    members, starts = last + np.uint64(MEMBERS), last + np.uint64(STARTS)
    for k in range(_4):
        mask = load64(members, k) & tail
        store64(members, k, mask)
        store64(kept, k, load32(starts, k) + ones(mask))
    _cut_tail(records + np.uint64(PICKED), groups - _1, tail, scratch + np.uint64(PICKED_BUSY))


@phase
def sort_lanes(job: Word, lanes: Word, groups: Word, tail: Word, scratch: Word, like: Array) -> None:
    """Masks and ranks of the bulk classes of a block; lanes of small classes are picked."""
    keep_apart()
    records, picked_busy = scratch + np.uint64(RECORDS), scratch + np.uint64(PICKED_BUSY)
    stride = lane_width(like) << _6
    sorting, ranks = _sorting(job), _ranks_so_far(job)
    for first in range(_0, groups, _64):
        picked = np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            small, ranks = _sort_group(lanes + g * stride, records + (g << _6), sorting, ranks, like)
            picked |= np.uint64(small != _0) << (g & _63)
        store64(picked_busy, first >> _6, picked)
    _end_sorting(job, ranks, groups, tail, scratch)


@phase
def compare_and_sort(job: Word, old: Word, new: Word, groups: Word, tail: Word, scratch: Word, like: Array) -> None:
    """`compare`, and `sort_lanes` of the old ones, in one go."""
    keep_apart()
    records = scratch + np.uint64(RECORDS)
    busy, picked_busy = scratch + np.uint64(BUSY), scratch + np.uint64(PICKED_BUSY)
    stride = lane_width(like) << _6
    sorting, ranks = _sorting(job), _ranks_so_far(job)
    for first in range(_0, groups, _64):
        bits, picked = np.uint64(0), np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            record = records + (g << _6)
            mask = differing(old + g * stride, new + g * stride, like)
            store64(record + np.uint64(DIFFER), _0, mask)
            bits |= np.uint64(mask != _0) << (g & _63)
            small, ranks = _sort_group(old + g * stride, record, sorting, ranks, like)
            picked |= np.uint64(small != _0) << (g & _63)
        store64(busy, first >> _6, bits)
        store64(picked_busy, first >> _6, picked)
    _cut_tail(records + np.uint64(DIFFER), groups - _1, tail, busy)
    _end_sorting(job, ranks, groups, tail, scratch)


@phase
def compare(old: Word, new: Word, groups: Word, tail: Word, scratch: Word, like: Array) -> None:
    """Masks of what differs, and which groups have any."""
    keep_apart()
    differ, busy = scratch + np.uint64(RECORDS + DIFFER), scratch + np.uint64(BUSY)
    stride = lane_width(like) << _6
    for first in range(_0, groups, _64):
        bits = np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            mask = differing(old + g * stride, new + g * stride, like)
            put_mask(differ, g, mask)
            bits |= np.uint64(mask != _0) << (g & _63)
        store64(busy, first >> _6, bits)
    _cut_tail(differ, groups - _1, tail, busy)


@phase
def members_of(
    lanes: Word, groups: Word, tail: Word, first: Word, span: Word, rank: Word, scratch: Word, like: Array
) -> Word:
    """Masks of the lanes whose magnitude is in a class of `span` from `first` on, and ranks from `rank` on.

    Returns the rank after the last one. They go where the first of the bulk classes has its own.
    """
    keep_apart()
    records = scratch + np.uint64(RECORDS)
    members, starts = records + np.uint64(MEMBERS), records + np.uint64(STARTS)
    stride = lane_width(like) << _6
    for g in range(groups):
        mask = within(lanes + g * stride, first, span, like)
        if g == groups - _1:
            mask &= tail
        put_mask(members, g, mask)
        put_start(starts, g, rank)
        rank += ones(mask)
    return rank


@part
def find_busy(masks: Word, groups: Word, busy: Word) -> None:
    """The bits of `busy` say which groups have a mask that is not empty."""
    for first in range(_0, groups, _64):
        bits = np.uint64(0)
        for g in range(first, min(groups, first + _64)):
            bits |= np.uint64(mask_at(masks, g) != _0) << (g & _63)
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
            mask, base = mask_at(masks, g), g << _6
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
def gather(lanes: Word, found: Word, count: Word, into: Word, like: Array) -> None:
    """The lanes at the indices found, one after the other."""
    keep_apart()
    for j in range(count):
        store_lane(into, j, load_lane(lanes, load32(found, j), like), like)
