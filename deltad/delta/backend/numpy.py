"""The reference backend: clear before fast. Every other backend must equal it, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from deltad.delta import packing
from deltad.delta.backend import UNSIGNED, Changes, EncodedFrame, Lanes, Mode, Place, Positions, Segments, Stream
from deltad.delta.classes import classes_by_exponent, exponents_of, plan, sample
from deltad.delta.coding import STREAMS_PER_CLASS, Coder, Coding, exponents
from deltad.delta.difference import adjusted, compose, difference, from_codes, to_codes
from deltad.delta.digest import U64, pack_sums, sum_bytes, sum_changes
from deltad.delta.symbols import decode_gaps, decode_values, encode_gaps, encode_values
from deltad.errors import FormatError, IntegrityError
from deltad.types import DType

_WINDOW_LANES = 1 << 20


class NumpyBackend:
    """Implements `deltad.delta.backend.Backend`."""

    name = "numpy"

    def encode(
        self, old: Segments, new: Segments, places: Sequence[Place], dtype: DType, mode: Mode
    ) -> EncodedFrame | None:
        moved = [_changed(a, b) for a, b in zip(old, new, strict=True)]
        counts = np.array([positions.size for positions in moved], np.int64)
        lanes, changed = sum(segment.size for segment in old), int(counts.sum())
        if not changed:
            return None
        sums = np.array(
            [
                sum_changes(positions + place.start, a[positions], b[positions], place.seed)
                for positions, a, b, place in zip(moved, old, new, places, strict=True)
            ]
        )
        if mode == "blind" or not exponents(dtype):
            coding = Coding(Coder.BLIND, lanes, changed)
            streams = _blind_streams(moved, old, new, dtype)
        else:
            table = plan(sample(old, new, dtype), lanes, mode)
            coding = Coding(Coder.CONTEXT, lanes, changed, table.small, table.starts, table.marked)
            streams = context_streams(coding, old, new, dtype)
        return EncodedFrame(coding, counts, sums, streams)

    def decode(self, coding: Coding, streams: Sequence[Stream], base: Segments | None, dtype: DType) -> Changes:
        if coding.coder is Coder.CONTEXT:
            assert base is not None, "context frames are decoded beside their base"
            changes = _decode_context(coding, streams, base, dtype)
        else:
            positions = _ranks(streams, 0, coding.lanes)
            values = decode_values(streams[2], streams[3], streams[4], positions.size, dtype)
            changes = Changes(positions, from_codes(values, dtype))
        if changes.positions.size != coding.changed:
            raise FormatError("frame", expected=f"{coding.changed} changes", found=str(changes.positions.size))
        return changes

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        old = target[changes.positions]
        new = compose(old, changes.differences, dtype)
        target[changes.positions] = new
        return old, sum_changes(changes.positions, old, new, seed)

    def decode_apply(  # noqa: PLR0917
        self,
        coding: Coding,
        check: U64,
        streams: Sequence[Stream],
        target: Segments,
        places: Sequence[Place],
        dtype: DType,
    ) -> U64:
        changes = self.decode(coding, streams, target, dtype)
        sums = np.zeros((len(target), 2), np.uint64)
        writes: list[tuple[Positions, Lanes]] = []
        for index, (start, end, first) in enumerate(_cuts(target, changes.positions)):
            at = changes.positions[start:end] - first
            old = target[index][at]
            new = compose(old, changes.differences[start:end], dtype)
            sums[index] = sum_changes(at + places[index].start, old, new, places[index].seed)
            writes.append((at, new))
        check_sums(sums, check)
        for segment, (at, new) in zip(target, writes, strict=True):
            segment[at] = new
        return sums

    def pack(self, lanes: Segments, dtype: DType) -> list[Stream]:
        return packing.pack(lanes, dtype)

    def unpack(self, streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
        return packing.unpack(streams, lanes, dtype)

    def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
        sums = np.zeros((len(lanes), 2), np.uint64)
        for i, (segment, place) in enumerate(zip(lanes, places, strict=True)):
            sums[i] = sum_bytes(segment.view(np.uint8), place.start * segment.itemsize, place.seed)
        return sums


def check_sums(sums: U64, check: U64) -> None:
    """Raises IntegrityError unless what a frame would add to its segments' sums adds up to its check."""
    found = sums.sum(axis=0, dtype=np.uint64)
    if not np.array_equal(found, check):
        raise IntegrityError(
            "frame",
            expected=f"changes that add {pack_sums(check).hex()} to the element sums",
            found=pack_sums(found).hex(),
            hint="it was made for another base, or is damaged; nothing was written",
        )


def _changed(old: Lanes, new: Lanes) -> Positions:
    """Where two segments differ, window by window, so that the masks stay small."""
    found = [
        np.flatnonzero(old[start : start + _WINDOW_LANES] != new[start : start + _WINDOW_LANES]) + start
        for start in range(0, old.size, _WINDOW_LANES)
    ]
    return np.concatenate(found).astype(np.int64, copy=False) if found else np.empty(0, np.int64)


def _blind_streams(moved: Sequence[Positions], old: Segments, new: Segments, dtype: DType) -> list[Stream]:
    firsts = np.cumsum([0, *(segment.size for segment in old)])
    ranks = np.concatenate([positions + first for positions, first in zip(moved, firsts, strict=False)])
    codes = [
        to_codes(difference(a[positions], b[positions], dtype), dtype)
        for positions, a, b in zip(moved, old, new, strict=True)
    ]
    return [*encode_gaps(ranks), *encode_values(np.concatenate(codes), dtype)]


def context_streams(coding: Coding, old: Segments, new: Segments, dtype: DType) -> list[Stream]:
    """The streams of a context frame, for any class table."""
    ranks: list[list[Positions]] = [[np.empty(0, np.int64)] for _ in range(coding.classes)]
    codes: list[list[Lanes]] = [[np.empty(0, UNSIGNED[dtype.lane_bytes])] for _ in range(coding.classes)]
    for index, was, now, rank in _class_windows(coding, old, new, dtype):
        differs = was != now
        ranks[index].append(np.flatnonzero(differs ^ coding.codes_unchanged(index)) + rank)
        before = was[differs]
        codes[index].append(to_codes(adjusted(difference(before, now[differs], dtype), before, dtype), dtype))
    streams: list[Stream] = []
    for index in range(coding.classes):
        streams += encode_gaps(np.concatenate(ranks[index]))
        streams += encode_values(np.concatenate(codes[index]), dtype)
    return streams


def _class_windows(
    coding: Coding, old: Segments, new: Segments, dtype: DType
) -> Iterator[tuple[int, Lanes, Lanes, int]]:
    """(class, its old lanes, its new lanes, the first one's rank), window by window."""
    for index, at, segment, rank in _members(coding, old, dtype):
        yield index, old[segment][at], new[segment][at], rank


def _members(coding: Coding, base: Segments, dtype: DType) -> Iterator[tuple[int, Positions, int, int]]:
    """Every lane once: (class, positions within the segment, segment, the first one's rank), in windows.

    Windows ascend; within one, classes do.
    """
    by_exponent = classes_by_exponent(coding.starts, dtype)
    population = [0] * coding.classes
    for segment, lanes in enumerate(base):
        for start in range(0, lanes.size, _WINDOW_LANES):
            kinds = by_exponent[exponents_of(lanes[start : start + _WINDOW_LANES], dtype)]
            for index in range(coding.classes):
                at = np.flatnonzero(kinds == index) + start
                if at.size:
                    yield index, at, segment, population[index]
                    population[index] += at.size


def _decode_context(coding: Coding, streams: Sequence[Stream], base: Segments, dtype: DType) -> Changes:
    marks = [_ranks(streams, index, coding.lanes) for index in range(coding.classes)]
    firsts = np.cumsum([0, *(segment.size for segment in base)])
    population = [0] * coding.classes
    positions: list[list[Positions]] = [[np.empty(0, np.int64)] for _ in range(coding.classes)]
    before: list[list[Lanes]] = [[np.empty(0, UNSIGNED[dtype.lane_bytes])] for _ in range(coding.classes)]
    for index, at, segment, rank in _members(coding, base, dtype):
        begin, end = np.searchsorted(marks[index], (rank, rank + at.size))
        changed = np.full(at.size, coding.codes_unchanged(index))
        changed[marks[index][begin:end] - rank] ^= True
        positions[index].append(at[changed] + firsts[segment])
        before[index].append(base[segment][at[changed]])
        population[index] = rank + changed.size
    found, differences = [], []
    for index in range(coding.classes):
        if marks[index].size and marks[index][-1] >= population[index]:
            raise FormatError(
                f"frame: class {index}",
                expected=f"ranks below {population[index]}",
                found=str(int(marks[index][-1])),
                hint="it was made for another base, or is damaged",
            )
        found.append(np.concatenate(positions[index]))
        old = np.concatenate(before[index])
        coded = streams[index * STREAMS_PER_CLASS :][2:STREAMS_PER_CLASS]
        values = decode_values(coded[0], coded[1], coded[2], old.size, dtype)
        differences.append(adjusted(from_codes(values, dtype), old, dtype))
    everywhere, of_all = np.concatenate(found), np.concatenate(differences)
    order = np.argsort(everywhere, kind="stable")
    return Changes(everywhere[order], of_all[order])


def _ranks(streams: Sequence[Stream], index: int, lanes: int) -> Positions:
    """The marked ranks of a class. Raises FormatError for one outside the frame."""
    ranks = decode_gaps(streams[index * STREAMS_PER_CLASS], streams[index * STREAMS_PER_CLASS + 1])
    if ranks.size and ranks[-1] >= lanes:
        raise FormatError("frame: gaps", expected=f"lanes below {lanes}", found=str(int(ranks[-1])))
    return ranks


def _cuts(segments: Segments, positions: Positions) -> Iterator[tuple[int, int, int]]:
    """Of ascending frame positions, those of each segment: begin, end, and the segment's first lane."""
    first = 0
    for segment in segments:
        begin, end = np.searchsorted(positions, (first, first + segment.size))
        yield int(begin), int(end), first
        first += segment.size
