"""A device as the CUDA backend sees it: memory, copies and launches. All that the backend does goes through here.

Launches and copies of one session take effect in the order in which they are asked for, as far as anybody can tell:
an implementation may overlap what does not meet. Each raises DeviceError when the device fails, after which what it
holds is lost; nothing that was given to it by the host has been changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from deltad.delta.digest import U64
from deltad.errors import DeviceError

ALIGNMENT = 16
"""Parts of an upload begin at multiples of this, and so does every buffer."""

Bytes = npt.NDArray[Any]
"""A contiguous array of any type on the host."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a device; it is given back when nobody holds this any more. `held` is the device's own affair."""

    address: int
    size: int
    held: Any


class Device(Protocol):
    """Runs the kernels of `deltad.delta.backend.cuda.source`."""

    name: str

    def session(self) -> AbstractContextManager[None]:
        """What everything below is done in: one frame's work, by one thread. Waits for its turn, and for the work."""

    def allocate(self, size: int) -> Buffer:
        """Memory of any content."""

    def zeros(self, size: int) -> Buffer:
        """Memory of zeros."""

    def adopt(self, array: object) -> int | None:
        """Where an array lies that is on this device already, or None for one of the host.

        What wrote the array has to be done. Raises DeviceError for an array on another device.
        """

    def upload(self, into: Buffer, offset: int, parts: Sequence[Bytes]) -> None:
        """Copy parts one behind the other, each to the next multiple of ALIGNMENT. They may change afterwards."""

    def download(self, source: Buffer, offset: int, out: Bytes) -> None:
        """Fill `out` from `offset` on, once all that was launched before is done."""

    def launch(self, kernel: str, blocks: int, words: U64) -> None:
        """Run at least one block of a kernel, with the arguments that `source.pack` made."""

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_free(name: str, free: int, total: int, needed: int) -> None:
    """Raises DeviceError if a device has less memory free than is needed: another process fills it."""
    if free < needed:
        raise DeviceError(
            name,
            expected=f"{needed} bytes of memory free",
            found=f"{free} of {total}",
            hint="another process fills it; lower [backend] memory_limit, or choose another device",
        )
