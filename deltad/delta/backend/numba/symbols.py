"""Numbers as symbols and bits, and small values as pairs: the coders that all classes share.

Owns the spelling: a number has one, and the readers here refuse any other. A reader is given as many
bytes as its arguments say and reads up to 8 more of a bit stream, which its caller pads with zeros.
"""

from __future__ import annotations

import numpy as np

from deltad.delta.backend.numba.bits import (
    Array,
    Word,
    above,
    below,
    copy_bytes,
    having,
    keep_apart,
    lane_width,
    leading,
    load8,
    load32,
    load64,
    load_lane,
    lowest,
    ones,
    spread,
    store8,
    store64,
    store_lane,
)
from deltad.delta.backend.numba.compiling import kernel, part, phase
from deltad.delta.backend.numba.job import BITS, CLASS_COLUMNS, FILLED, HELD, NEXT, SYMBOLS, VALUES

PADDING = 16
"""Bytes that must be addressable behind every stream that is written, and zero behind bit streams that are read."""

_PADDING = np.uint64(PADDING)
_CLASS_BYTES = np.uint64(8 * CLASS_COLUMNS)

_0, _1, _2, _3, _4, _5, _7, _8, _24 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 5, 7, 8, 24))
_31, _32, _56, _60, _63, _64 = (np.uint64(n) for n in (31, 32, 56, 60, 63, 64))


@phase
def write_gaps(ranks: Word, count: Word, base: Word, mine: Word) -> None:
    """Append the gaps of `count` ascending ranks, which count from `base`, to the class `mine`."""
    keep_apart()
    following = load64(mine, NEXT) - base
    symbols, bits = load64(mine, SYMBOLS), load64(mine, BITS)
    held, filled = load64(mine, HELD), load64(mine, FILLED)
    for j in range(count):
        rank = load32(ranks, j)
        gap = rank - following
        following = rank + _1
        length = _60 - leading(gap | _8)
        store8(symbols, j, (length << _3) + (gap >> length))
        held |= (gap & ((_1 << length) - _1)) << filled
        store64(bits, _0, held)
        filled += length
        bits += filled >> _3
        held >>= filled & _56
        filled &= _7
    store64(mine, NEXT, following + base)
    store64(mine, SYMBOLS, symbols + count)
    store64(mine, BITS, bits)
    store64(mine, HELD, held)
    store64(mine, FILLED, filled)


@part
def _write_number(number: Word, mantissa: Word, bits: Word, held: Word, filled: Word) -> tuple[Word, Word, Word, Word]:
    """One number's symbol, and the bit stream after it. Takes numbers of any length in two steps."""
    length = _63 - mantissa - leading(number | (_1 << mantissa))
    symbol = (length << mantissa) + (number >> length)
    rest = number & ((_1 << length) - _1)
    step = min(length, _32)
    held |= (rest & below(step)) << filled
    store64(bits, _0, held)
    filled += step
    bits += filled >> _3
    held >>= filled & _56
    filled &= _7
    if length > step:  # only numbers of 8 bytes are as long as that
        held |= (rest >> step) << filled
        store64(bits, _0, held)
        filled += length - step
        bits += filled >> _3
        held >>= filled & _56
        filled &= _7
    return symbol, bits, held, filled


@part
def _count_large(values: Word, count: Word, like: Array) -> Word:
    """How many of `count` values are 3 or more. Reads whole groups of 64."""
    large = np.uint64(0)
    for first in range(_0, count, _64):
        large += ones(above(values + first * lane_width(like), _3, like) & below(min(_64, count - first)))
    return large


@phase
def _write_values(values: Word, count: Word, low: Word, mantissa: Word, symbols: Word, bits: Word, like: Array) -> Word:
    """Symbols and bits of `count` values; returns how many bytes the bits take, whole u32 words."""
    keep_apart()
    first = bits
    held = np.uint64(0)
    filled = np.uint64(0)
    for j in range(count):
        value = load_lane(values, j, like)
        symbol, bits, held, filled = _write_number(value >> low, mantissa, bits, held, filled)
        store8(symbols, j, (symbol << low) | (value & low))
    store64(bits, _0, held)
    used = bits - first + np.uint64(filled != _0)
    return (used + _3) & ~_3


@phase
def _write_pairs(values: Word, count: Word, pairs: Word, like: Array) -> None:
    """Two-bit codes of `count` values; those of 3 or more are left where the values were, less 3.

    Reads whole groups of 64 values, and writes the codes of whole groups.
    """
    keep_apart()
    found = np.uint64(0)
    for first in range(_0, count, _64):
        lanes = values + first * lane_width(like)
        kept = below(min(_64, count - first))
        exceptions = above(lanes, _3, like) & kept
        low = (having(lanes, _1, like) & kept) | exceptions
        high = (having(lanes, _2, like) & kept) | exceptions
        store64(pairs, first >> _5, spread(low) | (spread(high) << _1))
        store64(pairs, (first >> _5) + _1, spread(low >> _32) | (spread(high >> _32) << _1))
        while exceptions != _0:
            store_lane(values, found, load_lane(lanes, lowest(exceptions), like) - _3, like)
            exceptions &= exceptions - _1
            found += _1


@part
def _place(starts: Word, stream: Word, length: Word, lengths: Word, room: Word) -> Word:
    store64(starts, stream, room)
    store64(lengths, stream, length)
    return (room + length + _PADDING + _63) & ~_63


@kernel
def measure_streams(classes: Word, count: Word, begins: Word, places: Word, like: Array) -> Word:
    """Where each of the five streams of `count` classes may go, and its length: the tables of `places`.

    The bits of values get the room that they may take. `begins` has the begin of each class's three buffers.
    Returns how much room all take.
    """
    starts, lengths = places, places + count * _5 * _8
    room = np.uint64(0)
    for c in range(count):
        mine, begin, stream = classes + c * _CLASS_BYTES, begins + c * _24, c * _5
        # Bits that do not fill a byte yet have been written behind the end, and zeros behind them.
        bits = load64(mine, BITS) - load64(begin, _1) + np.uint64(load64(mine, FILLED) != _0)
        values = (load64(mine, VALUES) - load64(begin, _2)) // lane_width(like)
        large = _count_large(load64(begin, _2), values, like)
        pairs, symbols = _0, values
        if values != _0 and large << _2 <= values:
            pairs, symbols = (values + _3) >> _2, large
        room = _place(starts, stream, load64(mine, SYMBOLS) - load64(begin, _0), lengths, room)
        room = _place(starts, stream + _1, (bits + _3) & ~_3, lengths, room)
        room = _place(starts, stream + _2, pairs, lengths, room)
        room = _place(starts, stream + _3, symbols, lengths, room)
        room = _place(starts, stream + _4, (symbols * lane_width(like) + _3) & ~_3, lengths, room)
    return room


@kernel
def write_streams(
    classes: Word, count: Word, begins: Word, places: Word, to: Word, low: Word, mantissa: Word, like: Array
) -> None:
    """Write what has been measured; the lengths of value bits become what they are. The values are used up."""
    starts, lengths = places, places + count * _5 * _8
    for c in range(count):
        mine, begin, stream = classes + c * _CLASS_BYTES, begins + c * _24, c * _5
        copy_bytes(to + load64(starts, stream), load64(begin, _0), load64(lengths, stream))
        copy_bytes(to + load64(starts, stream + _1), load64(begin, _1), load64(lengths, stream + _1))
        values = load64(begin, _2)
        if load64(lengths, stream + _2) != _0:
            total = (load64(mine, VALUES) - values) // lane_width(like)
            _write_pairs(values, total, to + load64(starts, stream + _2), like)
        symbols, bits = to + load64(starts, stream + _3), to + load64(starts, stream + _4)
        used = _write_values(values, load64(lengths, stream + _3), low, mantissa, symbols, bits, like)
        store64(lengths, stream + _4, used)


@part
def _bits_fill(used: Word, size: Word) -> bool:
    """Whether `used` bits reach into the last word of a stream of `size` bytes."""
    return bool((used + _31) >> np.uint64(5) == size >> _2)


@part
def _rest_is_zero(bits: Word, used: Word) -> bool:
    """Whether nothing but zeros follows `used` bits. What is behind the stream is padding, and zero."""
    return bool(load64(bits + (used >> _3), _0) >> (used & _7) == _0)


@kernel
def read_gaps(symbols: Word, count: Word, bits: Word, size: Word, ranks: Array) -> Word:
    """Ranks of `count` gap symbols; returns the last rank plus 1, or 2^64 - 1 where the bits do not fit.

    Ranks that are cut to 32 bits are wrong: the caller refuses a last rank that is no lane's.
    """
    used = np.uint64(0)
    for j in range(count):
        group = load8(symbols, j) >> _3
        used += group - np.uint64(group != _0)
    if not _bits_fill(used, size):
        return ~_0
    following = np.uint64(0)
    used = np.uint64(0)
    for j in range(count):
        symbol = load8(symbols, j)
        group = symbol >> _3
        long = np.uint64(group != _0)
        length = group - long
        held = load64(bits + (used >> _3), _0) >> (used & _7)
        used += length
        following += ((((symbol & _7) | (long << _3)) << length) | (held & ((_1 << length) - _1))) + _1
        ranks[j] = following - _1
    return following if _rest_is_zero(bits, used) else ~_0


@kernel
def read_values(
    symbols: Word, count: Word, bits: Word, size: Word, low: Word, mantissa: Word, limit: Word, values: Array
) -> bool:
    """Values of `count` symbols; False where one is above `limit` or the bits do not fit."""
    used = np.uint64(0)
    for j in range(count):
        group = load8(symbols, j) >> (low + mantissa)
        used += group - np.uint64(group != _0)
    if not _bits_fill(used, size):
        return False
    good = True
    used = np.uint64(0)
    for j in range(count):
        byte = load8(symbols, j)
        symbol = byte >> low
        group = symbol >> mantissa
        long = np.uint64(group != _0)
        length = group - long
        step = min(length, _32)
        held = (load64(bits + (used >> _3), _0) >> (used & _7)) & below(step)
        used += step
        if length > step:  # only numbers of 8 bytes are as long as that
            more = load64(bits + (used >> _3), _0) >> (used & _7)
            held |= (more & below(length - step)) << step
            used += length - step
        top = (symbol & ((_1 << mantissa) - _1)) | (long << mantissa)
        good = good and length + mantissa <= _63  # else the number has more than 64 bits
        value = (((top << (length & _63)) | held) << low) | (byte & low)
        good = good and value <= limit
        values[j] = value
    return good and _rest_is_zero(bits, used)


@kernel
def read_pairs(pairs: Word, size: Word, large: Array, count: Word, values: Array) -> bool:
    """Values of the `4 * size` codes of whole words; False unless they name exactly `count` large ones."""
    for j in range(size):
        packed = load8(pairs, j)
        values[j << _2] = packed & _3
        values[(j << _2) + _1] = (packed >> _2) & _3
        values[(j << _2) + _2] = (packed >> np.uint64(4)) & _3
        values[(j << _2) + _3] = packed >> np.uint64(6)
    found = np.uint64(0)
    for word in range(size >> _3):
        packed = load64(pairs, word)
        exceptions = packed & (packed >> _1) & np.uint64(0x5555_5555_5555_5555)
        if ones(exceptions) > count - found:
            return False
        while exceptions != _0:
            values[(word << _5) + (lowest(exceptions) >> _1)] = np.uint64(large[found]) + _3
            exceptions &= exceptions - _1
            found += _1
    return bool(found == count)
