"""Decoding one frame on a device: streams up, changes down, or written where lanes lie there.

Streams may hold anything. Between launches the host compares what kernels counted with what the streams' lengths
allow, so that no kernel reads or writes outside; what only kernels see, they report in a word of troubles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Changes, Lanes, Place, Positions, Segments, Stream
from deltad.delta.backend.cuda.device import Buffer, aligned
from deltad.delta.backend.cuda.encoding import GAP_BITS, GAP_SYMBOLS, PAIRS, VALUE_BITS, VALUE_SYMBOLS
from deltad.delta.backend.cuda.source import Words
from deltad.delta.backend.cuda.work import (
    PIECE,
    SPARSE_TILE,
    TILE,
    WORD,
    Classes,
    Counts,
    Side,
    Tiling,
    Work,
    cut_lists,
    lay_out,
)
from deltad.delta.backend.numpy import check_sums
from deltad.delta.coding import STREAMS_PER_CLASS, Coder, Coding
from deltad.delta.difference import from_codes
from deltad.delta.digest import U64, multiplier_bases
from deltad.delta.symbols import GAPS, Scheme, value_scheme
from deltad.errors import FormatError


def decode(work: Work, coding: Coding, streams: Sequence[Stream], base: Segments | None) -> Changes:
    """`deltad.delta.backend.Backend.decode`."""
    kind = UNSIGNED[work.width]
    if coding.coder is not Coder.CONTEXT:
        found = _locate(work, coding, streams, None)
        differences = from_codes(work.take(found.codes, kind, coding.changed), work.dtype)
    else:
        assert base is not None, "context frames are decoded beside their base"
        side = _uploaded(work, base)
        found = _locate(work, coding, streams, side)
        composed = _Composed(work, coding, found, side, None, differences=True)
        differences = work.take(composed.differences, kind, coding.changed)
    return Changes(work.take(found.positions, np.uint32, coding.changed).astype(np.int64), differences)


@dataclass(frozen=True, slots=True)
class Write:
    """Lanes that are still to be written to an array of the host, once nothing on the device can fail any more."""

    target: Lanes
    positions: Positions
    lanes: Lanes

    def do(self) -> None:
        self.target[self.positions] = self.lanes


def decode_apply(  # noqa: PLR0917
    work: Work, coding: Coding, check: U64, streams: Sequence[Stream], target: Segments, places: Sequence[Place]
) -> tuple[U64, list[Write]]:
    """`deltad.delta.backend.Backend.decode_apply`, but for the host's segments, for which it gives what to write."""
    side = _uploaded(work, target)
    found = _locate(work, coding, streams, side)
    composed = _Composed(work, coding, found, side, places, differences=False)
    sums: U64 = work.take(composed.sums, np.uint64, 2 * len(target)).reshape(-1, 2)
    check_sums(sums, check)
    writes = list(_writes(work, coding, found, composed, side)) if (side.offsets >= 0).any() else []
    if (side.offsets < 0).any():
        composed.scatter()
    return sums, writes


def _writes(work: Work, coding: Coding, found: _Found, composed: _Composed, side: Side) -> Iterator[Write]:
    """New lanes for the segments of the host."""
    positions = work.take(found.positions, np.uint32, coding.changed)
    lanes = work.take(composed.lanes, UNSIGNED[work.width], coding.changed)
    first = 0
    for segment, offset in zip(side.segments, side.offsets, strict=True):
        begin, end = np.searchsorted(positions, (first, first + segment.size))
        if offset >= 0:
            yield Write(segment, positions[begin:end].astype(np.int64) - first, lanes[begin:end])
        first += segment.size


def apply(work: Work, target: Lanes, changes: Changes, seed: int) -> tuple[Lanes, U64, list[Write]]:
    """`deltad.delta.backend.Backend.apply`, but for a target of the host, for which it gives what to write."""
    positions = np.ascontiguousarray(changes.positions, np.int64)
    if positions.size and not 0 <= positions[0] <= positions[-1] < target.size:
        raise ValueError(f"positions {positions[0]} to {positions[-1]} in {target.size} lanes")
    address = work.device.adopt(target)
    lanes = work.device.allocate(0) if address is not None else work.give(target[positions])
    old = work.device.allocate(positions.size * work.width)
    sums = work.device.zeros(2 * WORD)
    where, differences = work.give(positions), work.give(changes.differences)
    work.wide(
        "apply",
        -(-positions.size // PIECE),
        target=lanes.address if address is None else address,
        step=0 if address is None else _step(target, work.width),
        positions=where.address,
        differences=differences.address,
        changed=positions.size,
        kind=work.kind(turns=False),
        keys=work.keys,
        base=multiplier_bases(seed).tolist(),
        old_lanes=old.address,
        sums=sums.address,
    )
    kind = UNSIGNED[work.width]
    replaced, share = work.take(old, kind, positions.size), work.take(sums, np.uint64, 2)
    if address is not None:
        return replaced, share, []
    return replaced, share, [Write(target, positions, work.take(lanes, kind, positions.size))]


def _step(target: Lanes, width: int) -> int:
    """Lanes from one lane of an array on the device to the next."""
    stride = int(target.strides[0])
    if stride <= 0 or stride % width:
        raise ValueError(f"lanes {stride} bytes apart")
    return stride // width


@dataclass(frozen=True, slots=True)
class _Found:
    """Changed lanes in the order of the frame: positions (u32), and codes of the coder, on the device."""

    positions: Buffer
    codes: Buffer


def _uploaded(work: Work, segments: Segments) -> Side:
    side = lay_out(work, segments)
    side.upload(work.device, [(index, 0, int(segment.size)) for index, segment in enumerate(segments)])
    return side


def _locate(work: Work, coding: Coding, streams: Sequence[Stream], base: Side | None) -> _Found:
    """Positions and codes of a frame's changes. Raises FormatError for what the streams or the base do not allow."""
    given = _Streams(work, coding, streams)
    if coding.coder is not Coder.CONTEXT:
        marks = given.ranks([coding.lanes])
        _check_changed(coding, given.size(0, GAP_SYMBOLS))
        return _Found(marks, given.codes([coding.changed]))
    assert base is not None
    tiling, classes = Tiling(work, base, None, None, TILE), Classes(work, coding)
    cells = coding.classes * tiling.tiles
    counts = work.device.allocate(cells * WORD)
    fields: dict[str, Words] = {
        "classes": classes.words,
        "tiling": tiling.words,
        "counts": counts.address,
        "members_before": 0,
        "marks": 0,
        "first_mark": 0,
        "codes": 0,
        "first_code": 0,
        "positions": 0,
        "in_order": 0,
    }
    work.wide("census", tiling.tiles, **fields)
    before = work.running_sums(counts, 1, cells)
    members = np.diff(work.pick(before, np.arange(coding.classes + 1) * tiling.tiles))
    marks = given.ranks(members.tolist())
    marked = np.array([given.size(index, GAP_SYMBOLS) for index in range(coding.classes)])
    unchanged = np.array([coding.codes_unchanged(index) for index in range(coding.classes)])
    changed = np.where(unchanged, members - marked, marked)
    _check_changed(coding, int(changed.sum()))
    codes = given.codes(changed.tolist())
    firsts = work.give(np.concatenate([np.cumsum([0, *marked]), np.cumsum([0, *changed])]).astype(np.uint64))
    found = _Found(work.device.allocate(coding.changed * 4), work.device.allocate(coding.changed * work.width))
    fields |= {
        "members_before": before.address,
        "marks": marks.address,
        "first_mark": firsts.address,
        "codes": codes.address,
        "first_code": firsts.address + (coding.classes + 1) * WORD,
        "positions": found.positions.address,
        "in_order": found.codes.address,
    }
    work.wide("locate", tiling.tiles, **fields)
    return found


def _check_changed(coding: Coding, found: int) -> None:
    if found != coding.changed:
        raise FormatError("frame", expected=f"{coding.changed} changes", found=str(found))


class _Streams:
    """The plain streams of a frame, on the device, and what is read from them."""

    def __init__(self, work: Work, coding: Coding, streams: Sequence[Stream]) -> None:
        self._work = work
        self._classes = coding.classes
        self._streams = [np.frombuffer(stream, np.uint8) for stream in streams]
        rooms = [aligned(stream.size) for stream in self._streams]
        self._buffer = work.device.allocate(sum(rooms))
        work.device.upload(self._buffer, 0, self._streams)
        self._at = (self._buffer.address + np.cumsum([0, *rooms])).tolist()
        self._trouble = work.device.zeros(4)

    def size(self, index: int, which: int) -> int:
        """The length of a stream of a class."""
        return self._stream(index, which).size

    def _stream(self, index: int, which: int) -> npt.NDArray[np.uint8]:
        return self._streams[index * STREAMS_PER_CLASS + which]

    def _address(self, index: int, which: int) -> int:
        return int(self._at[index * STREAMS_PER_CLASS + which])

    def ranks(self, limits: Sequence[int]) -> Buffer:
        """The marked ranks of all classes, one behind the other; those of class c are below `limits[c]`."""
        return _Reading(self._work, self, GAP_SYMBOLS, GAP_BITS, GAPS, limits).ranks()

    def codes(self, counts: Sequence[int]) -> Buffer:
        """The codes of all classes, one behind the other: `counts[c]` of class c."""
        work = self._work
        scheme = value_scheme(work.dtype)
        numbers = _Reading(work, self, VALUE_SYMBOLS, VALUE_BITS, scheme)
        read = numbers.numbers(str(work.width))
        lists = np.zeros((self._classes, 4), np.uint64)
        pieces = cut_lists(work, counts)
        lists[:, 0], lists[:, 1], lists[:, 3] = pieces.begins[:-1], pieces.firsts[:-1], numbers.pieces.begins[:-1]
        for index, count in enumerate(counts):
            if self.size(index, PAIRS):
                self._check_pairs(index, count)
                lists[index, 2] = self._address(index, PAIRS)
            elif self.size(index, VALUE_SYMBOLS) != count:
                found = self.size(index, VALUE_SYMBOLS)
                raise FormatError("frame: values", expected=f"{count} of them", found=str(found))
        table = work.give(lists)
        exceptions = work.device.allocate(pieces.count * WORD)
        codes = work.device.allocate(int(pieces.begins[-1]) * work.width)
        fields = {
            "pieces": pieces.buffer.address,
            "lists": table.address,
            "exceptions": exceptions.address,
            "numbers": read.address,
            "codes": codes.address,
            "top": scheme.top,
            "trouble": self._trouble.address,
        }
        work.launch("fill_measure", pieces.count, before=0, **fields)
        before = work.running_sums(exceptions, 1, pieces.count)
        counted = np.diff(work.pick(before, pieces.firsts))
        for index in np.flatnonzero(lists[:, 2]).tolist():
            if counted[index] != self.size(index, VALUE_SYMBOLS):
                expected = f"{self.size(index, VALUE_SYMBOLS)} exceptions"
                raise FormatError("frame: pair codes", expected=expected, found=str(counted[index]))
        work.wide("fill", pieces.count, before=before.address, **fields)
        self.check_trouble()
        return codes

    def _check_pairs(self, index: int, count: int) -> None:
        pairs = self._stream(index, PAIRS)
        if pairs.size != (count + 3) // 4 or (count % 4 and pairs[-1] >> 2 * (count % 4)):
            raise FormatError("frame: pair codes", expected=f"{count} of them, zeros behind", found="others")

    def lists(self, symbols: int, bits: int) -> tuple[list[int], U64]:
        """The lengths of the classes' symbol streams, and where they and their bits lie: shape [classes, 2]."""
        sizes = [self.size(index, symbols) for index in range(self._classes)]
        places = [(self._address(index, symbols), self._address(index, bits)) for index in range(self._classes)]
        return sizes, np.array(places, np.uint64)

    def check_bits(self, which: int, totals: Counts) -> None:
        """Raises FormatError unless the bit streams hold `totals` bits, and zeros behind the last one."""
        for index, total in enumerate(totals.tolist()):
            bits = self._stream(index, which)
            if bits.size != (total + 31) // 32 * 4:
                raise FormatError("frame: bits", expected=f"{(total + 31) // 32} words", found=f"{bits.size} bytes")
            if total % 32 and int.from_bytes(bits[-4:].tobytes(), "little") >> total % 32:
                raise FormatError("frame: bits", expected="zeros behind the last number", found="other bits")

    @property
    def trouble(self) -> int:
        """Where kernels report what they were asked to read and may not."""
        return self._trouble.address

    def check_trouble(self) -> None:
        """Raises FormatError if a kernel reported any."""
        if self._work.take(self._trouble, np.uint32, 1)[0]:
            raise FormatError(
                "frame",
                expected="numbers within their bounds and ranks within their classes",
                found="larger ones",
                hint="it was made for another base, or is damaged",
            )


class _Reading:
    """The gaps, or the value symbols, of all classes: measured and checked when it is made.

    Ranks of class c are to be below `limits[c]`.
    """

    def __init__(  # noqa: PLR0917
        self, work: Work, streams: _Streams, symbols: int, bits: int, scheme: Scheme, limits: Sequence[int] | int = 0
    ) -> None:
        self._work = work
        self._streams = streams
        sizes, places = streams.lists(symbols, bits)
        self.pieces = cut_lists(work, sizes)
        count = self.pieces.count
        table = np.zeros((len(sizes), 5), np.uint64)
        table[:, 0], table[:, 1], table[:, 2:4] = self.pieces.begins[:-1], self.pieces.firsts[:-1], places
        table[:, 4] = limits
        self._lists = work.give(table)
        lengths, self._gap_sums = work.device.allocate(count * WORD), work.device.allocate(count * WORD)
        self._fields = {
            "pieces": self.pieces.buffer.address,
            "lists": self._lists.address,
            "scheme": scheme.mantissa | scheme.low << 8,
            "most_bits": scheme.most_bits,
            "top": scheme.top,
            "lengths": lengths.address,
            "bits_before": 0,
            "numbers": 0,
            "gap_sums": self._gap_sums.address,
            "ranks_before": 0,
            "trouble": streams.trouble,
        }
        work.launch("read_measure", count, **self._fields)
        self._before = work.running_sums(lengths, 1, count)
        totals = np.diff(work.pick(self._before, self.pieces.firsts))
        streams.check_trouble()
        streams.check_bits(bits, totals)

    def numbers(self, kernel: str) -> Buffer:
        """All numbers, one list behind the other."""
        numbers = self._work.device.allocate(int(self.pieces.begins[-1]) * int(kernel))
        self._fields |= {"bits_before": self._before.address, "numbers": numbers.address}
        self._work.launch(f"read_{kernel}", self.pieces.count, **self._fields)
        self._streams.check_trouble()
        return numbers

    def ranks(self) -> Buffer:
        """The numbers as gaps, added up to ranks."""
        ranks = self.numbers("4")
        before = self._work.running_sums(self._gap_sums, 1, self.pieces.count)
        self._work.launch("read_ranks", self.pieces.count, **self._fields | {"ranks_before": before.address})
        self._streams.check_trouble()
        return ranks


class _Composed:
    """The changes beside the old lanes: new lanes, and what they add to the sums of the segments."""

    def __init__(
        self, work: Work, coding: Coding, found: _Found, old: Side, places: Sequence[Place] | None, *, differences: bool
    ) -> None:
        self._work = work
        self.lanes = work.device.allocate(coding.changed * work.width)
        self.differences = work.device.allocate(coding.changed * work.width if differences else 0)
        self.sums = work.device.zeros(2 * len(old.segments) * WORD)
        self._tiling = Tiling(work, old, None, places, SPARSE_TILE)
        self._fields: dict[str, Words] = {
            "tiling": self._tiling.words,
            "kind": work.kind(turns=coding.coder is Coder.CONTEXT),
            "keys": work.keys,
            "positions": found.positions.address,
            "changed": coding.changed,
            "codes": found.codes.address,
            "differences": self.differences.address if differences else 0,
            "lanes": self.lanes.address,
            "sums": self.sums.address,
        }
        work.wide("compose", self._tiling.tiles, **self._fields)

    def scatter(self) -> None:
        """Write the new lanes to where the old ones lie on the device."""
        self._work.wide("scatter", self._tiling.tiles, **self._fields)
