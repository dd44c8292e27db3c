"""A delta whose chunks are read as they are needed, and its frames by what they cover.

Owns the invariant that no frame is passed over: a chunk is opened when the first region comes that it says it
touches, and a frame that its chunk's entry does not cover is refused. Memory is bounded by two chunks and the headers
of the frames.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deltad.delta.frame import Frame, FrameHeader, Rect, read_chunk, read_headers
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkRef
from deltad.errors import FormatError
from deltad.limits import Limits
from deltad.types import Digest

_HELD_CHUNKS = 2
"""Chunks of a delta that are kept, since the next region often begins in the one that the last ended in."""


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """The chunks of a delta, in order, and where their bytes are: `read` gives them, checked, by digest."""

    chunks: Sequence[ChunkRef]
    read: Callable[[Digest], bytes]

    def data(self) -> Iterator[bytes]:
        for ref in self.chunks:
            yield self.read(Digest(ref.digest))


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A frame of a stored delta: its number there, its header, its chunk, and its bytes within that."""

    number: int
    header: FrameHeader
    chunk: Digest
    start: int
    size: int


class StoredFrames:
    """The frames of one delta. Each chunk is read once where regions come in the order of its frames."""

    def __init__(self, delta: StoredDelta, layout: Layout, limits: Limits) -> None:
        self._read = delta.read
        self._layout = layout
        self._limits = limits
        self._unopened = list(delta.chunks)
        self._chunks: OrderedDict[Digest, bytes] = OrderedDict()
        self._frames: list[FoundFrame] = []
        self._spans: dict[int, list[tuple[int, int, int]]] = {}

    def over(self, rects: Sequence[Rect]) -> list[FoundFrame]:
        """The frames whose rectangles, or what lies between their rows, meet `rects`, in order."""
        low, high = min(rect.tensor for rect in rects), max(rect.tensor for rect in rects)
        self._open([ref for ref in self._unopened if ref.first_tensor <= high and low <= ref.last_tensor])
        found = set()
        for rect in rects:
            if spans := self._spans.get(rect.tensor):
                shape = self._layout.tensors[rect.tensor].lane_shape
                start, end = rect.flat_start(shape), rect.flat_end(shape)
                found |= {number for begin, stop, number in spans if begin < end and start < stop}
        return [self._frames[number] for number in sorted(found)]

    def finish(self) -> None:
        """Call after the last region. Raises FormatError for a chunk that no region touched, though it has frames."""
        self._open(list(self._unopened))

    def load(self, found: FoundFrame) -> Frame:
        """Read and parse a frame again. Raises what reading and parsing do."""
        data = memoryview(self._data(found.chunk))[found.start : found.start + found.size]
        (frame,) = read_chunk(bytes(data), self._layout, limits=self._limits)
        return frame

    def _open(self, refs: list[ChunkRef]) -> None:
        for ref in refs:
            self._unopened.remove(ref)
            digest = Digest(ref.digest)
            start = 0
            for header, size in read_headers(self._data(digest), self._layout, limits=self._limits):
                self._note(ref, FoundFrame(len(self._frames), header, digest, start, size))
                start += size

    def _note(self, ref: ChunkRef, found: FoundFrame) -> None:
        for rect in found.header.rects:
            if not ref.first_tensor <= rect.tensor <= ref.last_tensor:
                raise FormatError(
                    f"chunk {found.chunk.hex()}",
                    expected=f"frames of the tensors {ref.first_tensor} to {ref.last_tensor}, as its page says",
                    found=f"one of tensor {rect.tensor}",
                )
            shape = self._layout.tensors[rect.tensor].lane_shape
            span = (rect.flat_start(shape), rect.flat_end(shape), found.number)
            self._spans.setdefault(rect.tensor, []).append(span)
        self._frames.append(found)

    def _data(self, chunk: Digest) -> bytes:
        if chunk not in self._chunks:
            self._chunks[chunk] = self._read(chunk)
            if len(self._chunks) > _HELD_CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(chunk)
        return self._chunks[chunk]
