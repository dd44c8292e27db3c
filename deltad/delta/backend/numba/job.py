"""What a kernel is told: words in memory that Python fills in and kernels read and carry forward.

A job is one frame's coding or decoding: an array of u64 with the columns below, which points to a table
of segments, a table of classes and the scratch. Kernels get its address alone. One object here owns all
memory that a job points to, so nothing is freed under a kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Lanes, Place, Segments
from deltad.delta.coding import BULK_CLASSES, MANTISSA_BITS, Coder, Coding, exponents
from deltad.delta.digest import cell_keys
from deltad.types import Difference, DType

Words = npt.NDArray[np.uint64]

BLOCK = 2048
"""Lanes that are read at a time. What of old and new is needed a second time is still in a first-level cache of
32 KiB then: a miss would have to queue up behind all that is being fetched from memory."""
BASE_BLOCK = 4096
"""Lanes that are read at a time where there is no new one beside each."""
GROUPS = BASE_BLOCK // 64
BATCH = 1024
"""From so many on, what blocks have left to do for changes, or for lanes of small classes, is done."""
WAITING_LANES = BASE_BLOCK + BATCH
"""At most so many of either wait."""
SLACK = 64
"""Entries that scratch and streams have beyond what is counted: kernels write a little further."""

# Columns of a job.
(
    SCRATCH,
    KEYS,
    SEGMENTS,
    SEGMENT_COUNT,
    SEGMENT,  # the segment and
    LANE,  # the lane in it that a paused kernel goes on from
    CLASSES,
    CLASS_COUNT,
    SMALL,  # the number of small classes, which come first
    WAITING,  # lanes of small classes that wait in the scratch
    GATHERED,  # changes that do
    XOR,  # not 0: differences are XOR; else
    FLIP,  # the bits that are flipped in negative lanes
    ADJUST,  # all ones: differences change their sign with the old lane
    FULL,  # the mask of a whole lane
    SIGN,  # the position of its highest bit
    POSITIONS,  # decoded changes: where
    LANES_OUT,  # and to what, or by what
    DECODED,  # their number so far
    CHANGED,  # and the number that there must be
    COMPOSE,  # not 0: LANES_OUT gets new lanes, else plain differences
    SAMPLE_PERIOD,  # of the frame's lanes, those below SAMPLE_RUN modulo this are sampled
    SAMPLE_RUN,
    MANTISSA,  # the bits of a lane below its exponent
    EXPONENTS,  # the bits of an exponent
    BORDERS,  # the first exponents of four bulk classes; where there are fewer, the foremost have no lanes
    BULK_RANKS,  # lanes of these four so far
) = (*range(25), 25, 29)

# Columns of a segment.
OLD, NEW, LANES, SEED, START, COUNT, SUM_A, SUM_B = range(8)
SEGMENT_COLUMNS = 8

# Columns of a class: what it is, and then what coding or decoding carries from block to block.
(
    FIRST,  # its first magnitude
    SPAN,  # and how many it has
    UNCHANGED,  # all ones: its marked lanes are the unchanged ones
    RANKS,  # lanes of it so far
    NEXT,  # the rank after the last marked one
    SYMBOLS,  # where the next gap symbol goes; so on
    BITS,
    HELD,  # gap bits that do not fill a byte yet
    FILLED,  # and how many those are
    VALUES,
    SYMBOLS_END,
    BITS_END,
    VALUES_END,
    MARKS,  # decoding: where the next marked rank is; behind the last one is one beyond all lanes
    MARKS_END,
) = range(15)
CLASS_COLUMNS = 16

# A record of 64 lanes, in bytes: two masks; those of four classes; and their ranks, 32 bits each.
DIFFER, PICKED, MEMBERS, STARTS = 0, 8, 16, 48
RECORD_BYTES = 64

# Offsets in the scratch, in bytes. All areas of lanes are large enough for the widest. Those that a loop
# reads while it writes to another begin in different places of a page: processors compare no more than
# those twelve bits before they believe that a read needs an earlier write.
_AREA = 12 * 4096
BLOCK_OLD, BLOCK_NEW, SMALL_OLD, SMALL_NEW = (n * _AREA for n in range(4))
CHANGED_OLD, CHANGED_NEW, CODES = 4 * _AREA, 5 * _AREA + 1024, 6 * _AREA + 3072
FOUND, INDICES, SMALL_FOUND = 7 * _AREA + 2048, 8 * _AREA + 2560, 9 * _AREA + 2048
GATHERED_RANKS, KINDS, OTHER_CODES = 10 * _AREA + 1536, 11 * _AREA + 512, 12 * _AREA + 2048
KIND_RANKS = 13 * _AREA + 3584  # for each kind of lane, an area
RECORDS = (14 + BULK_CLASSES) * _AREA
BUSY, PICKED_BUSY, KIND_ENDS = (RECORDS + WAITING_LANES // 64 * RECORD_BYTES + n * 64 for n in range(3))
SCRATCH_BYTES = RECORDS + _AREA
KIND_AREA = _AREA


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


class _Local(threading.local):
    """One scratch per thread, so that frames of several threads never meet."""

    def __init__(self) -> None:
        held = np.zeros(SCRATCH_BYTES + RECORD_BYTES, np.uint8)
        self.scratch = held[-address(held) % RECORD_BYTES :]


_local = _Local()


def packed_keys() -> Words:
    """The cell keys of both sums, one word a cell, and the first again behind the last: shape [16385]."""
    keys = cell_keys()
    packed = keys[0] | keys[1] << np.uint64(32)
    return np.append(packed, packed[:1])


_KEYS = packed_keys()
_KEYS_ADDRESS = address(_KEYS)


def keys_address() -> int:
    return _KEYS_ADDRESS


def like(dtype: DType) -> Lanes:
    """An array whose type tells a kernel how wide lanes are."""
    return _LIKE[dtype.lane_bytes]


_LIKE = {width: np.zeros(1, kind) for width, kind in UNSIGNED.items()}


class Job:
    """The tables of one job. `old` and `new` are the frame's segments; `new` is absent when decoding.

    A new job is for the blind coder; `set_classes` makes it one for the context coder.
    """

    def __init__(self, dtype: DType, old: Segments, new: Segments | None, places: Sequence[Place]) -> None:
        self.held: tuple[object, ...] = (old, new, _local.scratch)
        self.dtype = dtype
        rows = [(address(lanes), 0, lanes.size, 0, 0, 0, 0, 0) for lanes in old]
        self.segments = np.array(rows, np.uint64).reshape(len(rows), SEGMENT_COLUMNS)
        if new is not None:
            self.segments[:, NEW] = [address(lanes) for lanes in new]
        if places:
            self.segments[:, SEED] = [place.seed for place in places]
            self.segments[:, START] = [place.start for place in places]
        self.words = np.zeros(40, np.uint64)
        bits = 8 * dtype.lane_bytes
        full = (1 << bits) - 1
        self._set(
            {
                SCRATCH: address(_local.scratch),
                KEYS: _KEYS_ADDRESS,
                SEGMENTS: address(self.segments),
                SEGMENT_COUNT: len(rows),
                XOR: dtype.difference is Difference.XOR,
                FLIP: full >> 1 if dtype.difference is Difference.LINE else 0,
                FULL: full,
                SIGN: bits - 1,
            }
        )
        if dtype.name in MANTISSA_BITS:
            self._set({MANTISSA: MANTISSA_BITS[dtype.name], EXPONENTS: exponents(dtype) - 1})
        self._make_classes(1)

    def set_coding(self, coding: Coding) -> None:
        """Code by this: its classes, and how many changes there must be."""
        self.words[CHANGED] = coding.changed
        if coding.coder is not Coder.CONTEXT:
            return
        self._make_classes(coding.classes)
        mantissa, small, bulk = MANTISSA_BITS[self.dtype.name], coding.small, coding.starts[coding.small :]
        bounds = [start << mantissa for start in (*coding.starts, exponents(self.dtype))]
        self.classes[:, FIRST] = bounds[:-1]
        self.classes[:, SPAN] = [end - first for first, end in pairwise(bounds)]
        self.classes[:, UNCHANGED] = [(1 << 64) - 1 if coding.codes_unchanged(c) else 0 for c in range(coding.classes)]
        self.words[BORDERS : BORDERS + BULK_CLASSES] = (*bulk[:1] * (BULK_CLASSES - len(bulk)), *bulk)
        self._set({SMALL: small, ADJUST: (1 << 64) - 1})

    def _make_classes(self, count: int) -> None:
        self.classes = np.zeros((count, CLASS_COLUMNS), np.uint64)
        self._set({CLASSES: address(self.classes), CLASS_COUNT: count})

    def _set(self, words: dict[int, int]) -> None:
        for column, value in words.items():
            self.words[column] = value

    @property
    def sums(self) -> Words:
        """What the changes add to the sums of their tensors, shape [segments, 2]."""
        return self.segments[:, SUM_A : SUM_B + 1].copy()

    @property
    def address(self) -> np.uint64:
        return np.uint64(address(self.words))
