"""FP8 e4m3 weights with float32 scales: one scale for a tensor, or one for each block of 128×128.

Scales are kept as uint32 patterns of float32, and multiply: value ≈ code · scale. Four rules make the bytes:

1. `amax` is the largest finite magnitude of the group, compared as integers. NaN and infinities do not count,
   so that one of them does not take its neighbours along.
2. scale = amax / 448, one float32 division to nearest even. Two exceptions: amax = 0 gives scale 1, and no
   scale is below 2⁻¹²⁶, the smallest normal float32, so that neither it nor its reciprocal leaves the normals.
3. reciprocal = 1 / scale, one float32 division a group; element · reciprocal, one float32 multiplication an
   element; both to nearest even. (A division per element would round some ties the other way.)
4. The product is cast as `element.encode` says: to nearest even, saturating at ±448, NaN to 0x7F, −0 kept.

Sources: e4m3 and its saturating cast, OCP OFP8 revision 1.0; the block layout, the notes on weight files of
DeepSeek-V3 (`weight_scale_inv`). The OFP8 text leaves the choice of scales open; rules 1 to 3 are ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.quant.element import (
    BATCH_LANES,
    E4M3,
    INFINITY,
    MAGNITUDE,
    QUIET_NAN,
    Codes,
    Lanes,
    check_codes,
    encode,
    widen,
)

BLOCK = 128
"""The side of a scale block, in elements."""
TOP = np.float32(448)
SMALLEST_SCALE = np.uint32(0x00800000)
LARGEST_SCALE = np.uint32(0x7E800000)
"""2⁻¹²⁶ and 2¹²⁶: between them a scale and its reciprocal are both normal numbers."""

_VALUES = E4M3.values()


def e4m3_from_float(lanes: Lanes) -> Codes:
    """float32 or bfloat16 lanes of any shape cast to e4m3 as they are: rule 4 without a scale."""
    codes = np.empty(lanes.size, np.uint8)
    flat = lanes.reshape(-1)
    for start in range(0, flat.size, BATCH_LANES):
        part = slice(start, start + BATCH_LANES)
        codes[part] = encode(widen(flat[part]), E4M3)
    return codes.reshape(lanes.shape)


def f32_from_e4m3(codes: Codes) -> npt.NDArray[np.uint32]:
    """e4m3 codes of any shape as float32 patterns; exact. NaN becomes 0x7FC00000, whatever its sign."""
    return dequantise(codes, np.uint32(0x3F800000))


def largest(lanes: Lanes) -> np.uint32:
    """The float32 pattern of the largest finite magnitude; 0 where there is none (rule 1).

    Windows of a tensor combine by `max`.
    """
    result = np.uint32(0)
    flat = lanes.reshape(-1)
    for start in range(0, flat.size, BATCH_LANES):
        result = max(result, _finite(widen(flat[start : start + BATCH_LANES])).max())
    return result


def scales_for(largest: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The scale pattern for each pattern of a largest finite magnitude, of any shape (rule 2)."""
    scales = (np.asarray(largest, np.uint32).view(np.float32) / TOP).view(np.uint32)
    scales = np.maximum(scales, SMALLEST_SCALE)
    return np.where(np.asarray(largest) == 0, np.float32(1).view(np.uint32), scales)


def quantise(lanes: Lanes, scale: np.uint32) -> Codes:
    """Lanes of any shape to codes, by one scale that is known already (rules 3 and 4).

    `scale` is a float32 pattern of 2⁻¹²⁶ to 2¹²⁶, as `scales_for` gives it; anything else is a ValueError.
    """
    factor = reciprocals(np.asarray(scale))
    codes = np.empty(lanes.size, np.uint8)
    flat = lanes.reshape(-1)
    for start in range(0, flat.size, BATCH_LANES):
        part = slice(start, start + BATCH_LANES)
        codes[part] = _scaled(widen(flat[part]), factor)
    return codes.reshape(lanes.shape)


def quantise_tensor(lanes: Lanes) -> tuple[Codes, np.uint32]:
    """A whole tensor to codes of its shape and its scale pattern.

    A tensor that is read in windows gives the same bytes: `largest` of every window, `scales_for` the
    largest of those, then `quantise` window by window.
    """
    scale = np.uint32(scales_for(np.asarray(largest(lanes)))[()])
    return quantise(lanes, scale), scale


def dequantise(codes: Codes, scale: np.uint32) -> npt.NDArray[np.uint32]:
    """Codes of any shape to float32 patterns: one float32 multiplication each, to nearest even.

    Every NaN, of the code or of the scale, becomes 0x7FC00000.
    """
    check_codes(codes)
    return _multiplied(_VALUES, np.asarray(scale, np.uint32))[codes]


def quantise_blocks(lanes: Lanes) -> tuple[Codes, npt.NDArray[np.uint32]]:
    """A matrix to codes of its shape and scales of shape [⌈rows / 128⌉, ⌈columns / 128⌉].

    A block at the right or lower edge is as small as what is left there; that equals the padding with zeros
    that DeepSeek-V3 describes, as zeros do not count for a scale. A matrix that is read in stripes gives the
    same bytes as long as every stripe but the last has a multiple of 128 rows; a stack of matrices is
    quantised matrix by matrix.
    """
    check_matrix(lanes)
    rows, columns = lanes.shape
    codes = np.empty(lanes.shape, np.uint8)
    scales = np.empty((blocks(rows), blocks(columns)), np.uint32)
    for stripe in range(scales.shape[0]):
        part = slice(stripe * BLOCK, (stripe + 1) * BLOCK)
        wide = widen(lanes[part])
        starts = np.arange(0, columns, BLOCK)
        scales[stripe] = scales_for(np.maximum.reduceat(_finite(wide).max(axis=0), starts)) if columns else 0
        codes[part] = _scaled(wide, np.repeat(reciprocals(scales[stripe]), BLOCK)[:columns])
    return codes, scales


def dequantise_blocks(codes: Codes, scales: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The inverse layout of `quantise_blocks`: float32 patterns, by the arithmetic of `dequantise`."""
    check_blocks(codes, scales)
    lanes = np.empty(codes.shape, np.uint32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = np.s_[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            lanes[part] = dequantise(codes[part], scales[row, column])
    return lanes


def blocks(extent: int) -> int:
    """How many blocks cover `extent` elements."""
    return -(-extent // BLOCK)


def reciprocals(scales: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """The factors of rule 3. Raises ValueError for a scale outside 2⁻¹²⁶ to 2¹²⁶."""
    if scales.dtype != np.uint32:
        raise ValueError(f"expected a scale as a uint32 pattern of float32, found {scales.dtype}")
    if np.any((scales < SMALLEST_SCALE) | (scales > LARGEST_SCALE)):
        raise ValueError(f"expected scales of 2**-126 to 2**126, found {scales.view(np.float32)}")
    return np.asarray(np.float32(1) / scales.view(np.float32))


def check_matrix(lanes: npt.NDArray[Any]) -> None:
    """Raises ValueError unless `lanes` have two dimensions."""
    if lanes.ndim != 2:
        raise ValueError(f"expected a matrix, found {lanes.ndim} dimensions")


def check_blocks(codes: npt.NDArray[Any], scales: npt.NDArray[Any]) -> None:
    """Raises ValueError unless `scales` are those of a matrix like `codes`."""
    check_codes(codes)
    check_matrix(codes)
    expected = (blocks(codes.shape[0]), blocks(codes.shape[1]))
    if scales.dtype != np.uint32 or scales.shape != expected:
        raise ValueError(f"expected uint32 scales of shape {expected}, found {scales.dtype} of {scales.shape}")


def _finite(wide: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Magnitude patterns, 0 in the place of NaN and infinity."""
    magnitude = wide & MAGNITUDE
    magnitude[magnitude >= INFINITY] = 0
    return magnitude


def _scaled(wide: npt.NDArray[np.uint32], factor: npt.NDArray[np.float32]) -> Codes:
    return encode(_multiplied(wide.view(np.float32), factor), E4M3)


def _multiplied(values: npt.NDArray[np.float32], factor: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Patterns of the float32 products; a NaN is 0x7FC00000, since machines differ in its sign and payload."""
    with np.errstate(all="ignore"):  # an infinity here is an answer, not an accident
        product = (values * factor.view(np.float32)).view(np.uint32)
    product[(product & MAGNITUDE) > INFINITY] = QUIET_NAN
    return product
