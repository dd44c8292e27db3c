"""Lanes as byte planes: all low bytes, then all next bytes, …; how raw frames carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltad.delta.backend import UNSIGNED, Lanes, Segments, Stream
from deltad.types import DType


def byte_planes(segments: Segments, dtype: DType) -> list[Stream]:
    """One stream for each byte of a lane, over all segments, low bytes first."""
    count, width = sum(segment.size for segment in segments), dtype.lane_bytes
    planes = np.empty((width, count), np.uint8)
    first = 0
    for segment in segments:
        lanes = np.ascontiguousarray(segment).view(np.uint8).reshape(-1, width)
        planes[:, first : first + segment.size] = lanes.T
        first += segment.size
    return list(planes)


def from_byte_planes(planes: Sequence[Stream], count: int, dtype: DType) -> Lanes:
    """The inverse of `byte_planes`, as one array; the lengths have been checked."""
    joined = np.empty((count, dtype.lane_bytes), np.uint8)
    for i, plane in enumerate(planes):
        joined[:, i] = np.frombuffer(plane, np.uint8)
    return joined.reshape(-1).view(UNSIGNED[dtype.lane_bytes])
