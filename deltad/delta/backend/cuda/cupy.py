"""A GPU through CuPy: `deltad.delta.backend.cuda.device.Device`.

Work goes to streams of the lowest priority, so that a trainer or an engine on the same GPU goes first. There are two
tracks for frames: while one frame's weights travel, kernels of another run. Within a track, uploads go through two
pinned buffers, each with a stream of its own: while one travels the host fills the other, from a mapped file as
well, and kernels that need neither run on. Memory comes from a pool of its own with a ceiling. Owns the invariant
that errors of CuPy and CUDA leave this module as DeviceError.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from deltad.delta.backend.cuda.device import Buffer, Bytes, aligned, check_free
from deltad.delta.backend.cuda.source import OPTIONS, THREADS, text
from deltad.delta.digest import U64
from deltad.errors import DeviceError

STAGE_BYTES = 8 << 20
TRACKS = 2
_LOWEST_PRIORITY = 0  # larger numbers mean less, and CUDA has none above this
_INSTALL = "pip install 'deltad[cupy]', and NVIDIA's driver for CUDA 13"


class _Stage:
    """A pinned buffer, the stream that carries it, and when it last arrived."""

    def __init__(self, cuda: Any) -> None:
        self.memory = cuda.alloc_pinned_memory(STAGE_BYTES)
        self.bytes = np.frombuffer(self.memory, np.uint8, STAGE_BYTES)
        self.stream = cuda.Stream(non_blocking=True, priority=_LOWEST_PRIORITY)
        self.arrived = cuda.Event(disable_timing=True)


class _Track:
    """What one frame works with: a stream for its kernels, stages for what goes up, one for what comes back."""

    def __init__(self, cuda: Any) -> None:
        self.stream = cuda.Stream(non_blocking=True, priority=_LOWEST_PRIORITY)
        self.stages = [_Stage(cuda), _Stage(cuda)]
        self.back = cuda.alloc_pinned_memory(STAGE_BYTES)
        self.back_bytes = np.frombuffer(self.back, np.uint8, STAGE_BYTES)


class CupyDevice:
    """GPU number `index`. Raises DeviceError if there is none, or less than `memory_limit` bytes of it are free."""

    def __init__(self, index: int, memory_limit: int) -> None:
        self.name = f"GPU {index}"
        try:
            cupy = importlib.import_module("cupy")
        except Exception as error:  # a broken installation raises whatever its libraries do
            raise DeviceError(self.name, found=f"CuPy cannot be imported ({error})", hint=_INSTALL) from error
        self._cuda: Any = cupy.cuda
        self._index = index
        self._limit = memory_limit
        self._tracks: SimpleQueue[_Track] = SimpleQueue()
        self._mine = threading.local()
        self._kernels: dict[str, Any] = {}
        self._failures = (
            self._cuda.runtime.CUDARuntimeError,
            self._cuda.driver.CUDADriverError,
            self._cuda.compiler.CompileException,
            self._cuda.nvrtc.NVRTCError,
        )
        with self._reporting("opening it"), self._cuda.Device(index):
            self._open(cupy)

    def _open(self, cupy: Any) -> None:
        properties = self._cuda.runtime.getDeviceProperties(self._index)
        self.name = f"{properties['name'].decode()} (GPU {self._index})"
        free, total = self._cuda.runtime.memGetInfo()
        check_free(self.name, free, total, self._limit)
        self._pool = self._cuda.MemoryPool()
        self._pool.set_limit(size=self._limit)
        for _ in range(TRACKS):
            self._tracks.put(_Track(self._cuda))
        self._module = cupy.RawModule(code=text(), options=OPTIONS)
        self._module.compile()

    @contextmanager
    def session(self) -> Iterator[None]:
        track = self._mine.track = self._tracks.get()
        try:
            with self._reporting("finishing"), self._cuda.Device(self._index), track.stream:
                try:
                    yield
                finally:
                    track.stream.synchronize()  # until then, kernels may read and write arrays of others
        finally:
            self._mine.track = None
            self._tracks.put(track)

    @property
    def stream(self) -> Any:
        """The stream of the calling thread's session."""
        return self._mine.track.stream

    def allocate(self, size: int) -> Buffer:
        with self._reporting(f"allocating {size} bytes"):
            return self._buffer(self._room(size), size)

    def zeros(self, size: int) -> Buffer:
        with self._reporting(f"allocating {size} bytes"):
            memory = self._room(size)
            self._cuda.runtime.memsetAsync(memory.ptr, 0, size, self.stream.ptr)
            return self._buffer(memory, size)

    def _room(self, size: int) -> Any:
        try:
            return self._pool.malloc(max(1, size))
        except self._cuda.memory.OutOfMemoryError:
            self._pool.free_all_blocks()  # the pool keeps what frames of other sizes left, and counts it
            return self._pool.malloc(max(1, size))

    def _buffer(self, memory: Any, size: int) -> Buffer:
        """With the moment from which on the memory is its holder's: launches before may have used it for others."""
        ours = self._cuda.Event(disable_timing=True)
        self.stream.record(ours)
        return Buffer(int(memory.ptr), size, (memory, ours))

    def adopt(self, array: object) -> int | None:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            return None
        address = int(interface["data"][0])
        if not address:  # of an array of nothing
            return 0
        with self._reporting("looking at an array"):
            owner = int(self._cuda.runtime.pointerGetAttributes(address).device)
        if owner != self._index:
            raise DeviceError("array", expected=f"one on {self.name}", found=f"one on GPU {owner}")
        return address

    def upload(self, into: Buffer, offset: int, parts: Sequence[Bytes]) -> None:
        stages = self._mine.track.stages
        with self._reporting("copying to it"):
            filled = 0
            for part in parts:
                data = part.reshape(-1).view(np.uint8)
                filled = aligned(filled)
                while data.size:
                    if filled == STAGE_BYTES:
                        self._send(into, offset, filled)
                        offset, filled = offset + filled, 0
                    if not filled:
                        stages[0].arrived.synchronize()
                    count = min(STAGE_BYTES - filled, data.size)
                    stages[0].bytes[filled : filled + count] = data[:count]
                    data, filled = data[count:], filled + count
            if filled:
                self._send(into, offset, filled)

    def _send(self, into: Buffer, offset: int, size: int) -> None:
        """Let the first stage travel, and make the other one the first."""
        track, runtime = self._mine.track, self._cuda.runtime
        stage = track.stages[0]
        _, ours = into.held
        stage.stream.wait_event(ours)
        address = into.address + offset
        runtime.memcpyAsync(address, stage.memory.ptr, size, runtime.memcpyHostToDevice, stage.stream.ptr)
        stage.stream.record(stage.arrived)
        track.stream.wait_event(stage.arrived)
        track.stages.reverse()

    def download(self, source: Buffer, offset: int, out: Bytes) -> None:
        track, runtime = self._mine.track, self._cuda.runtime
        data = out.reshape(-1).view(np.uint8)
        with self._reporting("copying from it"):
            for first in range(0, data.size, STAGE_BYTES):
                size = min(STAGE_BYTES, data.size - first)
                address = source.address + offset + first
                runtime.memcpyAsync(track.back.ptr, address, size, runtime.memcpyDeviceToHost, track.stream.ptr)
                track.stream.synchronize()
                data[first : first + size] = track.back_bytes[:size]

    def launch(self, kernel: str, blocks: int, words: U64) -> None:
        with self._reporting(f"launching {kernel}"):
            run = self._kernels.get(kernel)
            if run is None:
                run = self._kernels[kernel] = self._module.get_function(kernel)
            # CuPy passes a NumPy array of one element by value: here, the arguments as one struct.
            run((blocks,), (THREADS,), (words.view(f"V{words.nbytes}"),))

    def memory(self) -> tuple[int, int]:
        with self._reporting("asking for its memory"):
            free, total = self._cuda.runtime.memGetInfo()
            return int(free), int(total)

    @contextmanager
    def _reporting(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._cuda.memory.OutOfMemoryError as error:
            raise DeviceError(
                self.name,
                expected=f"room within {self._limit} bytes",
                found=f"none while {doing} ({error})",
                hint="raise [backend] memory_limit, or choose another device",
            ) from error
        except self._failures as error:
            raise DeviceError(self.name, found=f"{type(error).__name__} while {doing}: {error}") from error
