"""MXFP8 and MXFP4: blocks of 32 elements along the last axis, with one power of two as their scale.

The scale X is an e8m0 byte c, meaning 2^(c − 127); 255 is NaN. Three rules make the bytes, after the "OCP
Microscaling Formats (MX) Specification", version 1.0:

1. §6.3: X is the largest power of two that is not above the largest magnitude of the block, divided by the
   largest power of two of the element format (2⁸ for e4m3, 2² for e2m1): floor(log₂ amax) − emax_elem. On
   patterns that is c = (float32's biased exponent of amax) − emax_elem: no logarithm and no rounding.
2. §6.3: each element is V / X in the element format, to nearest, ties to even; what lies beyond the largest
   normal number is clamped to it, so up to a factor of 8/7 (e4m3) or 4/3 (e2m1) above it. −0 is kept.
   V · 2^(127 − c) is one float32 multiplication, exact but for products that round to zero in any case.
3. What §6.3 leaves open: a scale below 2⁻¹²⁷, that of a block of zeros included, becomes 2⁻¹²⁷ (c = 0); one
   above 2¹²⁷ cannot come from float32. A block that holds a NaN or an infinity gets c = 255, which makes all
   its 32 values NaN (§5.1), and elements 0x7F (e4m3) or 0 (e2m1, which has no NaN): 32 NaNs are noticed, a
   clamped infinity would be served.

Lanes may have any number of axes; the last must be a multiple of 32. Any window of whole blocks gives the
bytes of the whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.quant.element import (
    BATCH_LANES,
    E2M1,
    E4M3,
    MAGNITUDE,
    QUIET_NAN,
    Codes,
    Element,
    Lanes,
    check_codes,
    encode,
    widen,
)

BLOCK = 32
"""Elements that share a scale."""
NAN_SCALE = 255

_E4M3_VALUES = E4M3.values()
_E2M1_VALUES = E2M1.values()


def quantise_mxfp8(lanes: Lanes) -> tuple[Codes, Codes]:
    """Lanes of shape […, n] to e4m3 codes of that shape and e8m0 scales of shape […, n / 32]."""
    return _quantised(lanes, E4M3)


def dequantise_mxfp8(codes: Codes, scales: Codes) -> npt.NDArray[np.uint32]:
    """float32 patterns of element · scale: exact, but infinite beyond float32; every NaN is 0x7FC00000."""
    check_scales(codes, scales, BLOCK)
    return _scaled_up(_E4M3_VALUES[codes], scales)


def quantise_mxfp4(lanes: Lanes) -> tuple[Codes, Codes]:
    """Lanes of shape […, n] to packed e2m1 codes, […, n / 2], and e8m0 scales, […, n / 32].

    Two codes a byte, the element of the lower index in the low half: torch's float4_e2m1fn_x2.
    """
    codes, scales = _quantised(lanes, E2M1)
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4), scales


def dequantise_mxfp4(packed: Codes, scales: Codes) -> npt.NDArray[np.uint32]:
    """float32 patterns, […, n], of packed codes, […, n / 2]; by the arithmetic of `dequantise_mxfp8`."""
    check_scales(packed, scales, BLOCK // 2)
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return _scaled_up(_E2M1_VALUES[codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)], scales)


def check_whole_blocks(lanes: npt.NDArray[Any]) -> None:
    """Raises ValueError unless the last axis is a multiple of 32."""
    if lanes.ndim < 1 or lanes.shape[-1] % BLOCK:
        raise ValueError(f"expected whole blocks of {BLOCK} lanes along the last axis, found shape {lanes.shape}")


def check_scales(codes: npt.NDArray[Any], scales: npt.NDArray[Any], block_bytes: int) -> None:
    """Raises ValueError unless `scales` are those of `codes`, a block of which has `block_bytes` bytes."""
    check_codes(codes)
    check_codes(scales)
    if codes.ndim < 1 or codes.shape != (*scales.shape[:-1], scales.shape[-1] * block_bytes):
        raise ValueError(f"expected a scale for each {block_bytes} codes, found {scales.shape} for {codes.shape}")


def _quantised(lanes: Lanes, element: Element) -> tuple[Codes, Codes]:
    check_whole_blocks(lanes)
    flat = lanes.reshape(-1, BLOCK)
    codes = np.empty(flat.shape, np.uint8)
    scales = np.empty(flat.shape[0], np.uint8)
    batch = BATCH_LANES // BLOCK
    for start in range(0, flat.shape[0], batch):
        part = slice(start, start + batch)
        codes[part], scales[part] = _quantised_blocks(widen(flat[part]), element)
    return codes.reshape(lanes.shape), scales.reshape(*lanes.shape[:-1], lanes.shape[-1] // BLOCK)


def _quantised_blocks(wide: npt.NDArray[np.uint32], element: Element) -> tuple[Codes, Codes]:
    top = np.uint32(element.top_exponent)
    exponent = (wide & MAGNITUDE).max(axis=1) >> np.uint32(23)
    broken = exponent == 255
    scale = np.maximum(exponent, top) - top
    scale[broken] = NAN_SCALE
    factor = (np.uint32(254) - np.minimum(scale, np.uint32(252))) << np.uint32(23)  # the pattern of 1 / X
    with np.errstate(all="ignore"):  # broken blocks may do anything here
        codes = encode((wide.view(np.float32) * factor.view(np.float32)[:, None]).view(np.uint32), element)
    codes[broken] = element.nan or 0
    return codes, scale.astype(np.uint8)


def _scaled_up(values: npt.NDArray[np.float32], scales: Codes) -> npt.NDArray[np.uint32]:
    # float64 holds every product exactly, so that there is one rounding, and none that hurts.
    with np.errstate(over="ignore"):
        power = np.ldexp(1.0, scales.astype(np.int32) - 127)
        product = (values.reshape(*scales.shape, BLOCK) * power[..., None]).astype(np.float32).view(np.uint32)
    product[scales == NAN_SCALE] = QUIET_NAN
    product[np.isnan(product.view(np.float32))] = QUIET_NAN
    return product.reshape(values.shape)
