"""Old and new lanes to gap symbols and values, block by block.

A block is compared by masks of 64 lanes; masks become indices without a branch on data but one per group;
indices become ranks within their class, gaps and values. Small classes are few lanes: those are put by
until there are enough, and then coded just like a block. All that outlives a block is in the job, so
segments of any length and a pause to enlarge buffers change nothing in the streams.
"""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    below,
    copy_bytes,
    differing,
    lane_width,
    load32,
    load64,
    load_lane,
    ones,
    store32,
    store64,
    store_lane,
)
from deltad.delta.backend.numba.compiling import kernel, part, phase
from deltad.delta.backend.numba.groups import busy_groups, gather, indices, members_of
from deltad.delta.backend.numba.job import (
    ADJUST,
    BITS,
    BITS_END,
    BLOCK,
    BLOCK_NEW,
    BLOCK_OLD,
    BUSY,
    CHANGED_NEW,
    CHANGED_OLD,
    CLASS_COLUMNS,
    CLASS_COUNT,
    CLASSES,
    CODES,
    COUNT,
    DIFFER,
    FIRST,
    FLIP,
    FOUND,
    FULL,
    KEYS,
    LANE,
    LANES,
    MANTISSA,
    MARKED_BUSY,
    MASKS,
    MEMBERS,
    NEW,
    OLD,
    RANKS,
    RANKS_FOUND,
    SAMPLE_PERIOD,
    SAMPLE_RUN,
    SCRATCH,
    SEGMENT,
    SEGMENT_COLUMNS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIGN,
    SMALL,
    SMALL_NEW,
    SMALL_OLD,
    SMALL_SPAN,
    SPAN,
    STARTS,
    SYMBOLS,
    SYMBOLS_END,
    UNCHANGED,
    VALUES,
    VALUES_END,
    WAITING,
    XOR,
)
from deltad.delta.backend.numba.sums import add_changes
from deltad.delta.backend.numba.symbols import write_gaps

_0, _1, _2, _6, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 6, 63, 64))
_BLOCK = np.uint64(BLOCK)
_CLASS_BYTES = np.uint64(8 * CLASS_COLUMNS)
_SEGMENT_BYTES = np.uint64(8 * SEGMENT_COLUMNS)


@phase
def _compare(old: Word, new: Word, groups: Word, tail: Word, scratch: Word, like: Array) -> Word:
    """Masks of what differs, and which groups have any; returns the number of those."""
    differ = scratch + np.uint64(DIFFER)
    stride = lane_width(like) << _6
    for g in range(groups):
        store64(differ, g, differing(old + g * stride, new + g * stride, like))
    store64(differ, groups - _1, load64(differ, groups - _1) & tail)
    return busy_groups(differ, groups, scratch + np.uint64(BUSY))


@phase
def _make_codes(job: Word, count: Word, scratch: Word, like: Array) -> None:
    """The codes of the changed lanes."""
    old, new = scratch + np.uint64(CHANGED_OLD), scratch + np.uint64(CHANGED_NEW)
    codes = scratch + np.uint64(CODES)
    if load64(job, XOR) != _0:
        for j in range(count):
            store_lane(codes, j, (load_lane(old, j, like) ^ load_lane(new, j, like)) - _1, like)
        return
    flip, adjust, full, sign = load64(job, FLIP), load64(job, ADJUST), load64(job, FULL), load64(job, SIGN)
    for j in range(count):
        before, after = load_lane(old, j, like), load_lane(new, j, like)
        negative = _0 - (before >> sign)
        after ^= flip & (_0 - (after >> sign))
        before ^= flip & negative
        negative &= adjust
        distance = (((after - before) ^ negative) - negative) & full
        store_lane(codes, j, ((distance << _1) ^ (_0 - (distance >> sign))) - _1, like)


@part
def _gather_changes(job: Word, old: Word, new: Word, used: Word, scratch: Word, like: Array) -> Word:
    """Positions, lanes and codes of all that differs; returns their number."""
    found = scratch + np.uint64(FOUND)
    count = indices(scratch + np.uint64(DIFFER), scratch + np.uint64(BUSY), used, found)
    gather(old, found, count, scratch + np.uint64(CHANGED_OLD), like)
    gather(new, found, count, scratch + np.uint64(CHANGED_NEW), like)
    _make_codes(job, count, scratch, like)
    return count


@part
def _append_codes(mine: Word, count: Word, scratch: Word, like: Array) -> None:
    size = count * lane_width(like)
    copy_bytes(load64(mine, VALUES), scratch + np.uint64(CODES), size)
    store64(mine, VALUES, load64(mine, VALUES) + size)


@phase
def _append_codes_of_members(mine: Word, count: Word, magnitude: Word, scratch: Word, like: Array) -> None:
    """Append the codes of those changes whose old lane is in the class `mine`."""
    first, span, values = load64(mine, FIRST), load64(mine, SPAN), load64(mine, VALUES)
    old, codes = scratch + np.uint64(CHANGED_OLD), scratch + np.uint64(CODES)
    kept = np.uint64(0)
    for j in range(count):
        store_lane(values, kept, load_lane(codes, j, like), like)
        kept += np.uint64(((load_lane(old, j, like) & magnitude) - first) < span)
    store64(mine, VALUES, values + kept * lane_width(like))


@part
def _rank(members: Word, mask: Word) -> Word:
    """How many members are before the lowest bit of `mask`."""
    return ones(members & ((mask ^ (mask - _1)) >> _1))


@phase
def _ranks(masks: Word, busy: Word, used: Word, scratch: Word) -> Word:
    """The ranks among `members` of the set bits of `masks` that are members; returns their number."""
    member_masks, starts = scratch + np.uint64(MEMBERS), scratch + np.uint64(STARTS)
    ranks = scratch + np.uint64(RANKS_FOUND)
    count = np.uint64(0)
    for j in range(used):
        g = load32(busy, j)
        members, start = load64(member_masks, g), load32(starts, g)
        mask = load64(masks, g) & members
        beyond = count + ones(mask)
        store32(ranks, count, start + _rank(members, mask))
        mask &= mask - _1
        store32(ranks, count + _1, start + _rank(members, mask))
        mask &= mask - _1
        count += _2
        while count < beyond:
            store32(ranks, count, start + _rank(members, mask))
            mask &= mask - _1
            count += _1
        count = beyond
    return count


@phase
def _append_gaps(
    mine: Word, lanes: Word, groups: Word, tail: Word, used: Word, scratch: Word, like: Array
) -> None:
    """Append the gaps of the class `mine` over lanes that have been compared and differ in `used` groups."""
    differ, masks, members = scratch + np.uint64(DIFFER), scratch + np.uint64(MASKS), scratch + np.uint64(MEMBERS)
    population = members_of(lanes, groups, tail, load64(mine, FIRST), load64(mine, SPAN), scratch, like)
    if load64(mine, UNCHANGED) != _0:
        for g in range(groups):
            store64(masks, g, ~load64(differ, g) & load64(members, g))
        busy = scratch + np.uint64(MARKED_BUSY)
        count = _ranks(masks, busy, busy_groups(masks, groups, busy), scratch)
    else:
        count = _ranks(differ, scratch + np.uint64(BUSY), used, scratch)
    write_gaps(scratch + np.uint64(RANKS_FOUND), count, mine)
    store64(mine, RANKS, load64(mine, RANKS) + population)


@phase
def _code_small_classes(job: Word, like: Array) -> None:
    """Code the lanes that wait."""
    lanes, scratch = load64(job, WAITING), load64(job, SCRATCH)
    store64(job, WAITING, _0)
    if lanes == _0:
        return
    old, new = scratch + np.uint64(SMALL_OLD), scratch + np.uint64(SMALL_NEW)
    groups, tail = (lanes + _63) >> _6, below(((lanes - _1) & _63) + _1)
    used = _compare(old, new, groups, tail, scratch, like)
    changed = _gather_changes(job, old, new, used, scratch, like)
    for c in range(load64(job, SMALL)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        _append_gaps(mine, old, groups, tail, used, scratch, like)
        _append_codes_of_members(mine, changed, load64(job, FULL) >> _1, scratch, like)


@phase
def _put_by_small_lanes(job: Word, old: Word, new: Word, groups: Word, tail: Word, like: Array) -> None:
    """Let the lanes of this block that are in small classes wait for more of them."""
    span, scratch = load64(job, SMALL_SPAN), load64(job, SCRATCH)
    members, busy, found = scratch + np.uint64(MEMBERS), scratch + np.uint64(BUSY), scratch + np.uint64(FOUND)
    count = members_of(old, groups, tail, _0, span, scratch, like)
    if load64(job, WAITING) + count > _BLOCK:
        _code_small_classes(job, like)
        members_of(old, groups, tail, _0, span, scratch, like)  # the masks have been overwritten
    indices(members, busy, busy_groups(members, groups, busy), found)
    waiting = load64(job, WAITING)
    offset = waiting * lane_width(like)
    gather(old, found, count, scratch + np.uint64(SMALL_OLD) + offset, like)
    gather(new, found, count, scratch + np.uint64(SMALL_NEW) + offset, like)
    store64(job, WAITING, waiting + count)


@part
def _code_block(job: Word, segment: Word, lane: Word, old: Word, new: Word, lanes: Word, like: Array) -> None:
    """Code a block, and follow its sums."""
    scratch = load64(job, SCRATCH)
    groups, tail = (lanes + _63) >> _6, below(((lanes - _1) & _63) + _1)
    used = _compare(old, new, groups, tail, scratch, like)
    changed = _gather_changes(job, old, new, used, scratch, like)
    found = scratch + np.uint64(FOUND)
    changed_old, changed_new = scratch + np.uint64(CHANGED_OLD), scratch + np.uint64(CHANGED_NEW)
    add_changes(found, changed, changed_old, changed_new, lane, segment, load64(job, KEYS), like)
    store64(segment, COUNT, load64(segment, COUNT) + changed)
    small, mine = load64(job, SMALL), load64(job, CLASSES)
    if load64(job, ADJUST) == _0:
        write_gaps(found, changed, mine)
        store64(mine, RANKS, load64(mine, RANKS) + lanes)
        _append_codes(mine, changed, scratch, like)
        return
    for c in range(small, load64(job, CLASS_COUNT)):
        _append_gaps(mine + c * _CLASS_BYTES, old, groups, tail, used, scratch, like)
        _append_codes_of_members(mine + c * _CLASS_BYTES, changed, load64(job, FULL) >> _1, scratch, like)
    if small != _0:
        _put_by_small_lanes(job, old, new, groups, tail, like)


@part
def _room(job: Word, like: Array) -> bool:
    """Whether every class has room for the codes and gaps of a whole block."""
    for c in range(load64(job, CLASS_COUNT)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        if load64(mine, SYMBOLS_END) - load64(mine, SYMBOLS) < _BLOCK + _64:
            return False
        if load64(mine, BITS_END) - load64(mine, BITS) < _BLOCK * np.uint64(4) + _64:
            return False
        if load64(mine, VALUES_END) - load64(mine, VALUES) < _BLOCK * lane_width(like) + _64:
            return False
    return True


@kernel
def encode(job: Word, like: Array) -> bool:
    """Code all segments from where the job stands; False where a buffer has to be enlarged to go on."""
    scratch, width = load64(job, SCRATCH), lane_width(like)
    for i in range(load64(job, SEGMENT), load64(job, SEGMENT_COUNT)):
        store64(job, SEGMENT, i)
        segment = load64(job, SEGMENTS) + i * _SEGMENT_BYTES
        for lane in range(load64(job, LANE), load64(segment, LANES), _BLOCK):
            store64(job, LANE, lane)
            if not _room(job, like):
                return False
            lanes = min(_BLOCK, load64(segment, LANES) - lane)
            old, new = load64(segment, OLD) + lane * width, load64(segment, NEW) + lane * width
            if lanes & _63 != _0:  # masks are of 64 lanes, and the segment may end at the end of a page
                copy_bytes(scratch + np.uint64(BLOCK_OLD), old, lanes * width)
                copy_bytes(scratch + np.uint64(BLOCK_NEW), new, lanes * width)
                old, new = scratch + np.uint64(BLOCK_OLD), scratch + np.uint64(BLOCK_NEW)
            _code_block(job, segment, lane, old, new, lanes, like)
        store64(job, LANE, _0)
    store64(job, SEGMENT, load64(job, SEGMENT_COUNT))
    if not _room(job, like):
        return False
    _code_small_classes(job, like)
    return True


@kernel
def histogram(job: Word, like: Array, tables: Array) -> None:
    """Count the sampled lanes of the frame by exponent: `tables` (shape [4, exponents], zeros) is to be added up.

    The low half of an entry counts lanes, the high half those that changed. Four tables, so that lanes of
    one exponent need not wait for each other.
    """
    width, mantissa, magnitude = lane_width(like), load64(job, MANTISSA), load64(job, FULL) >> _1
    period, run = load64(job, SAMPLE_PERIOD), load64(job, SAMPLE_RUN)
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
            end = min(lanes, at + run - within_period)
            for j in range(at, end):
                before = load_lane(old, j, like)
                exponent = (before & magnitude) >> mantissa
                tables[j & np.uint64(3), exponent] += _1 + (np.uint64(before != load_lane(new, j, like)) << np.uint64(32))
            at = end
        first += lanes
