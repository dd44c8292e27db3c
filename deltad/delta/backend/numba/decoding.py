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
    below,
    copy_bytes,
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
from deltad.delta.backend.numba.groups import busy_groups, gather, indices, members_of
from deltad.delta.backend.numba.job import (
    ADJUST,
    BLOCK,
    BLOCK_OLD,
    BUSY,
    CHANGED,
    CHANGED_NEW,
    CHANGED_OLD,
    CLASS_COLUMNS,
    CLASS_COUNT,
    CLASSES,
    COMPOSE,
    COUNT,
    DECODED,
    FIRST,
    FLIP,
    FOUND,
    FULL,
    GROUPS,
    KEYS,
    LANES,
    LANES_OUT,
    MARKS,
    MARKS_END,
    MASKS,
    MEMBERS,
    OLD,
    POSITIONS,
    RANKS,
    SCRATCH,
    SEGMENT_COLUMNS,
    SEGMENT_COUNT,
    SEGMENTS,
    SIGN,
    SMALL,
    SMALL_FOUND,
    SMALL_OLD,
    SMALL_SPAN,
    SPAN,
    STARTS,
    UNCHANGED,
    VALUES,
    VALUES_END,
    WAITING,
    XOR,
)
from deltad.delta.backend.numba.sums import add_changes

_0, _1, _2, _3, _4, _6, _8, _63 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 6, 8, 63))
_16, _32, _64 = (np.uint64(n) for n in (16, 32, 64))
_BLOCK = np.uint64(BLOCK)
_GROUPS = np.uint64(GROUPS)
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
def _put(job: Word, segment: Word, lane: Word, count: Word, codes: Word, like: Array) -> bool:
    """Add `count` changes at `lane + found[j]` of a segment to what is decoded; False where there are too many."""
    scratch, done = load64(job, SCRATCH), load64(job, DECODED)
    if count > load64(job, CHANGED) - done:
        return False
    found = scratch + np.uint64(FOUND)
    old, new = scratch + np.uint64(CHANGED_OLD), scratch + np.uint64(CHANGED_NEW)
    out = load64(job, LANES_OUT) + done * lane_width(like)
    composes = load64(job, COMPOSE) != _0
    for j in range(count):
        difference, after = _compose(job, load_lane(old, j, like), load_lane(codes, j, like))
        store_lane(new, j, after, like)
        store_lane(out, j, after if composes else difference, like)
    positions = load64(job, POSITIONS) + (done << _2)
    for j in range(count):
        store32(positions, j, lane + load32(found, j))
    if composes:
        add_changes(found, count, old, new, lane, segment, load64(job, KEYS), like)
    store64(job, DECODED, done + count)
    store64(segment, COUNT, load64(segment, COUNT) + count)
    return True


@part
def _climb(starts: Word, group: Word, rank: Word, step: Word) -> Word:
    return group + step * np.uint64(load32(starts, group + step) <= rank)


@part
def _lane_of_rank(rank: Word, starts: Word, members: Word) -> Word:
    """The lane of the block that has this rank among the members: search the group, then the bit."""
    group = _climb(starts, _0, rank, _64)
    group = _climb(starts, group, rank, _32)
    group = _climb(starts, group, rank, _16)
    group = _climb(starts, group, rank, _8)
    group = _climb(starts, group, rank, _4)
    group = _climb(starts, group, rank, _2)
    group = _climb(starts, group, rank, _1)
    return (group << _6) + select(load64(members, group), rank - load32(starts, group))


@phase
def _find_marked(mine: Word, groups: Word, population: Word, scratch: Word) -> Word:
    """The lanes of the marked ranks in this block, whose class members have been found; returns their number."""
    starts, members, found = scratch + np.uint64(STARTS), scratch + np.uint64(MEMBERS), scratch + np.uint64(FOUND)
    for g in range(groups, _GROUPS):
        store32(starts, g, _NO_RANK)
    marks, first = load64(mine, MARKS), load64(mine, RANKS)
    beyond = first + population
    count = np.uint64(0)
    while load32(marks, count) < beyond:
        count += _1
    for j in range(count):
        store32(found, j, _lane_of_rank(load32(marks, j) - first, starts, members))
    store64(mine, MARKS, marks + (count << _2))
    store64(mine, RANKS, beyond)
    return count


@phase
def _all_but_found(groups: Word, count: Word, scratch: Word) -> Word:
    """Replace the `count` lanes found by the other members of the class; returns their number."""
    members, masks = scratch + np.uint64(MEMBERS), scratch + np.uint64(MASKS)
    busy, found = scratch + np.uint64(BUSY), scratch + np.uint64(FOUND)
    copy_bytes(masks, members, groups << _3)
    for j in range(count):
        lane = load32(found, j)
        group = lane >> _6
        store64(masks, group, load64(masks, group) & ~(_1 << (lane & _63)))
    return indices(masks, busy, busy_groups(masks, groups, busy), found)


@phase
def _decode_class(
    job: Word, segment: Word, mine: Word, lane: Word, lanes: Word, groups: Word, tail: Word, like: Array
) -> Word:
    """Find the changes of one class in a block of lanes, and their old lanes; returns their number.

    Returns more than a block has where there are not as many values.
    """
    scratch = load64(job, SCRATCH)
    population = members_of(lanes, groups, tail, load64(mine, FIRST), load64(mine, SPAN), scratch, like)
    count = _find_marked(mine, groups, population, scratch)
    if load64(mine, UNCHANGED) != _0:
        count = _all_but_found(groups, count, scratch)
    values = load64(mine, VALUES)
    size = count * lane_width(like)
    if size > load64(mine, VALUES_END) - values:
        return ~_0
    store64(mine, VALUES, values + size)
    gather(lanes, scratch + np.uint64(FOUND), count, scratch + np.uint64(CHANGED_OLD), like)
    return count


@phase
def _decode_small_classes(job: Word, segment: Word, like: Array) -> bool:
    """Decode the lanes of this segment that wait."""
    count, scratch = load64(job, WAITING), load64(job, SCRATCH)
    store64(job, WAITING, _0)
    if count == _0:
        return True
    lanes, found = scratch + np.uint64(SMALL_OLD), scratch + np.uint64(FOUND)
    places = scratch + np.uint64(SMALL_FOUND)
    groups, tail = (count + _63) >> _6, below(((count - _1) & _63) + _1)
    for c in range(load64(job, SMALL)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        codes = load64(mine, VALUES)
        changed = _decode_class(job, segment, mine, _0, lanes, groups, tail, like)
        if changed > _BLOCK:
            return False
        for j in range(changed):
            store32(found, j, load32(places, load32(found, j)))
        if not _put(job, segment, _0, changed, codes, like):
            return False
    return True


@phase
def _put_by_small_lanes(
    job: Word, segment: Word, lane: Word, lanes: Word, groups: Word, tail: Word, like: Array
) -> bool:
    """Let the lanes of this block that are in small classes wait for more of them."""
    span, scratch = load64(job, SMALL_SPAN), load64(job, SCRATCH)
    members, busy, found = scratch + np.uint64(MEMBERS), scratch + np.uint64(BUSY), scratch + np.uint64(FOUND)
    count = members_of(lanes, groups, tail, _0, span, scratch, like)
    if load64(job, WAITING) + count > _BLOCK:
        if not _decode_small_classes(job, segment, like):
            return False
        members_of(lanes, groups, tail, _0, span, scratch, like)  # the masks have been overwritten
    indices(members, busy, busy_groups(members, groups, busy), found)
    waiting = load64(job, WAITING)
    gather(lanes, found, count, scratch + np.uint64(SMALL_OLD) + waiting * lane_width(like), like)
    places = scratch + np.uint64(SMALL_FOUND) + (waiting << _2)
    for j in range(count):
        store32(places, j, lane + load32(found, j))
    store64(job, WAITING, waiting + count)
    return True


@part
def _decode_block(job: Word, segment: Word, lane: Word, lanes: Word, count: Word, like: Array) -> bool:
    groups, tail = (count + _63) >> _6, below(((count - _1) & _63) + _1)
    small = load64(job, SMALL)
    for c in range(small, load64(job, CLASS_COUNT)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        codes = load64(mine, VALUES)
        changed = _decode_class(job, segment, mine, lane, lanes, groups, tail, like)
        if changed > _BLOCK or not _put(job, segment, lane, changed, codes, like):
            return False
    return small == _0 or _put_by_small_lanes(job, segment, lane, lanes, groups, tail, like)


@kernel
def decode_context(job: Word, like: Array) -> bool:
    """Decode all segments; False where the streams do not fit the base.

    Segments come in order. Within one, changes ascend class by class only.
    """
    scratch, width = load64(job, SCRATCH), lane_width(like)
    for i in range(load64(job, SEGMENT_COUNT)):
        segment = load64(job, SEGMENTS) + i * _SEGMENT_BYTES
        for lane in range(_0, load64(segment, LANES), _BLOCK):
            count = min(_BLOCK, load64(segment, LANES) - lane)
            lanes = load64(segment, OLD) + lane * width
            if count & _63 != _0:
                copy_bytes(scratch + np.uint64(BLOCK_OLD), lanes, count * width)
                lanes = scratch + np.uint64(BLOCK_OLD)
            if not _decode_block(job, segment, lane, lanes, count, like):
                return False
        if not _decode_small_classes(job, segment, like):
            return False
    for c in range(load64(job, CLASS_COUNT)):
        mine = load64(job, CLASSES) + c * _CLASS_BYTES
        if load64(mine, MARKS) != load64(mine, MARKS_END):
            return False
    return True


@phase
def _gather_ahead(lanes: Word, found: Word, count: Word, into: Word, like: Array) -> None:
    """`gather` from lanes that are not in a cache. `found` has slack, and what lies there is not followed."""
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
            if not _put(job, segment, _0, count, codes, like):
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
