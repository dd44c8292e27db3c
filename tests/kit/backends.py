"""The backends that this machine has. What one of them must do, all must."""

from __future__ import annotations

from functools import cache

from deltad.delta.backend import Backend, choose
from deltad.delta.backend.cuda.engine import CudaBackend
from deltad.errors import ConfigError
from tests.kit.host_device import HostDevice, compiler

KINDS = ("numpy", "numba", "cupy")


class EmulatedBackend(CudaBackend):
    """The CUDA backend with all of its source, on the host: threads in an order that no GPU would choose."""

    name = "cuda-on-host"

    def __init__(self) -> None:
        super().__init__(HostDevice("scattered"))


@cache
def emulated() -> list[Backend]:
    """The CUDA backend without a GPU, where there is a C++ compiler; `tests/delta/test_cuda.py` says if not."""
    return [EmulatedBackend()] if compiler() else []


def present() -> list[Backend]:
    """Every backend that is built in and can be used here; the reference first."""
    found = []
    for kind in KINDS:
        try:
            found.append(choose(kind))
        except ConfigError:
            continue
    return found + emulated()
