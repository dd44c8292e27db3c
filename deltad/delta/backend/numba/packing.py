"""The loops of the packed coder: lanes to planes and back, planes to words and back.

Everything else about it, what is refused in particular, is `deltad.delta.packing`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Lanes, Segments, Stream
from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    lane_width,
    load8,
    load16,
    load32,
    load64,
    load_lane,
    store8,
    store32,
    store64,
    store_lane,
)
from deltad.delta.backend.numba.compiling import kernel, part
from deltad.delta.backend.numba.job import address, like
from deltad.delta.coding import BLOCK_SYMBOLS, LONGEST_CODE, blocks_of
from deltad.delta.digest import U64
from deltad.delta.huffman import Code
from deltad.delta.packing import Plane, Words, pack_plane, unpack_planes
from deltad.delta.planes import is_rotated
from deltad.types import DType

Bytes = npt.NDArray[np.uint8]

_0, _1, _3, _4, _5, _7, _8, _31, _64 = (np.uint64(n) for n in (0, 1, 3, 4, 5, 7, 8, 31, 64))
_LOW8, _LOW16, _WINDOW = np.uint64(0xFF), np.uint64(0xFFFF), np.uint64((1 << LONGEST_CODE) - 1)
_CUT = np.uint64(4096)  # lanes that are cut into planes, or joined, while they are in the first-level cache
_BLOCK = np.uint64(BLOCK_SYMBOLS)
_BESIDE = np.uint64(4)  # blocks that are decoded side by side, since each symbol waits for the one before
_AHEAD = BLOCK_SYMBOLS * LONGEST_CODE // 8 + 8
"""How far behind its first word a block can be read, in bytes, whatever its words are."""
_KEPT_BYTES = 8 << 20


class _Local(threading.local):
    """Buffers that are kept from frame to frame: a fresh one costs page faults."""

    def __init__(self) -> None:
        self.kept: dict[str, Bytes] = {}


_local = _Local()


def _scratch(name: str, size: int) -> Bytes:
    """`size` bytes of this thread's, of any content; good until it asks for the same name again."""
    held = _local.kept.get(name)
    if held is None or held.size < size:
        held = np.empty(size, np.uint8)
        if size <= _KEPT_BYTES:
            _local.kept[name] = held
    return held[:size]


def pack(lanes: Segments, dtype: DType) -> list[Stream]:
    """`Backend.pack`."""
    width, count = dtype.lane_bytes, sum(segment.size for segment in lanes)
    planes = _scratch("planes", width * count).reshape(width, count)
    counts = np.zeros((width, 4, 256), np.uint32)
    first = 0
    for segment in lanes:
        numbers = (address(segment), segment.size, address(planes) + first, count, is_rotated(dtype), address(counts))
        cut(*[*_words(numbers), like(dtype)])
        first += segment.size
    totals = counts.sum(axis=1, dtype=np.int64)
    return [stream for i in range(width) for stream in pack_plane(planes[i], totals[i], _encode)]


def unpack(streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
    """`Backend.unpack`."""
    planes = [np.frombuffer(plane, np.uint8) for plane in unpack_planes(streams, lanes, _decode)]
    where = np.array([address(plane) for plane in planes], np.uint64)
    joined = np.empty(lanes, UNSIGNED[dtype.lane_bytes])
    numbers = (address(where), lanes, address(joined), is_rotated(dtype))
    join(*[*_words(numbers), like(dtype)])
    return joined


def _encode(plane: Plane, code: Code) -> tuple[npt.NDArray[np.uint16], Words]:
    entries = code.words.astype(np.uint32) | code.lengths.astype(np.uint32) << np.uint32(16)
    blocks = blocks_of(plane.size)
    sizes = np.empty(blocks, np.uint16)
    # All codewords take no more bits than the plane; each block fills its last word up; a store is 8 bytes wide.
    packed = _scratch("words", plane.size + 4 * blocks + 16)
    numbers = (address(plane), plane.size, address(entries), address(sizes), address(packed))
    words = int(encode(*_words(numbers)))
    return sizes, packed[: 4 * words].view(np.uint32)


def _decode(code: Code, starts: U64, words: Words, symbols: int) -> tuple[Plane, U64]:
    entries = code.symbols.astype(np.uint16) | code.sizes.astype(np.uint16) << np.uint16(8)
    padded = _scratch("words", words.nbytes + _AHEAD)
    padded[: words.nbytes] = words.view(np.uint8)
    padded[words.nbytes :] = 0
    at = starts * np.uint64(32)
    plane = np.empty(symbols, np.uint8)
    numbers = (address(entries), address(padded), address(at), at.size, address(plane), symbols)
    decode(*_words(numbers))
    return plane, at - starts * np.uint64(32)


def _words(numbers: Sequence[int]) -> list[Word]:
    return [np.uint64(number) for number in numbers]


@part
def _turn_left(lane: Word, rotated: Word, like: Array) -> Word:
    top = (lane_width(like) << _3) - _1
    return (lane << rotated) | ((lane >> top) & rotated)


@part
def _turn_right(lane: Word, rotated: Word, like: Array) -> Word:
    top = (lane_width(like) << _3) - _1
    return (lane >> rotated) | ((lane & rotated) << top)


@kernel
def cut(lanes: Word, count: Word, planes: Word, stride: Word, rotated: Word, counts: Word, like: Array) -> None:
    """Lanes as planes, which are `stride` bytes apart; symbols are added to `counts`, four tables a plane.

    `rotated`: 1 where lanes are rotated left by one bit, else 0.
    """
    for first in range(_0, count, _CUT):
        size = min(count - first, _CUT)
        for byte in range(lane_width(like)):
            plane = planes + byte * stride + first
            source = lanes + first * lane_width(like)
            shift = byte << _3
            for i in range(size):
                store8(plane, i, _turn_left(load_lane(source, i, like), rotated, like) >> shift)
            _count(plane, size, counts + (byte << np.uint64(12)))


@part
def _count(plane: Word, size: Word, counts: Word) -> None:
    # Neighbours are often equal: counting them in tables of their own, none waits for the one before.
    second, third, fourth = counts + np.uint64(1024), counts + np.uint64(2048), counts + np.uint64(3072)
    for i in range(size >> _3):
        word = load64(plane, i)
        for _ in range(2):
            _add(counts, word & _LOW8)
            _add(second, (word >> _8) & _LOW8)
            _add(third, (word >> np.uint64(16)) & _LOW8)
            _add(fourth, (word >> np.uint64(24)) & _LOW8)
            word >>= np.uint64(32)
    for i in range(size & ~_7, size):
        _add(counts, load8(plane, i))


@part
def _add(counts: Word, symbol: Word) -> None:
    store32(counts, symbol, load32(counts, symbol) + _1)


@kernel
def join(planes: Word, count: Word, lanes: Word, rotated: Word, like: Array) -> None:
    """The inverse of `cut`: `planes` are their addresses."""
    width = lane_width(like)
    for first in range(_0, count, _CUT):
        size = min(count - first, _CUT)
        target = lanes + first * width
        for byte in range(width):
            plane, shift = load64(planes, byte) + first, byte << _3
            for i in range(size):
                lane = load8(plane, i) << shift
                if byte:
                    lane |= load_lane(target, i, like)
                store_lane(target, i, lane, like)
        if rotated:
            for i in range(size):
                store_lane(target, i, _turn_right(load_lane(target, i, like), _1, like), like)


@kernel
def encode(plane: Word, count: Word, entries: Word, sizes: Word, packed: Word) -> Word:
    """Every block's codewords from a word of its own on; `sizes` gets their words. Returns the words of all."""
    words = _0
    block = _0
    for first in range(_0, count, _BLOCK):
        size = min(count - first, _BLOCK)
        source = plane + first
        start = packed + (words << np.uint64(2))
        bits = _0  # of this block, of which those below are not stored yet
        held = _0
        for i in range(size >> np.uint64(2)):
            four = load32(source, i)
            a = load32(entries, four & _LOW8)
            b = load32(entries, (four >> _8) & _LOW8)
            c = load32(entries, (four >> np.uint64(16)) & _LOW8)
            d = load32(entries, four >> np.uint64(24))
            la, lb, lc = a >> np.uint64(16), b >> np.uint64(16), c >> np.uint64(16)
            ab = (a & _LOW16) | ((b & _LOW16) << la)
            cd = (c & _LOW16) | ((d & _LOW16) << lc)
            held |= (ab | (cd << (la + lb))) << (bits & _7)
            store64(start + (bits >> _3), _0, held)
            before = bits & ~_7
            bits += la + lb + lc + (d >> np.uint64(16))
            held >>= (bits & ~_7) - before
        for i in range(size & ~_3, size):
            entry = load32(entries, load8(source, i))
            held |= (entry & _LOW16) << (bits & _7)
            store64(start + (bits >> _3), _0, held)
            before = bits & ~_7
            bits += entry >> np.uint64(16)
            held >>= (bits & ~_7) - before
        store64(start + (bits >> _3), _0, held)
        used = (bits + _31) >> _5
        store8(sizes, block << _1, used)
        store8(sizes, (block << _1) + _1, used >> _8)
        words += used
        block += _1
    return words


@part
def _one(entries: Word, packed: Word, bit: Word) -> Word:
    return load16(entries, (load64(packed + (bit >> _3), _0) >> (bit & _7)) & _WINDOW)


@kernel
def decode(entries: Word, packed: Word, bits: Word, blocks: Word, plane: Word, count: Word) -> None:
    """All blocks' symbols. `bits` holds the first bit of every block, and then the one behind its last.

    Reads up to `_AHEAD` bytes from where a block begins, whatever is there.
    """
    whole = count // _BLOCK
    block = _0
    while block + _BESIDE <= whole:
        a, b, c, d = (
            load64(bits, block),
            load64(bits, block + _1),
            load64(bits, block + np.uint64(2)),
            load64(bits, block + _3),
        )
        to_a = plane + block * _BLOCK
        to_b, to_c = to_a + _BLOCK, to_a + _BLOCK + _BLOCK
        to_d = to_c + _BLOCK
        for i in range(_BLOCK >> np.uint64(2)):
            a = _four(entries, packed, a, to_a, i)
            b = _four(entries, packed, b, to_b, i)
            c = _four(entries, packed, c, to_c, i)
            d = _four(entries, packed, d, to_d, i)
        store64(bits, block, a)
        store64(bits, block + _1, b)
        store64(bits, block + np.uint64(2), c)
        store64(bits, block + _3, d)
        block += _BESIDE
    for last in range(block, blocks):
        bit = load64(bits, last)
        begin = last * _BLOCK
        size = min(count - begin, _BLOCK)
        for i in range(size >> np.uint64(2)):
            bit = _four(entries, packed, bit, plane + begin, i)
        for i in range(size & ~_3, size):
            entry = _one(entries, packed, bit)
            store8(plane + begin, i, entry)
            bit += entry >> _8
        store64(bits, last, bit)


@part
def _four(entries: Word, packed: Word, bit: Word, to: Word, i: Word) -> Word:
    """Decode four symbols, the i-th four of a block; returns the bit behind them."""
    window = load64(packed + (bit >> _3), _0) >> (bit & _7)
    e0 = load16(entries, window & _WINDOW)
    n0 = e0 >> _8
    window >>= n0
    e1 = load16(entries, window & _WINDOW)
    n1 = e1 >> _8
    window >>= n1
    e2 = load16(entries, window & _WINDOW)
    n2 = e2 >> _8
    window >>= n2
    e3 = load16(entries, window & _WINDOW)
    low = (e0 & _LOW8) | ((e1 & _LOW8) << _8)
    high = (e2 & _LOW8) | ((e3 & _LOW8) << _8)
    store32(to, i, low | (high << np.uint64(16)))
    return bit + n0 + n1 + n2 + (e3 >> _8)
