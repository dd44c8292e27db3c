"""The loops behind `deltad.delta.quant.fast`, compiled by numba. Importing this module imports numba.

Each kernel writes into arrays that its caller made, checks nothing and holds no lock while it runs. The
compiled code is kept beside this file (or in `NUMBA_CACHE_DIR`). Fast-math stays off: the bytes are those of
IEEE 754 float32, and the loops are written without branches so that they become vector instructions anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

P = ParamSpec("P")
R = TypeVar("R")
Array = npt.NDArray[Any]


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as machine code that runs without the interpreter's lock; compiled on its first call."""
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as part of the loop that calls it, which may then become vector instructions."""
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True, error_model="numpy", inline="always")(function))


@inlined
def f32_pattern(lane: Any, lane_bytes: int) -> Any:
    """A lane of either width as a float32 pattern; the width is known when this is compiled."""
    return np.uint32(np.uint32(lane) << np.uint32(32 - 8 * lane_bytes))


@inlined
def e4m3(pattern: Any) -> Any:
    """`element.encode` to E4M3 for one float32 pattern.

    Adding 2¹⁴, whose last bit is worth 2⁻⁹, makes the float unit round a subnormal result as it must be.
    """
    magnitude = np.uint32(pattern & np.uint32(0x7FFFFFFF))
    even = np.uint32(magnitude >> np.uint32(20)) & np.uint32(1)
    normal = np.uint32(np.uint32(magnitude + np.uint32(0x7FFFF) + even) >> np.uint32(20)) - np.uint32(120 << 3)
    subnormal = np.float32(magnitude.view(np.float32) + np.float32(2**14)).view(np.uint32) - np.uint32(0x46800000)
    code = min(np.uint32(subnormal if magnitude < np.uint32(121 << 23) else normal), np.uint32(0x7E))
    signed = np.uint32(code | np.uint32(np.uint32(pattern >> np.uint32(24)) & np.uint32(0x80)))
    return np.uint32(0x7F) if magnitude > np.uint32(0x7F800000) else signed


@inlined
def e2m1(pattern: Any) -> Any:
    """`element.encode` to E2M1 for one float32 pattern; here 2²² has a last bit worth 0.5."""
    magnitude = np.uint32(pattern & np.uint32(0x7FFFFFFF))
    even = np.uint32(magnitude >> np.uint32(22)) & np.uint32(1)
    normal = np.uint32(np.uint32(magnitude + np.uint32(0x1FFFFF) + even) >> np.uint32(22)) - np.uint32(126 << 1)
    subnormal = np.float32(magnitude.view(np.float32) + np.float32(2**22)).view(np.uint32) - np.uint32(0x4A800000)
    code = min(np.uint32(subnormal if magnitude < np.uint32(127 << 23) else normal), np.uint32(7))
    return np.uint32(code | np.uint32(np.uint32(pattern >> np.uint32(28)) & np.uint32(8)))


@inlined
def product(pattern: Any, factor: Any) -> Any:
    """The pattern of one float32 product."""
    return np.float32(np.uint32(pattern).view(np.float32) * factor).view(np.uint32)


@compiled
def round_to_bf16(lanes: Array, result: Array) -> None:
    for i in range(lanes.size):
        lane = lanes[i]
        top = lane >> np.uint32(16)
        rounded = (lane + (np.uint32(0x7FFF) + (top & np.uint32(1)))) >> np.uint32(16)
        nan = lane & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
        result[i] = np.uint16(top | np.uint32(0x40) if nan else rounded)


@compiled
def largest_finite(lanes: Array) -> Any:
    result = np.uint32(0)
    for i in range(lanes.size):
        magnitude = f32_pattern(lanes[i], lanes.itemsize) & np.uint32(0x7FFFFFFF)
        result = max(result, magnitude if magnitude < np.uint32(0x7F800000) else np.uint32(0))
    return result


@compiled
def scaled(lanes: Array, factor: Any, codes: Array) -> None:
    for i in range(lanes.size):
        codes[i] = np.uint8(e4m3(product(f32_pattern(lanes[i], lanes.itemsize), factor)))


@compiled
def cast_e4m3(lanes: Array, codes: Array) -> None:
    for i in range(lanes.size):
        codes[i] = np.uint8(e4m3(f32_pattern(lanes[i], lanes.itemsize)))


@compiled
def largest_of_blocks(stripe: Array, side: int, result: Array) -> None:
    """The largest finite magnitudes of the blocks in a stripe of at most `side` rows, into zeros."""
    for row in range(stripe.shape[0]):
        for block in range(result.size):
            most = largest_finite(stripe[row, block * side : (block + 1) * side])
            result[block] = max(result[block], most)


@compiled
def scaled_blocks(stripe: Array, side: int, factors: Array, codes: Array) -> None:
    for row in range(stripe.shape[0]):
        for block in range(factors.size):
            part = slice(block * side, (block + 1) * side)
            scaled(stripe[row, part], factors[block], codes[row, part])


@inlined
def number(value: Any) -> Any:
    """The float32 pattern of a float64, with one pattern for all NaNs."""
    pattern = np.float32(value).view(np.uint32)
    return np.uint32(0x7FC00000) if pattern & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else pattern


@inlined
def block_scale(lanes: Array, block: int, top: Any) -> Any:
    """The e8m0 scale of one row of 32; `top` is the exponent of the largest power of two of the elements."""
    most = np.uint32(0)
    for i in range(32):
        most = max(most, np.uint32(f32_pattern(lanes[block, i], lanes.itemsize) & np.uint32(0x7FFFFFFF)))
    exponent = np.uint32(most >> np.uint32(23))
    return np.uint8(255) if exponent == 255 else np.uint8(max(exponent, top) - top)


@inlined
def reciprocal_of(scale: Any) -> Any:
    """2^(127 − scale), for a scale of at most 252."""
    return np.uint32((np.uint32(254) - min(np.uint32(scale), np.uint32(252))) << np.uint32(23)).view(np.float32)


@compiled
def mxfp8(lanes: Array, codes: Array, scales: Array) -> None:
    for block in range(scales.size):
        scales[block] = block_scale(lanes, block, np.uint32(8))
        factor = reciprocal_of(scales[block])
        for i in range(32):
            codes[block, i] = np.uint8(e4m3(product(f32_pattern(lanes[block, i], lanes.itemsize), factor)))
        if scales[block] == 255:
            codes[block] = 0x7F


@compiled
def mxfp4(lanes: Array, packed: Array, scales: Array) -> None:
    codes = np.empty(32, np.uint8)  # apart from the packing, so that both loops become vector instructions
    for block in range(scales.size):
        scales[block] = block_scale(lanes, block, np.uint32(2))
        factor = reciprocal_of(scales[block])
        for i in range(32):
            codes[i] = np.uint8(e2m1(product(f32_pattern(lanes[block, i], lanes.itemsize), factor)))
        for i in range(16):
            packed[block, i] = codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4))
        if scales[block] == 255:
            packed[block] = 0


@compiled
def mxfp8_values(codes: Array, scales: Array, values: Array, powers: Array, lanes: Array) -> None:
    for block in range(scales.size):
        power = powers[scales[block]]
        for i in range(32):
            lanes[block, i] = number(values[codes[block, i]] * power)


@compiled
def mxfp4_values(packed: Array, scales: Array, values: Array, powers: Array, lanes: Array) -> None:
    for block in range(scales.size):
        power = powers[scales[block]]
        for i in range(16):
            lanes[block, 2 * i] = number(values[packed[block, i] & np.uint8(15)] * power)
            lanes[block, 2 * i + 1] = number(values[packed[block, i] >> np.uint8(4)] * power)
