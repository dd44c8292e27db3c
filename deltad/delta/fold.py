"""Arithmetic on whole deltas: fold several into one, invert one, and change the coder of one.

Differences form a group, so A→B and B→C join to A→C, and A→B turns into B→A, without the weights they
act on. Blind deltas do that as they stand, frame by frame, however their frames are cut. What is coded by
context has to be read beside the weights that it starts from. Owns the invariant that the result does
what its parts did, lane for lane. All parts are read side by side, once; memory is bounded by two chunks of each
and a few frames, whatever the model's size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltad.delta import merging
from deltad.delta.backend import UNSIGNED, Backend, Changes, Lanes, Mode
from deltad.delta.codec import DELTA_FRAME_BYTES, Patch, frame_patches
from deltad.delta.coding import WHOLE, Coder, coder_name
from deltad.delta.difference import compose
from deltad.delta.digest import pack_sums, unpack_sums, zero_sum
from deltad.delta.emit import Checks, ChunkBuilder, EncodedChunk, FrameWriter, WrittenFrame, halves
from deltad.delta.frame import Frame, FrameHeader, Rect, plan_frames, read_chunk
from deltad.delta.layout import Layout
from deltad.delta.region import Region
from deltad.delta.stored import FoundFrame, StoredDelta, StoredFrames
from deltad.delta.weights import Weights, borrowed_segments, by_rect
from deltad.errors import FormatError
from deltad.limits import DEFAULT_LIMITS, Limits

__all__ = ["MadeDelta", "StoredDelta", "fold", "invert", "transcode"]

_HELD_FRAMES = 2
"""Decoded frames of a part that are kept beside the base, since the next region may begin in the one that the last
ended in."""


@dataclass(slots=True)
class MadeDelta:
    """A delta in the making. Iterate `chunks()` to the end; then `changed` and `coders` are those of the edge."""

    limits: Limits
    _frames: Iterator[WrittenFrame]
    changed: int = field(init=False, default=0)
    """Lanes that its frames change; all those of a whole frame."""
    coders: tuple[int, ...] = field(init=False, default=())

    def chunks(self) -> Iterator[EncodedChunk]:
        """Every chunk, in order. Raises FormatError or IntegrityError where it cannot be made of its parts."""
        builder = ChunkBuilder(self.limits.chunk_bytes)
        for frame in self._frames:
            self.changed += frame.coding.changed
            yield from builder.add(frame)
        yield from builder.flush()
        self.coders = tuple(sorted(builder.coders))


def fold(
    parts: Sequence[StoredDelta],
    layout: Layout,
    backend: Backend,
    *,
    inverted: bool = False,
    base: Weights | None = None,
    mode: Mode = "blind",
    limits: Limits = DEFAULT_LIMITS,
) -> MadeDelta:
    """The delta A→Z of A→B, B→C, … , Y→Z, given in this order, or the one that undoes it where `inverted`.

    Blind and whole frames need no weights, and give blind and whole ones. With `base`, the weights of A, all
    deltas may be coded by context, and so may the result. Without it a frame has a check only where it
    covers all frames that it was made of. Whole frames, and what is made beside the base, cannot be inverted.
    """
    if not parts:
        raise ValueError("expected at least one delta to fold")
    if base is None and mode != "blind":
        raise ValueError("coding by context takes the base")
    writer = FrameWriter(layout, backend, mode, limits)
    if base is None:
        return MadeDelta(limits, _BlindFold(parts, writer, inverted=inverted).frames())
    if inverted:
        raise ValueError("beside the base, fold first and invert then")
    return MadeDelta(limits, _FoldBeside(parts, writer, base).frames())


def invert(delta: StoredDelta, layout: Layout, backend: Backend, *, limits: Limits = DEFAULT_LIMITS) -> MadeDelta:
    """The delta B→A of a blind A→B, in the same frames. Raises FormatError for whole ones."""
    return MadeDelta(limits, _invert(delta, FrameWriter(layout, backend, "blind", limits)))


def transcode(
    delta: StoredDelta, layout: Layout, base: Weights, backend: Backend, mode: Mode, *, limits: Limits = DEFAULT_LIMITS
) -> MadeDelta:
    """The same delta in another coder, read beside the weights that it starts from. Whole frames stay whole."""
    return MadeDelta(limits, _transcode(delta, FrameWriter(layout, backend, mode, limits), base))


def _invert(delta: StoredDelta, writer: FrameWriter) -> Iterator[WrittenFrame]:
    for frame in _frames(delta, writer):
        header = frame.header
        _require_blind(header)
        dtype = writer.layout.tensors[header.rects[0].tensor].type
        changes = merging.invert(writer.backend.decode(header.coding, frame.streams, None, dtype), dtype)
        yield from _emit(header.rects, changes, writer, _one_check(header))


def _transcode(delta: StoredDelta, writer: FrameWriter, base: Weights) -> Iterator[WrittenFrame]:
    for frame in _frames(delta, writer):
        rects = frame.header.rects
        with borrowed_segments(base, rects, writer.layout) as old:
            region = Region(rects, writer.layout, old)
            for patch in frame_patches(frame, writer.layout, writer.backend, old):
                region.play(patch)
            if frame.header.coder in WHOLE:
                written = list(writer.whole(rects, region.numbers))
            else:
                written = list(writer.delta(rects, old, region.numbers, writer.encode(rects, old, region.numbers)))
        yield from written


class _BlindFold:
    """A fold without weights. What is blind is merged as changes; where a frame is whole, its region is laid out."""

    def __init__(self, parts: Sequence[StoredDelta], writer: FrameWriter, *, inverted: bool) -> None:
        self._writer = writer
        self._parts = [StoredFrames(part, writer.layout, writer.limits) for part in parts]
        self._inverted = inverted
        self._lanes: Lanes = np.empty(0, np.uint8)
        """All 0 between two regions, so that nobody has to walk over it; `_zeros` always."""
        self._zeros = self._lanes

    def frames(self) -> Iterator[WrittenFrame]:
        writer = self._writer
        for rects in plan_frames(writer.layout, frame_bytes=DELTA_FRAME_BYTES, limits=writer.limits):
            found = [(part, frame) for part in self._parts for frame in part.over(rects)]
            if not found:
                continue
            if all(frame.header.coder == Coder.BLIND for _, frame in found):
                yield from self._merge(rects, found)
            else:
                yield from self._lay_out(rects, found)
        for part in self._parts:
            part.finish()

    def _merge(
        self, rects: tuple[Rect, ...], found: Sequence[tuple[StoredFrames, FoundFrame]]
    ) -> Iterator[WrittenFrame]:
        dtype = self._writer.layout.tensors[rects[0].tensor].type
        parts = [self._changes(part.load(frame), rects) for part, frame in found]
        if self._inverted:
            parts = [merging.invert(part, dtype) for part in parts]
        checks, lanes = self._checks(found), sum(rect.lanes for rect in rects)
        if merging.SPARSE * sum(part.positions.size for part in parts) <= lanes:
            yield from _emit(rects, merging.merge(parts, dtype), self._writer, checks)
        else:
            yield from self._scatter(rects, parts, checks)

    def _scatter(self, rects: tuple[Rect, ...], parts: Sequence[Changes], checks: Checks) -> list[WrittenFrame]:
        """Frames of many changes: from a lane of zero bits, a difference leads to what differs from it by just that."""
        dtype, lanes = self._writer.layout.tensors[rects[0].tensor].type, sum(rect.lanes for rect in rects)
        if self._lanes.dtype != UNSIGNED[dtype.lane_bytes] or self._lanes.size < lanes:
            self._lanes, self._zeros = (np.zeros(lanes, UNSIGNED[dtype.lane_bytes]) for _ in range(2))
        for part in parts:
            self._lanes[part.positions] = compose(self._lanes[part.positions], part.differences, dtype)
        ends = np.cumsum([rect.lanes for rect in rects])
        zeros, after = (np.split(all_lanes[:lanes], ends[:-1]) for all_lanes in (self._zeros, self._lanes))
        written = list(self._writer.delta(rects, zeros, after, self._writer.encode(rects, zeros, after), checks))
        for part in parts:
            self._lanes[part.positions] = 0
        return written

    def _lay_out(
        self, rects: tuple[Rect, ...], found: Sequence[tuple[StoredFrames, FoundFrame]]
    ) -> Iterator[WrittenFrame]:
        region = Region(rects, self._writer.layout)
        for part, frame in found:
            if self._inverted:
                _require_blind(frame.header)
            for patch in frame_patches(part.load(frame), self._writer.layout, self._writer.backend, None):
                region.play(patch)
        yield from region.emit(self._writer, self._checks(found))

    def _changes(self, frame: Frame, rects: tuple[Rect, ...]) -> Changes:
        """What a blind frame does to `rects`, by position within them."""
        layout, header = self._writer.layout, frame.header
        dtype = layout.tensors[rects[0].tensor].type
        changes = self._writer.backend.decode(header.coding, frame.streams, None, dtype)
        if header.rects == rects:
            return changes
        positions, differences = [np.empty(0, np.int64)], [changes.differences[:0]]
        for source, which, local in by_rect(header.rects, changes.positions):
            shape = layout.tensors[source.tensor].lane_shape
            flat = source.flat_positions(local, shape)
            first = 0
            for rect in rects:
                if rect.tensor == source.tensor:
                    inside, at = rect.locate(flat, shape)
                    positions.append(at + first)
                    differences.append(changes.differences[which][inside])
                first += rect.lanes
        everywhere = np.concatenate(positions)
        order = np.argsort(everywhere, kind="stable")
        return Changes(everywhere[order], np.concatenate(differences)[order])

    def _checks(self, found: Sequence[tuple[StoredFrames, FoundFrame]]) -> Checks:
        headers = [frame.header for _, frame in found]
        return lambda rects: _joined_checks(headers, rects, self._writer.layout, negated=self._inverted)


class _FoldBeside:
    """A fold beside the weights that the first part starts from."""

    def __init__(self, parts: Sequence[StoredDelta], writer: FrameWriter, base: Weights) -> None:
        self._writer = writer
        self._base = base
        self._parts = [StoredFrames(part, writer.layout, writer.limits) for part in parts]
        self._decoded: list[OrderedDict[int, list[Patch]]] = [OrderedDict() for _ in parts]

    def frames(self) -> Iterator[WrittenFrame]:
        writer = self._writer
        for rects in plan_frames(writer.layout, frame_bytes=DELTA_FRAME_BYTES, limits=writer.limits):
            if not any(part.over(rects) for part in self._parts):
                continue
            after = self._after(len(self._parts), rects).numbers
            with borrowed_segments(self._base, rects, writer.layout) as old:
                written = list(writer.delta(rects, old, after, writer.encode(rects, old, after)))
            yield from written
        for part in self._parts:
            part.finish()

    def _after(self, count: int, rects: tuple[Rect, ...]) -> Region:
        """Some rectangles as they are after the first `count` parts."""
        with borrowed_segments(self._base, rects, self._writer.layout) as lanes:
            region = Region(rects, self._writer.layout, lanes)
        for i in range(count):
            for frame in self._parts[i].over(rects):
                for patch in self._patches(i, frame, region):
                    region.play(patch)
        return region

    def _patches(self, i: int, frame: FoundFrame, region: Region) -> list[Patch]:
        """What a frame of part `i` does; `region` is as that part finds it, but for this part's other frames."""
        kept = self._decoded[i]
        if frame.number not in kept:
            rects = frame.header.rects
            before = region if rects == region.rects else self._after(i, rects)
            data = self._parts[i].load(frame)
            kept[frame.number] = frame_patches(data, self._writer.layout, self._writer.backend, before.numbers)
            if len(kept) > _HELD_FRAMES:
                kept.popitem(last=False)
        kept.move_to_end(frame.number)
        return kept[frame.number]


def _emit(rects: tuple[Rect, ...], changes: Changes, writer: FrameWriter, checks: Checks) -> Iterator[WrittenFrame]:
    """Blind frames of these changes."""
    if not changes.positions.size:
        return
    dtype, lanes = writer.layout.tensors[rects[0].tensor].type, sum(rect.lanes for rect in rects)
    frame = writer.coded(rects, (), (), merging.encode(changes, lanes, dtype), checks)
    if len(frame.data) <= writer.limits.chunk_bytes and frame.plain <= writer.limits.frame_plain_bytes:
        yield frame
        return
    for half, start, end in halves(rects):
        yield from _emit(half, merging.cut(changes, start, end), writer, checks)


def _frames(delta: StoredDelta, writer: FrameWriter) -> Iterator[Frame]:
    for data in delta.data():
        yield from read_chunk(data, writer.layout, limits=writer.limits)


def _require_blind(header: FrameHeader) -> None:
    if header.coder != Coder.BLIND:
        raise FormatError(
            "delta to invert",
            expected="frames of the blind coder alone",
            found=f"a {coder_name(header.coder)} frame",
            hint="transcode it beside its base, or compare the weights themselves",
        )


def _one_check(header: FrameHeader) -> Checks:
    """The check of the inverse of one frame, where it covers the same; a part of it has none."""
    check = header.check
    if check:
        check = pack_sums(zero_sum() - unpack_sums(check, 1)[0])
    return lambda rects: check if tuple(rects) == header.rects else b""


def _joined_checks(headers: Sequence[FrameHeader], rects: Sequence[Rect], layout: Layout, *, negated: bool) -> bytes:
    """What differences over `rects`, which are runs, add to the element sums; nothing where the parts do not tell."""
    total = zero_sum()
    spans = [(rect.tensor, *_span(rect, layout)) for rect in rects]
    for header in headers:
        if not header.check or header.coder in WHOLE:
            return b""
        if header.rects != rects:
            inside = all(
                any(rect.tensor == tensor and start <= low and high <= end for tensor, start, end in spans)
                for rect in header.rects
                for low, high in [_span(rect, layout)]
            )
            if not inside:
                return b""
        total += unpack_sums(header.check, 1)[0]
    return pack_sums(zero_sum() - total if negated else total)


def _span(rect: Rect, layout: Layout) -> tuple[int, int]:
    shape = layout.tensors[rect.tensor].lane_shape
    return rect.flat_start(shape), rect.flat_end(shape)
