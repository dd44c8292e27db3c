"""One frame's work on a device: its tables, its memory, and the steps that encoding and decoding share.

Owns the rule that segments are cut into tiles, runs of lanes that one block of a kernel works on, none across a
border.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import Lanes, Place, Segments
from deltad.delta.backend.cuda.device import Buffer, Device, aligned
from deltad.delta.backend.cuda.source import THREADS, Words, pack
from deltad.delta.classes import classes_by_exponent
from deltad.delta.coding import MANTISSA_BITS, Coder, Coding
from deltad.delta.digest import BLOCK_CELLS, U64, cell_keys, multiplier_bases
from deltad.types import Difference, DType

Counts = npt.NDArray[np.int64]

TILE = 8 * THREADS
"""Lanes of a tile where a kernel reads all of them."""
SPARSE_TILE = 16_384
"""Lanes of a tile where it reads but the changed ones."""
GATHER_TILES = 16
"""Tiles whose finds a block brings to their lists."""
PIECE = 4 * THREADS
"""Numbers of a list that a block works on."""
BATCH_BYTES = 8 << 20
"""What goes to the device at a time: the kernels of one batch run while the next one travels."""
WORD = 8
_SCAN_PIECE = 8 * THREADS

# Columns of the table of segments.
OLD, NEW, LANES, POSITION, CANONICAL, BASE_A, BASE_B, FIRST_TILE = range(8)


class Work:
    """A device, the dtype of a frame, and shorthand for what is done with them."""

    def __init__(self, device: Device, dtype: DType, keys: Buffer) -> None:
        self.device = device
        self.dtype = dtype
        self.width = dtype.lane_bytes
        self.keys = keys.address

    def kind(self, *, turns: bool) -> int:
        """The word that tells kernels of the dtype; `turns`: codes count away from zero."""
        word = int(self.dtype.difference is Difference.XOR) | int(self.dtype.difference is Difference.LINE) << 1
        return word | int(turns) << 2 | MANTISSA_BITS.get(self.dtype.name, 0) << 8

    def launch(self, kernel: str, blocks: int, **fields: Words) -> None:
        """Run a kernel; of no blocks, nothing."""
        words = pack(kernel, fields)
        if blocks:
            self.device.launch(kernel, blocks, words)

    def wide(self, kernel: str, blocks: int, **fields: Words) -> None:
        """Run a kernel that there is one of for each lane width."""
        self.launch(f"{kernel}_{self.width}", blocks, **fields)

    def give(self, table: npt.NDArray[Any]) -> Buffer:
        """A table of the host, on the device."""
        buffer = self.device.allocate(table.nbytes)
        self.device.upload(buffer, 0, [np.ascontiguousarray(table)])
        return buffer

    def take(self, source: Buffer, kind: Any, count: int, offset: int = 0) -> npt.NDArray[Any]:
        """`count` values from `offset` bytes on, on the host."""
        out = np.empty(count, kind)
        if count:
            self.device.download(source, offset, out)
        return out

    def pick(self, numbers: Buffer, which: npt.NDArray[np.integer[Any]]) -> Counts:
        """Some of many u64 on the device, on the host."""
        wanted, out = self.give(which.astype(np.uint64)), self.device.allocate(which.size * WORD)
        self.launch(
            "pick_words",
            -(-which.size // THREADS),
            numbers=numbers.address,
            which=wanted.address,
            count=which.size,
            out=out.address,
        )
        return self.take(out, np.uint64, which.size).astype(np.int64).reshape(which.shape)

    def running_sums(self, numbers: Buffer, rows: int, count: int) -> Buffer:
        """What comes before each number of its row, and the row's total behind: u64, shape [rows, count + 1]."""
        if not count:
            return self.device.zeros(rows * WORD)
        pieces = -(-count // _SCAN_PIECE)
        sums = self.device.allocate(rows * pieces * WORD)
        before = self.device.allocate(rows * (count + 1) * WORD)
        fields = {
            "numbers": numbers.address,
            "count": count,
            "pieces": pieces,
            "rows": rows,
            "pieces_before": sums.address,
            "before": before.address,
        }
        self.launch("scan_sums", rows * pieces, **fields)
        self.launch("scan_pieces", rows, **fields)
        self.launch("scan_before", rows * pieces, **fields)
        return before


class Classes:
    """The class table of a frame on the device."""

    def __init__(self, work: Work, coding: Coding) -> None:
        by_context = coding.coder is Coder.CONTEXT
        table = classes_by_exponent(coding.starts, work.dtype) if by_context else np.zeros(1, np.uint8)
        self._table = work.give(table)
        self.words = (self._table.address, coding.classes, coding.marked, work.kind(turns=by_context))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Lists cut into pieces: the table on the device, where each list's first number and first piece are."""

    buffer: Buffer
    count: int
    begins: Counts
    """Running sum of the lists' sizes, shape [lists + 1]."""
    firsts: Counts
    """And of their numbers of pieces."""


def cut_lists(work: Work, sizes: Sequence[int]) -> Pieces:
    """Cut lists of `sizes` numbers."""
    counts = [-(-size // PIECE) for size in sizes]
    firsts, begins = (np.cumsum([0, *numbers], dtype=np.int64) for numbers in (counts, sizes))
    total = int(firsts[-1])
    table = np.zeros((total, 3), np.uint64)
    of = np.repeat(np.arange(len(sizes)), counts)
    start = (np.arange(total) - firsts[of]) * PIECE
    table[:, 0], table[:, 1] = of, start
    table[:, 2] = np.minimum(PIECE, np.array(sizes, np.int64)[of] - start)
    return Pieces(work.give(table), total, begins, firsts)


@dataclass(frozen=True, slots=True)
class Side:
    """The old or the new segments of a frame on the device: where each lies, and what has to travel first."""

    segments: Segments
    addresses: npt.NDArray[np.uint64]
    buffer: Buffer
    """Holds the host's segments, each at a multiple of 16 bytes."""
    offsets: Counts
    """Of those in the buffer; -1 for one that lies on the device already."""

    def upload(self, device: Device, runs: Sequence[tuple[int, int, int]]) -> None:
        """Send lanes (segment, from, to) to where they lie on the device; consecutive ones together."""
        together: list[Lanes] = []
        begin = end = -1
        for segment, first, last in runs:
            if self.offsets[segment] < 0:
                continue
            part = np.ascontiguousarray(self.segments[segment][first:last])
            at = int(self.offsets[segment]) + first * part.itemsize
            if at != aligned(end) and together:
                device.upload(self.buffer, begin, together)
                together = []
            if not together:
                begin = at
            together.append(part)
            end = at + part.nbytes
        if together:
            device.upload(self.buffer, begin, together)


def lay_out(work: Work, segments: Segments) -> Side:
    """Room for the segments that are the host's; the others stay where they are."""
    addresses = np.zeros(len(segments), np.uint64)
    offsets = np.full(len(segments), -1, np.int64)
    size = 0
    adopted = [work.device.adopt(segment) for segment in segments]
    for index, (segment, address) in enumerate(zip(segments, adopted, strict=True)):
        if address is None:
            offsets[index] = size
            size += aligned(int(segment.size) * work.width)
    buffer = work.device.allocate(size)
    for index, address in enumerate(adopted):
        addresses[index] = buffer.address + int(offsets[index]) if address is None else address
    return Side(segments, addresses, buffer, offsets)


class Tiling:
    """The segments of a frame as kernels find their tiles in them, of at most `tile_lanes` lanes each."""

    def __init__(
        self, work: Work, old: Side, new: Side | None, places: Sequence[Place] | None, tile_lanes: int
    ) -> None:
        self.tile_lanes = tile_lanes
        self._sizes = np.array([segment.size for segment in old.segments], np.int64)
        counts = -(-self._sizes // tile_lanes)
        self._first_tiles = np.cumsum(counts) - counts
        self.tiles = int(counts.sum())
        self.lanes = int(self._sizes.sum())
        table = np.zeros((self._sizes.size, 8), np.uint64)
        table[:, OLD], table[:, LANES], table[:, FIRST_TILE] = old.addresses, self._sizes, self._first_tiles
        if new is not None:
            table[:, NEW] = new.addresses
        table[:, POSITION] = np.cumsum(self._sizes) - self._sizes
        if places is not None:
            table[:, CANONICAL] = [place.start for place in places]
            table[:, BASE_A : BASE_B + 1] = [multiplier_bases(place.seed) for place in places]
        self._table = work.give(table)
        self.words = (self._table.address, self._sizes.size, tile_lanes, self.tiles)

    def batches(self, width: int) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
        """Consecutive tiles of about BATCH_BYTES: (first, beyond, runs of lanes as (segment, from, to))."""
        each = max(1, BATCH_BYTES // (self.tile_lanes * width))
        for first in range(0, self.tiles, each):
            beyond = min(first + each, self.tiles)
            low = int(np.searchsorted(self._first_tiles, first, side="right")) - 1
            high = int(np.searchsorted(self._first_tiles, beyond))
            runs = []
            for segment in range(low, high):
                begin, end = ((tile - int(self._first_tiles[segment])) * self.tile_lanes for tile in (first, beyond))
                runs.append((segment, max(0, begin), min(end, int(self._sizes[segment]))))
            yield first, beyond, runs


def packed_keys() -> U64:
    """The cell keys of both sums in one word a cell, the first sum's in the low half."""
    keys = cell_keys()
    packed: U64 = keys[0] | keys[1] << np.uint64(32)
    assert packed.size == BLOCK_CELLS
    return packed
