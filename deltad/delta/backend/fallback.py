"""A GPU's backend that may fail at any call, beside the CPU's that takes over: no caller notices.

Both give the same bytes and write nothing when they raise, so the call that failed is simply made again.
A device that failed is left alone; it is opened anew when it has rested, each time longer, and idle calls
cost one comparison until then. Takes the time from its maker. Invariant: of a call that a CPU can answer,
DeviceError is never the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from deltad.delta.backend import Backend, Changes, EncodedFrame, Lanes, Mode, Place, Segments, Stream
from deltad.delta.coding import Coding
from deltad.delta.digest import U64
from deltad.errors import DeviceError
from deltad.types import DType

Answer = TypeVar("Answer")

FIRST_REST_SECONDS = 30.0
LONGEST_REST_SECONDS = 3600.0


def next_rest(last: float, worked: float) -> float:
    """How long a device is left alone, in seconds, that has just failed after it worked for `worked` seconds.

    `last` is how long it was left alone before that; 0 if it never was. Rests double until the device has
    worked for as long as it rested.
    """
    if worked >= last:
        return FIRST_REST_SECONDS
    return min(2 * last, LONGEST_REST_SECONDS)


@dataclass(frozen=True, slots=True)
class Switch:
    """Another backend computes from now on. `failed` names the one that failed; empty where a device is back."""

    backend: str
    reason: str
    failed: str = ""


class Fallback:
    """Implements `deltad.delta.backend.Backend`; any thread may call it.

    `reopen` opens the device anew and proves it, or raises DeviceError. `on_switch` is told once for each
    change, on the thread whose call met it. `now` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        device: Backend,
        cpu: Backend,
        *,
        reopen: Callable[[], Backend],
        now: Callable[[], float],
        on_switch: Callable[[Switch], None],
    ) -> None:
        self.cpu = cpu
        self._device: Backend | None = device
        self._reopen = reopen
        self._now = now
        self._on_switch = on_switch
        self._lock = Lock()
        self._since = now()  # when the device began to work or, while there is none, to rest
        self._rest = 0.0
        self._reopening = False

    @property
    def name(self) -> str:
        """The name of the backend that computes now."""
        device = self._device
        return self.cpu.name if device is None else device.name

    def encode(
        self, old: Segments, new: Segments, places: Sequence[Place], dtype: DType, mode: Mode
    ) -> EncodedFrame | None:
        return self._answer(lambda backend: backend.encode(old, new, places, dtype, mode))

    def decode(self, coding: Coding, streams: Sequence[Stream], base: Segments | None, dtype: DType) -> Changes:
        return self._answer(lambda backend: backend.decode(coding, streams, base, dtype))

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        return self._answer(lambda backend: backend.apply(target, changes, dtype, seed))

    def decode_apply(  # noqa: PLR0917
        self,
        coding: Coding,
        check: U64,
        streams: Sequence[Stream],
        target: Segments,
        places: Sequence[Place],
        dtype: DType,
    ) -> U64:
        return self._answer(lambda backend: backend.decode_apply(coding, check, streams, target, places, dtype))

    def pack(self, lanes: Segments, dtype: DType) -> Sequence[Stream]:
        return self.cpu.pack(lanes, dtype)  # no device has kernels of its own for this

    def unpack(self, streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
        return self.cpu.unpack(streams, lanes, dtype)

    def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
        return self._answer(lambda backend: backend.sum(lanes, places))

    def _answer(self, call: Callable[[Backend], Answer]) -> Answer:
        device = self._device
        if device is None:
            device = self._rested()
        if device is not None:
            try:
                return call(device)
            except DeviceError as error:
                self._leave(device, error)
        return call(self.cpu)

    def _leave(self, device: Backend, error: DeviceError) -> None:
        with self._lock:
            if self._device is not device:
                return  # another thread's call failed first
            self._device = None
            self._let_rest(self._now() - self._since)
        reason = f"{device.name} failed and is tried again now and then ({error})"
        self._on_switch(Switch(self.cpu.name, reason, failed=device.name))

    def _rested(self) -> Backend | None:
        """The device, opened anew, if it has rested and no other thread is about it."""
        with self._lock:
            if self._device is not None or self._reopening or self._now() - self._since < self._rest:
                return self._device
            self._reopening = True
        device = None
        try:
            device = self._reopen()
        except DeviceError:
            return None
        finally:
            with self._lock:
                self._reopening = False
                if device is None:
                    self._let_rest(0.0)
                else:
                    self._device, self._since = device, self._now()
        self._on_switch(Switch(device.name, "it works again"))
        return device

    def _let_rest(self, worked: float) -> None:
        self._rest, self._since = next_rest(self._rest, worked), self._now()
