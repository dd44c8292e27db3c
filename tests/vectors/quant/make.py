"""Writes the vectors of the quantisers: `python -m tests.vectors.quant.make`, from the numpy reference.

One JSON file a format. A case holds its input, its codes and its scales, each as {"shape", "lane_bytes",
"data"}: little-endian lanes in base64. Input lanes of 4 bytes are float32, of 2 bytes bfloat16; scales of 4
bytes are float32, of 1 byte e8m0. Inputs come from a counter and integer arithmetic, so the command gives the
same files everywhere.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deltad.delta.quant import fp8, mx

DIRECTORY = Path(__file__).parent
FORMATS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "fp8_tensor": fp8.quantise_tensor,
    "fp8_block128": fp8.quantise_blocks,
    "mxfp8": mx.quantise_mxfp8,
    "mxfp4": mx.quantise_mxfp4,
}


def noise(count: int) -> np.ndarray:
    """32 well mixed bits for each counter: the finaliser of MurmurHash3."""
    x = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def weights(shape: tuple[int, ...], binades: int = 12, top: int = 0x7B) -> np.ndarray:
    """float32 patterns of random sign and mantissa, over `binades` exponents of which `top` is the highest."""
    bits = noise(int(np.prod(shape)))
    exponent = np.uint32(top) - (bits >> np.uint32(23)) % np.uint32(binades)
    return ((bits & np.uint32(0x807FFFFF)) | exponent << np.uint32(23)).reshape(shape)


def inputs(name: str) -> dict[str, np.ndarray]:
    """The input of each case of one format, by the name of the case."""
    shape = (130, 132) if name == "fp8_block128" else (3, 256)
    plain = weights(shape)
    special = weights((2, 256))
    special[0, :8] = [0, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x33800000, 0xB3800000]
    broken = weights((4, 64))
    broken[0, 5], broken[1, 40], broken[2, 0], broken[3, 63] = 0x7FC00000, 0x7F800000, 0xFF800000, 0xFF800001
    values = np.ldexp(np.arange(-128, 128) / 16.0, 5).astype(np.float32).view(np.uint32)
    ties = np.stack([values, (values.view(np.float32) / 64).view(np.uint32)])
    return {
        "bfloat16": (plain >> np.uint32(16)).astype(np.uint16),
        "float32": weights((3, 256)),
        "signs of zero and subnormals": special,
        "NaN and infinities": broken,
        "ties": ties,
        "zeros": np.tile(np.array([0, 0x8000], np.uint16), (2, 16)),
        "smallest": weights((2, 64), binades=11, top=0x0A),
        "largest": weights((2, 64), top=0xFE),
        "wide": noise(256).reshape(2, 128) & np.uint32(0xBFFFFFFF),
    }


def packed(array: Any) -> dict[str, Any]:
    array = np.asarray(array)
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return {"shape": list(array.shape), "lane_bytes": array.dtype.itemsize, "data": data}


def unpacked(field: dict[str, Any]) -> np.ndarray:
    data = np.frombuffer(base64.b64decode(field["data"]), f"<u{field['lane_bytes']}")
    return data.astype(data.dtype.newbyteorder("=")).reshape(field["shape"])


def file_of(name: str) -> Path:
    return DIRECTORY / f"{name}.json"


def content(name: str) -> str:
    cases = []
    for case, lanes in inputs(name).items():
        codes, scales = FORMATS[name](lanes)
        cases.append({"case": case, "input": packed(lanes), "codes": packed(codes), "scales": packed(scales)})
    return json.dumps({"format": name, "cases": cases}, indent=1) + "\n"


if __name__ == "__main__":
    for name in FORMATS:
        file_of(name).write_text(content(name))
