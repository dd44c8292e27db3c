"""Frames and chunks: the unit of work and the unit of transfer.

A frame codes the changes within a list of hyper-rectangles over tensors of one dtype; positions are
local to the frame, and it decodes alone. A chunk is whole frames, back to back:

    chunk := frame*        frame := u32 header length | header (MessagePack) | stream*

Nothing in a header is believed: every rectangle is checked against its tensor, every stream against
the declared lengths and the limits, before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from deltad.delta import FORMAT
from deltad.delta.coding import CODERS, Coder, Coding, check_coding, check_lengths
from deltad.delta.encoding import check_format, decode, encode
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import FormatError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits

_U32 = struct.Struct("<I")
_ZSTD_LEVEL = 1
_SMALLEST_WORTH_COMPRESSING = 48


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
        start = 0
        for offset, size in zip(self.offset, shape, strict=True):
            start = start * size + offset
        return start

    def is_contiguous(self, shape: Sequence[int]) -> bool:
        """Whether the rectangle is one run of canonical positions."""
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


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a frame says of itself. `streams` holds (plain length, stored length) in bytes.

    `check` is what the frame adds to the element sums, over all its tensors: two u64, little-endian.
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

    @property
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
    """Cut a frame that came out too large: by rectangles if there are several, else along its axes."""
    if len(rects) > 1:
        middle = len(rects) // 2
        return [tuple(rects[:middle]), tuple(rects[middle:])]
    (rect,) = rects
    halves = slabs(rect.tensor, rect.extent, max(1, rect.lanes // 2))
    return [
        (Rect(r.tensor, tuple(a + b for a, b in zip(rect.offset, r.offset, strict=True)), r.extent),) for r in halves
    ]


def write_frame(
    coder: Coder, dtype: str, rects: Sequence[Rect], changed: int, streams: Sequence[bytes | memoryview]
) -> bytes:
    """The bytes of one frame. A stream that zstd does not shrink is stored as it is."""
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False)
    stored = []
    for plain in streams:
        packed = compressor.compress(plain) if len(plain) >= _SMALLEST_WORTH_COMPRESSING else plain
        stored.append(packed if len(packed) < len(plain) else plain)
    lengths = tuple((len(plain), len(packed)) for plain, packed in zip(streams, stored, strict=True))
    header = encode(FrameHeader(0, int(coder), dtype, tuple(rects), changed, lengths))
    return b"".join([_U32.pack(len(header)), header, *stored])


def read_chunk(data: bytes, layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[Frame]:
    """Parse a chunk whose SHA-256 has been checked. Raises FormatError or LimitError, never reads past."""
    if len(data) > limits.chunk_bytes:
        raise LimitError("chunk", expected=f"at most {limits.chunk_bytes} bytes", found=f"{len(data)} bytes")
    view = memoryview(data)
    at = 0
    while at < len(view):
        header, at = _read_header(view, at, layout, limits)
        streams = []
        for plain_length, stored_length in header.streams:
            if stored_length > len(view) - at:
                raise FormatError(
                    "frame", expected=f"a stream of {stored_length} bytes", found=f"{len(view) - at} bytes to the end"
                )
            streams.append(_read_stream(view[at : at + stored_length], plain_length))
            at += stored_length
        yield Frame(header, tuple(streams))


def _read_header(view: memoryview, at: int, layout: Layout, limits: Limits) -> tuple[FrameHeader, int]:
    if len(view) - at < _U32.size:
        raise FormatError("frame", expected="a header length of 4 bytes", found=f"{len(view) - at} bytes to the end")
    (length,) = _U32.unpack_from(view, at)
    at += _U32.size
    if length > min(limits.frame_header_bytes, len(view) - at):
        raise FormatError(
            "frame", expected=f"a header within the {len(view) - at} bytes that are left", found=f"{length} bytes"
        )
    header = decode(FrameHeader, bytes(view[at : at + length]), what="frame header", limit=limits.frame_header_bytes)
    _check_header(header, layout, limits)
    return header, at + length


def _check_header(header: FrameHeader, layout: Layout, limits: Limits) -> None:
    check_format(header.format, "frame")
    if header.coder not in CODERS:
        raise FormatError("frame", expected=f"a coder of {sorted(CODERS)}", found=str(header.coder))
    if not 1 <= len(header.rects) <= limits.frame_rects:
        raise LimitError("frame", expected=f"1 to {limits.frame_rects} rectangles", found=str(len(header.rects)))
    for rect in header.rects:
        if not 0 <= rect.tensor < len(layout.tensors):
            raise FormatError("frame", expected=f"a tensor below {len(layout.tensors)}", found=f"tensor {rect.tensor}")
        _check_rect(rect, layout.tensors[rect.tensor], header.dtype)
    lanes = header.lanes
    if lanes > limits.frame_lanes:
        raise LimitError("frame", expected=f"at most {limits.frame_lanes} lanes", found=str(lanes))
    if not 0 <= header.changed <= lanes:
        raise FormatError("frame", expected=f"0 to {lanes} changes", found=str(header.changed))
    lane_bytes = layout.tensors[header.rects[0].tensor].type.lane_bytes
    if header.coder == Coder.RAW:
        bounds = [lanes] * lane_bytes
        exact = bounds
    else:
        # A gap of up to `lanes` costs one token a change and one per 255 lanes skipped.
        bounds = [header.changed + lanes // 255 + 1] + [header.changed] * lane_bytes
        exact = [header.streams[0][0] if header.streams else 0] + [header.changed] * lane_bytes
    if len(header.streams) != len(bounds):
        raise FormatError("frame", expected=f"{len(bounds)} streams", found=str(len(header.streams)))
    for (plain, stored), bound, size in zip(header.streams, bounds, exact, strict=True):
        if plain != size or not 0 <= stored <= plain <= bound:
            raise FormatError(
                "frame",
                expected=f"a stream of {size} bytes, at most {bound}",
                found=f"{plain} bytes stored as {stored}",
            )


def _check_rect(rect: Rect, tensor: TensorSpec, dtype: str) -> None:
    thing = f"frame: rectangle of tensor {tensor.name[:120]!r}"
    if tensor.alias_of:
        raise FormatError(thing, expected=f"changes of {tensor.alias_of!r}", found="an alias, which holds no weights")
    if tensor.dtype != dtype:
        raise FormatError(thing, expected=f"dtype {tensor.dtype}", found=dtype[:40])
    shape = tensor.lane_shape
    if len(rect.offset) != len(shape) or len(rect.extent) != len(shape):
        raise FormatError(thing, expected=f"{len(shape)} dimensions", found=f"{len(rect.offset)}, {len(rect.extent)}")
    for offset, extent, size in zip(rect.offset, rect.extent, shape, strict=True):
        if offset < 0 or extent < 1 or offset + extent > size:
            raise FormatError(
                thing, expected=f"a rectangle within {list(shape)}", found=f"{list(rect.offset)} + {list(rect.extent)}"
            )


def _read_stream(stored: memoryview, plain_length: int) -> bytes:
    if len(stored) == plain_length:
        return bytes(stored)
    # `max_output_size` is ignored when the zstd frame states its own size, so that is read first.
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != plain_length:
            raise FormatError("frame: stream", expected=f"{plain_length} bytes", found=f"zstd claims {claimed}")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError("frame: stream", expected="a zstd frame", found=str(error)) from None
