"""The kernels of the CUDA backend without a GPU: the same source, built by a C++ compiler, walked by a loop.

Blocks and threads go in the order that is asked for; a kernel that keeps the discipline of `phases.cuh` gives the
same bytes in each. What is allocated holds rubbish, and so does the shared memory of a block.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import numpy as np

from deltad.delta.backend.cuda.device import Buffer, Bytes, aligned
from deltad.delta.backend.cuda.source import text
from deltad.delta.digest import U64

ORDERS = ("forwards", "backwards", "scattered")
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror")
_RUBBISH = 0xA5


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def sanitizer() -> Path | None:
    """The library that a process has to load first to run what was built with `SANITIZED`."""
    if compiler() is None:
        return None
    done = subprocess.run([str(compiler()), "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    found = Path(done.stdout.strip())
    return found.resolve() if found.is_absolute() else None


@cache
def built(*flags: str) -> Path:
    """The kernels as a shared library, built once for each content of their source."""
    command = [compiler() or "g++", *_FLAGS, *flags, "-DDELTAD_HOST", "-x", "c++", "-"]
    named = hashlib.sha256(f"{command} {text()}".encode()).hexdigest()[:24]
    path = Path(tempfile.gettempdir()) / f"deltad-kernels-{os.getuid()}-{named}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "kernels.so"
            subprocess.run([*command, "-o", str(made)], input=text().encode(), check=True)
            shutil.copy(made, path.with_suffix(f".{os.getpid()}"))
        path.with_suffix(f".{os.getpid()}").replace(path)
    return path


_LIBC = ctypes.CDLL(None)
_allocate, _free = _LIBC.posix_memalign, _LIBC.free
_allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_free.argtypes = [ctypes.c_void_p]


class _Held:
    """Memory of its own allocation, so that a sanitizer knows its bounds."""

    def __init__(self, size: int, fill: int) -> None:
        held = ctypes.c_void_p()
        assert _allocate(ctypes.byref(held), 256, max(1, size)) == 0
        self.address: int = held.value or 0
        ctypes.memset(self.address, fill, size)

    def __del__(self) -> None:
        _free(self.address)


def _buffer(size: int, fill: int) -> Buffer:
    held = _Held(size, fill)
    return Buffer(held.address, size, held)


class OnDevice(np.ndarray):
    """An array that tests say lies on the device: the backend is not to copy it."""


class HostDevice:
    """Implements `deltad.delta.backend.cuda.device.Device`."""

    name = "host C++"

    def __init__(self, order: str = "forwards", *flags: str) -> None:
        self._order = ORDERS.index(order)
        self._kernels = ctypes.CDLL(str(built(*flags)))
        self.steps: list[str] = []
        self.uploaded: list[int] = []

    @property
    def uploaded_bytes(self) -> int:
        return sum(self.uploaded)

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate(self, size: int) -> Buffer:
        return _buffer(size, _RUBBISH)

    def zeros(self, size: int) -> Buffer:
        return _buffer(size, 0)

    def adopt(self, array: object) -> int | None:
        return array.__array_interface__["data"][0] if isinstance(array, OnDevice) else None

    def upload(self, into: Buffer, offset: int, parts: Sequence[Bytes]) -> None:
        self.steps.append("lanes" if parts and parts[0].dtype.kind == "u" and parts[0].itemsize == 2 else "table")
        for part in parts:
            assert part.flags.c_contiguous
            assert 0 <= offset <= offset + part.nbytes <= into.size
            ctypes.memmove(into.address + offset, part.ctypes.data, part.nbytes)
            offset += aligned(part.nbytes)
            self.uploaded.append(part.nbytes)

    def download(self, source: Buffer, offset: int, out: Bytes) -> None:
        assert 0 <= offset <= offset + out.nbytes <= source.size
        ctypes.memmove(out.ctypes.data, source.address + offset, out.nbytes)

    def launch(self, kernel: str, blocks: int, words: U64) -> None:
        self.steps.append(kernel)
        run = getattr(self._kernels, kernel)
        run.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
        run(blocks, words.ctypes.data, words.nbytes, self._order)

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30
