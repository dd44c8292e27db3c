"""Lanes as byte planes: all low bytes, then all next bytes, …; what the packed coder works on.

Floats are rotated left by one bit first, so that the sign joins the mantissa, which looks random anyway, and
the exponent begins with the highest bit: that of BF16 and F32 is a plane of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Lanes, Segments, Stream
from deltad.types import Difference, DType

Planes = npt.NDArray[np.uint8]
"""Shape [lane bytes, lanes], low bytes first."""


def is_rotated(dtype: DType) -> bool:
    """Whether the lanes of this dtype are rotated. Of a single byte it would change nothing but its name."""
    return dtype.difference is Difference.LINE and dtype.lane_bytes > 1


def byte_planes(segments: Segments, dtype: DType) -> Planes:
    """The planes of all segments, one after the other."""
    count, width = sum(segment.size for segment in segments), dtype.lane_bytes
    planes = np.empty((width, count), np.uint8)
    first = 0
    for segment in segments:
        lanes = _rotated(segment, 1) if is_rotated(dtype) else segment
        for byte in range(width):
            planes[byte, first : first + segment.size] = (lanes >> lanes.dtype.type(8 * byte)).astype(np.uint8)
        first += segment.size
    return planes


def from_byte_planes(planes: Sequence[Stream], dtype: DType) -> Lanes:
    """The inverse of `byte_planes`, as one array; the planes have equal lengths."""
    width = dtype.lane_bytes
    joined = np.empty((len(planes[0]), width), np.uint8)
    for byte, plane in enumerate(planes):
        joined[:, byte] = np.frombuffer(plane, np.uint8)
    lanes = joined.reshape(-1).view(UNSIGNED[width])
    return _rotated(lanes, 8 * width - 1) if is_rotated(dtype) else lanes


def _rotated(lanes: Lanes, bits: int) -> Lanes:
    """All lanes rotated left."""
    kind = lanes.dtype.type
    turned: Lanes = lanes << kind(bits) | lanes >> kind(8 * lanes.itemsize - bits)
    return turned
