"""A GPU as far as its backend shows it: right answers, and DeviceError in any call that a test wants lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltad.delta.backend import Backend, Changes, EncodedFrame, Lanes, Mode, Place, Segments, Stream
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.coding import Coding
from deltad.delta.digest import U64
from deltad.errors import DeviceError
from deltad.types import DType


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeDevice:
    """Implements `deltad.delta.backend.Backend` as `cupy`; `fails` is asked before each call, by its number from 0.

    `costs` seconds pass on the clock for each lane that it encodes.
    """

    name = "cupy"

    def __init__(
        self,
        fails: Callable[[int], bool] = lambda number: False,
        *,
        works_as: Backend | None = None,
        clock: Clock | None = None,
        costs: float = 0.0,
    ) -> None:
        self.calls = 0
        self._fails = fails
        self._backend = works_as or NumpyBackend()
        self._clock = clock or Clock()
        self._costs = costs

    def _begin(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        if self._fails(number):
            raise DeviceError("GPU 0", found=f"lost in call {number}")

    def encode(
        self, old: Segments, new: Segments, places: Sequence[Place], dtype: DType, mode: Mode
    ) -> EncodedFrame | None:
        self._begin()
        self._clock.now += self._costs * sum(segment.size for segment in old)
        return self._backend.encode(old, new, places, dtype, mode)

    def decode(self, coding: Coding, streams: Sequence[Stream], base: Segments | None, dtype: DType) -> Changes:
        self._begin()
        return self._backend.decode(coding, streams, base, dtype)

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        self._begin()
        return self._backend.apply(target, changes, dtype, seed)

    def decode_apply(  # noqa: PLR0917
        self,
        coding: Coding,
        check: U64,
        streams: Sequence[Stream],
        target: Segments,
        places: Sequence[Place],
        dtype: DType,
    ) -> U64:
        self._begin()
        return self._backend.decode_apply(coding, check, streams, target, places, dtype)

    def pack(self, lanes: Segments, dtype: DType) -> Sequence[Stream]:
        self._begin()
        return self._backend.pack(lanes, dtype)

    def unpack(self, streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
        self._begin()
        return self._backend.unpack(streams, lanes, dtype)

    def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
        self._begin()
        return self._backend.sum(lanes, places)
