"""The group of differences on bit patterns, and the codes that spell its elements.

Each difference is the one group element that carries an old pattern to a new one (`deltad.types.Difference`
says which group). Elements of consecutive deltas join without the patterns they act on; that is what
folding and inverting rest on. A code is a spelling only: it must become a difference before it is joined.
"""

from __future__ import annotations

from deltad.delta.backend import Lanes
from deltad.types import Difference, DType


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
    negated: Lanes = 0 - differences
    return negated


def join(first: Lanes, second: Lanes, dtype: DType) -> Lanes:
    """The group element that does what `first` and then `second` do."""
    joined: Lanes = first ^ second if dtype.difference is Difference.XOR else first + second
    return joined


def adjusted(differences: Lanes, old: Lanes, dtype: DType) -> Lanes:
    """Differences as the context coder sees them: away from zero counts up, whatever the sign of `old`.

    Doing it twice restores them. Only lines have a zero to move away from.
    """
    if dtype.difference is not Difference.LINE:
        return differences
    negative = inverse(old >> old.dtype.type(8 * dtype.lane_bytes - 1), dtype)  # all ones or all zeros
    turned: Lanes = (differences ^ negative) - negative
    return turned


def to_codes(differences: Lanes, dtype: DType) -> Lanes:
    """Differences, none of them 0, to small non-negative codes: zigzag on the line, then minus 1."""
    one = differences.dtype.type(1)
    if dtype.difference is not Difference.XOR:
        sign = differences >> differences.dtype.type(dtype.lane_bytes * 8 - 1)
        differences = (differences << one) ^ (0 - sign)
    codes: Lanes = differences - one
    return codes


def from_codes(codes: Lanes, dtype: DType) -> Lanes:
    """The inverse of `to_codes`."""
    one = codes.dtype.type(1)
    codes = codes + one
    if dtype.difference is not Difference.XOR:
        codes = (codes >> one) ^ (0 - (codes & one))
    return codes


def _to_line(lanes: Lanes, dtype: DType) -> Lanes:
    """Sign-magnitude patterns to two's complement, where the floats are in ascending order.

    A negative pattern keeps its sign bit and has its magnitude bits flipped: a bijection on patterns,
    so NaN payloads, infinities and -0.0 are as good as any number.
    """
    if dtype.difference is Difference.RING:
        return lanes
    sign = lanes >> lanes.dtype.type(dtype.lane_bytes * 8 - 1)
    line: Lanes = lanes ^ ((0 - sign) >> lanes.dtype.type(1))
    return line


_from_line = _to_line  # the map is its own inverse: the sign bit never changes
