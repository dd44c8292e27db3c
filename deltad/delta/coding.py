"""What a frame's header says of its streams: which coder made them, over which classes, how many changes.

Backends and frames share these words. Owns the rules that a class table must keep and the bounds that
every stream length is checked against before anything of its size is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from deltad.errors import FormatError
from deltad.types import DType

FRAME_LANES = 1 << 30
"""No frame covers more lanes, whatever the limits say: gap symbols are planned for this many."""
STREAMS_PER_CLASS = 5
"""Gap symbols, gap bits, pair codes, value symbols, value bits."""
STREAMS_PER_PLANE = 3
"""Table, words of each block, words."""
BLOCK_SYMBOLS = 4096
"""Symbols of a packed plane that are decoded alone; the last block may have fewer."""
LONGEST_CODE = 12
"""No codeword of a packed plane has more bits, so that a decoder's table fits a first-level cache."""
TABLE_BYTES = 128
"""The table of a packed plane: the length of each symbol's codeword in 4 bits."""
SMALL_CLASSES = 12
BULK_CLASSES = 4


class Coder(IntEnum):
    """How a frame's streams are to be read."""

    RAW = 0
    """The new value of every lane, as it is. Needs no base."""
    BLIND = 1
    """One class of all lanes. Read, folded and inverted without the base; applied to it."""
    CONTEXT = 2
    """Classes by the exponent of the old lane. Read only beside the base."""
    PACKED = 3
    """The new value of every lane, as byte planes with a code of their own. Needs no base."""


CODERS = frozenset(int(coder) for coder in Coder)
WHOLE = frozenset({Coder.RAW, Coder.PACKED})
"""The coders that hold new values. Their streams are stored as they are."""

MANTISSA_BITS = {
    "BF16": 7,
    "F16": 10,
    "F32": 23,
    "F64": 52,
    "F8_E4M3": 3,
    "F8_E5M2": 2,
    "F8_E4M3FNUZ": 3,
    "F8_E5M2FNUZ": 2,
}
"""The dtypes that the context coder is offered for. A lane's exponent is its magnitude without these bits."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How the streams of a blind or context frame are to be read.

    `lanes` and `changed` count the frame's lanes and those that differ. For the context coder `starts`
    holds the first exponent of every class, ascending from 0; the first `small` of them are small
    classes, the others bulk; bit c of `marked` says that small class c codes its unchanged lanes.
    """

    coder: Coder
    lanes: int
    changed: int
    small: int = 0
    starts: tuple[int, ...] = ()
    marked: int = 0

    @property
    def classes(self) -> int:
        return len(self.starts) if self.coder is Coder.CONTEXT else 1

    def codes_unchanged(self, index: int) -> bool:
        """The polarity of class `index`: whether its marked lanes are the unchanged ones."""
        return bool(self.marked >> index & 1)


def coder_name(number: int) -> str:
    """`blind`, `raw`, or the bare number of one that this build does not know."""
    return Coder(number).name.lower() if number in CODERS else str(number)


def exponents(dtype: DType) -> int:
    """How many exponents a lane can have; 0 for a dtype that has none and is never coded by context."""
    if dtype.name not in MANTISSA_BITS:
        return 0
    return 1 << (8 * dtype.lane_bytes - 1 - MANTISSA_BITS[dtype.name])


def check_coding(coding: Coding, dtype: DType) -> None:
    """Raises FormatError unless counts and class table are possible for frames of `dtype`."""
    if not 0 <= coding.changed <= coding.lanes:
        raise FormatError("frame", expected=f"0 to {coding.lanes} changes", found=str(coding.changed))
    if coding.coder in WHOLE and coding.changed != coding.lanes:
        name = coder_name(coding.coder)
        raise FormatError(
            "frame", expected=f"all {coding.lanes} lanes changed in a {name} frame", found=f"{coding.changed}"
        )
    if coding.coder is not Coder.CONTEXT:
        if (coding.small, coding.starts, coding.marked) != (0, (), 0):
            raise FormatError("frame", expected=f"no classes in a {coder_name(coding.coder)} frame", found="some")
        return
    top = exponents(dtype)
    starts, small = coding.starts, coding.small
    if not top:
        raise FormatError("frame", expected=f"no context coder for {dtype.name}, which has no exponent")
    if not 0 <= small <= SMALL_CLASSES or not 1 <= len(starts) - small <= BULK_CLASSES:
        raise FormatError(
            "frame",
            expected=f"0 to {SMALL_CLASSES} small classes and 1 to {BULK_CLASSES} bulk ones",
            found=f"{small} of {len(starts)} are small",
        )
    if starts[0] != 0 or starts[-1] >= top or any(a >= b for a, b in pairwise(starts)):
        raise FormatError("frame", expected=f"class starts that ascend from 0 below {top}", found=str(list(starts)))
    if not 0 <= coding.marked < 1 << small:
        raise FormatError("frame", expected=f"polarities of {small} small classes", found=f"bits {coding.marked:#x}")


def check_lengths(coding: Coding, dtype: DType, lengths: Sequence[int]) -> None:
    """Raises FormatError unless the plain stream lengths are possible. All of them are bounded afterwards."""
    if coding.coder is Coder.RAW:
        if list(lengths) != [coding.lanes * dtype.lane_bytes]:
            raise FormatError("frame", expected=f"a stream of {coding.lanes * dtype.lane_bytes} bytes", found="others")
        return
    if coding.coder is Coder.PACKED:
        _check_planes(coding.lanes, dtype, lengths)
        return
    if len(lengths) != STREAMS_PER_CLASS * coding.classes:
        raise FormatError("frame", expected=f"{STREAMS_PER_CLASS * coding.classes} streams", found=str(len(lengths)))
    left = {False: coding.changed, True: coding.lanes - coding.changed}
    values = coding.changed
    for index in range(coding.classes):
        gaps, gap_bits, pairs, symbols, value_bits = lengths[index * STREAMS_PER_CLASS :][:STREAMS_PER_CLASS]
        unchanged = coding.codes_unchanged(index)
        left[unchanged] -= gaps
        values -= symbols
        if unchanged:
            fits = 4 * pairs < coding.changed + 4 and symbols <= coding.changed
        else:
            fits = pairs in (0, (gaps + 3) // 4) and (symbols <= gaps if pairs else symbols == gaps)
        fits = fits and _bits_fit(gaps, gap_bits, 4) and _bits_fit(symbols, value_bits, dtype.lane_bytes)
        if not fits or min(left.values()) < 0 or values < 0:
            raise FormatError(
                f"frame: class {index}",
                expected=f"streams for {coding.changed} changes of {coding.lanes} lanes",
                found=f"lengths {gaps}, {gap_bits}, {pairs}, {symbols}, {value_bits}",
            )


def _check_planes(lanes: int, dtype: DType, lengths: Sequence[int]) -> None:
    count = STREAMS_PER_PLANE * dtype.lane_bytes
    if len(lengths) != count:
        raise FormatError("frame", expected=f"{count} streams", found=str(len(lengths)))
    for byte in range(dtype.lane_bytes):
        table, sizes, words = lengths[byte * STREAMS_PER_PLANE :][:STREAMS_PER_PLANE]
        one_symbol, plain = (1, 0, 0), (0, 0, lanes)
        if (table, sizes, words) in (one_symbol, plain):
            continue
        if (table, sizes) != (TABLE_BYTES, 2 * blocks_of(lanes)) or words % 4 or not 0 < words <= _most_bytes(lanes):
            raise FormatError(
                f"frame: plane {byte}",
                expected=f"streams for {lanes} symbols",
                found=f"lengths {table}, {sizes}, {words}",
            )


def blocks_of(symbols: int) -> int:
    """How many blocks a plane of so many symbols has."""
    return -(-symbols // BLOCK_SYMBOLS)


def _most_bytes(symbols: int) -> int:
    """The most bytes that the words of a plane can have."""
    whole, rest = divmod(symbols, BLOCK_SYMBOLS)
    return 4 * (whole * (BLOCK_SYMBOLS * LONGEST_CODE // 32) + (rest * LONGEST_CODE + 31) // 32)


def _bits_fit(symbols: int, bits: int, width: int) -> bool:
    """Whether `symbols` symbols of numbers of `width` bytes can own a bit stream of `bits` bytes."""
    return symbols >= 0 and bits % 4 == 0 and 0 <= bits <= (symbols * width + 3) // 4 * 4
