"""Numbers as symbols of one byte and raw bits: how gaps and values are spelled in a stream.

A number is cut like a small float: below 2^(k+1) it is its own symbol, above it keeps its leading k+1
bits in the symbol and puts the rest, which is close to random, into a bit stream that nobody need
compress. Values are packed four to a byte first where most of them are tiny. Owns the invariant that
every list of numbers has one spelling, and that any other spelling is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Lanes, Positions, Stream
from deltad.delta.coding import FRAME_LANES
from deltad.delta.digest import U64
from deltad.errors import FormatError
from deltad.types import Difference, DType

PAIR_LIMIT = 3
"""The 2-bit code that stands for every value from itself up; those are spelled as symbols, less this."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How numbers of one kind become symbols: k mantissa bits, whether bit 0 stays apart, the largest number."""

    mantissa: int
    low: int
    top: int

    @property
    def most_bits(self) -> int:
        """The most raw bits that a number can own."""
        return max(0, (self.top >> self.low).bit_length() - self.mantissa - 1)


GAPS = Scheme(3, 0, FRAME_LANES - 1)


def value_scheme(dtype: DType) -> Scheme:
    """The scheme of a dtype's values. Narrow lanes keep the direction of a change within the symbol."""
    width = dtype.lane_bytes
    directed = width <= 2 and dtype.difference is not Difference.XOR
    return Scheme(2 if width == 8 else 3, int(directed), (1 << 8 * width) - 2)


def to_symbols(numbers: U64, scheme: Scheme) -> tuple[bytes, bytes]:
    """Symbols and bits of `numbers`, all of which are within the scheme."""
    k, low = np.uint64(scheme.mantissa), np.uint64(scheme.low)
    one = np.uint64(1)
    magnitude = numbers >> low
    symbol = magnitude.copy()
    large = np.flatnonzero(magnitude >> (k + one))
    wide = magnitude[large]
    length = _bit_length(wide) - k - one
    symbol[large] = ((length + one) << k) + ((wide >> length) & ((one << k) - one))
    symbol = (symbol << low) | (numbers & low)
    return symbol.astype(np.uint8).tobytes(), pack_bits(wide & ((one << length) - one), length)


def from_symbols(symbols: Stream, bits: Stream, scheme: Scheme) -> U64:
    """The inverse of `to_symbols`. Raises FormatError for any other spelling, or a number above the largest."""
    k, low = np.uint64(scheme.mantissa), np.uint64(scheme.low)
    one = np.uint64(1)
    symbol = np.frombuffer(symbols, np.uint8).astype(np.uint64)
    magnitude = symbol >> low
    large = np.flatnonzero(magnitude >> (k + one))
    length = (magnitude[large] >> k) - one
    if large.size and int(length.max()) > scheme.most_bits:
        raise FormatError("frame: symbols", expected=f"numbers up to {scheme.top}", found="a larger one")
    mantissa = (magnitude[large] & ((one << k) - one)) | (one << k)
    magnitude[large] = (mantissa << length) | _unpack_bits(bits, length)
    numbers = (magnitude << low) | (symbol & low)
    if numbers.size and int(numbers.max()) > scheme.top:
        raise FormatError("frame: symbols", expected=f"numbers up to {scheme.top}", found=str(int(numbers.max())))
    return numbers


def encode_gaps(ranks: Positions) -> tuple[bytes, bytes]:
    """Symbols and bits of the gaps between ascending ranks."""
    gaps = np.diff(ranks, prepend=np.int64(-1)) - 1
    return to_symbols(gaps.astype(np.uint64), GAPS)


def decode_gaps(symbols: Stream, bits: Stream) -> Positions:
    """The ascending ranks; the caller checks that the last one exists. Raises FormatError."""
    gaps = from_symbols(symbols, bits, GAPS).astype(np.int64)
    ranks: Positions = np.cumsum(gaps + 1) - 1
    return ranks


def encode_values(codes: Lanes, dtype: DType) -> tuple[bytes, bytes, bytes]:
    """Pair codes, symbols and bits of value codes."""
    scheme = value_scheme(dtype)
    exceptions = codes >= PAIR_LIMIT
    if 4 * np.count_nonzero(exceptions) > codes.size:
        return b"", *to_symbols(codes.astype(np.uint64), scheme)
    pairs = np.zeros((codes.size + 3) // 4 * 4, np.uint8)
    pairs[: codes.size] = np.minimum(codes, PAIR_LIMIT)
    packed = pairs[0::4] | pairs[1::4] << 2 | pairs[2::4] << 4 | pairs[3::4] << 6
    return packed.tobytes(), *to_symbols(codes[exceptions].astype(np.uint64) - np.uint64(PAIR_LIMIT), scheme)


def decode_values(pairs: Stream, symbols: Stream, bits: Stream, count: int, dtype: DType) -> Lanes:
    """The inverse of `encode_values`. Raises FormatError unless the streams hold exactly `count` values."""
    scheme = value_scheme(dtype)
    numbers = from_symbols(symbols, bits, scheme)
    packed = np.frombuffer(pairs, np.uint8)
    if not packed.size:
        if numbers.size != count:
            raise FormatError("frame: values", expected=f"{count} of them", found=str(numbers.size))
        return numbers.astype(UNSIGNED[dtype.lane_bytes])
    if packed.size != (count + 3) // 4 or (count % 4 and packed[-1] >> 2 * (count % 4)):
        raise FormatError("frame: pair codes", expected=f"{count} of them, zeros behind", found="others")
    spread = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)[:count]
    codes = spread.astype(UNSIGNED[dtype.lane_bytes])
    exceptions = np.flatnonzero(spread == PAIR_LIMIT)
    if exceptions.size != numbers.size:
        raise FormatError("frame: pair codes", expected=f"{numbers.size} exceptions", found=str(exceptions.size))
    if numbers.size and int(numbers.max()) > scheme.top - PAIR_LIMIT:
        raise FormatError("frame: values", expected=f"codes up to {scheme.top}", found="a larger one")
    codes[exceptions] = numbers.astype(codes.dtype) + codes.dtype.type(PAIR_LIMIT)
    return codes


def _bit_length(numbers: U64) -> U64:
    # float64 holds 53 bits, so halves of 32 are measured exactly.
    high = numbers >> np.uint64(32)
    part = np.where(high > 0, high, numbers).astype(np.float64)
    return np.frexp(part)[1].astype(np.uint64) + np.where(high > 0, np.uint64(32), np.uint64(0))


_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def pack_bits(numbers: U64, lengths: U64) -> bytes:
    """The low `lengths` bits of each number, least significant first, in little-endian words of 32 bits."""
    ends = np.cumsum(lengths, dtype=np.uint64)
    total = int(ends[-1]) if ends.size else 0
    words = np.zeros((total + 31) // 32 + 3, np.uint64)  # a number of no bits may be the last
    at = ends - lengths
    word, shift = (at >> np.uint64(5)).astype(np.intp), at & np.uint64(31)
    low, high = (numbers & _WORD) << shift, (numbers >> _HALF) << shift
    # Bits of different numbers never meet, so adding is or-ing.
    np.add.at(words, word, low & _WORD)
    np.add.at(words, word + 1, (low >> _HALF) + (high & _WORD))
    np.add.at(words, word + 2, high >> _HALF)
    return words[: (total + 31) // 32].astype("<u4").tobytes()


def _unpack_bits(bits: Stream, lengths: U64) -> U64:
    """The inverse of `pack_bits`. Raises FormatError unless the stream is used up and padded with zeros."""
    ends = np.cumsum(lengths, dtype=np.uint64)
    total = int(ends[-1]) if ends.size else 0
    held = np.frombuffer(bits, np.uint8)
    if held.size != (total + 31) // 32 * 4:
        raise FormatError("frame: bits", expected=f"{(total + 31) // 32} words", found=f"{held.size} bytes")
    words: npt.NDArray[np.uint64] = np.zeros(held.size // 4 + 2, np.uint64)
    words[: held.size // 4] = held.view("<u4")
    if total % 32 and int(words[total // 32]) >> total % 32:
        raise FormatError("frame: bits", expected="zeros behind the last number", found="other bits")
    at = ends - lengths
    word, shift = (at >> np.uint64(5)).astype(np.intp), at & np.uint64(31)
    near = (words[word] | words[word + 1] << _HALF) >> shift
    far = words[word + 2] << (np.uint64(63) - shift) << np.uint64(1)
    numbers: U64 = (near | far) & ((np.uint64(1) << lengths) - np.uint64(1))
    return numbers
