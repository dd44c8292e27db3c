"""Encoding and applying one edge: weights in, chunks out, and back.

Streams by frame, so memory is bounded by the frames that threads work on and not by the model; the bytes do not
depend on how many threads there are. While it reads, the encoder recomputes the element sum of everything in the
target and follows the base's sum through the changes; both must meet, which proves that the base it read was the
base that was published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from deltad.delta.backend import UNSIGNED, Backend, Changes, Lanes, Mode, Place, Positions, Segments
from deltad.delta.backend.numpy import check_sums
from deltad.delta.coding import WHOLE, Coder
from deltad.delta.difference import compose, inverse
from deltad.delta.digest import U64, root_of, sum_changes, tensor_seed, unpack_sums
from deltad.delta.emit import ChunkBuilder, EncodedChunk, FrameWriter, WrittenFrame, share_of_lanes
from deltad.delta.frame import Frame, Rect, StoredFrame, plan_frames, stored_frames
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.threads import in_order
from deltad.delta.weights import (
    Weights,
    all_contiguous,
    borrowed,
    borrowed_segments,
    by_rect,
    flat_positions,
    places_of,
    release_segments,
    sum_weights,
)
from deltad.errors import BaseMismatchError, FormatError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import Digest, DType

__all__ = [
    "EdgeEncoder",
    "EncodedChunk",
    "Patch",
    "Weights",
    "apply_chunks",
    "apply_frame",
    "apply_patch",
    "frame_patches",
    "read_patches",
    "sum_weights",
]

DELTA_FRAME_BYTES = 24 << 20
"""Weights that one frame of a delta covers: large enough for good statistics, and small enough that two threads may
hold a frame of both states each."""


@dataclass(frozen=True, slots=True)
class _EncodedRegion:
    """The frames of some rectangles; by rectangle, the element sums of the target, shape [rectangles, 2], what the
    changes add to them, and how many changed."""

    rects: tuple[Rect, ...]
    frames: tuple[WrittenFrame, ...]
    sums: U64
    added: U64
    changed: U64


@dataclass(slots=True)
class EdgeEncoder:
    """Encodes the edge from `base` to `target`, or an anchor when there is no base.

    Iterate `chunks()` to the end; then `sums`, `changed`, `coders` and `root` are those of the edge. Raises
    BaseMismatchError when what it read as the base has not the given `base_sums`.
    """

    layout: Layout
    target: Weights
    backend: Backend
    base: Weights | None = None
    base_sums: U64 | None = None
    limits: Limits = DEFAULT_LIMITS
    mode: Mode = "blind"
    threads: int = 1
    """How many frames are worked on at a time, each by a thread of its own."""
    sums: U64 = field(init=False)
    """Element sums of the target, shape [tensors, 2]."""
    changed: U64 = field(init=False)
    """Changed lanes per tensor, shape [tensors]; all of them in an anchor."""
    coders: tuple[int, ...] = field(init=False, default=())
    """The coders of all frames, ascending, as a manifest lists them."""
    _followed: U64 = field(init=False)
    _writer: FrameWriter = field(init=False)

    def __post_init__(self) -> None:
        if (self.base is None) != (self.base_sums is None):
            raise ValueError("base and base_sums come together")
        self.sums = np.zeros((len(self.layout.tensors), 2), np.uint64)
        self.changed = np.zeros(len(self.layout.tensors), np.uint64)
        self._followed = self.sums.copy() if self.base_sums is None else self.base_sums.copy()
        self._writer = FrameWriter(self.layout, self.backend, self.mode, self.limits)

    @property
    def root(self) -> Digest:
        return root_of(self.layout, self.sums)

    def chunks(self) -> Iterator[EncodedChunk]:
        """Every chunk of the edge, in order. A delta without changes has none."""
        builder = ChunkBuilder(self.limits.chunk_bytes)
        # An anchor's frame is about as large as its weights, so it must fit a chunk from the start. A
        # delta's is two orders of magnitude smaller, and is cut in the rare case that it is not.
        frame_bytes = self.limits.chunk_bytes // 2 if self.base is None else DELTA_FRAME_BYTES
        plan = plan_frames(self.layout, frame_bytes=frame_bytes, limits=self.limits)
        with closing(in_order(self._encode_region, plan, self.threads)) as regions:
            for region in regions:
                tensors = [rect.tensor for rect in region.rects]
                np.add.at(self.sums, tensors, region.sums)
                np.add.at(self._followed, tensors, region.added)
                np.add.at(self.changed, tensors, region.changed)
                for frame in region.frames:
                    yield from builder.add(frame)
        if self.base is not None:
            self._check_base()
        yield from builder.flush()
        self.coders = tuple(sorted(builder.coders))

    def _encode_region(self, rects: tuple[Rect, ...]) -> _EncodedRegion:
        with borrowed_segments(self.target, rects, self.layout) as new:
            sums = share_of_lanes(rects, new, self.layout, self.backend)
            added, changed = np.zeros_like(sums), np.zeros(len(rects), np.uint64)
            if self.base is None:
                changed[:] = [rect.lanes for rect in rects]
                return _EncodedRegion(rects, tuple(self._writer.whole(rects, new)), sums, added, changed)
            with borrowed_segments(self.base, rects, self.layout) as old:
                encoded = self._writer.encode(rects, old, new)
                if encoded is not None:
                    added, changed = encoded.sums, encoded.changed.astype(np.uint64)
                frames = tuple(self._writer.delta(rects, old, new, encoded))
        return _EncodedRegion(rects, frames, sums, added, changed)

    def _check_base(self) -> None:
        wrong = np.flatnonzero((self._followed != self.sums).any(axis=1))
        if wrong.size:
            raise BaseMismatchError(
                f"baseline of tensor {self.layout.tensors[int(wrong[0])].name!r}",
                expected="the weights of the last published version",
                found="other bytes",
                hint="the files that held it were changed or are damaged",
            )


@dataclass(frozen=True, slots=True)
class Patch:
    """What one frame does to one tensor.

    `index` selects canonical lane positions; `values` holds, for each, the group difference from the
    old lane or, if `absolute`, the new lane itself.
    """

    tensor: int
    index: Positions | slice
    values: Lanes
    absolute: bool

    def inverted(self, old: Lanes, spec: TensorSpec) -> Patch:
        """The patch that undoes this one; `old` is what `apply_patch` returned."""
        values = old if self.absolute else inverse(self.values, spec.type)
        return Patch(self.tensor, self.index, values, self.absolute)


def read_patches(
    chunks: Iterable[bytes],
    layout: Layout,
    backend: Backend,
    *,
    base: Weights | None = None,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 1,
) -> Iterator[Patch]:
    """Decode chunks of one edge whose SHA-256 has been checked. Every position is within its tensor.

    With `base`, the weights that the edge starts from, each frame's check is verified before its patches
    are given; without it only raw and packed frames' are, and the sums that follow the writes must tell. Context
    frames are read beside their base only. Raises FormatError, LimitError or IntegrityError; patches that
    came before the error are good but incomplete. With several threads, frames are decoded ahead: then nobody
    may write to `base` meanwhile.
    """

    def patches_of(stored: StoredFrame) -> list[Patch]:
        frame = stored.unpack()
        if base is None:
            return frame_patches(frame, layout, backend, None)
        with borrowed_segments(base, frame.header.rects, layout) as segments:
            return frame_patches(frame, layout, backend, segments)

    frames = (frame for data in chunks for frame in stored_frames(data, layout, limits=limits))
    for patches in in_order(patches_of, frames, threads):
        yield from patches


def frame_patches(frame: Frame, layout: Layout, backend: Backend, base: Segments | None) -> list[Patch]:
    """`read_patches` for one frame; `base` holds the old lanes of its rectangles, row-major."""
    header = frame.header
    dtype = layout.tensors[header.rects[0].tensor].type
    if header.coder in WHOLE:
        return list(_whole_patches(frame, layout, dtype, backend))
    if base is None and header.coder == Coder.CONTEXT:
        raise FormatError(
            "frame",
            expected="the base beside a frame of the context coder",
            found="none",
            hint="read it where the base is at hand",
        )
    changes = backend.decode(header.coding, frame.streams, base, dtype)
    patches = []
    for rect, which, local in by_rect(header.rects, changes.positions):
        flat = rect.flat_positions(local, layout.tensors[rect.tensor].lane_shape)
        patches.append(Patch(rect.tensor, flat, changes.differences[which], absolute=False))
    if base is not None and header.check:
        check_sums(_shares(header.rects, base, changes, layout), unpack_sums(header.check, 1)[0])
    return patches


def _whole_patches(frame: Frame, layout: Layout, dtype: DType, backend: Backend) -> Iterator[Patch]:
    header = frame.header
    if header.coder == Coder.RAW:
        lanes: Lanes = np.frombuffer(frame.streams[0], UNSIGNED[dtype.lane_bytes])
    else:
        lanes = backend.unpack(frame.streams, header.lanes, dtype)
    segments = np.split(lanes, np.cumsum([rect.lanes for rect in header.rects])[:-1])
    if header.check:
        check_sums(share_of_lanes(header.rects, segments, layout, backend), unpack_sums(header.check, 1)[0])
    for rect, part in zip(header.rects, segments, strict=True):
        shape = layout.tensors[rect.tensor].lane_shape
        if rect.is_contiguous(shape):
            start = rect.flat_start(shape)
            yield Patch(rect.tensor, slice(start, start + rect.lanes), part, absolute=True)
        else:
            yield Patch(rect.tensor, flat_positions(rect, layout), part, absolute=True)


def _shares(rects: Sequence[Rect], old: Segments, changes: Changes, layout: Layout) -> U64:
    """What changes add to the element sum of every rectangle's tensor. Shape [rectangles, 2]."""
    shares = np.zeros((len(rects), 2), np.uint64)
    first = 0
    for i, (rect, segment) in enumerate(zip(rects, old, strict=True)):
        begin, end = np.searchsorted(changes.positions, (first, first + rect.lanes))
        local = changes.positions[begin:end] - first
        spec = layout.tensors[rect.tensor]
        new = compose(segment[local], changes.differences[begin:end], spec.type)
        flat = rect.flat_positions(local, spec.lane_shape)
        shares[i] = sum_changes(flat, segment[local], new, tensor_seed(spec.name))
        first += rect.lanes
    return shares


def apply_patch(patch: Patch, target: Lanes, spec: TensorSpec, sums: U64, backend: Backend) -> Lanes:
    """Write one patch into `target`, all lanes of its tensor in canonical order, in place.

    `sums` (shape [tensors, 2]) follows every write, so that after the last patch it must equal the
    manifest's. Returns the lanes that were overwritten.
    """
    old, share = _write_patch(patch, target, spec, backend)
    sums[patch.tensor] += share
    return old


def _write_patch(patch: Patch, target: Lanes, spec: TensorSpec, backend: Backend) -> tuple[Lanes, U64]:
    """The lanes that were overwritten, and what that adds to the sum of their tensor."""
    seed = tensor_seed(spec.name)
    if isinstance(patch.index, slice):
        old: Lanes = target[patch.index].copy()
        target[patch.index] = patch.values
        place = Place(seed, patch.index.start)
        after, before = backend.sum([np.ascontiguousarray(patch.values), old], [place, place])
        return old, after - before
    if patch.absolute:
        old, new = target[patch.index], patch.values
        target[patch.index] = new
        return old, sum_changes(patch.index, old, new, seed)
    return backend.apply(target, Changes(patch.index, patch.values), spec.type, seed)


def apply_chunks(
    chunks: Iterable[bytes],
    layout: Layout,
    target: Weights,
    sums: U64,
    backend: Backend,
    *,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 1,
) -> None:
    """Decode chunks of one edge whose SHA-256 has been checked and write them into `target`, whose lanes are
    writable, contiguous views.

    Frame by frame: each is checked as a whole before its first byte is written. `sums` (shape [tensors, 2])
    follows the writes. Raises FormatError, LimitError or IntegrityError; other frames have been written by then,
    so what is written to must be private until the sums are compared with the manifest's.
    """
    placed = (_Placed(frame, layout) for data in chunks for frame in stored_frames(data, layout, limits=limits))

    def work(placed: _Placed) -> tuple[list[int], U64]:
        return apply_frame(placed.stored, layout, target, backend)

    for tensors, shares in in_order(work, placed, threads, clash=_Placed.may_meet):
        np.add.at(sums, tensors, shares)


def apply_frame(stored: StoredFrame, layout: Layout, target: Weights, backend: Backend) -> tuple[list[int], U64]:
    """What `apply_chunks` does with one frame: which tensors were written to, and what that adds to their sums."""
    frame = stored.unpack()
    header = frame.header
    rects = header.rects
    if header.coder in WHOLE or not header.check or not all_contiguous(rects, layout):
        with borrowed_segments(target, rects, layout) as segments:
            patches = frame_patches(frame, layout, backend, segments)
        shares = [_write(patch, layout, target, backend) for patch in patches]
        return [patch.tensor for patch in patches], np.array(shares, np.uint64).reshape(-1, 2)
    try:
        # Not by `read_segments`, which may give copies: these are written to.
        views = [
            target.lanes(rect.tensor, rect.flat_start(layout.tensors[rect.tensor].lane_shape), rect.lanes)
            for rect in rects
        ]
        dtype = layout.tensors[rects[0].tensor].type
        check = unpack_sums(header.check, 1)[0]
        sums = backend.decode_apply(header.coding, check, frame.streams, views, places_of(rects, layout), dtype)
    finally:
        release_segments(target, rects, layout)
    return [rect.tensor for rect in rects], sums


def _write(patch: Patch, layout: Layout, target: Weights, backend: Backend) -> U64:
    spec = layout.tensors[patch.tensor]
    with borrowed(target, (patch.tensor, 0, spec.lanes)) as lanes:
        return _write_patch(patch, lanes, spec, backend)[1]


@dataclass(frozen=True)
class _Placed:
    """A frame to be applied, and where its lanes lie.

    Frames of an edge are disjoint, but one that has been received may not keep to that, and nobody may write lanes
    that another thread reads.
    """

    stored: StoredFrame
    layout: Layout

    def may_meet(self, other: _Placed) -> bool:
        """Whether the two may have a lane in common."""
        if self.stored.header.dtype != other.stored.header.dtype:
            return False
        (low, high), (first, last) = self._reach, other._reach
        return low <= last and first <= high

    @cached_property
    def _reach(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The lowest and the highest (tensor, canonical position)."""
        rects = self.stored.header.rects
        shapes = [self.layout.tensors[rect.tensor].lane_shape for rect in rects]
        starts = ((rect.tensor, rect.flat_start(shape)) for rect, shape in zip(rects, shapes, strict=True))
        ends = ((rect.tensor, rect.flat_end(shape) - 1) for rect, shape in zip(rects, shapes, strict=True))
        return min(starts), max(ends)
