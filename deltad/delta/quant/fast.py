"""The quantisers compiled: the names, the contracts and the bytes of `bf16`, `fp8` and `mx`, at memory speed.

numba is imported and its code loaded on the first call, never by an import. Each call runs on one thread and
without the interpreter's lock, so a caller that wants more threads feeds windows from several. Lanes that are
not contiguous are copied first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.quant import fp8, mx
from deltad.delta.quant.element import E2M1, E4M3, Codes, Lanes
from deltad.delta.quant.fp8 import dequantise, dequantise_blocks, f32_from_e4m3

__all__ = [
    "bf16_from_f32",
    "dequantise",
    "dequantise_blocks",
    "dequantise_mxfp4",
    "dequantise_mxfp8",
    "e4m3_from_float",
    "f32_from_e4m3",
    "largest",
    "quantise",
    "quantise_blocks",
    "quantise_mxfp4",
    "quantise_mxfp8",
    "quantise_tensor",
]

_E4M3_VALUES = E4M3.values().astype(np.float64)
_E2M1_VALUES = E2M1.values().astype(np.float64)
_POWERS = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)
"""The value of each e8m0 scale."""


def bf16_from_f32(lanes: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """`bf16.bf16_from_f32`."""
    from deltad.delta.quant import kernels

    if lanes.dtype != np.uint32:
        raise ValueError(f"expected uint32 lanes, found {lanes.dtype}")
    result = np.empty(lanes.shape, np.uint16)
    kernels.round_to_bf16(_flat(lanes), result.reshape(-1))
    return result


def e4m3_from_float(lanes: Lanes) -> Codes:
    """`fp8.e4m3_from_float`."""
    from deltad.delta.quant import kernels

    codes = np.empty(lanes.shape, np.uint8)
    kernels.cast_e4m3(_flat(lanes), codes.reshape(-1))
    return codes


def largest(lanes: Lanes) -> np.uint32:
    """`fp8.largest`."""
    from deltad.delta.quant import kernels

    return np.uint32(kernels.largest_finite(_flat(lanes)))


def quantise(lanes: Lanes, scale: np.uint32) -> Codes:
    """`fp8.quantise`."""
    from deltad.delta.quant import kernels

    factor = np.float32(fp8.reciprocals(np.asarray(scale))[()])
    codes = np.empty(lanes.shape, np.uint8)
    kernels.scaled(_flat(lanes), factor, codes.reshape(-1))
    return codes


def quantise_tensor(lanes: Lanes) -> tuple[Codes, np.uint32]:
    """`fp8.quantise_tensor`."""
    scale = np.uint32(fp8.scales_for(np.asarray(largest(lanes)))[()])
    return quantise(lanes, scale), scale


def quantise_blocks(lanes: Lanes) -> tuple[Codes, npt.NDArray[np.uint32]]:
    """`fp8.quantise_blocks`."""
    from deltad.delta.quant import kernels

    fp8.check_matrix(lanes)
    matrix = _flat(lanes).reshape(lanes.shape)
    codes = np.empty(lanes.shape, np.uint8)
    scales = np.zeros((fp8.blocks(lanes.shape[0]), fp8.blocks(lanes.shape[1])), np.uint32)
    for stripe in range(scales.shape[0]):
        part = slice(stripe * fp8.BLOCK, (stripe + 1) * fp8.BLOCK)  # still in the cache for the second pass
        kernels.largest_of_blocks(matrix[part], fp8.BLOCK, scales[stripe])
        scales[stripe] = fp8.scales_for(scales[stripe])
        kernels.scaled_blocks(matrix[part], fp8.BLOCK, fp8.reciprocals(scales[stripe]), codes[part])
    return codes, scales


def quantise_mxfp8(lanes: Lanes) -> tuple[Codes, Codes]:
    """`mx.quantise_mxfp8`."""
    from deltad.delta.quant import kernels

    mx.check_whole_blocks(lanes)
    codes = np.empty(lanes.shape, np.uint8)
    scales = np.empty((*lanes.shape[:-1], lanes.shape[-1] // mx.BLOCK), np.uint8)
    kernels.mxfp8(_flat(lanes).reshape(-1, mx.BLOCK), codes.reshape(-1, mx.BLOCK), scales.reshape(-1))
    return codes, scales


def dequantise_mxfp8(codes: Codes, scales: Codes) -> npt.NDArray[np.uint32]:
    """`mx.dequantise_mxfp8`."""
    from deltad.delta.quant import kernels

    mx.check_scales(codes, scales, mx.BLOCK)
    lanes = np.empty(codes.shape, np.uint32)
    blocks = _readable(codes).reshape(-1, mx.BLOCK)
    flat = _readable(scales)
    kernels.mxfp8_values(blocks, flat, _E4M3_VALUES, _POWERS, lanes.reshape(-1, mx.BLOCK))
    return lanes


def quantise_mxfp4(lanes: Lanes) -> tuple[Codes, Codes]:
    """`mx.quantise_mxfp4`."""
    from deltad.delta.quant import kernels

    mx.check_whole_blocks(lanes)
    packed = np.empty((*lanes.shape[:-1], lanes.shape[-1] // 2), np.uint8)
    scales = np.empty((*lanes.shape[:-1], lanes.shape[-1] // mx.BLOCK), np.uint8)
    kernels.mxfp4(_flat(lanes).reshape(-1, mx.BLOCK), packed.reshape(-1, mx.BLOCK // 2), scales.reshape(-1))
    return packed, scales


def dequantise_mxfp4(packed: Codes, scales: Codes) -> npt.NDArray[np.uint32]:
    """`mx.dequantise_mxfp4`."""
    from deltad.delta.quant import kernels

    mx.check_scales(packed, scales, mx.BLOCK // 2)
    lanes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint32)
    blocks = _readable(packed).reshape(-1, mx.BLOCK // 2)
    flat = _readable(scales)
    kernels.mxfp4_values(blocks, flat, _E2M1_VALUES, _POWERS, lanes.reshape(-1, mx.BLOCK))
    return lanes


def _flat(lanes: Lanes) -> Lanes:
    """Lanes of a width that the kernels know, ready for them."""
    if lanes.dtype not in (np.uint32, np.uint16):
        raise ValueError(f"expected uint32 (float32) or uint16 (bfloat16) lanes, found {lanes.dtype}")
    return _readable(lanes)


def _readable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A contiguous, one-dimensional view or copy, always read-only.

    A mapped checkpoint is read-only, which is another type to numba: so there is one kind to compile for.
    """
    view = np.ascontiguousarray(array).reshape(-1).view()
    view.flags.writeable = False
    return view
