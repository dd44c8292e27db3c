"""Marked ranks and values to positions and lanes, block by block, and the writing of those.

The streams have been read: marked ranks ascend and end with one that no class reaches, values are within
the lane. What is left to check is whether they fit the base, and that is done before anything is stored:
ranks by the populations of classes, values and changes by how many there are. Nothing is written to the
base until all of the frame has been decoded and its sums have been compared.
"""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    copy_bytes,
    keep_apart,
    lane_width,
    load32,
    load64,
    load_lane,
    prefetch,
    select,
    store32,
    store64,
    store_lane,
)
from deltad.delta.backend.numba.compiling import kernel, part, phase
from deltad.delta.backend.numba.groups import (
    find_busy,
    gather,
    indices,
    mask_at,
    members_of,
    put_mask,
    put_start,
    sort_lanes,
    start_at,
    tail_of,
)
from deltad.delta.backend.numba.job import (
    ADJUST,
    BASE_BLOCK,
    BATCH,
    BLOCK_OLD,
    BULK_RANKS,
    CHANGED,
    CHANGED_NEW,
    CHANGED_OLD,
    CLASS_COLUMNS,
    CLASS_COUNT,
    CLASSES,
    CODES,
    COMPOSE,
    COUNT,
    DECODED,
    FIRST,
    FLIP,
    FOUND,
    FULL,
    GATHERED,
    GROUPS,
    INDICES,
    KEYS,
    LANES,
    LANES_OUT,
    MARKS,
    MARKS_END,
    MEMBERS,
    OLD,
    PICKED,
    PICKED_BUSY,
    POSITIONS,
    RANKS,
    RECORDS,
    SCRATCH,
    SEGMENT_COLUMNS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIGN,
    SMALL,
    SMALL_FOUND,
    SMALL_OLD,
    SPAN,
    STARTS,
    UNCHANGED,
    VALUES,
    VALUES_END,
    WAITING,
    XOR,
)
from deltad.delta.backend.numba.sums import add_changes
from deltad.delta.coding import BULK_CLASSES

_0, _1, _2, _4, _6, _8, _63 = (np.uint64(n) for n in (0, 1, 2, 4, 6, 8, 63))
_16, _32 = np.uint64(16), np.uint64(32)
_BLOCK, _BATCH = np.uint64(BASE_BLOCK), np.uint64(BATCH)
_GROUPS = np.uint64(GROUPS)
_BULK = np.uint64(BULK_CLASSES)
_CLASS_BYTES = np.uint64(8 * CLASS_COLUMNS)
_SEGMENT_BYTES = np.uint64(8 * SEGMENT_COLUMNS)
_NO_RANK = np.uint64(0xFFFF_FFFF)
_AHEAD = np.uint64(24)


@part
def _compose(job: Word, before: Word, code: Word) -> tuple[Word, Word]:
    """The plain difference that a code stands for beside its old lane, and the new lane."""
    moved = code + _1
    if load64(job, XOR) != _0:
        return moved, before ^ moved
    flip, full, sign = load64(job, FLIP), load64(job, FULL), load64(job, SIGN)
    negative = _0 - (before >> sign)
    adjust = negative & load64(job, ADJUST)
    difference = (((moved >> _1) ^ (_0 - (moved & _1)) ^ adjust) - adjust) & full
    after = ((before ^ (flip & negative)) + difference) & full
    return difference, after ^ (flip & (_0 - (after >> sign)))


@phase
def _put(job: Word, segment: Word, count: Word, codes: Word, like: Array) -> bool:
    """Add `count` changes at lanes `found[j]` of a segment to what is decoded; False where there are too many."""
    keep_apart()
    scratch, done = load64(job, SCRATCH), load64(job, DECODED)
    if count > load64(job, CHANGED) - done:
        return False
    if count == _0:
        return True
    found = scratch + np.uint64(FOUND)
    old, new = scratch + np.uint64(CHANGED_OLD), scratch + np.uint64(CHANGED_NEW)
    out = load64(job, LANES_OUT) + done * lane_width(like)
    composes = load64(job, COMPOSE) != _0
    for j in range(count):
        difference, after = _compose(job, load_lane(old, j, like), load_lane(codes, j, like))
        store_lane(new, j, after, like)
        store_lane(out, j, after if composes else difference, like)
    copy_bytes(load64(job, POSITIONS) + (done << _2), found, count << _2)
    if composes:
        add_changes(found, count, old, new, _0, segment, load64(job, KEYS), like)
    store64(job, DECODED, done + count)
    store64(segment, COUNT, load64(segment, COUNT) + count)
    return True


@part
def _put_what_waits(job: Word, segment: Word, like: Array) -> bool:
    count = load64(job, GATHERED)
    store64(job, GATHERED, _0)
    return bool(_put(job, segment, count, load64(job, SCRATCH) + np.uint64(CODES), like))


@part
def _climb(starts: Word, group: Word, rank: Word, step: Word) -> Word:
    return group + step * np.uint64(start_at(starts, group + step) <= rank)


@part
def _lane_of_rank(rank: Word, starts: Word, members: Word) -> Word:
    """The lane of the block that has this rank among the members: search the group, then the bit."""
    group = _climb(starts, _0, rank, _32)
    group = _climb(starts, group, rank, _16)
    group = _climb(starts, group, rank, _8)
    group = _climb(starts, group, rank, _4)
    group = _climb(starts, group, rank, _2)
    group = _climb(starts, group, rank, _1)
    return (group << _6) + select(mask_at(members, group), rank - start_at(starts, group))


@phase
def _find_marked(mine: Word, kind: Word, groups: Word, beyond: Word, scratch: Word) -> Word:
    """The lanes of a class's marked ranks before `beyond`, the rank after this block; returns their number.

    `kind` says which of the four classes of the records it is.
    """
    keep_apart()
    records, found = scratch + np.uint64(RECORDS), scratch + np.uint64(INDICES)
    starts, members = records + np.uint64(STARTS) + (kind << _2), records + np.uint64(MEMBERS) + (kind << np.uint64(3))
    for g in range(groups, _GROUPS):
        put_start(starts, g, _NO_RANK)
    marks, count = load64(mine, MARKS), np.uint64(0)
    while load32(marks, count) < beyond:
        count += _1
    for j in range(count):
        store32(found, j, _lane_of_rank(load32(marks, j), starts, members))
    store64(mine, MARKS, marks + (count << _2))
    return count


@phase
def _all_but_found(groups: Word, count: Word, scratch: Word) -> Word:
    """Replace the `count` lanes found by the other members of the class; returns their number."""
    keep_apart()
    records, found = scratch + np.uint64(RECORDS), scratch + np.uint64(INDICES)
    members, others = records + np.uint64(MEMBERS), records + np.uint64(PICKED)
    busy = scratch + np.uint64(PICKED_BUSY)
    for g in range(groups):
        put_mask(others, g, mask_at(members, g))
    for j in range(count):
        lane = load32(found, j)
        group = lane >> _6
        put_mask(others, group, mask_at(others, group) & ~(_1 << (lane & _63)))
    find_busy(others, groups, busy)
    return indices(others, groups, busy, found)


@part
def _take_values(job: Word, mine: Word, count: Word, lanes: Word, scratch: Word, like: Array) -> bool:
    """Let changes wait: the next `count` codes of a class, and old lanes at INDICES. False without so many codes."""
    values, size = load64(mine, VALUES), count * lane_width(like)
    if size > load64(mine, VALUES_END) - values:
        return False
    store64(mine, VALUES, values + size)
    waiting = load64(job, GATHERED)
    offset = waiting * lane_width(like)
    copy_bytes(scratch + np.uint64(CODES) + offset, values, size)
    gather(lanes, scratch + np.uint64(INDICES), count, scratch + np.uint64(CHANGED_OLD) + offset, like)
    store64(job, GATHERED, waiting + count)
    return True


@phase
def _decode_bulk_classes(job: Word, lane: Word, lanes: Word, groups: Word, scratch: Word, like: Array) -> bool:
    """Let the changes of bulk classes in a block wait; False where there are not as many values."""
    keep_apart()
    bulk = load64(job, CLASS_COUNT) - load64(job, SMALL)
    for kind in range(_BULK - bulk, _BULK):
        mine = load64(job, CLASSES) + (load64(job, CLASS_COUNT) + kind - _BULK) * _CLASS_BYTES
        count = _find_marked(mine, kind, groups, load64(job + (BULK_RANKS << np.uint64(3)), kind), scratch)
        found, at = scratch + np.uint64(FOUND) + (load64(job, GATHERED) << _2), scratch + np.uint64(INDICES)
        if not _take_values(job, mine, count, lanes, scratch, like):
            return False
        for j in range(count):
            store32(found, j, lane + load32(at, j))
    return True


@phase
def _decode_small_classes(job: Word, segment: Word, like: Array) -> bool:
    """Decode the lanes of this segment that wait, block by block. No changes may wait."""
    keep_apart()
    scratch, total = load64(job, SCRATCH), load64(job, WAITING)
    store64(job, WAITING, _0)
    for first in range(_0, total, _BLOCK):
        count = min(_BLOCK, total - first)
        lanes, groups, tail = (
            scratch + np.uint64(SMALL_OLD) + first * lane_width(like),
            (count + _63) >> _6,
            tail_of(count),
        )
        places, at = scratch + np.uint64(SMALL_FOUND) + (first << _2), scratch + np.uint64(INDICES)
        for c in range(load64(job, SMALL)):
            mine = load64(job, CLASSES) + c * _CLASS_BYTES
            begin, span, rank = load64(mine, FIRST), load64(mine, SPAN), load64(mine, RANKS)
            beyond = members_of(lanes, groups, tail, begin, span, rank, scratch, like)
            store64(mine, RANKS, beyond)
            changed = _find_marked(mine, _0, groups, beyond, scratch)
            if load64(mine, UNCHANGED) != _0:
                changed = _all_but_found(groups, changed, scratch)
            found = scratch + np.uint64(FOUND) + (load64(job, GATHERED) << _2)
            if not _take_values(job, mine, changed, lanes, scratch, like):
                return False
            for j in range(changed):
                store32(found, j, load32(places, load32(at, j)))
        if not _put_what_waits(job, segment, like):
            return False
    return True


@phase
def _put_by_small_lanes(job: Word, lane: Word, lanes: Word, groups: Word, scratch: Word, like: Array) -> None:
    """Let the lanes of this block that are in small classes wait for more of them."""
    keep_apart()
    found, waiting = scratch + np.uint64(INDICES), load64(job, WAITING)
    count = indices(scratch + np.uint64(RECORDS + PICKED), groups, scratch + np.uint64(PICKED_BUSY), found)
    gather(lanes, found, count, scratch + np.uint64(SMALL_OLD) + waiting * lane_width(like), like)
    places = scratch + np.uint64(SMALL_FOUND) + (waiting << _2)
    for j in range(count):
        store32(places, j, lane + load32(found, j))
    store64(job, WAITING, waiting + count)


@part
def _decode_what_waits(job: Word, segment: Word, least: Word, like: Array) -> bool:
    """Decode what waits, where it is `least` or more; False where the streams do not fit the base."""
    small = load64(job, WAITING) >= least
    if (small or load64(job, GATHERED) >= least) and not _put_what_waits(job, segment, like):
        return False
    return not small or bool(_decode_small_classes(job, segment, like))


@kernel
def decode_context(job: Word, like: Array) -> bool:
    """Decode all segments; False where the streams do not fit the base.

    Segments come in order; within one, changes are in no order.
    """
    scratch, width = load64(job, SCRATCH), lane_width(like)
    for i in range(load64(job, SEGMENT_COUNT)):
        segment = load64(job, SEGMENTS) + i * _SEGMENT_BYTES
        for lane in range(_0, load64(segment, LANES), _BLOCK):
            count = min(_BLOCK, load64(segment, LANES) - lane)
            lanes, groups = load64(segment, OLD) + lane * width, (count + _63) >> _6
            if count & _63 != _0:
                copy_bytes(scratch + np.uint64(BLOCK_OLD), lanes, count * width)
                lanes = scratch + np.uint64(BLOCK_OLD)
            if not _decode_what_waits(job, segment, _BATCH, like):
                return False
            sort_lanes(job, lanes, groups, tail_of(count), scratch, like)
            if not _decode_bulk_classes(job, lane, lanes, groups, scratch, like):
                return False
            if load64(job, SMALL) != _0:
                _put_by_small_lanes(job, lane, lanes, groups, scratch, like)
        if not _decode_what_waits(job, segment, _0, like):
            return False
    for c in range(load64(job, CLASS_COUNT)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        if load64(mine, MARKS) != load64(mine, MARKS_END):
            return False
    return True


@phase
def _gather_ahead(lanes: Word, found: Word, count: Word, into: Word, like: Array) -> None:
    """`gather` from lanes that are not in a cache. `found` has slack, and what lies there is not followed."""
    keep_apart()
    width = lane_width(like)
    for j in range(count):
        prefetch(lanes + load32(found, j + _AHEAD) * width)
        store_lane(into, j, load_lane(lanes, load32(found, j), like), like)


@kernel
def compose_blind(job: Word, like: Array) -> bool:
    """From the first class's marks, which are frame positions, and values: new lanes and sums, by segment."""
    scratch, mine = load64(job, SCRATCH), load64(job, CLASSES)
    found = scratch + np.uint64(FOUND)
    width = lane_width(like)
    first = np.uint64(0)
    for i in range(load64(job, SEGMENT_COUNT)):
        segment = load64(job, SEGMENTS) + i * _SEGMENT_BYTES
        beyond = first + load64(segment, LANES)
        count = _BLOCK
        while count == _BLOCK:
            marks, codes = load64(mine, MARKS), load64(mine, VALUES)
            count = np.uint64(0)
            while count < _BLOCK and load32(marks, count) < beyond:
                store32(found, count, load32(marks, count) - first)
                count += _1
            _gather_ahead(load64(segment, OLD), found, count, scratch + np.uint64(CHANGED_OLD), like)
            if not _put(job, segment, count, codes, like):
                return False
            store64(mine, MARKS, marks + (count << _2))
            store64(mine, VALUES, codes + count * width)
        first = beyond
    return True


@kernel
def write_lanes(job: Word, like: Array) -> None:
    """Write the decoded lanes of every segment to where it lies."""
    positions, lanes = load64(job, POSITIONS), load64(job, LANES_OUT)
    for i in range(load64(job, SEGMENT_COUNT)):
        segment = load64(job, SEGMENTS) + i * _SEGMENT_BYTES
        target, count = load64(segment, OLD), load64(segment, COUNT)
        for j in range(count):
            prefetch(target + load32(positions, j + _AHEAD) * lane_width(like))
            store_lane(target, load32(positions, j), load_lane(lanes, j, like), like)
        positions += count << _2
        lanes += count * lane_width(like)


@kernel
def apply_changes(job: Word, positions: Word, differences: Word, old_out: Word, stride: Word, like: Array) -> None:
    """Compose `CHANGED` lanes of the first segment, `stride` bytes apart, in place; old ones go to `old_out`."""
    scratch, segment = load64(job, SCRATCH), load64(job, SEGMENTS)
    found, old = scratch + np.uint64(FOUND), scratch + np.uint64(CHANGED_OLD)
    new, target = scratch + np.uint64(CHANGED_NEW), load64(segment, OLD)
    width, total = lane_width(like), load64(job, CHANGED)
    flip, full, sign, xor = load64(job, FLIP), load64(job, FULL), load64(job, SIGN), load64(job, XOR)
    done = np.uint64(0)
    while done < total:
        first = load64(positions, done)
        count = min(_BLOCK, total - done)
        while load64(positions, done + count - _1) - first >= _NO_RANK:
            count -= _1
        for j in range(count):
            at = load64(positions, done + j)
            store32(found, j, at - first)
            before = load_lane(target + at * stride, _0, like)
            difference = load_lane(differences, done + j, like)
            if xor != _0:
                after = before ^ difference
            else:
                after = ((before ^ (flip & (_0 - (before >> sign)))) + difference) & full
                after ^= flip & (_0 - (after >> sign))
            store_lane(old, j, before, like)
            store_lane(new, j, after, like)
            store_lane(target + at * stride, _0, after, like)
        copy_bytes(old_out + done * width, old, count * width)
        add_changes(found, count, old, new, first, segment, load64(job, KEYS), like)
        done += count
