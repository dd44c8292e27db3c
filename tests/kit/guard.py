"""Memory whose surroundings tell whether anyone wrote there, and how much memory a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.kit.weights import ArrayWeights

ZONE_BYTES = 4096
_CANARY = 0xA5


class Guards:
    """Hands out arrays with a zone before and behind each that nobody may write to."""

    def __init__(self) -> None:
        self._zones: list[np.ndarray] = []
        self._kept: list[tuple[np.ndarray, bytes]] = []

    def around(self, data: np.ndarray) -> np.ndarray:
        """A copy of `data` that may be written to."""
        whole = np.full(2 * ZONE_BYTES + data.nbytes, _CANARY, np.uint8)
        self._zones += [whole[:ZONE_BYTES], whole[ZONE_BYTES + data.nbytes :]]
        array = whole[ZONE_BYTES : ZONE_BYTES + data.nbytes].view(data.dtype)
        array[:] = data
        return array

    def reading(self, data: np.ndarray | bytes) -> np.ndarray:
        """A copy of `data` that nobody may write to either."""
        array = self.around(np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data)
        self._kept.append((array, array.tobytes()))
        return array

    def weights(self, weights: ArrayWeights) -> ArrayWeights:
        """Weights each tensor of which lies between zones of its own."""
        return ArrayWeights([self.around(array) for array in weights.arrays])

    def check(self) -> None:
        """Raises AssertionError if anything was written that may not be."""
        assert all((zone == _CANARY).all() for zone in self._zones), "something was written outside"
        assert all(array.tobytes() == kept for array, kept in self._kept), "an input was written to"


@contextmanager
def at_most(count: int, what: object = "") -> Iterator[None]:
    """Raises AssertionError if more than `count` bytes are allocated within, at any one time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= count, f"{peak} bytes for {what}, and {count} are enough"
