"""The element sum: over bytes at any offset, and over changes as they pass.

See `deltad.delta.digest` for what it is. Keys come as one u64 a cell: the first sum's in its low half,
the second sum's in its high half.
"""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    keep_apart,
    lane_width,
    load8,
    load32,
    load64,
    load_lane,
    prefetch,
    store64,
)
from deltad.delta.backend.numba.compiling import kernel, part, phase
from deltad.delta.backend.numba.job import SEED, START, SUM_A

_0, _1, _2, _3, _4, _8 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 8))
_16, _27, _30, _31, _32 = (np.uint64(n) for n in (16, 27, 30, 31, 32))
_LOW = np.uint64(0xFFFF_FFFF)
_AHEAD = np.uint64(32)
_BLOCK_CELLS, _BLOCK_BYTES = np.uint64(1 << 14), np.uint64(1 << 16)
_CELL = np.uint64((1 << 14) - 1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_SUMS = np.uint64(8 * SUM_A)
_MIX_B = np.uint64(0x94D049BB133111EB)


@part
def _mix(word: Word) -> Word:
    word = (word ^ (word >> _30)) * _MIX_A
    word = (word ^ (word >> _27)) * _MIX_B
    return word ^ (word >> _31)


@part
def _multiplier(seed: Word, lane: Word, block: Word) -> Word:
    """R: the odd factor of a block of 16,384 cells."""
    return _mix(_mix(seed + lane * _GOLDEN) + block) | _1


@part
def _share(at: Word, old: Word, new: Word, keys: Word, like: Array) -> tuple[Word, Word]:
    """Both sums' shares of a change at a byte of its tensor, before its block's multipliers."""
    cell = (at >> _2) & _CELL
    key = load64(keys, cell)
    if lane_width(like) == _8:
        low, high = (new & _LOW) - (old & _LOW), (new >> _32) - (old >> _32)
        upper = load64(keys, cell + _1)
        return low * (key & _LOW) + high * (upper & _LOW), low * (key >> _32) + high * (upper >> _32)
    delta = (new - old) << ((at & _3) << _3)
    return delta * (key & _LOW), delta * (key >> _32)


@phase
def add_changes(
    found: Word, count: Word, old: Word, new: Word, lane: Word, segment: Word, keys: Word, like: Array
) -> None:
    """Add to a segment's sums what its lanes `lane + found[j]` add by going from `old[j]` to `new[j]`."""
    keep_apart()
    width = lane_width(like)
    seed, start = load64(segment, SEED), load64(segment, START) + lane
    block = ((start + load32(found, _0)) * width) >> _16
    a, b = _0, _0
    for j in range(count):
        # Keys have left the nearest caches since the last batch. Beyond the last change, any key is as good.
        ahead = (start + load32(found, j + _AHEAD)) * width
        prefetch(keys + (((ahead >> _2) & _CELL) << _3))
        at = (start + load32(found, j)) * width
        if at >> _16 != block:  # rarely: blocks are long, and lanes nearly ascend
            _add(segment + _SUMS, a, b, seed, block)
            block, a, b = at >> _16, _0, _0
        more_a, more_b = _share(at, load_lane(old, j, like), load_lane(new, j, like), keys, like)
        a += more_a
        b += more_b
    _add(segment + _SUMS, a, b, seed, block)


@part
def _add(sums: Word, a: Word, b: Word, seed: Word, block: Word) -> None:
    store64(sums, _0, load64(sums, _0) + a * _multiplier(seed, _0, block))
    store64(sums, _1, load64(sums, _1) + b * _multiplier(seed, _1, block))


@part
def _partial_cell(data: Word, count: Word, lead: Word) -> Word:
    """The cell that has `count` bytes at `data` from its byte `lead` on, and zeros."""
    cell = np.uint64(0)
    for j in range(count):
        cell |= load8(data, j) << ((lead + j) << _3)
    return cell


@part
def _whole_cells(data: Word, count: Word, keys: Word) -> tuple[Word, Word]:
    a, b = _0, _0
    for j in range(count):
        value, key = load32(data, j), load64(keys, j)
        a += value * (key & _LOW)
        b += value * (key >> _32)
    return a, b


@part
def _four_blocks(data: Word, keys: Word) -> tuple[Word, Word, Word, Word, Word, Word, Word, Word]:
    """Both sums of four whole blocks. Keys are twice the size of what they multiply, so they are read once for all."""
    second, third, fourth = data + _BLOCK_BYTES, data + _2 * _BLOCK_BYTES, data + _3 * _BLOCK_BYTES
    a0, a1, a2, a3 = _0, _0, _0, _0
    b0, b1, b2, b3 = _0, _0, _0, _0
    for j in range(_BLOCK_CELLS):
        key = load64(keys, j)
        low, high = key & _LOW, key >> _32
        value = load32(data, j)
        a0 += value * low
        b0 += value * high
        value = load32(second, j)
        a1 += value * low
        b1 += value * high
        value = load32(third, j)
        a2 += value * low
        b2 += value * high
        value = load32(fourth, j)
        a3 += value * low
        b3 += value * high
    return a0, b0, a1, b1, a2, b2, a3, b3


@phase
def _add_bytes(data: Word, size: Word, offset: Word, seed: Word, keys: Word, sums: Word) -> None:
    """Add to two sums the share of `size` bytes at `data`, which lie at `offset` of their tensor."""
    keep_apart()
    end = offset + size
    while offset < end:
        block = offset >> _16
        room = min(end, (block + _1) << _16) - offset
        lead = offset & _3
        cell = (offset >> _2) & _CELL
        if end - offset >= _4 * _BLOCK_BYTES and room == _BLOCK_BYTES:
            count = _4 * _BLOCK_BYTES
            a0, b0, a1, b1, a2, b2, a3, b3 = _four_blocks(data, keys)
            _add(sums, a0, b0, seed, block)
            _add(sums, a1, b1, seed, block + _1)
            _add(sums, a2, b2, seed, block + _2)
            _add(sums, a3, b3, seed, block + _3)
        elif lead != _0 or room < _4:
            count = min(_4 - lead, room)
            value, key = _partial_cell(data, count, lead), load64(keys, cell)
            _add(sums, value * (key & _LOW), value * (key >> _32), seed, block)
        else:
            count = room & ~_3
            a, b = _whole_cells(data, room >> _2, keys + (cell << _3))
            _add(sums, a, b, seed, block)
        data += count
        offset += count


@kernel
def sum_runs(runs: Word, count: Word, keys: Word, sums: Word) -> None:
    """Add to the two sums of each run its share. A row of `runs`: address, size, offset in its tensor, its seed."""
    for i in range(count):
        run = runs + i * _32
        data, size, offset, seed = load64(run, _0), load64(run, _1), load64(run, _2), load64(run, _3)
        _add_bytes(data, size, offset, seed, keys, sums + i * _16)
