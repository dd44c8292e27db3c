"""A device that stops in the midst of work."""

from __future__ import annotations

from deltad.delta.digest import U64
from deltad.errors import DeviceError
from tests.kit.host_device import HostDevice


class FailingDevice(HostDevice):
    """Fails from its launch number `lasts` on, as a GPU that fell off the bus does."""

    def __init__(self, lasts: int) -> None:
        super().__init__()
        self.left = lasts

    def launch(self, kernel: str, blocks: int, words: U64) -> None:
        self.left -= 1
        if self.left < 0:
            raise DeviceError("GPU 0", found=f"nothing answers while launching {kernel}")
        super().launch(kernel, blocks, words)
