"""Casts between float32 and bfloat16, on bit patterns.

The one cast that deltad makes by itself is float32 → bfloat16, and only where `publish_as = "bf16"` asks
for it. Owns one invariant: the result depends on the bits of the element alone, so that a window, a
shard or a device gives the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK_LANES = 1 << 18  # bounds the temporaries to a few MiB, within a core's cache


def bf16_from_f32(lanes: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """float32 patterns (uint32, one dimension) rounded to bfloat16 patterns, to nearest, ties to even.

    Denormals are rounded like any number, what is beyond the largest finite bfloat16 by half a step or
    more becomes infinity, and signs of zero survive. A NaN stays a NaN: it keeps its sign and the top of
    its payload, and becomes quiet.
    """
    if lanes.dtype != np.uint32:
        raise ValueError(f"expected uint32 lanes, found {lanes.dtype}")
    result = np.empty(lanes.shape, np.uint16)
    for start in range(0, lanes.size, _BLOCK_LANES):
        block = lanes[start : start + _BLOCK_LANES]
        top = block >> np.uint32(16)
        # Half a step, less one where the kept part is even, carries exactly when it must. Only a NaN can
        # run over 32 bits, and NaNs are replaced below.
        rounded = (block + (np.uint32(0x7FFF) + (top & np.uint32(1)))) >> np.uint32(16)
        nan = (block & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        np.copyto(rounded, top | np.uint32(0x0040), where=nan)
        result[start : start + _BLOCK_LANES] = rounded
    return result


def f32_from_bf16(lanes: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """bfloat16 patterns (uint16, any shape) as float32 patterns; exact, NaN payloads included."""
    if lanes.dtype != np.uint16:
        raise ValueError(f"expected uint16 lanes, found {lanes.dtype}")
    return lanes.astype(np.uint32) << np.uint32(16)
