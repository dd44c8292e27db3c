"""The CUDA backend: the codec's operations by kernels of our own, on a GPU that CuPy reaches.

Importing this costs nothing; `open_backend` imports CuPy, and compiles the kernels for the GPU that it finds (CuPy
keeps what was compiled, so this happens once a machine).
"""

from __future__ import annotations

from deltad.delta.backend import Backend
from deltad.limits import DEVICE_MEMORY_BYTES


def open_backend(device: int = 0, memory_limit: int = DEVICE_MEMORY_BYTES) -> Backend:
    """The backend on GPU number `device`, which takes at most `memory_limit` bytes of its memory.

    Raises DeviceError, here where there is no usable GPU or less than the limit is free, and from any operation
    where the GPU fails in the midst of work. Then the operation has written nothing to the host's lanes, and
    another backend can do it.
    """
    from deltad.delta.backend.cuda.cupy import CupyDevice
    from deltad.delta.backend.cuda.engine import CudaBackend

    return CudaBackend(CupyDevice(device, memory_limit))
