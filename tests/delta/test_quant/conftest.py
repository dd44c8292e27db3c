"""What the tests of the quantisers share: both implementations, an oracle that reads numbers, and inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltad.delta.quant import fast, fp8, mx
from deltad.delta.quant.element import Element

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)
REFERENCE = SimpleNamespace(**{**vars(fp8), **vars(mx)})


@pytest.fixture(params=[REFERENCE, fast], ids=["numpy", "numba"])
def quant(request: pytest.FixtureRequest) -> Any:
    """Something with the quantisers' functions: the reference, or its compiled twin."""
    return request.param


def patterns(numbers: Any) -> np.ndarray:
    """Numbers as float32 patterns."""
    return np.atleast_1d(np.asarray(numbers, np.float32)).view(np.uint32)


def numbers(lanes: np.ndarray) -> np.ndarray:
    """float32 or bfloat16 patterns as float32 numbers."""
    wide = lanes.astype(np.uint32) << np.uint32(16) if lanes.dtype == np.uint16 else lanes
    return wide.view(np.float32)


def nearest(values: np.ndarray, element: Element) -> np.ndarray:
    """The oracle: look each number up among all values of the format and take the nearer, ties to even codes."""
    table = element.values()[: element.top + 1].astype(np.float64)
    nan = np.isnan(values)
    magnitude = np.minimum(np.abs(np.where(nan, np.float32(0), values).astype(np.float64)), table[-1])
    above = np.searchsorted(table, magnitude)
    below = np.maximum(above - (table[above] != magnitude), 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = np.where(up < down, above, np.where(down < up, below, np.where(above % 2 == 0, above, below)))
    code |= np.where(np.signbit(values), element.sign, 0)
    return np.where(nan, element.nan or 0, code).astype(np.uint8)


def around(borders: np.ndarray) -> np.ndarray:
    """float32 patterns of both signs: each border and its two neighbours."""
    middle = patterns(borders).astype(np.int64)
    near = np.concatenate([middle - 1, middle, middle + 1])
    near = near[near >= 0].astype(np.uint32)
    return np.concatenate([near, near | np.uint32(0x80000000)])
