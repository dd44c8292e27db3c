"""Changes of several deltas over the same lanes, joined into one list. Pure arithmetic on sorted positions.

All groups of differences commute, so nothing depends on the order of the parts. Costs what has changed, not what is
there: for where little has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltad.delta.backend import UNSIGNED, Changes, EncodedFrame
from deltad.delta.coding import Coder, Coding
from deltad.delta.difference import inverse, to_codes
from deltad.delta.symbols import encode_gaps, encode_values
from deltad.types import Difference, DType

SPARSE = 512
"""Where there is at most one change for so many lanes, sorting changes beats walking over lanes (measured)."""
_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)


def merge(parts: Sequence[Changes], dtype: DType) -> Changes:
    """What all parts, at least one, do together; what cancels out is left out. No part names a lane twice."""
    if len(parts) == 1:
        return parts[0]
    unsigned = UNSIGNED[dtype.lane_bytes]
    positions = np.concatenate([part.positions for part in parts])
    differences = np.concatenate([part.differences for part in parts])
    if dtype.lane_bytes <= 4:
        # Positions are below 2^30, so both fit one number, and numbers sort much faster than their order is found.
        keys = positions.astype(np.uint64) << _HALF
        keys |= differences
        keys.sort()
        positions = (keys >> _HALF).astype(np.int64)
        differences = (keys & _LOW).astype(unsigned)
    else:
        order = np.argsort(positions, kind="stable")
        positions, differences = positions[order], differences[order]
    firsts = np.flatnonzero(np.diff(positions, prepend=-1))
    add = np.bitwise_xor if dtype.difference is Difference.XOR else np.add
    joined = add.reduceat(differences, firsts, dtype=unsigned) if firsts.size else differences
    kept = np.flatnonzero(joined)
    return Changes(positions[firsts[kept]], joined[kept])


def invert(changes: Changes, dtype: DType) -> Changes:
    """What undoes the changes."""
    return Changes(changes.positions, inverse(changes.differences, dtype))


def cut(changes: Changes, start: int, end: int) -> Changes:
    """The changes of lanes `start` to `end`, counted from there."""
    begin, stop = np.searchsorted(changes.positions, (start, end))
    return Changes(changes.positions[begin:stop] - start, changes.differences[begin:stop])


def encode(changes: Changes, lanes: int, dtype: DType) -> EncodedFrame:
    """A blind frame of changes over `lanes` lanes. Its `changed` and `sums` are not filled in."""
    coding = Coding(Coder.BLIND, lanes, changes.positions.size)
    streams = [*encode_gaps(changes.positions), *encode_values(to_codes(changes.differences, dtype), dtype)]
    return EncodedFrame(coding, np.empty(0, np.int64), np.empty((0, 2), np.uint64), streams)
