"""One rank's share of an edge: what it holds of each tensor, encoded where it is.

A rank holds rectangles of tensors. It compares them with what it held at the base and writes frames of its own;
frames of all ranks together are the edge. Nothing is gathered: positions are local to a frame, and element sums add
up over any partition. Owns one invariant: what its frames change leads from the base's sums to those that it hands
over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deltad.delta.backend import UNSIGNED, Backend, Lanes, Mode
from deltad.delta.coding import WHOLE, Coder
from deltad.delta.difference import compose
from deltad.delta.digest import U64
from deltad.delta.emit import ChunkBuilder, EncodedChunk, FrameWriter, WrittenFrame, share_of_changes, share_of_lanes
from deltad.delta.frame import Rect, StoredFrame, slabs, stored_frames
from deltad.delta.layout import Layout
from deltad.delta.threads import in_order
from deltad.delta.weights import all_contiguous, by_rect
from deltad.errors import BaseMismatchError
from deltad.limits import DEFAULT_LIMITS, Limits

SHARD_FRAME_BYTES = 12 << 20
"""Weights that one frame of a rank's delta covers: half of what a daemon takes, for a rank has less memory to spare."""


class Source(Protocol):
    """The lanes of one shard, row-major within its rectangle."""

    def lanes(self, start: int, count: int) -> Lanes:
        """`count` lanes from `start` on, contiguous; they must stay as they are until they are encoded."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard that a frame covers: its rectangle, whose shard it is, and where it begins there, in lanes."""

    rect: Rect
    shard: int
    start: int


Group = tuple[Piece, ...]
"""The pieces that one frame covers."""


def plan_pieces(shards: Sequence[Rect], layout: Layout, *, frame_bytes: int, limits: Limits) -> Iterator[Group]:
    """Every lane of every shard once, in groups of one dtype and at most `frame_bytes` bytes."""
    by_dtype: dict[str, list[int]] = {}
    for i, rect in enumerate(shards):
        if rect.lanes:
            by_dtype.setdefault(layout.tensors[rect.tensor].dtype, []).append(i)
    for name in sorted(by_dtype):
        width = layout.tensors[shards[by_dtype[name][0]].tensor].type.lane_bytes
        limit = max(1, min(limits.frame_lanes, frame_bytes // width))
        group: list[Piece] = []
        room = limit
        for i in by_dtype[name]:
            for piece in _cut(shards[i], i, limit):
                if piece.rect.lanes > room or len(group) == limits.frame_rects:
                    yield tuple(group)
                    group, room = [], limit
                group.append(piece)
                room -= piece.rect.lanes
        if group:
            yield tuple(group)


def _cut(shard: Rect, number: int, limit: int) -> Iterator[Piece]:
    for within in slabs(shard.tensor, shard.extent, limit):
        offset = tuple(a + b for a, b in zip(shard.offset, within.offset, strict=True))
        yield Piece(Rect(shard.tensor, offset, within.extent), number, within.flat_start(shard.extent))


@dataclass(frozen=True, slots=True)
class _Encoded:
    group: Group
    frames: tuple[WrittenFrame, ...]
    sums: U64
    added: U64
    changed: int


@dataclass(slots=True)
class ShardEncoder:
    """Encodes what a rank's shards say, against `base` or, without one, whole.

    Iterate `chunks()` to the end; then `sums` (shape [shards, 2]), `changed` and `coders` are those of the shards.
    `base_sums` are the sums of `base`. Raises BaseMismatchError where what was read as the base has others.
    """

    layout: Layout
    shards: Sequence[Rect]
    target: Sequence[Source]
    backend: Backend
    base: Sequence[Source] | None = None
    base_sums: U64 | None = None
    mode: Mode = "blind"
    limits: Limits = DEFAULT_LIMITS
    threads: int = 1
    reading: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered for as long as a frame's lanes are looked at."""
    audits: Callable[[int], bool] = lambda shard: True
    """Whether a shard, by its number, is summed anew, which also shows whether its base is what it was. Where it is
    not, its sum follows from the base's through the changes. Without a base all are."""
    sums: U64 = field(init=False)
    changed: int = field(init=False, default=0)
    coders: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if (self.base is None) != (self.base_sums is None):
            raise ValueError("base and base_sums come together")
        self.sums = np.zeros((len(self.shards), 2), np.uint64)

    def chunks(self) -> Iterator[EncodedChunk]:
        """Every chunk of the rank's share, in order. A share without changes has none."""
        builder = ChunkBuilder(self.limits.chunk_bytes)
        followed = self.sums.copy() if self.base_sums is None else self.base_sums.copy()
        size = self.limits.chunk_bytes // 2 if self.base is None else SHARD_FRAME_BYTES
        plan = plan_pieces(self.shards, self.layout, frame_bytes=size, limits=self.limits)
        with closing(in_order(self._encode, plan, self.threads)) as groups:
            for encoded in groups:
                which = [piece.shard for piece in encoded.group]
                np.add.at(self.sums, which, encoded.sums)
                np.add.at(followed, which, encoded.added)
                self.changed += encoded.changed
                for frame in encoded.frames:
                    yield from builder.add(frame)
        unsummed = [i for i in range(len(self.shards)) if not self._is_summed(i)]
        self.sums[unsummed] = followed[unsummed]
        if self.base is not None and (wrong := np.flatnonzero((followed != self.sums).any(axis=1))).size:
            spec = self.layout.tensors[self.shards[int(wrong[0])].tensor]
            raise BaseMismatchError(
                f"baseline of this rank's shard of {spec.name!r}",
                expected="the weights that it held at the last published version",
                found="others",
                hint="something wrote to the publisher's own copy",
            )
        yield from builder.flush()
        self.coders = tuple(sorted(builder.coders))

    def _is_summed(self, shard: int) -> bool:
        return self.base is None or self.audits(shard)

    def _encode(self, group: Group) -> _Encoded:
        with self.reading():
            return self._read(group)

    def _read(self, group: Group) -> _Encoded:
        rects = tuple(piece.rect for piece in group)
        writer = FrameWriter(self.layout, self.backend, self.mode, self.limits)
        new = _segments(self.target, group)
        sums = np.zeros((len(rects), 2), np.uint64)
        if summed := [i for i, piece in enumerate(group) if self._is_summed(piece.shard)]:
            parts = [new[i] for i in summed]
            sums[summed] = share_of_lanes([rects[i] for i in summed], parts, self.layout, self.backend)
        if self.base is None:
            lanes = sum(rect.lanes for rect in rects)
            return _Encoded(group, tuple(writer.whole(rects, new)), sums, np.zeros_like(sums), lanes)
        old = _segments(self.base, group)
        encoded = writer.encode(rects, old, new)
        if encoded is None:
            return _Encoded(group, (), sums, np.zeros_like(sums), 0)
        runs = all_contiguous(rects, self.layout)
        added = encoded.sums if runs else share_of_changes(rects, old, new, self.layout)
        frames = tuple(writer.delta(rects, old, new, encoded))
        return _Encoded(group, frames, sums, added, int(encoded.changed.sum()))


def _segments(sources: Sequence[Source], group: Group) -> list[Lanes]:
    return [sources[piece.shard].lanes(piece.start, piece.rect.lanes) for piece in group]


class ShardCopy:
    """A rank's own copy of its shards, which follows what was published by applying it.

    `arrays` hold the lanes of each shard, row-major, writable: in memory, pinned, or mapped from a file.
    """

    def __init__(self, layout: Layout, shards: Sequence[Rect], arrays: Sequence[Lanes], backend: Backend) -> None:
        self._layout = layout
        self._backend = backend
        self._by_tensor: dict[int, list[tuple[Rect, Lanes]]] = {}
        for rect, array in zip(shards, arrays, strict=True):
            if array.shape != (rect.lanes,) or array.dtype != UNSIGNED[layout.tensors[rect.tensor].type.lane_bytes]:
                raise ValueError(f"an array of {array.shape} {array.dtype} for {rect}")
            self._by_tensor.setdefault(rect.tensor, []).append((rect, array))
        self.sources: list[Source] = [ArraySource(array) for array in arrays]

    def apply(self, chunks: Sequence[bytes], *, limits: Limits = DEFAULT_LIMITS) -> None:
        """Play the rank's own chunks, as `ShardEncoder` made them."""
        for data in chunks:
            for stored in stored_frames(data, self._layout, limits=limits):
                self._play(stored)

    def _play(self, stored: StoredFrame) -> None:
        frame = stored.unpack()
        header = frame.header
        views = [self._view(rect) for rect in header.rects]
        dtype = self._layout.tensors[header.rects[0].tensor].type
        if header.coder in WHOLE:
            lanes = (
                np.frombuffer(frame.streams[0], UNSIGNED[dtype.lane_bytes])
                if header.coder == Coder.RAW
                else self._backend.unpack(frame.streams, header.lanes, dtype)
            )
            for view, part in zip(
                views, np.split(lanes, np.cumsum([rect.lanes for rect in header.rects])[:-1]), strict=True
            ):
                view[:] = part
            return
        changes = self._backend.decode(header.coding, frame.streams, views, dtype)
        by_its_rect = dict(zip(header.rects, views, strict=True))
        for rect, which, local in by_rect(header.rects, changes.positions):
            view = by_its_rect[rect]
            view[local] = compose(view[local], changes.differences[which], dtype)

    def _view(self, rect: Rect) -> Lanes:
        """The part of a shard that a frame's rectangle is, which the encoder cut as one run of the shard."""
        for shard, array in self._by_tensor.get(rect.tensor, ()):
            offset = tuple(a - b for a, b in zip(rect.offset, shard.offset, strict=True))
            if all(o >= 0 and o + e <= s for o, e, s in zip(offset, rect.extent, shard.extent, strict=True)):
                start = Rect(rect.tensor, offset, rect.extent).flat_start(shard.extent)
                return array[start : start + rect.lanes]
        raise ValueError(f"{rect} is not of this rank's shards")


@dataclass(frozen=True, slots=True)
class ArraySource:
    """The lanes of one shard in an array."""

    array: Lanes

    def lanes(self, start: int, count: int) -> Lanes:
        return self.array[start : start + count]
