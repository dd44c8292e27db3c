"""Small float formats and the cast into them, shared by everything that quantises.

A *code* is the bit pattern of one small float in a uint8. The cast uses integers only. The formats and the
rules come from two specifications of the Open Compute Project: "OCP 8-bit Floating Point Specification
(OFP8)", revision 1.0, for e4m3, and "OCP Microscaling Formats (MX) Specification", version 1.0, for e2m1
(§5.3.3) and e8m0 (§5.4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.quant.bf16 import f32_from_bf16

Lanes = npt.NDArray[Any]
"""uint32 patterns of float32 or uint16 patterns of bfloat16, of any shape."""
Codes = npt.NDArray[np.uint8]

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
QUIET_NAN = np.uint32(0x7FC00000)

BATCH_LANES = 1 << 17
"""How many lanes the reference works on at a time, so that its temporaries stay within a core's cache."""


@dataclass(frozen=True, slots=True)
class Element:
    """A float format of at most 8 bits, without infinities: sign, exponent, mantissa from the top down."""

    name: str
    mantissa_bits: int
    bias: int
    top: int
    """The code of the largest finite value."""
    nan: int | None
    """The code that a NaN becomes; None where the format has none."""
    sign: int
    """The sign bit of a code."""

    @property
    def first_exponent(self) -> int:
        """The biased float32 exponent of the smallest normal value."""
        return 128 - self.bias

    @property
    def top_exponent(self) -> int:
        """The exponent of the largest finite value: emax_elem in OCP MX."""
        return (self.top >> self.mantissa_bits) - self.bias

    def values(self) -> npt.NDArray[np.float32]:
        """The value of each code, in the order of the codes; exact. All that is above `top` is NaN."""
        magnitude = np.arange(self.sign)
        exponent = np.maximum(magnitude >> self.mantissa_bits, 1)
        fraction = magnitude & ((1 << self.mantissa_bits) - 1)
        hidden = np.where(magnitude >> self.mantissa_bits > 0, 1 << self.mantissa_bits, 0)
        value = np.ldexp((hidden + fraction).astype(np.float32), exponent - self.bias - self.mantissa_bits)
        value[magnitude > self.top] = QUIET_NAN.view(np.float32)
        return np.concatenate([value, -value])


E4M3 = Element("e4m3", mantissa_bits=3, bias=7, top=0x7E, nan=0x7F, sign=0x80)
"""OFP8 E4M3, torch's float8_e4m3fn: no infinities, NaN is S.1111.111, largest value 448, smallest 2⁻⁹."""
E2M1 = Element("e2m1", mantissa_bits=1, bias=1, top=0x7, nan=None, sign=0x8)
"""OCP MX FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; neither infinities nor NaN."""


def widen(lanes: Lanes) -> npt.NDArray[np.uint32]:
    """float32 patterns as they are, bfloat16 patterns as the float32 patterns of the same numbers."""
    if lanes.dtype == np.uint16:
        return f32_from_bf16(lanes)
    if lanes.dtype != np.uint32:
        raise ValueError(f"expected uint32 (float32) or uint16 (bfloat16) lanes, found {lanes.dtype}")
    return lanes


def check_codes(codes: npt.NDArray[Any]) -> None:
    """Raises ValueError unless `codes` are bytes."""
    if codes.dtype != np.uint8:
        raise ValueError(f"expected uint8 codes, found {codes.dtype}")


def encode(lanes: npt.NDArray[np.uint32], element: Element) -> Codes:
    """float32 patterns of any shape to codes, one a byte: to nearest, ties to even, saturating.

    What lies beyond the largest finite value becomes that value, ±infinity included: OFP8's conversion in
    saturating mode, and the clamp of OCP MX §6.3. Subnormal codes are rounded as exactly as normal ones. The
    sign is kept, also that of −0 and of what rounds to zero. A NaN becomes `element.nan`, without its sign:
    IEEE 754 leaves that sign open and machines differ in it. To a format without NaN give none.
    """
    magnitude = lanes & MAGNITUDE
    exponent = magnitude >> np.uint32(23)
    first = np.uint32(element.first_exponent)
    bits = np.uint32(element.mantissa_bits)
    # A value below the smallest normal loses one more bit per binade. From 25 bits on nothing is left; the
    # bound also covers float32's own subnormals, whose hidden bit is not there.
    lost = np.minimum(np.uint32(23) - bits + (first - np.minimum(exponent, first)), np.uint32(25))
    significand = (magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    even = (significand >> lost) & np.uint32(1)
    kept = (significand + ((np.uint32(1) << (lost - np.uint32(1))) - np.uint32(1) + even)) >> lost
    # The hidden bit, where it was kept, adds 1 to the exponent field; so does a carry out of the mantissa.
    code = np.minimum(kept + ((np.maximum(exponent, first) - first) << bits), np.uint32(element.top))
    code |= np.where(lanes >= SIGN, np.uint32(element.sign), np.uint32(0))
    if element.nan is not None:
        code = np.where(magnitude > INFINITY, np.uint32(element.nan), code)
    result: Codes = code.astype(np.uint8)
    return result
