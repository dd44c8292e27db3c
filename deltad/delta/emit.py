"""From lanes to frames to chunks: what every writer of an edge shares.

Owns the rules of writing: a frame that gains nothing holds its lanes whole, packed where that is shorter than raw;
one that is too large is cut in halves; a chunk holds whole frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deltad.delta.backend import Backend, EncodedFrame, Lanes, Mode, Place, Segments, Stream
from deltad.delta.coding import WHOLE, Coder, Coding
from deltad.delta.digest import U64, pack_sums, sum_changes, tensor_seed
from deltad.delta.encoding import sha256
from deltad.delta.frame import Rect, halve, write_frame
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkRef
from deltad.delta.weights import all_contiguous, places_of
from deltad.errors import LimitError
from deltad.limits import Limits
from deltad.types import DType


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk ready to be stored."""

    ref: ChunkRef
    data: bytes


@dataclass(frozen=True, slots=True)
class WrittenFrame:
    """A frame's bytes, what it covers, and what its header says of it. `plain` is its size when it is unpacked."""

    data: bytes
    rects: tuple[Rect, ...]
    coding: Coding
    plain: int


Checks = Callable[[Sequence[Rect]], bytes]
"""What a frame over some rectangles adds to the element sums, as a header holds it."""


@dataclass(frozen=True, slots=True)
class FrameWriter:
    """Writes frames of one layout within the limits."""

    layout: Layout
    backend: Backend
    mode: Mode
    limits: Limits

    def encode(self, rects: Sequence[Rect], old: Segments, new: Segments) -> EncodedFrame | None:
        """What the backend makes of a frame. Its sums are good where all rectangles are runs."""
        return self.backend.encode(old, new, places_of(rects, self.layout), self._dtype(rects), self.mode)

    def delta(
        self,
        rects: tuple[Rect, ...],
        old: Segments,
        new: Segments,
        encoded: EncodedFrame | None,
        checks: Checks | None = None,
    ) -> Iterator[WrittenFrame]:
        """The frames that carry `old` to `new`; `encoded` is what `encode` gave for them.

        With `checks`, old and new stand for their difference only: no frame goes whole, and `checks` says what
        theirs are.
        """
        if encoded is None:
            return
        frame = self.coded(rects, old, new, encoded, checks)
        # Hardly any weights are packed to less than half, so a frame that is smaller needs no comparison.
        if checks is None and 2 * len(frame.data) >= sum(segment.nbytes for segment in new):
            frame = min(self._whole_frame(rects, new), frame, key=lambda written: len(written.data))
        if self._fits(frame):
            yield frame
            return
        for half, start, end in halves(rects):
            before, after = cut_segments(old, start, end), cut_segments(new, start, end)
            yield from self.delta(half, before, after, self.encode(half, before, after), checks)

    def coded(
        self,
        rects: tuple[Rect, ...],
        old: Segments,
        new: Segments,
        encoded: EncodedFrame,
        checks: Checks | None = None,
    ) -> WrittenFrame:
        """The one frame that `encoded` is, whatever its size."""
        if checks is not None:
            check = checks(rects)
        elif all_contiguous(rects, self.layout):
            check = pack_sums(encoded.sums.sum(axis=0, dtype=np.uint64))
        else:
            check = pack_sums(share_of_changes(rects, old, new, self.layout).sum(axis=0, dtype=np.uint64))
        return self._write(rects, encoded.coding, check, encoded.streams)

    def whole(self, rects: tuple[Rect, ...], new: Segments) -> Iterator[WrittenFrame]:
        """The frames that hold `new` itself."""
        frame = self._whole_frame(rects, new)
        if self._fits(frame):
            yield frame
            return
        for half, start, end in halves(rects):
            yield from self.whole(half, cut_segments(new, start, end))

    def _whole_frame(self, rects: tuple[Rect, ...], new: Segments) -> WrittenFrame:
        lanes = sum(segment.size for segment in new)
        check = pack_sums(share_of_lanes(rects, new, self.layout, self.backend).sum(axis=0, dtype=np.uint64))
        streams = self.backend.pack(new, self._dtype(rects))
        packed = self._write(rects, Coding(Coder.PACKED, lanes, lanes), check, streams)
        if len(packed.data) <= packed.plain:
            return packed  # a raw frame also has a header
        raw = self._write(rects, Coding(Coder.RAW, lanes, lanes), check, [np.concatenate(new).view(np.uint8)])
        return min(raw, packed, key=lambda written: len(written.data))

    def _write(self, rects: tuple[Rect, ...], coding: Coding, check: bytes, streams: Sequence[Stream]) -> WrittenFrame:
        dtype = self._dtype(rects)
        data = write_frame(dtype.name, rects, coding, check, streams)
        whole = coding.coder in WHOLE
        plain = coding.lanes * dtype.lane_bytes if whole else sum(len(stream) for stream in streams)
        return WrittenFrame(data, rects, coding, plain)

    def _fits(self, frame: WrittenFrame) -> bool:
        return len(frame.data) <= self.limits.chunk_bytes and frame.plain <= self.limits.frame_plain_bytes

    def _dtype(self, rects: Sequence[Rect]) -> DType:
        return self.layout.tensors[rects[0].tensor].type


class ChunkBuilder:
    """Packs whole frames into chunks of at most `limit` bytes, and counts what went in."""

    def __init__(self, limit: int) -> None:
        self.coders: set[int] = set()
        self._limit = limit
        self._frames: list[bytes] = []
        self._tensors: list[int] = []
        self._size = 0

    def add(self, frame: WrittenFrame) -> Iterator[EncodedChunk]:
        """Take a frame; give the chunk that it no longer fits, if there is one."""
        if self._size + len(frame.data) > self._limit:
            yield from self.flush()
        self.coders.add(int(frame.coding.coder))
        self._frames.append(frame.data)
        self._tensors += (rect.tensor for rect in frame.rects)
        self._size += len(frame.data)

    def flush(self) -> Iterator[EncodedChunk]:
        """The last chunk, if there is one."""
        if self._frames:
            data = b"".join(self._frames)
            ref = ChunkRef(sha256(data), len(data), min(self._tensors), max(self._tensors))
            yield EncodedChunk(ref, data)
        self._frames, self._tensors, self._size = [], [], 0


def share_of_lanes(rects: Sequence[Rect], lanes: Segments, layout: Layout, backend: Backend) -> U64:
    """What the lanes of each rectangle add to its tensor's element sum. Shape [rectangles, 2].

    A pass of its own over them (decision 20): within the encoding kernel it would cost more.
    """
    places = places_of(rects, layout)
    shares = np.zeros((len(rects), 2), np.uint64)
    runs = [i for i, rect in enumerate(rects) if rect.is_contiguous(layout.tensors[rect.tensor].lane_shape)]
    shares[runs] = backend.sum([lanes[i] for i in runs], [places[i] for i in runs])
    for i in set(range(len(rects))).difference(runs):
        starts, length = rects[i].runs(layout.tensors[rects[i].tensor].lane_shape)
        rows = lanes[i].reshape(len(starts), length)
        seed = places[i].seed
        shares[i] = backend.sum(list(rows), [Place(seed, int(start)) for start in starts]).sum(axis=0, dtype=np.uint64)
    return shares


def share_of_changes(rects: Sequence[Rect], old: Segments, new: Segments, layout: Layout) -> U64:
    """What changes add to the element sum of each rectangle's tensor, whatever its shape. Shape [rectangles, 2]."""
    shares = np.zeros((len(rects), 2), np.uint64)
    for i, (rect, was, now) in enumerate(zip(rects, old, new, strict=True)):
        spec = layout.tensors[rect.tensor]
        changed = np.flatnonzero(was != now)
        flat = rect.flat_positions(changed, spec.lane_shape)
        shares[i] = sum_changes(flat, was[changed], now[changed], tensor_seed(spec.name))
    return shares


def halves(rects: tuple[Rect, ...]) -> Iterator[tuple[tuple[Rect, ...], int, int]]:
    """Each half of a frame, and its lanes of it, from and to."""
    if sum(rect.lanes for rect in rects) == 1:
        raise LimitError("frame", expected="a single lane within a chunk", found="a larger one", hint="raise the limit")
    at = 0
    for half in halve(rects):
        end = at + sum(rect.lanes for rect in half)
        yield half, at, end
        at = end


def cut_segments(segments: Segments, start: int, end: int) -> list[Lanes]:
    """Lanes `start` to `end` of the frame, segment by segment."""
    cut = []
    for segment in segments:
        if start < segment.size and end > 0:
            cut.append(segment[max(0, start) : end])
        start, end = start - segment.size, end - segment.size
    return cut
