"""Encoding one frame on a device: lanes up, streams down.

The host decides what the format leaves to a writer (classes, and whether values go by pair codes) between launches,
from counts that kernels made; it never looks at lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import EncodedFrame, Mode, Place, Segments, Stream
from deltad.delta.backend.cuda.device import Buffer, aligned
from deltad.delta.backend.cuda.work import GATHER_TILES, TILE, WORD, Classes, Counts, Tiling, Work, cut_lists, lay_out
from deltad.delta.classes import RUN_LANES, Histogram, plan, run_stride
from deltad.delta.coding import STREAMS_PER_CLASS, Coder, Coding, exponents
from deltad.delta.symbols import GAPS, Scheme, value_scheme

GAP_SYMBOLS, GAP_BITS, PAIRS, VALUE_SYMBOLS, VALUE_BITS = range(STREAMS_PER_CLASS)
MEMBERS, MARKED, CHANGED = range(3)


def encode(work: Work, old: Segments, new: Segments, places: Sequence[Place], mode: Mode) -> EncodedFrame | None:
    """`deltad.delta.backend.Backend.encode`."""
    before, after = lay_out(work, old), lay_out(work, new)
    tiling = Tiling(work, before, after, places, TILE)
    by_context = mode != "blind" and exponents(work.dtype) > 0
    coding = Coding(Coder.BLIND, tiling.lanes, 0)
    collect = None if by_context else _Collect(work, coding, tiling)
    for first, beyond, runs in tiling.batches(work.width):
        before.upload(work.device, runs)
        after.upload(work.device, runs)
        if collect is not None:
            collect.launch(first, beyond)
    if collect is None:
        chosen = plan(_histogram(work, tiling), tiling.lanes, mode)
        coding = Coding(Coder.CONTEXT, tiling.lanes, 0, chosen.small, chosen.starts, chosen.marked)
        collect = _Collect(work, coding, tiling)
        collect.launch(0, tiling.tiles)
    return collect.encoded(len(old))


def _histogram(work: Work, tiling: Tiling) -> Histogram:
    """Equal to `deltad.delta.classes.sample`."""
    size = exponents(work.dtype)
    counts = work.device.zeros(2 * size * WORD)
    period = RUN_LANES * run_stride(tiling.lanes)
    work.wide(
        "histogram",
        -(-tiling.lanes // period),
        tiling=tiling.words,
        run=RUN_LANES,
        period=period,
        lanes_in_frame=tiling.lanes,
        kind=work.kind(turns=True),
        exponents=size,
        lanes=counts.address,
        changed=counts.address + size * WORD,
    )
    found = work.take(counts, np.uint64, 2 * size).astype(np.int64)
    return Histogram(found[:size], found[size:])


class _Collect:
    """The first half of encoding under one class table: all the memory of it, and its launches."""

    def __init__(self, work: Work, coding: Coding, tiling: Tiling) -> None:
        self._work = work
        self._coding = coding
        self._tiling = tiling
        self._classes = Classes(work, coding)
        device = work.device
        self._counts = device.allocate(3 * coding.classes * tiling.tiles * WORD)
        self._ranks = device.allocate(tiling.tiles * TILE * 2)
        self._codes = device.allocate(tiling.tiles * TILE * work.width)
        self._segments = tiling.words[1]
        self._totals = device.zeros(3 * self._segments * WORD)  # sums of the segments, then what changed in each

    def launch(self, first: int, beyond: int) -> None:
        """Collect the tiles from `first` to before `beyond`."""
        self._work.wide(
            "collect",
            beyond - first,
            classes=self._classes.words,
            tiling=self._tiling.words,
            first_tile=first,
            keys=self._work.keys,
            counts=self._counts.address,
            ranks=self._ranks.address,
            codes=self._codes.address,
            sums=self._totals.address,
            changed=self._totals.address + 2 * self._segments * WORD,
        )

    def encoded(self, segments: int) -> EncodedFrame | None:
        """The frame, once all tiles have been collected."""
        work = self._work
        totals = work.take(self._totals, np.uint64, 3 * segments)
        counts = totals[2 * segments :].astype(np.int64)
        changed = int(counts.sum())
        if not changed:
            return None
        marks, codes, begins = self._gather()
        streams = _streams(work, marks, codes, np.diff(begins[MARKED]).tolist(), np.diff(begins[CHANGED]).tolist())
        coding = replace(self._coding, changed=changed)
        return EncodedFrame(coding, counts, totals[: 2 * segments].reshape(segments, 2), streams)

    def _gather(self) -> tuple[Buffer, Buffer, Counts]:
        """Marked ranks and codes, class by class, and where the classes begin: shape [3, classes + 1]."""
        work, tiles = self._work, self._tiling.tiles
        cells = self._coding.classes * tiles
        before = work.running_sums(self._counts, 3, cells)
        rows = np.arange(3)[:, None] * (cells + 1)
        begins = work.pick(before, rows + np.arange(self._coding.classes + 1) * tiles)
        marks = work.device.allocate(int(begins[MARKED, -1]) * 4)
        codes = work.device.allocate(int(begins[CHANGED, -1]) * work.width)
        work.wide(
            "gather",
            -(-tiles // GATHER_TILES),
            classes=self._coding.classes,
            tile_count=tiles,
            before=before.address,
            ranks=self._ranks.address,
            codes=self._codes.address,
            marks=marks.address,
            in_order=codes.address,
        )
        return marks, codes, begins


@dataclass(frozen=True, slots=True)
class _Lengths:
    """What each list takes. Shape [lists] each."""

    numbers: list[int]
    bits: list[int]
    exceptions: list[int]
    exception_bits: list[int]

    def paired(self, index: int) -> bool:
        """Whether a list of values goes by pair codes: at most a quarter of them are exceptions (FORMAT.md, 7.3)."""
        return self.numbers[index] > 0 and 4 * self.exceptions[index] <= self.numbers[index]


class _Spelling:
    """The gaps, or the values, of all classes: measured when it is made, written by `write`."""

    def __init__(self, work: Work, numbers: Buffer, sizes: list[int], scheme: Scheme, *, gaps: bool) -> None:
        self._work = work
        self._pieces = cut_lists(work, sizes)
        self._kernels = "4" if gaps else str(work.width)
        count = self._pieces.count
        lengths = work.device.allocate(3 * count * WORD)
        self._fields = {
            "pieces": self._pieces.buffer.address,
            "numbers": numbers.address,
            "gaps": int(gaps),
            "scheme": scheme.mantissa | scheme.low << 8,
            "piece_count": count,
            "lengths": lengths.address,
        }
        self._lists = np.zeros((len(sizes), 5), np.uint64)
        self._lists[:, 0], self._lists[:, 1] = self._pieces.begins[:-1], self._pieces.firsts[:-1]
        lists = work.give(self._lists)
        work.launch(f"measure_{self._kernels}", count, lists=lists.address, before=0, **self._fields)
        self._before = work.running_sums(lengths, 3, count)
        rows = np.arange(3)[:, None] * (count + 1)
        self.lengths = _Lengths(sizes, *np.diff(work.pick(self._before, rows + self._pieces.firsts)).tolist())

    def write(self, addresses: npt.NDArray[np.uint64]) -> None:
        """Write pairs, symbols and bits to addresses, shape [lists, 3]; no pairs where theirs is 0."""
        self._lists[:, 2:] = addresses
        lists = self._work.give(self._lists)
        fields = {"lists": lists.address, "before": self._before.address, **self._fields}
        self._work.launch(f"spell_{self._kernels}", self._pieces.count, **fields)


def _streams(work: Work, marks: Buffer, codes: Buffer, marked: list[int], changed: list[int]) -> list[Stream]:
    """The streams of all classes, in order."""
    gaps = _Spelling(work, marks, marked, GAPS, gaps=True)
    values = _Spelling(work, codes, changed, value_scheme(work.dtype), gaps=False)
    sizes = np.zeros((len(marked), STREAMS_PER_CLASS), np.int64)
    paired = np.array([values.lengths.paired(index) for index in range(len(changed))])
    sizes[:, GAP_SYMBOLS] = marked
    sizes[:, GAP_BITS] = _words(gaps.lengths.bits)
    sizes[:, PAIRS] = np.where(paired, (np.array(changed) + 3) // 4, 0)
    sizes[:, VALUE_SYMBOLS] = np.where(paired, values.lengths.exceptions, changed)
    sizes[:, VALUE_BITS] = _words(np.where(paired, values.lengths.exception_bits, values.lengths.bits))
    rooms = np.array([aligned(size) for size in sizes.reshape(-1).tolist()])
    ends = np.cumsum(rooms)
    out = work.device.zeros(int(ends[-1]))
    begins = (ends - rooms).reshape(sizes.shape)
    at = begins.astype(np.uint64) + np.uint64(out.address)
    nowhere = np.zeros(len(marked), np.uint64)
    gaps.write(np.stack([nowhere, at[:, GAP_SYMBOLS], at[:, GAP_BITS]], axis=1))
    pairs = np.where(paired, at[:, PAIRS], nowhere)
    values.write(np.stack([pairs, at[:, VALUE_SYMBOLS], at[:, VALUE_BITS]], axis=1))
    data = work.take(out, np.uint8, out.size)
    cuts = zip(begins.reshape(-1).tolist(), sizes.reshape(-1).tolist(), strict=True)
    return [data[begin : begin + size] for begin, size in cuts]


def _words(bits: Sequence[int] | Counts) -> Counts:
    """The bytes of bit streams."""
    return (np.asarray(bits, np.int64) + 31) // 32 * 4
