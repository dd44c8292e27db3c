"""As much of CuPy as `bench/gpu_check.py` uses, over memory of the host: for a run of that script without a GPU."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.kit.host_device import HostDevice, OnDevice


class Array(OnDevice):
    """An array that CuPy would hold."""

    def set(self, lanes: np.ndarray) -> None:
        self[:] = lanes

    def get(self) -> np.ndarray:
        return np.array(self)

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Event:
    """A moment."""

    def __init__(self) -> None:
        self.at = 0.0


class Stream:
    """Work that is done as soon as it is asked for."""

    ptr = 0

    def __init__(self, **_options: bool) -> None:
        pass

    def record(self, event: Event) -> None:
        event.at = time.perf_counter()

    def synchronize(self) -> None:
        pass


class Pinned:
    def __init__(self, size: int) -> None:
        self.held = np.zeros(size, np.uint8)
        self.ptr = self.held.ctypes.data


def _copy(into: int, source: int, size: int, _kind: int, _stream: int) -> None:
    ctypes.memmove(into, source, size)


CUPY = SimpleNamespace(
    asarray=lambda lanes: lanes.copy().view(Array),
    empty=lambda size, kind: np.empty(size, kind).view(Array),
    empty_like=lambda lanes: np.empty(lanes.size, lanes.dtype).view(Array),
    cuda=SimpleNamespace(
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        Stream=Stream,
        Event=Event,
        get_elapsed_time=lambda begun, ended: 1000 * (ended.at - begun.at),
        alloc_pinned_memory=Pinned,
        runtime=SimpleNamespace(memcpyAsync=_copy, memcpyDeviceToDevice=3, memcpyHostToDevice=1, memcpyDeviceToHost=2),
    ),
)


class StreamedHostDevice(HostDevice):
    """A device of the host with a stream to record moments on."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()
