"""The CUDA backend: the codec's operations by kernels of our own, on a GPU that CuPy reaches.

Importing this costs nothing; `open_backend` imports CuPy, and compiles the kernels for the GPU that it finds (CuPy
keeps what was compiled, so this happens once a machine).
"""

from __future__ import annotations

from deltad.delta.backend import Backend

NEEDED_BYTES = 3 << 29
"""What two of the largest frames take at worst: both states, room for what each lane may turn into, streams."""


def open_backend(device: int = 0, memory_limit: int | None = None) -> Backend:
    """The backend on GPU number `device`, which takes at most `memory_limit` bytes of its memory (1.5 GiB if None).

    Raises DeviceError, here where there is no usable GPU or less than the limit is free, and from any operation
    where the GPU fails in the midst of work. Then the operation has written nothing to the host's lanes, and
    another backend can do it.
    """
    from deltad.delta.backend.cuda.cupy import CupyDevice
    from deltad.delta.backend.cuda.engine import CudaBackend

    return CudaBackend(CupyDevice(device, NEEDED_BYTES if memory_limit is None else memory_limit))
