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
)
from deltad.delta.backend.numba.compiling import kernel, part, phase
from deltad.delta.backend.numba.job import BITS, FILLED, HELD, NEXT, SYMBOLS

PADDING = 16
"""Bytes that must be addressable behind every stream that is written, and zero behind bit streams that are read."""

_0, _1, _2, _3, _5, _7, _8 = (np.uint64(n) for n in (0, 1, 2, 3, 5, 7, 8))
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


@kernel
def count_large(values: Array, count: Word) -> Word:
    """How many of the first `count` values are 3 or more."""
    large = np.uint64(0)
    for j in range(count):
        large += np.uint64(values[j] >= 3)
    return large


@kernel
def write_values(values: Array, count: Word, low: Word, mantissa: Word, symbols: Word, bits: Word) -> Word:
    """Symbols and bits of the first `count` values; returns how many bytes the bits take, whole u32 words."""
    first = bits
    held = np.uint64(0)
    filled = np.uint64(0)
    for j in range(count):
        value = np.uint64(values[j])
        symbol, bits, held, filled = _write_number(value >> low, mantissa, bits, held, filled)
        store8(symbols, j, (symbol << low) | (value & low))
    store64(bits, _0, held)
    used = bits - first + np.uint64(filled != _0)
    return (used + _3) & ~_3


@kernel
def write_pairs(values: Word, count: Word, pairs: Word, large: Array) -> Word:
    """Two-bit codes of `count` values at an address; what is 3 or more goes to `large`, less 3. Returns their number.

    Reads whole groups of 64 values, and writes the codes of whole groups.
    """
    found = np.uint64(0)
    for first in range(_0, count, _64):
        lanes = values + first * lane_width(large)
        kept = below(min(_64, count - first))
        exceptions = above(lanes, _3, large) & kept
        low = (having(lanes, _1, large) & kept) | exceptions
        high = (having(lanes, _2, large) & kept) | exceptions
        store64(pairs, first >> _5, spread(low) | (spread(high) << _1))
        store64(pairs, (first >> _5) + _1, spread(low >> _32) | (spread(high >> _32) << _1))
        while exceptions != _0:
            large[found] = load_lane(lanes, lowest(exceptions), large) - _3
            exceptions &= exceptions - _1
            found += _1
    return found


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
