"""CuPy without a GPU, as late as CUDA allows: nothing that is queued happens before somebody has to wait for it.

Streams hold what was asked of them; an event is a place in a stream; waiting for one runs that stream up to there, and
whatever it waits for itself. Freed memory is handed out again to the same stream at once, with older work still
pending. So a buffer that is filled again before it has travelled, a result that is read before it is there, memory
that is written while its last holder's kernels wait: all give wrong bytes. Kernels run by `HostDevice`'s build.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.kit.host_device import HostDevice


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of CUDA."""


class OutOfMemoryError(MemoryError):
    """What its pool raises."""


class OnGpu(np.ndarray):
    """An array that CuPy would say lies on the GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__


class Event:
    """A place in a stream."""

    def __init__(self, **_options: bool) -> None:
        self.place: tuple[Stream, int] | None = None

    def synchronize(self) -> None:
        if self.place is not None:
            stream, count = self.place
            stream.run(count)


class Stream:
    """Work in order, none of it done yet."""

    _current = threading.local()
    _by_number: dict[int, Stream] = {}  # noqa: RUF012

    def __init__(self, **_options: Any) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.RLock()
        self.ptr = 1 + len(self._by_number)
        self._by_number[self.ptr] = self

    @classmethod
    def numbered(cls, number: int) -> Stream:
        return cls._by_number[number]

    @classmethod
    def current(cls) -> Stream:
        return cls._current.stack[-1]

    def __enter__(self) -> None:
        self._current.stack = [*getattr(self._current, "stack", []), self]

    def __exit__(self, *_: object) -> None:
        self._current.stack.pop()

    def add(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def record(self, event: Event) -> None:
        event.place = self, len(self._work)

    def wait_event(self, event: Event) -> None:
        if (place := event.place) is not None:
            self.add(lambda: place[0].run(place[1]))

    def synchronize(self) -> None:
        self.run(len(self._work))

    def run(self, count: int) -> None:
        with self._lock:
            while self._done < count:
                work = self._work[self._done]
                self._done += 1
                work()


class Pinned(bytearray):
    """Memory of the host that does not move."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class Memory:
    """A block of a pool, back in its stream's free list when it is dropped."""

    def __init__(self, block: np.ndarray, free: list[np.ndarray]) -> None:
        self.ptr = block.ctypes.data
        self._block, self._free = block, free

    def __del__(self) -> None:
        self._free.append(self._block)


class MemoryPool:
    """Counts what it keeps towards its limit, as CuPy's does."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._total = 0
        self._limit = 0
        self._lock = threading.Lock()

    def set_limit(self, size: int) -> None:
        self._limit = size

    def malloc(self, size: int) -> Memory:
        size = -(-size // 512) * 512
        with self._lock:
            free = self._free[Stream.current().ptr]
            for index in range(len(free) - 1, -1, -1):
                if free[index].size == size:
                    return Memory(free.pop(index), free)
            if self._total + size > self._limit:
                raise OutOfMemoryError(f"{size} bytes beside {self._total}")
            self._total += size
            return Memory(np.full(size, 0xA5, np.uint8), free)

    def free_all_blocks(self) -> None:
        for stream in list(Stream._by_number.values()):
            stream.synchronize()  # giving memory back to CUDA waits for the device
        with self._lock:
            for free in self._free.values():
                self._total -= sum(block.size for block in free)
                free.clear()


class LazyCupy:
    """The module `cupy`. With `calls`, CUDA fails for good after so many copies and launches.

    `carriers` lists the streams of the copies to the GPU, in order.
    """

    def __init__(self, *, free: int = 1 << 34, calls: int = 1 << 60) -> None:
        self.calls = calls
        self.carriers: list[int] = []
        self._host = HostDevice("scattered")
        self.cuda = SimpleNamespace(
            Device=lambda _index: Nothing(),
            Stream=Stream,
            Event=Event,
            MemoryPool=MemoryPool,
            alloc_pinned_memory=Pinned,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            driver=SimpleNamespace(CUDADriverError=CUDARuntimeError),
            compiler=SimpleNamespace(CompileException=CUDARuntimeError),
            nvrtc=SimpleNamespace(NVRTCError=CUDARuntimeError),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceProperties=lambda _index: {"name": b"Lazy"},
                memGetInfo=lambda: (free, 1 << 35),
                pointerGetAttributes=lambda _address: SimpleNamespace(device=0),
                memcpyAsync=self._copy,
                memsetAsync=self._set,
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
            ),
        )

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802
        assert code.startswith("#line 1")
        assert options == ("-std=c++17",)
        return SimpleNamespace(compile=lambda: None, get_function=lambda name: lambda *call: self._launch(name, *call))

    def _call(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise CUDARuntimeError("cudaErrorLaunchFailure")

    def _copy(self, into: int, source: int, size: int, kind: int, stream: int) -> None:
        self._call()
        if kind == self.cuda.runtime.memcpyHostToDevice:
            self.carriers.append(stream)
        Stream.numbered(stream).add(lambda: ctypes.memmove(into, source, size))

    def _set(self, at: int, value: int, size: int, stream: int) -> None:
        self._call()
        Stream.numbered(stream).add(lambda: ctypes.memset(at, value, size))

    def _launch(self, name: str, grid: tuple[int], block: tuple[int], arguments: tuple[np.ndarray]) -> None:
        self._call()
        (words,) = arguments
        assert (block, words.size) == ((256,), 1)
        kept = np.frombuffer(words.tobytes(), np.uint64)
        Stream.current().add(lambda: self._host.launch(name, grid[0], kept))


class Nothing:
    """A context without effect."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
