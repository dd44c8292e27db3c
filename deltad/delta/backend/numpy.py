"""The reference backend: clear before fast. Every other backend must equal it, byte for byte."""

from __future__ import annotations

import numpy as np

from deltad.delta.backend import Changes, Lanes, Positions
from deltad.errors import FormatError
from deltad.types import Difference, DType

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SKIP = 255
"""A gap token: `t < 255` skips t unchanged lanes and then names a change; 255 skips 255 and names none."""


class NumpyBackend:
    """Implements `deltad.delta.backend.Backend`."""

    name = "numpy"

    def scan(self, old: Lanes, new: Lanes, dtype: DType) -> Changes:
        positions = np.flatnonzero(old != new).astype(np.int64, copy=False)
        return Changes(positions, difference(old[positions], new[positions], dtype))

    def encode(self, changes: Changes, dtype: DType) -> list[bytes]:
        tokens = _gap_tokens(changes.positions)
        values = _to_code(changes.differences, dtype)
        return [tokens.tobytes(), *byte_planes(values)]

    def decode(self, streams: tuple[bytes, ...], changed: int, lanes: int, dtype: DType) -> Changes:
        positions = _positions(np.frombuffer(streams[0], np.uint8))
        if positions.size != changed or (changed and positions[-1] >= lanes):
            raise FormatError(
                "frame: gap stream",
                expected=f"{changed} changes within {lanes} lanes",
                found=f"{positions.size} changes up to {int(positions[-1]) if positions.size else 'none'}",
            )
        values = from_byte_planes(streams[1:], changed, dtype)
        return Changes(positions, _from_code(values, dtype))

    def apply(self, target: Lanes, changes: Changes, dtype: DType) -> tuple[Lanes, Lanes]:
        old = target[changes.positions]
        new = compose(old, changes.differences, dtype)
        target[changes.positions] = new
        return old, new


def difference(old: Lanes, new: Lanes, dtype: DType) -> Lanes:
    """The unique group element that carries each old pattern to the new one; 0 iff they are equal."""
    if dtype.difference is Difference.XOR:
        changed: Lanes = old ^ new
    else:
        changed = _to_line(new, dtype) - _to_line(old, dtype)
    return changed


def compose(old: Lanes, differences: Lanes, dtype: DType) -> Lanes:
    """The inverse of `difference`: the pattern that the group element carries `old` to."""
    if dtype.difference is Difference.XOR:
        new: Lanes = old ^ differences
    else:
        new = _from_line(_to_line(old, dtype) + differences, dtype)
    return new


def inverse(differences: Lanes, dtype: DType) -> Lanes:
    """The group element that undoes each of `differences`."""
    if dtype.difference is Difference.XOR:
        return differences
    return np.negative(differences)


def _to_line(lanes: Lanes, dtype: DType) -> Lanes:
    """Sign-magnitude patterns to two's complement, where the floats are in ascending order.

    A negative pattern keeps its sign bit and has its magnitude bits flipped: a bijection on patterns,
    so NaN payloads, infinities and -0.0 are as good as any number.
    """
    if dtype.difference is Difference.RING:
        return lanes
    bits = dtype.lane_bytes * 8
    sign = lanes >> lanes.dtype.type(bits - 1)
    line: Lanes = lanes ^ (np.negative(sign) >> lanes.dtype.type(1))
    return line


_from_line = _to_line  # the map is its own inverse: the sign bit never changes


def _to_code(differences: Lanes, dtype: DType) -> Lanes:
    """Differences, none of them 0, to small non-negative codes: zigzag on the line, then minus 1."""
    one = differences.dtype.type(1)
    if dtype.difference is not Difference.XOR:
        sign = differences >> differences.dtype.type(dtype.lane_bytes * 8 - 1)
        differences = (differences << one) ^ np.negative(sign)
    codes: Lanes = differences - one
    return codes


def _from_code(codes: Lanes, dtype: DType) -> Lanes:
    one = codes.dtype.type(1)
    codes = codes + one
    if dtype.difference is not Difference.XOR:
        codes = (codes >> one) ^ np.negative(codes & one)
    return codes


def _gap_tokens(positions: Positions) -> Lanes:
    gaps = np.diff(positions, prepend=-1) - 1
    skips, rest = np.divmod(gaps, _SKIP)
    tokens = np.full(int(skips.sum()) + gaps.size, _SKIP, np.uint8)
    tokens[np.cumsum(skips + 1) - 1] = rest
    return tokens


def _positions(tokens: Lanes) -> Positions:
    named = tokens != _SKIP
    advance = tokens.astype(np.int64) + named
    positions: Positions = np.cumsum(advance)[named] - 1
    return positions


def byte_planes(lanes: Lanes) -> list[bytes]:
    """All low bytes, then all next bytes, …: one stream per byte of a lane."""
    planes = np.ascontiguousarray(lanes).view(np.uint8).reshape(-1, lanes.dtype.itemsize)
    return [np.ascontiguousarray(planes[:, i]).tobytes() for i in range(lanes.dtype.itemsize)]


def from_byte_planes(planes: tuple[bytes, ...], count: int, dtype: DType) -> Lanes:
    """The inverse of `byte_planes`; the lengths have been checked."""
    joined = np.empty((count, dtype.lane_bytes), np.uint8)
    for i, plane in enumerate(planes):
        joined[:, i] = np.frombuffer(plane, np.uint8)
    return joined.reshape(-1).view(UNSIGNED[dtype.lane_bytes])
