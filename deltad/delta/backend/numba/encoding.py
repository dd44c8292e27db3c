"""Old and new lanes to gap symbols and values, block by block.

A block is compared and sorted into classes by masks of 64 lanes, in one pass over its lanes. What differs, and
what is in small classes, are few lanes: those are put by until there are enough, and then coded together, so
that loops over them are long. All that outlives a block is in the job, so segments of any length and a pause
to enlarge buffers change nothing in the streams.
"""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    below,
    copy_bytes,
    keep_apart,
    lane_width,
    load8,
    load32,
    load64,
    load_lane,
    lowest,
    ones,
    store8,
    store32,
    store64,
    store_lane,
    within,
)
from deltad.delta.backend.numba.compiling import kernel, part, phase
from deltad.delta.backend.numba.groups import (
    compare,
    compare_and_sort,
    find_busy,
    gather,
    indices,
    mask_at,
    members_of,
    put_mask,
    start_at,
    tail_of,
)
from deltad.delta.backend.numba.job import (
    ADJUST,
    BATCH,
    BITS,
    BITS_END,
    BLOCK,
    BLOCK_NEW,
    BLOCK_OLD,
    BORDERS,
    BUSY,
    CHANGED_NEW,
    CHANGED_OLD,
    CLASS_COLUMNS,
    CLASS_COUNT,
    CLASSES,
    CODES,
    COUNT,
    DIFFER,
    EXPONENTS,
    FIRST,
    FLIP,
    FOUND,
    FULL,
    GATHERED,
    GATHERED_RANKS,
    INDICES,
    KEYS,
    KIND_AREA,
    KIND_ENDS,
    KIND_RANKS,
    KINDS,
    LANE,
    LANES,
    MANTISSA,
    MEMBERS,
    NEW,
    OLD,
    OTHER_CODES,
    PICKED,
    PICKED_BUSY,
    RANKS,
    RECORDS,
    SCRATCH,
    SEGMENT,
    SEGMENT_COLUMNS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIGN,
    SLACK,
    SMALL,
    SMALL_NEW,
    SMALL_OLD,
    SPAN,
    STARTS,
    SYMBOLS,
    SYMBOLS_END,
    UNCHANGED,
    VALUES,
    VALUES_END,
    WAITING,
    WAITING_LANES,
    XOR,
)
from deltad.delta.backend.numba.sums import add_changes
from deltad.delta.backend.numba.symbols import write_gaps
from deltad.delta.coding import BULK_CLASSES

_0, _1, _2, _3, _4, _6, _63, _64 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 6, 63, 64))
_BLOCK, _BATCH = np.uint64(BLOCK), np.uint64(BATCH)
_ROOM = np.uint64(2 * WAITING_LANES)
_KINDS = np.uint64(BULK_CLASSES + 1)
_CLASS_BYTES = np.uint64(8 * CLASS_COLUMNS)
_SEGMENT_BYTES = np.uint64(8 * SEGMENT_COLUMNS)


@phase
def _make_codes(job: Word, count: Word, scratch: Word, like: Array) -> None:
    """The codes of the changed lanes."""
    keep_apart()
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


@phase
def _put_by_changes(job: Word, lane: Word, old: Word, new: Word, groups: Word, scratch: Word, like: Array) -> None:
    """Let the changes of a block wait for more of them: positions in the segment, and lanes."""
    keep_apart()
    waiting, at = load64(job, GATHERED), scratch + np.uint64(INDICES)
    count = indices(scratch + np.uint64(RECORDS + DIFFER), groups, scratch + np.uint64(BUSY), at)
    found, offset = scratch + np.uint64(FOUND) + (waiting << _2), waiting * lane_width(like)
    for j in range(count):
        store32(found, j, lane + load32(at, j))
    gather(old, at, count, scratch + np.uint64(CHANGED_OLD) + offset, like)
    gather(new, at, count, scratch + np.uint64(CHANGED_NEW) + offset, like)
    store64(job, GATHERED, waiting + count)


@phase
def _put_by_kinds(job: Word, first: Word, scratch: Word, like: Array) -> None:
    """For the changes of this block, which wait from `first` on: which bulk class, counted from 1, and which rank.

    A change in a small class is of kind 0, and its rank means nothing.
    """
    keep_apart()
    records, at = scratch + np.uint64(RECORDS), scratch + np.uint64(INDICES)
    masks, starts = records + np.uint64(MEMBERS - 8), records + np.uint64(STARTS - 4)
    old = scratch + np.uint64(CHANGED_OLD) + first * lane_width(like)
    kinds, ranks = scratch + np.uint64(KINDS) + first, scratch + np.uint64(GATHERED_RANKS) + (first << _2)
    borders = job + (BORDERS << _3)
    a, b, c, d = load64(borders, _0), load64(borders, _1), load64(borders, _2), load64(borders, _3)
    shift, kept = load64(job, MANTISSA), load64(job, EXPONENTS)
    for j in range(load64(job, GATHERED) - first):
        lane = load32(at, j)
        group = lane >> _6
        exponent = (load_lane(old, j, like) >> shift) & kept
        kind = np.uint64(exponent >= a) + np.uint64(exponent >= b) + np.uint64(exponent >= c) + np.uint64(exponent >= d)
        earlier = mask_at(masks + (kind << _3), group) & ((_1 << (lane & _63)) - _1)
        store32(ranks, j, start_at(starts + (kind << _2), group) + ones(earlier))
        store8(kinds, j, kind)


@part
def _class_of_kind(job: Word, kind: Word) -> Word:
    """The class that the lanes of a kind are in. The kinds before the first class's have no lanes."""
    return load64(job, CLASSES) + (load64(job, CLASS_COUNT) + kind - _KINDS) * _CLASS_BYTES


@part
def _kinds_in_use(job: Word) -> Word:
    return load64(job, CLASS_COUNT) - load64(job, SMALL)


@phase
def _append_by_kind(job: Word, count: Word, scratch: Word, like: Array) -> None:
    """Append ranks and codes of the changes that wait to their bulk classes."""
    keep_apart()
    ends, width = scratch + np.uint64(KIND_ENDS), lane_width(like)
    first = _KINDS - _kinds_in_use(job)
    for kind in range(_KINDS):
        values = scratch + np.uint64(OTHER_CODES)
        if kind >= first:
            values = load64(_class_of_kind(job, kind), VALUES)
        store64(ends, kind << _1, scratch + np.uint64(KIND_RANKS) + kind * np.uint64(KIND_AREA))
        store64(ends, (kind << _1) + _1, values)
    kinds, ranks, codes = scratch + np.uint64(KINDS), scratch + np.uint64(GATHERED_RANKS), scratch + np.uint64(CODES)
    for j in range(count):
        end = ends + (load8(kinds, j) << _4)
        to_rank, to_value = load64(end, _0), load64(end, _1)
        store32(to_rank, _0, load32(ranks, j))
        store_lane(to_value, _0, load_lane(codes, j, like), like)
        store64(end, _0, to_rank + _4)
        store64(end, _1, to_value + width)
    for kind in range(first, _KINDS):
        mine = _class_of_kind(job, kind)
        begin = scratch + np.uint64(KIND_RANKS) + kind * np.uint64(KIND_AREA)
        write_gaps(begin, (load64(ends, kind << _1) - begin) >> _2, _0, mine)
        store64(mine, VALUES, load64(ends, (kind << _1) + _1))


@phase
def _code_changes(job: Word, segment: Word, like: Array) -> None:
    """Code the changes that wait, all of one segment, and follow its sums."""
    keep_apart()
    scratch, count = load64(job, SCRATCH), load64(job, GATHERED)
    if count == _0:
        return
    store64(job, GATHERED, _0)
    found = scratch + np.uint64(FOUND)
    old, new = scratch + np.uint64(CHANGED_OLD), scratch + np.uint64(CHANGED_NEW)
    _make_codes(job, count, scratch, like)
    add_changes(found, count, old, new, _0, segment, load64(job, KEYS), like)
    store64(segment, COUNT, load64(segment, COUNT) + count)
    if load64(job, ADJUST) != _0:
        _append_by_kind(job, count, scratch, like)
        return
    mine, size = load64(job, CLASSES), count * lane_width(like)
    write_gaps(found, count, load64(mine, RANKS), mine)
    copy_bytes(load64(mine, VALUES), scratch + np.uint64(CODES), size)
    store64(mine, VALUES, load64(mine, VALUES) + size)


@phase
def _append_codes_of_members(mine: Word, count: Word, scratch: Word, like: Array) -> None:
    """Append the codes of those changes whose old lane is in the class `mine`."""
    keep_apart()
    first, span, values = load64(mine, FIRST), load64(mine, SPAN), load64(mine, VALUES)
    old, codes = scratch + np.uint64(CHANGED_OLD), scratch + np.uint64(CODES)
    kept = np.uint64(0)
    for j in range(_0, count, _64):
        mask = within(old + j * lane_width(like), first, span, like) & below(min(_64, count - j))
        while mask != _0:
            store_lane(values, kept, load_lane(codes, j + lowest(mask), like), like)
            mask &= mask - _1
            kept += _1
    store64(mine, VALUES, values + kept * lane_width(like))


@phase
def _append_gaps_of_members(mine: Word, lanes: Word, groups: Word, tail: Word, scratch: Word, like: Array) -> None:
    """Append the gaps of a small class over lanes that have been compared."""
    keep_apart()
    first, span, rank = load64(mine, FIRST), load64(mine, SPAN), load64(mine, RANKS)
    store64(mine, RANKS, members_of(lanes, groups, tail, first, span, rank, scratch, like))
    records, found = scratch + np.uint64(RECORDS), scratch + np.uint64(INDICES)
    differ, members = records + np.uint64(DIFFER), records + np.uint64(MEMBERS)
    marked, busy = records + np.uint64(PICKED), scratch + np.uint64(PICKED_BUSY)
    flip = load64(mine, UNCHANGED)
    for g in range(groups):
        put_mask(marked, g, (mask_at(differ, g) ^ flip) & mask_at(members, g))
    find_busy(marked, groups, busy)
    count = indices(marked, groups, busy, found)
    starts = records + np.uint64(STARTS)
    for j in range(count):
        lane = load32(found, j)
        group = lane >> _6
        earlier = mask_at(members, group) & ((_1 << (lane & _63)) - _1)
        store32(found, j, start_at(starts, group) + ones(earlier))
    write_gaps(found, count, _0, mine)


@phase
def _code_small_classes(job: Word, like: Array) -> None:
    """Code the lanes that wait. No changes may wait: they would lie in the same places."""
    keep_apart()
    lanes, scratch = load64(job, WAITING), load64(job, SCRATCH)
    store64(job, WAITING, _0)
    if lanes == _0:
        return
    old, new, found = scratch + np.uint64(SMALL_OLD), scratch + np.uint64(SMALL_NEW), scratch + np.uint64(FOUND)
    groups, tail = (lanes + _63) >> _6, tail_of(lanes)
    compare(old, new, groups, tail, scratch, like)
    changed = indices(scratch + np.uint64(RECORDS + DIFFER), groups, scratch + np.uint64(BUSY), found)
    gather(old, found, changed, scratch + np.uint64(CHANGED_OLD), like)
    gather(new, found, changed, scratch + np.uint64(CHANGED_NEW), like)
    _make_codes(job, changed, scratch, like)
    for c in range(load64(job, SMALL)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        _append_gaps_of_members(mine, old, groups, tail, scratch, like)
        _append_codes_of_members(mine, changed, scratch, like)


@phase
def _put_by_small_lanes(job: Word, old: Word, new: Word, groups: Word, scratch: Word, like: Array) -> None:
    """Let the lanes of this block that are in small classes wait for more of them."""
    keep_apart()
    found, waiting = scratch + np.uint64(INDICES), load64(job, WAITING)
    count = indices(scratch + np.uint64(RECORDS + PICKED), groups, scratch + np.uint64(PICKED_BUSY), found)
    offset = waiting * lane_width(like)
    gather(old, found, count, scratch + np.uint64(SMALL_OLD) + offset, like)
    gather(new, found, count, scratch + np.uint64(SMALL_NEW) + offset, like)
    store64(job, WAITING, waiting + count)


@part
def _read_block(job: Word, lane: Word, old: Word, new: Word, lanes: Word, scratch: Word, like: Array) -> None:
    """Put by what there is to code in a block."""
    groups, tail = (lanes + _63) >> _6, tail_of(lanes)
    if load64(job, ADJUST) == _0:
        compare(old, new, groups, tail, scratch, like)
        _put_by_changes(job, lane, old, new, groups, scratch, like)
        return
    compare_and_sort(job, old, new, groups, tail, scratch, like)
    waiting = load64(job, GATHERED)
    _put_by_changes(job, lane, old, new, groups, scratch, like)
    _put_by_kinds(job, waiting, scratch, like)
    if load64(job, SMALL) != _0:
        _put_by_small_lanes(job, old, new, groups, scratch, like)


@part
def _room(job: Word, like: Array) -> bool:
    """Whether every class has room for all that can be appended before this is asked again."""
    for c in range(load64(job, CLASS_COUNT)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        if load64(mine, SYMBOLS_END) - load64(mine, SYMBOLS) < _ROOM + _64:
            return False
        if load64(mine, BITS_END) - load64(mine, BITS) < _ROOM * _4 + _64:
            return False
        if load64(mine, VALUES_END) - load64(mine, VALUES) < _ROOM * lane_width(like) + np.uint64(16 * SLACK):
            return False
    return True


@kernel
def encode(job: Word, like: Array) -> bool:
    """Code all segments from where the job stands; False where a buffer has to be enlarged to go on."""
    scratch, width, mine = load64(job, SCRATCH), lane_width(like), load64(job, CLASSES)
    for i in range(load64(job, SEGMENT), load64(job, SEGMENT_COUNT)):
        store64(job, SEGMENT, i)
        segment = load64(job, SEGMENTS) + i * _SEGMENT_BYTES
        for lane in range(load64(job, LANE), load64(segment, LANES), _BLOCK):
            store64(job, LANE, lane)
            if not _room(job, like):
                return False
            small_ones_wait = load64(job, WAITING) >= _BATCH
            if small_ones_wait or load64(job, GATHERED) >= _BATCH:
                _code_changes(job, segment, like)
            if small_ones_wait:
                _code_small_classes(job, like)
            lanes = min(_BLOCK, load64(segment, LANES) - lane)
            old, new = load64(segment, OLD) + lane * width, load64(segment, NEW) + lane * width
            if lanes & _63 != _0:  # masks are of 64 lanes, and the segment may end at the end of a page
                copy_bytes(scratch + np.uint64(BLOCK_OLD), old, lanes * width)
                copy_bytes(scratch + np.uint64(BLOCK_NEW), new, lanes * width)
                old, new = scratch + np.uint64(BLOCK_OLD), scratch + np.uint64(BLOCK_NEW)
            _read_block(job, lane, old, new, lanes, scratch, like)
        _code_changes(job, segment, like)
        if load64(job, ADJUST) == _0:
            store64(mine, RANKS, load64(mine, RANKS) + load64(segment, LANES))
        store64(job, LANE, _0)
    store64(job, SEGMENT, load64(job, SEGMENT_COUNT))
    if not _room(job, like):
        return False
    _code_small_classes(job, like)
    return True
