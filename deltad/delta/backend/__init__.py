"""The operations that have several implementations, and how one is chosen.

All backends give the same bytes and the same arrays; `numpy` is the reference that the others are
tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltad.types import DType

Lanes = npt.NDArray[Any]
"""A one-dimensional array of unsigned integers of the dtype's lane width."""
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed lanes: ascending positions and, for each, the group difference from old to new."""

    positions: Positions
    differences: Lanes


class Backend(Protocol):
    """Scan and encode, decode, apply. Arrays are one-dimensional and contiguous unless said otherwise."""

    name: str

    def scan(self, old: Lanes, new: Lanes, dtype: DType) -> Changes:
        """The lanes whose bits differ."""

    def encode(self, changes: Changes, dtype: DType) -> list[bytes]:
        """The plain streams of the blind coder: gap tokens, then one byte plane per lane byte."""

    def decode(self, streams: tuple[bytes, ...], changed: int, lanes: int, dtype: DType) -> Changes:
        """The inverse of `encode`. Raises FormatError if a position falls outside `lanes`."""

    def apply(self, target: Lanes, changes: Changes, dtype: DType) -> tuple[Lanes, Lanes]:
        """Write old ∘ difference in place (any strides); returns the old and the new lanes."""


def choose(kind: str = "auto") -> Backend:
    """The backend named in the configuration. Raises ConfigError for one that is not built in."""
    from deltad.delta.backend.numpy import NumpyBackend
    from deltad.errors import ConfigError

    if kind not in ("auto", "numpy"):
        raise ConfigError(f"[backend] kind = {kind!r}", expected="auto or numpy")
    return NumpyBackend()
