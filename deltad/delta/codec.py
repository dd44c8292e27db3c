"""Encoding and applying one edge: weights in, chunks out, and back.

Streams by frame, so memory is bounded by the frame and not by the model. While it reads, the encoder
recomputes the element sum of everything in the target and follows the base's sum through the changes;
both must meet, which proves that the base it read was the base that was published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deltad.delta.backend import Backend, Changes, Lanes, Positions
from deltad.delta.backend.numpy import byte_planes, from_byte_planes, inverse
from deltad.delta.digest import U64, root_of, sum_bytes, sum_changes, tensor_seed
from deltad.delta.encoding import sha256
from deltad.delta.frame import Coder, Frame, Rect, halve, plan_frames, read_chunk, write_frame
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.manifest import ChunkRef
from deltad.errors import BaseMismatchError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import Digest

DELTA_FRAME_BYTES = 16 << 20
"""Weights that one frame of a delta covers: large enough for good statistics, small enough to hold."""


class Weights(Protocol):
    """Something that holds the tensors of a layout. A tensor is named by its index in the layout."""

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        """`count` lanes from canonical position `start`, as unsigned integers; a view where possible."""

    def release(self, tensor: int, start: int, count: int) -> None:
        """The caller is done with these lanes: memory that backs them may be dropped."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk ready to be stored."""

    ref: ChunkRef
    data: bytes


@dataclass(slots=True)
class EdgeEncoder:
    """Encodes the edge from `base` to `target`, or an anchor when there is no base.

    Iterate `chunks()` to the end; then `sums`, `changed` and `root` are those of the target. Raises
    BaseMismatchError when what it read as the base has not the given `base_sums`.
    """

    layout: Layout
    target: Weights
    backend: Backend
    base: Weights | None = None
    base_sums: U64 | None = None
    limits: Limits = DEFAULT_LIMITS
    sums: U64 = field(init=False)
    """Element sums of the target, shape [tensors, 2]."""
    changed: U64 = field(init=False)
    """Changed lanes per tensor, shape [tensors]; all of them in an anchor."""
    _followed: U64 = field(init=False)

    def __post_init__(self) -> None:
        if (self.base is None) != (self.base_sums is None):
            raise ValueError("base and base_sums come together")
        self.sums = np.zeros((len(self.layout.tensors), 2), np.uint64)
        self.changed = np.zeros(len(self.layout.tensors), np.uint64)
        self._followed = self.sums.copy() if self.base_sums is None else self.base_sums.copy()

    @property
    def root(self) -> Digest:
        return root_of(self.layout, self.sums)

    def chunks(self) -> Iterator[EncodedChunk]:
        """Every chunk of the edge, in order. A delta without changes has none."""
        builder = _ChunkBuilder(self.limits.chunk_bytes)
        # An anchor's frame is about as large as its weights, so it must fit a chunk from the start. A
        # delta's is two orders of magnitude smaller, and is cut in the rare case that it is not.
        anchor = self.base is None
        frame_bytes = self.limits.chunk_bytes // 2 if anchor else DELTA_FRAME_BYTES
        for rects in plan_frames(self.layout, frame_bytes=frame_bytes, limits=self.limits):
            for frame, covered in self._encode_region(rects):
                yield from builder.add(frame, covered)
        if not anchor:
            self._check_base()
        yield from builder.flush()

    def _encode_region(self, rects: tuple[Rect, ...]) -> Iterator[tuple[bytes, tuple[Rect, ...]]]:
        new = self._read(self.target, rects)
        self._sum_target(rects, new)
        if self.base is None:
            for rect in rects:
                self.changed[rect.tensor] += np.uint64(rect.lanes)
            yield self._raw_frame(rects, new), rects
        else:
            old = self._read(self.base, rects)
            yield from self._encode_changes(rects, old, new)
            self._release(self.base, rects)
        self._release(self.target, rects)

    def _encode_changes(
        self, rects: tuple[Rect, ...], old: Lanes, new: Lanes, *, follow: bool = True
    ) -> Iterator[tuple[bytes, tuple[Rect, ...]]]:
        dtype = self.layout.tensors[rects[0].tensor].type
        changes = self.backend.scan(old, new, dtype)
        if not changes.positions.size:
            return
        if follow:
            self._follow_base(rects, changes.positions, old, new)
        streams = self.backend.encode(changes, dtype)
        frame = write_frame(Coder.BLIND, dtype.name, rects, int(changes.positions.size), streams)
        if len(frame) >= new.nbytes:
            frame = self._raw_frame(rects, new)
        if len(frame) <= self.limits.chunk_bytes:
            yield frame, rects
            return
        at = 0
        for half in halve(rects):
            end = at + sum(rect.lanes for rect in half)
            yield from self._encode_changes(half, old[at:end], new[at:end], follow=False)
            at = end

    def _raw_frame(self, rects: tuple[Rect, ...], new: Lanes) -> bytes:
        dtype = self.layout.tensors[rects[0].tensor].type
        return write_frame(Coder.RAW, dtype.name, rects, int(new.size), byte_planes(new))

    def _sum_target(self, rects: tuple[Rect, ...], new: Lanes) -> None:
        for rect, part in _parts(rects, new):
            spec = self.layout.tensors[rect.tensor]
            offset = rect.flat_start(spec.lane_shape) * spec.type.lane_bytes
            self.sums[rect.tensor] += sum_bytes(part.view(np.uint8), offset, tensor_seed(spec.name))

    def _follow_base(self, rects: tuple[Rect, ...], positions: Positions, old: Lanes, new: Lanes) -> None:
        for rect, first, local in _positions_by_rect(rects, positions):
            spec = self.layout.tensors[rect.tensor]
            flat = rect.flat_positions(local, spec.lane_shape)
            at = local + first
            self._followed[rect.tensor] += sum_changes(flat, old[at], new[at], tensor_seed(spec.name))
            self.changed[rect.tensor] += np.uint64(local.size)

    def _check_base(self) -> None:
        wrong = np.flatnonzero((self._followed != self.sums).any(axis=1))
        if wrong.size:
            raise BaseMismatchError(
                f"baseline of tensor {self.layout.tensors[int(wrong[0])].name!r}",
                expected="the weights of the last published version",
                found="other bytes",
                hint="the files that held it were changed or are damaged",
            )

    def _read(self, weights: Weights, rects: tuple[Rect, ...]) -> Lanes:
        parts = [
            weights.lanes(rect.tensor, rect.flat_start(self.layout.tensors[rect.tensor].lane_shape), rect.lanes)
            for rect in rects
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _release(self, weights: Weights, rects: tuple[Rect, ...]) -> None:
        for rect in rects:
            start = rect.flat_start(self.layout.tensors[rect.tensor].lane_shape)
            weights.release(rect.tensor, start, rect.lanes)


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


def read_patches(data: bytes, layout: Layout, backend: Backend, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[Patch]:
    """Decode a chunk whose SHA-256 has been checked. Every position is within its tensor.

    Raises FormatError or LimitError; patches that came before the error are good but incomplete.
    """
    for frame in read_chunk(data, layout, limits=limits):
        yield from _frame_patches(frame, layout, backend)


def _frame_patches(frame: Frame, layout: Layout, backend: Backend) -> Iterator[Patch]:
    header = frame.header
    dtype = layout.tensors[header.rects[0].tensor].type
    if header.coder == Coder.RAW:
        lanes = from_byte_planes(frame.streams, header.lanes, dtype)
        for rect, part in _parts(header.rects, lanes):
            shape = layout.tensors[rect.tensor].lane_shape
            if rect.is_contiguous(shape):
                start = rect.flat_start(shape)
                yield Patch(rect.tensor, slice(start, start + rect.lanes), part, absolute=True)
            else:
                local = np.arange(rect.lanes, dtype=np.int64)
                yield Patch(rect.tensor, rect.flat_positions(local, shape), part, absolute=True)
        return
    changes = backend.decode(frame.streams, header.changed, header.lanes, dtype)
    for rect, first, local in _positions_by_rect(header.rects, changes.positions):
        flat = rect.flat_positions(local, layout.tensors[rect.tensor].lane_shape)
        begin = int(np.searchsorted(changes.positions, first))
        values = changes.differences[begin : begin + local.size]
        yield Patch(rect.tensor, flat, values, absolute=False)


def apply_patch(patch: Patch, target: Lanes, spec: TensorSpec, sums: U64, backend: Backend) -> Lanes:
    """Write one patch into `target`, all lanes of its tensor in canonical order, in place.

    `sums` (shape [tensors, 2]) follows every write, so that after the last patch it must equal the
    manifest's. Returns the lanes that were overwritten.
    """
    seed = tensor_seed(spec.name)
    if isinstance(patch.index, slice):
        old: Lanes = target[patch.index].copy()
        target[patch.index] = patch.values
        offset = patch.index.start * spec.type.lane_bytes
        sums[patch.tensor] += sum_bytes(np.ascontiguousarray(patch.values).view(np.uint8), offset, seed)
        sums[patch.tensor] -= sum_bytes(old.view(np.uint8), offset, seed)
        return old
    if patch.absolute:
        old, new = target[patch.index], patch.values
        target[patch.index] = new
    else:
        old, new = backend.apply(target, Changes(patch.index, patch.values), spec.type)
    sums[patch.tensor] += sum_changes(patch.index, old, new, seed)
    return old


def sum_weights(layout: Layout, weights: Weights, *, window_bytes: int = 8 << 20) -> U64:
    """Element sums of everything in `weights`, read window by window. Shape [tensors, 2]."""
    sums = np.zeros((len(layout.tensors), 2), np.uint64)
    for i, spec in enumerate(layout.tensors):
        width = spec.type.lane_bytes
        step = max(1, window_bytes // width)
        for start in range(0, spec.lanes, step):
            count = min(step, spec.lanes - start)
            window = np.ascontiguousarray(weights.lanes(i, start, count)).view(np.uint8)
            sums[i] += sum_bytes(window, start * width, tensor_seed(spec.name))
            weights.release(i, start, count)
    return sums


class _ChunkBuilder:
    """Packs whole frames into chunks of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: list[bytes] = []
        self._tensors: list[int] = []
        self._size = 0

    def add(self, frame: bytes, rects: Sequence[Rect]) -> Iterator[EncodedChunk]:
        if self._size + len(frame) > self._limit:
            yield from self.flush()
        self._frames.append(frame)
        self._tensors += (rect.tensor for rect in rects)
        self._size += len(frame)

    def flush(self) -> Iterator[EncodedChunk]:
        if self._frames:
            data = b"".join(self._frames)
            ref = ChunkRef(sha256(data), len(data), min(self._tensors), max(self._tensors))
            yield EncodedChunk(ref, data)
        self._frames, self._tensors, self._size = [], [], 0


def _parts(rects: Sequence[Rect], lanes: Lanes) -> Iterator[tuple[Rect, Lanes]]:
    at = 0
    for rect in rects:
        yield rect, lanes[at : at + rect.lanes]
        at += rect.lanes


def _positions_by_rect(rects: Sequence[Rect], positions: Positions) -> Iterator[tuple[Rect, int, Positions]]:
    """Cut ascending frame positions into (rectangle, its first lane in the frame, positions within it)."""
    first = 0
    for rect in rects:
        begin, end = np.searchsorted(positions, (first, first + rect.lanes))
        if end > begin:
            yield rect, first, positions[begin:end] - first
        first += rect.lanes
