"""Weights in memory, and strategies that draw them: every dtype, every shape, every bit pattern."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltad.delta.backend import Lanes
from deltad.delta.backend.numpy import UNSIGNED
from deltad.delta.layout import Layout, TensorSpec
from deltad.types import DTYPES, Difference


class ArrayWeights:
    """Implements `deltad.delta.codec.Weights` over one flat array of lanes per tensor."""

    def __init__(self, arrays: Sequence[Lanes]) -> None:
        self.arrays = list(arrays)
        self.released = 0

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        return self.arrays[tensor][start : start + count]

    def release(self, tensor: int, start: int, count: int) -> None:
        self.released += count

    def copy(self) -> ArrayWeights:
        return ArrayWeights([array.copy() for array in self.arrays])

    @classmethod
    def zeros(cls, layout: Layout) -> ArrayWeights:
        return cls([np.zeros(spec.lanes, UNSIGNED[spec.type.lane_bytes]) for spec in layout.tensors])

    @classmethod
    def random(cls, layout: Layout, seed: int = 0) -> ArrayWeights:
        rng = np.random.default_rng(seed)
        return cls(
            [
                rng.integers(0, 256, spec.bytes, dtype=np.uint8).view(UNSIGNED[spec.type.lane_bytes])
                for spec in layout.tensors
            ]
        )

    @classmethod
    def bell(cls, layout: Layout, seed: int = 0) -> ArrayWeights:
        """Weights that look like a model's: floats of a normal distribution, everything else small integers."""
        rng = np.random.default_rng(seed)
        arrays = []
        for spec in layout.tensors:
            width, lanes = spec.type.lane_bytes, rng.normal(0, 0.02, spec.lanes)
            if spec.type.difference is not Difference.LINE:
                arrays.append(rng.integers(0, 4, spec.lanes).astype(UNSIGNED[width]))
            elif spec.dtype == "F64":
                arrays.append(lanes.view(np.uint64))
            elif spec.dtype == "F16":
                arrays.append(lanes.astype(np.float16).view(np.uint16))
            else:
                arrays.append((lanes.astype(np.float32).view(np.uint32) >> (32 - 8 * width)).astype(UNSIGNED[width]))
        return cls(arrays)

    def changed(self, density: float, seed: int = 1) -> ArrayWeights:
        """A copy in which about `density` of the lanes, at least one a tensor, have other bits."""
        rng = np.random.default_rng(seed)
        after = self.copy()
        for array in after.arrays:
            if array.size:
                at = rng.choice(array.size, max(1, int(array.size * density)), replace=False)
                array[at] += rng.integers(1, 100, at.size).astype(array.dtype)
        return after

    def equals(self, other: ArrayWeights) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.arrays, other.arrays, strict=True))


SPECIAL_BITS = {
    1: [0x00, 0x80, 0x7F, 0xFF, 0x01, 0x81, 0x7E],
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x3F80],
    4: [0x00000000, 0x80000000, 0x7F800000, 0x7FC00001, 0xFFFFFFFF, 0x00000001, 0x80000001],
    8: [0x0, 0x8000000000000000, 0x7FF0000000000000, 0x7FF8000000000001, 0xFFFFFFFFFFFFFFFF, 0x1],
}
"""Zeros of both signs, infinities, quiet and signalling NaNs with payloads, denormals, by lane width."""


@st.composite
def layouts(draw: st.DrawFn, max_tensors: int = 4) -> Layout:
    """Layouts of any dtypes, with scalars and empty tensors among them."""
    specs = []
    for i in range(draw(st.integers(0, max_tensors))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=2))
        if DTYPES[dtype].bits % 8:
            shape.append(8)
        specs.append(TensorSpec(f"tensor.{i}", dtype, tuple(shape)))
    return Layout(1, tuple(specs))


@st.composite
def weights(draw: st.DrawFn, layout: Layout) -> ArrayWeights:
    """Any bits, the special ones often."""
    arrays = []
    for spec in layout.tensors:
        width = spec.type.lane_bytes
        values = st.one_of(st.sampled_from(SPECIAL_BITS[width]), st.integers(0, 2 ** (8 * width) - 1))
        arrays.append(draw(hnp.arrays(UNSIGNED[width], spec.lanes, elements=values)))
    return ArrayWeights(arrays)


LINE_TYPES = [dtype for dtype in DTYPES.values() if dtype.difference is Difference.LINE]
