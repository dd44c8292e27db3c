"""Frames and chunks: the unit of work and the unit of transfer.

A frame codes the changes within a list of disjoint hyper-rectangles over tensors of one dtype;
positions are local to the frame, and it decodes alone. A chunk is whole frames, back to back:

    chunk := frame*        frame := u32 header length | header (MessagePack) | stream*

Nothing in a header is believed: every rectangle is checked against its tensor and its neighbours, every
stream against the declared counts and the limits, before anything is allocated.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from deltad.delta import FORMAT
from deltad.delta.backend import Stream
from deltad.delta.coding import CODERS, FRAME_LANES, WHOLE, Coder, Coding, check_coding, check_lengths, coder_name
from deltad.delta.digest import SUM_BYTES
from deltad.delta.encoding import check_format, decode, encode
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import FormatError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits

_U32 = struct.Struct("<I")
_Index = npt.NDArray[np.int64]
_ZSTD_LEVEL = 1
_SMALLEST_WORTH_COMPRESSING = 48


class _Local(threading.local):
    """zstd's own memory: not for several threads at once, and a new one costs more than a stream takes."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Local()


class Rect(msgspec.Struct, frozen=True, array_like=True):
    """A hyper-rectangle of one tensor, in lanes: offset and extent for each dimension."""

    tensor: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def lanes(self) -> int:
        return math.prod(self.extent)

    def flat_start(self, shape: Sequence[int]) -> int:
        """The canonical (row-major) position of the first lane."""
        if not any(self.offset):
            return 0
        start = 0
        for offset, size in zip(self.offset, shape, strict=True):
            start = start * size + offset
        return start

    def is_contiguous(self, shape: Sequence[int]) -> bool:
        """Whether the rectangle is one run of canonical positions."""
        if self.extent == shape:
            return True
        whole = True
        for extent, size in zip(reversed(self.extent), reversed(shape), strict=True):
            if not whole and extent != 1:
                return False
            whole = whole and extent == size
        return True

    def flat_positions(self, local: npt.NDArray[np.int64], shape: Sequence[int]) -> npt.NDArray[np.int64]:
        """Canonical positions of the `local` ones, which count row-major within the rectangle."""
        if self.is_contiguous(shape):
            return local + self.flat_start(shape)
        flat = np.zeros_like(local)
        stride = 1
        rest = local
        for offset, extent, size in zip(reversed(self.offset), reversed(self.extent), reversed(shape), strict=True):
            rest, within = np.divmod(rest, extent)
            flat += (within + offset) * stride
            stride *= size
        return flat

    def runs(self, shape: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
        """The runs of canonical positions that it is made of: where each begins, ascending, and how long they are."""
        length = 1
        axis = len(shape)
        while axis and (axis == len(shape) or self.extent[axis] == shape[axis]):
            axis -= 1
            length *= self.extent[axis]
        starts = np.zeros(1, np.int64)
        for i in range(axis):
            stride = math.prod(shape[i + 1 :])
            steps = (self.offset[i] + np.arange(self.extent[i], dtype=np.int64)) * stride
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        return starts + sum(self.offset[i] * math.prod(shape[i + 1 :]) for i in range(axis, len(shape))), length

    def flat_end(self, shape: Sequence[int]) -> int:
        """One more than the canonical position of the last lane."""
        if self.extent == shape:
            return math.prod(self.extent)
        last = 0
        for offset, extent, size in zip(self.offset, self.extent, shape, strict=True):
            last = last * size + offset + extent - 1
        return last + 1

    def locate(self, flat: npt.NDArray[np.int64], shape: Sequence[int]) -> tuple[slice | _Index, _Index]:
        """Of ascending canonical positions, those within: which of them, and where in the rectangle."""
        begin, end = np.searchsorted(flat, (self.flat_start(shape), self.flat_end(shape)))
        if self.is_contiguous(shape):
            return slice(int(begin), int(end)), flat[begin:end] - self.flat_start(shape)
        rest = flat[begin:end]
        local = np.zeros_like(rest)
        inside = np.ones(rest.size, bool)
        stride = 1
        for offset, extent, size in zip(reversed(self.offset), reversed(self.extent), reversed(shape), strict=True):
            rest, within = np.divmod(rest, size)
            within -= offset
            inside &= (within >= 0) & (within < extent)
            local += within * stride
            stride *= extent
        which = np.flatnonzero(inside)
        return which + begin, local[which]


class FrameHeader(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """What a frame says of itself. `streams` holds (plain length, stored length) in bytes.

    `check` is what the frame adds to the element sums, over all its tensors: two u64, little-endian. A frame
    that was folded where nobody could know has none.
    """

    format: int
    coder: int
    dtype: str
    rects: tuple[Rect, ...]
    changed: int
    check: bytes
    small: int
    starts: tuple[int, ...]
    marked: int
    streams: tuple[tuple[int, int], ...]

    @cached_property
    def lanes(self) -> int:
        return sum(rect.lanes for rect in self.rects)

    @property
    def coding(self) -> Coding:
        """How the streams are to be read. The coder has been checked."""
        return Coding(Coder(self.coder), self.lanes, self.changed, self.small, self.starts, self.marked)


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed frame: its header and its plain streams."""

    header: FrameHeader
    streams: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A frame whose header has been checked, and its streams as they are stored."""

    header: FrameHeader
    stored: memoryview

    def unpack(self) -> Frame:
        """Raises FormatError for streams that are not what the header says."""
        streams = []
        at = 0
        for plain_length, stored_length in self.header.streams:
            streams.append(_read_stream(self.stored[at : at + stored_length], plain_length))
            at += stored_length
        return Frame(self.header, tuple(streams))


def slabs(tensor: int, shape: Sequence[int], limit: int) -> Iterator[Rect]:
    """Cut a tensor of lane shape `shape` into contiguous rectangles of at most `limit` lanes."""
    total = math.prod(shape)
    if total <= limit:
        yield Rect(tensor, (0,) * len(shape), tuple(shape))
        return
    axis = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= limit)
    rows = limit // math.prod(shape[axis + 1 :])
    tail = len(shape) - axis - 1
    for prefix in np.ndindex(*shape[:axis]):
        for row in range(0, shape[axis], rows):
            yield Rect(
                tensor,
                (*(int(i) for i in prefix), row) + (0,) * tail,
                (1,) * axis + (min(rows, shape[axis] - row), *shape[axis + 1 :]),
            )


def plan_frames(layout: Layout, *, frame_bytes: int, limits: Limits = DEFAULT_LIMITS) -> Iterator[tuple[Rect, ...]]:
    """Every lane of every tensor exactly once, in groups of one dtype and at most `frame_bytes` bytes.

    Depends on the layout and the limits alone, so that two hosts cut the same frames.
    """
    by_dtype: dict[str, list[int]] = {}
    for i, tensor in enumerate(layout.tensors):
        if tensor.lanes:
            by_dtype.setdefault(tensor.dtype, []).append(i)
    for name in sorted(by_dtype):
        limit = max(1, min(limits.frame_lanes, frame_bytes // layout.tensors[by_dtype[name][0]].type.lane_bytes))
        group: list[Rect] = []
        room = limit
        for i in by_dtype[name]:
            for rect in slabs(i, layout.tensors[i].lane_shape, limit):
                if rect.lanes > room or len(group) == limits.frame_rects:
                    yield tuple(group)
                    group, room = [], limit
                group.append(rect)
                room -= rect.lanes
        if group:
            yield tuple(group)


def halve(rects: Sequence[Rect]) -> list[tuple[Rect, ...]]:
    """Cut a frame that came out too large: by rectangles if there are several, else along its axes.

    The halves follow each other: what belongs to the first comes first in the frame.
    """
    if len(rects) > 1:
        middle = len(rects) // 2
        return [tuple(rects[:middle]), tuple(rects[middle:])]
    (rect,) = rects
    halves = slabs(rect.tensor, rect.extent, rect.lanes // 2)
    return [
        (Rect(r.tensor, tuple(a + b for a, b in zip(rect.offset, r.offset, strict=True)), r.extent),) for r in halves
    ]


def write_frame(dtype: str, rects: Sequence[Rect], coding: Coding, check: bytes, streams: Sequence[Stream]) -> bytes:
    """The bytes of one frame. A stream that zstd does not shrink is stored as it is; whole frames' all are.

    `check` is what the frame adds to the element sums, 16 bytes, or none where that is not known.
    """
    compressor, compresses = _local.compressor, coding.coder not in WHOLE
    stored: list[bytes | memoryview] = []
    for stream in streams:
        plain = stream.data if isinstance(stream, np.ndarray) else memoryview(stream)
        packed = compressor.compress(plain) if compresses and len(plain) >= _SMALLEST_WORTH_COMPRESSING else plain
        stored.append(packed if len(packed) < len(plain) else plain)
    lengths = tuple((len(plain), len(packed)) for plain, packed in zip(streams, stored, strict=True))
    header = encode(
        FrameHeader(
            FORMAT,
            int(coding.coder),
            dtype,
            tuple(rects),
            coding.changed,
            check,
            coding.small,
            coding.starts,
            coding.marked,
            lengths,
        )
    )
    return b"".join([_U32.pack(len(header)), header, *stored])


def read_headers(data: bytes, layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[tuple[FrameHeader, int]]:
    """`read_chunk` without the streams: every frame's header, and the size of the frame in bytes."""
    for header, stored, size in _walk(data, limits):
        _check_header(header, layout, limits)
        yield header, size + len(stored)


def read_chunk(data: bytes, layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[Frame]:
    """Parse a chunk whose SHA-256 has been checked. Raises FormatError or LimitError, never reads past."""
    for stored in stored_frames(data, layout, limits=limits):
        yield stored.unpack()


def stored_frames(data: bytes, layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[StoredFrame]:
    """`read_chunk` without the work that threads can share."""
    for header, stored, _ in _walk(data, limits):
        _check_header(header, layout, limits)
        yield StoredFrame(header, stored)


def _walk(data: bytes, limits: Limits) -> Iterator[tuple[FrameHeader, memoryview, int]]:
    """Every frame's header, its streams as they are stored, and how many bytes came before those."""
    if len(data) > limits.chunk_bytes:
        raise LimitError("chunk", expected=f"at most {limits.chunk_bytes} bytes", found=f"{len(data)} bytes")
    view = memoryview(data)
    while view:
        left = len(view)
        header, view = _read_header(view, limits)
        before = left - len(view)
        size = sum(stored for _, stored in header.streams)
        if any(not 0 <= stored <= plain for plain, stored in header.streams) or size > len(view):
            raise FormatError("frame", expected=f"{len(view)} bytes of streams to the end", found=f"{size} declared")
        yield header, view[:size], before
        view = view[size:]


def _read_header(view: memoryview, limits: Limits) -> tuple[FrameHeader, memoryview]:
    if len(view) < _U32.size:
        raise FormatError("frame", expected="a header length of 4 bytes", found=f"{len(view)} bytes to the end")
    (length,) = _U32.unpack_from(view)
    view = view[_U32.size :]
    if length > min(limits.frame_header_bytes, len(view)):
        raise FormatError(
            "frame", expected=f"a header within the {len(view)} bytes that are left", found=f"{length} bytes"
        )
    header = decode(FrameHeader, bytes(view[:length]), what="frame header", limit=limits.frame_header_bytes)
    check_format(header.format, "frame")
    return header, view[length:]


def _check_header(header: FrameHeader, layout: Layout, limits: Limits) -> None:
    if header.coder not in CODERS:
        raise FormatError(
            "frame",
            expected=f"a coder of {sorted(CODERS)}",
            found=f"coder {header.coder}",
            hint="it was written by a newer deltad; use a build that reads it",
        )
    if not 1 <= len(header.rects) <= limits.frame_rects:
        raise LimitError("frame", expected=f"1 to {limits.frame_rects} rectangles", found=str(len(header.rects)))
    for rect in header.rects:
        if not 0 <= rect.tensor < len(layout.tensors):
            raise FormatError("frame", expected=f"a tensor below {len(layout.tensors)}", found=f"tensor {rect.tensor}")
        _check_rect(rect, layout.tensors[rect.tensor], header.dtype)
    _check_disjoint(header.rects, layout)
    if header.lanes > min(limits.frame_lanes, FRAME_LANES):
        raise LimitError("frame", expected=f"at most {limits.frame_lanes} lanes", found=str(header.lanes))
    dtype = layout.tensors[header.rects[0].tensor].type
    plain = [length for length, _ in header.streams]
    size = header.lanes * dtype.lane_bytes if header.coder in WHOLE else sum(plain)
    if size > limits.frame_plain_bytes:
        raise LimitError("frame", expected=f"at most {limits.frame_plain_bytes} plain bytes", found=str(size))
    if header.coder in WHOLE and any(length != stored for length, stored in header.streams):
        name = coder_name(header.coder)
        raise FormatError("frame", expected=f"streams of a {name} frame stored as they are", found="compressed ones")
    if len(header.check) != SUM_BYTES and (header.check or header.coder != Coder.BLIND):
        raise FormatError("frame", expected=f"a check of {SUM_BYTES} bytes", found=f"{len(header.check)} bytes")
    check_coding(header.coding, dtype)
    check_lengths(header.coding, dtype, plain)


def _check_rect(rect: Rect, tensor: TensorSpec, dtype: str) -> None:
    thing = f"frame: rectangle of tensor {tensor.name[:120]!r}"
    if tensor.alias_of:
        raise FormatError(thing, expected=f"changes of {tensor.alias_of!r}", found="an alias, which holds no weights")
    if tensor.dtype != dtype:
        raise FormatError(thing, expected=f"dtype {tensor.dtype}", found=dtype[:40])
    shape = tensor.lane_shape
    if len(rect.offset) != len(shape) or len(rect.extent) != len(shape):
        raise FormatError(thing, expected=f"{len(shape)} dimensions", found=f"{len(rect.offset)}, {len(rect.extent)}")
    if rect.extent == shape and not any(rect.offset) and all(shape):
        return  # the whole tensor, as nearly always
    for offset, extent, size in zip(rect.offset, rect.extent, shape, strict=True):
        if offset < 0 or extent < 1 or offset + extent > size:
            raise FormatError(
                thing, expected=f"a rectangle within {list(shape)}", found=f"{list(rect.offset)} + {list(rect.extent)}"
            )


def _check_disjoint(rects: Sequence[Rect], layout: Layout) -> None:
    """No lane may be changed twice: what a frame does would depend on the order."""
    if len({rect.tensor for rect in rects}) == len(rects):
        return
    by_tensor: dict[int, list[Rect]] = {}
    for rect in rects:
        by_tensor.setdefault(rect.tensor, []).append(rect)
    for tensor, group in by_tensor.items():
        if len(group) == 1:
            continue
        shape = layout.tensors[tensor].lane_shape
        if not disjoint(group, shape):
            raise FormatError(
                f"frame: rectangles of tensor {layout.tensors[tensor].name[:120]!r}", expected="disjoint ones"
            )


def disjoint(rects: Sequence[Rect], shape: Sequence[int]) -> bool:
    """Whether no two of some rectangles of one tensor have a lane in common."""
    if len(rects) < 2:
        return True
    return bool(shape) and not _overlap(rects, shape)


def _overlap(rects: Sequence[Rect], shape: Sequence[int]) -> bool:
    spans = sorted((rect.flat_start(shape), rect.flat_end(shape)) for rect in rects)
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return False
    # Spans of rectangles that are no runs may cross while the rectangles do not.
    low = np.array([rect.offset for rect in rects])
    high = low + np.array([rect.extent for rect in rects])
    return any(((low[:i] < high[i]) & (low[i] < high[:i])).all(axis=1).any() for i in range(1, len(rects)))


def _read_stream(stored: memoryview, plain_length: int) -> bytes:
    if len(stored) == plain_length:
        return bytes(stored)
    # `max_output_size` is ignored when the zstd frame states its own size, so that is read first.
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != plain_length:
            raise FormatError("frame: stream", expected=f"{plain_length} bytes", found=f"zstd claims {claimed}")
        return _local.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError("frame: stream", expected="a zstd frame", found=str(error)) from None
