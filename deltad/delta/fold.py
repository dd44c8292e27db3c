"""Arithmetic on whole deltas: fold two into one, invert one, and change the coder of one.

Differences form a group, so A→B and B→C join to A→C, and A→B turns into B→A, without the weights they
act on. Blind deltas do that as they stand, frame by frame, however their frames are cut. What is coded by
context has to be read beside the weights that it starts from. Owns the invariant that the result does
what its parts did, lane for lane; memory is bounded by a few frames, whatever the model's size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Backend, Lanes, Mode, Positions
from deltad.delta.codec import DELTA_FRAME_BYTES, Patch, frame_patches
from deltad.delta.coding import WHOLE, Coder, coder_name
from deltad.delta.difference import compose, inverse, join
from deltad.delta.digest import pack_sums, unpack_sums, zero_sum
from deltad.delta.emit import ChunkBuilder, EncodedChunk, FrameWriter, WrittenFrame, cut_segments, halves
from deltad.delta.frame import Frame, FrameHeader, Rect, plan_frames, read_chunk, read_headers
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkRef
from deltad.delta.weights import Weights, borrowed_segments
from deltad.errors import FormatError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import Digest

_HELD_FRAMES = 4
"""Decoded frames of an edge that are kept, since the next region often begins in the one that the last ended in."""


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """The chunks of a delta, in order, and where their bytes are: `read` gives them, checked, by digest."""

    chunks: Sequence[ChunkRef]
    read: Callable[[Digest], bytes]

    def data(self) -> Iterator[bytes]:
        for ref in self.chunks:
            yield self.read(Digest(ref.digest))


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
    first: StoredDelta,
    second: StoredDelta,
    layout: Layout,
    backend: Backend,
    *,
    base: Weights | None = None,
    mode: Mode = "blind",
    limits: Limits = DEFAULT_LIMITS,
) -> MadeDelta:
    """The delta A→C of A→B and B→C.

    Blind and whole frames need no weights, and give blind and whole ones. With `base`, the weights of A, both
    deltas may be coded by context, and so may the result. Without it a frame has a check only where it
    covers all frames that it was made of.
    """
    if base is None and mode != "blind":
        raise ValueError("coding by context takes the base")
    return MadeDelta(limits, _fold(first, second, FrameWriter(layout, backend, mode, limits), base))


def invert(delta: StoredDelta, layout: Layout, backend: Backend, *, limits: Limits = DEFAULT_LIMITS) -> MadeDelta:
    """The delta B→A of a blind A→B. Raises FormatError for whole frames, which do not know what they replaced."""
    return MadeDelta(limits, _invert(delta, FrameWriter(layout, backend, "blind", limits)))


def transcode(
    delta: StoredDelta, layout: Layout, base: Weights, backend: Backend, mode: Mode, *, limits: Limits = DEFAULT_LIMITS
) -> MadeDelta:
    """The same delta in another coder, read beside the weights that it starts from. Whole frames stay whole."""
    return MadeDelta(limits, _transcode(delta, FrameWriter(layout, backend, mode, limits), base))


def _invert(delta: StoredDelta, writer: FrameWriter) -> Iterator[WrittenFrame]:
    for frame in _frames(delta.data(), writer):
        header = frame.header
        if header.coder != Coder.BLIND:
            raise FormatError(
                "delta to invert",
                expected="frames of the blind coder alone",
                found=f"a {coder_name(header.coder)} frame",
                hint="transcode it beside its base, or compare the weights themselves",
            )
        region = _Region(header.rects, writer.layout)
        for patch in frame_patches(frame, writer.layout, writer.backend, None):
            spec = writer.layout.tensors[patch.tensor]
            region.play(Patch(patch.tensor, patch.index, inverse(patch.values, spec.type), absolute=False))
        yield from region.emit(writer, _one_check(header, negated=True))


def _transcode(delta: StoredDelta, writer: FrameWriter, base: Weights) -> Iterator[WrittenFrame]:
    for frame in _frames(delta.data(), writer):
        rects = frame.header.rects
        with borrowed_segments(base, rects, writer.layout) as old:
            region = _Region(rects, writer.layout, old)
            for patch in frame_patches(frame, writer.layout, writer.backend, old):
                region.play(patch)
            if frame.header.coder in WHOLE:
                written = list(writer.whole(rects, region.numbers))
            else:
                written = list(writer.delta(rects, old, region.numbers, writer.encode(rects, old, region.numbers)))
        yield from written


def _fold(first: StoredDelta, second: StoredDelta, writer: FrameWriter, base: Weights | None) -> Iterator[WrittenFrame]:
    layout = writer.layout

    def before_first(rects: Sequence[Rect]) -> _Region:
        if base is None:
            return _Region(rects, layout)
        with borrowed_segments(base, rects, layout) as lanes:
            return _Region(rects, layout, lanes)

    def before_second(rects: Sequence[Rect]) -> _Region:
        region = before_first(rects)
        left.play(region)
        return region

    left = _Edge(first, writer, before_first if base is not None else None)
    right = _Edge(second, writer, before_second if base is not None else None)

    def checks(rects: Sequence[Rect]) -> bytes:
        return _joined_checks([*left.headers_over(rects), *right.headers_over(rects)], rects, layout)

    for rects in plan_frames(layout, frame_bytes=DELTA_FRAME_BYTES, limits=writer.limits):
        if not left.headers_over(rects) and not right.headers_over(rects):
            continue
        region = before_second(rects)
        right.play(region)
        if base is None:
            yield from region.emit(writer, checks)
        else:
            with borrowed_segments(base, rects, layout) as old:
                written = list(writer.delta(rects, old, region.numbers, writer.encode(rects, old, region.numbers)))
            yield from written


class _Region:
    """Some rectangles, and what has happened to each of their lanes so far.

    A lane's number is the difference from what it was, or its pattern where `known` says that it is known:
    from the start beside the base, else from the first whole frame on.
    """

    def __init__(self, rects: Sequence[Rect], layout: Layout, lanes: Sequence[Lanes] | None = None) -> None:
        self.rects = tuple(rects)
        self.layout = layout
        self.dtype = layout.tensors[rects[0].tensor].type
        unsigned = UNSIGNED[self.dtype.lane_bytes]
        self.numbers: list[Lanes]
        if lanes is None:
            self.numbers = [np.zeros(rect.lanes, unsigned) for rect in rects]
        else:
            self.numbers = [segment.copy() for segment in lanes]
        self.known = [np.full(rect.lanes, lanes is not None) for rect in rects]

    def play(self, patch: Patch) -> None:
        """Let a patch happen to the lanes that it shares with this region."""
        shape = self.layout.tensors[patch.tensor].lane_shape
        for rect, numbers, known in zip(self.rects, self.numbers, self.known, strict=True):
            if rect.tensor != patch.tensor:
                continue
            which, at = rect.locate(_positions(patch), shape)
            values = patch.values[which]
            if patch.absolute:
                numbers[at], known[at] = values, True
            else:
                was, pattern = numbers[at], known[at]
                after = join(was, values, self.dtype)
                after[pattern] = compose(was[pattern], values[pattern], self.dtype)
                numbers[at] = after

    def emit(self, writer: FrameWriter, checks: Callable[[Sequence[Rect]], bytes]) -> Iterator[WrittenFrame]:
        """Frames that do what has happened: whole where lanes are known, blind where they are not."""
        yield from self._emit(writer, checks, self.rects, self.numbers, self.known)

    def _emit(
        self,
        writer: FrameWriter,
        checks: Callable[[Sequence[Rect]], bytes],
        rects: tuple[Rect, ...],
        numbers: list[Lanes],
        known: list[npt.NDArray[np.bool_]],
    ) -> Iterator[WrittenFrame]:
        if all(part.all() for part in known):
            yield from writer.whole(rects, numbers)
        elif not any(part.any() for part in known):
            # From a lane of zero bits, a difference leads to a pattern that differs from it by just that.
            zeros = [np.zeros_like(part) for part in numbers]
            after = [compose(zero, part, self.dtype) for zero, part in zip(zeros, numbers, strict=True)]
            yield from writer.delta(rects, zeros, after, writer.encode(rects, zeros, after), checks)
        else:
            for half, start, end in halves(rects):
                parts = cut_segments(numbers, start, end), cut_segments(known, start, end)
                yield from self._emit(writer, checks, half, *parts)


@dataclass(frozen=True, slots=True)
class _HeldFrame:
    """Where a frame lies: its chunk, and its bytes within that."""

    header: FrameHeader
    chunk: Digest
    start: int
    size: int


class _Edge:
    """A delta's frames by the tensors that they touch, decoded when they are needed.

    `before` gives the lanes that the delta starts from; without it context frames are refused.
    """

    def __init__(
        self, delta: StoredDelta, writer: FrameWriter, before: Callable[[Sequence[Rect]], _Region] | None
    ) -> None:
        self._delta = delta
        self._writer = writer
        self._before = before
        self._decoded: OrderedDict[int, list[Patch]] = OrderedDict()
        self._held: list[_HeldFrame] = []
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        for ref in delta.chunks:
            digest = Digest(ref.digest)
            start = 0
            for header, size in read_headers(delta.read(digest), writer.layout, limits=writer.limits):
                self._index(_HeldFrame(header, digest, start, size))
                start += size

    def _index(self, held: _HeldFrame) -> None:
        for rect in held.header.rects:
            shape = self._writer.layout.tensors[rect.tensor].lane_shape
            span = (rect.flat_start(shape), rect.flat_end(shape), len(self._held))
            self._spans.setdefault(rect.tensor, []).append(span)
        self._held.append(held)

    def headers_over(self, rects: Sequence[Rect]) -> list[FrameHeader]:
        return [self._held[i].header for i in self._over(rects)]

    def play(self, region: _Region) -> None:
        """Let the delta happen to a region."""
        for i in self._over(region.rects):
            for patch in self._patches(i):
                region.play(patch)

    def _over(self, rects: Sequence[Rect]) -> list[int]:
        """The frames whose rectangles, or what lies between their rows, meet `rects`, in order."""
        found = set()
        for rect in rects:
            shape = self._writer.layout.tensors[rect.tensor].lane_shape
            start, end = rect.flat_start(shape), rect.flat_end(shape)
            found |= {i for low, high, i in self._spans.get(rect.tensor, []) if low < end and start < high}
        return sorted(found)

    def _patches(self, i: int) -> list[Patch]:
        if i in self._decoded:
            self._decoded.move_to_end(i)
            return self._decoded[i]
        held = self._held[i]
        layout, backend, limits = self._writer.layout, self._writer.backend, self._writer.limits
        data = self._delta.read(held.chunk)[held.start : held.start + held.size]
        (frame,) = read_chunk(data, layout, limits=limits)
        base = None if self._before is None else self._before(held.header.rects).numbers
        self._decoded[i] = frame_patches(frame, layout, backend, base)
        if len(self._decoded) > _HELD_FRAMES:
            self._decoded.popitem(last=False)
        return self._decoded[i]


def _frames(chunks: Iterable[bytes], writer: FrameWriter) -> Iterator[Frame]:
    for data in chunks:
        yield from read_chunk(data, writer.layout, limits=writer.limits)


def _positions(patch: Patch) -> Positions:
    if isinstance(patch.index, slice):
        return np.arange(patch.index.start, patch.index.stop, dtype=np.int64)
    return patch.index


def _one_check(header: FrameHeader, *, negated: bool) -> Callable[[Sequence[Rect]], bytes]:
    """The check of a frame that came from one other and covers the same; a part of it has none."""
    check = header.check
    if check and negated:
        check = pack_sums(zero_sum() - unpack_sums(check, 1)[0])
    return lambda rects: check if tuple(rects) == header.rects else b""


def _joined_checks(headers: Sequence[FrameHeader], rects: Sequence[Rect], layout: Layout) -> bytes:
    """What differences over `rects`, which are runs, add to the element sums; nothing where the parts do not tell."""
    total = zero_sum()
    spans = [(rect.tensor, *_span(rect, layout)) for rect in rects]
    for header in headers:
        inside = all(
            any(rect.tensor == tensor and start <= low and high <= end for tensor, start, end in spans)
            for rect in header.rects
            for low, high in [_span(rect, layout)]
        )
        if not inside or not header.check or header.coder in WHOLE:
            return b""
        total += unpack_sums(header.check, 1)[0]
    return pack_sums(total)


def _span(rect: Rect, layout: Layout) -> tuple[int, int]:
    shape = layout.tensors[rect.tensor].lane_shape
    return rect.flat_start(shape), rect.flat_end(shape)
