"""The CUDA backend: `deltad.delta.backend.Backend` by the kernels of `kernels/`, on one device.

Equal to the numpy reference in every byte and every refusal. Lanes may be the host's or lie on the device; what is
given back is the host's. Threads may work on frames side by side, as many as the device has sessions for.

Whole frames are packed and unpacked by the reference, on the host: no kernel packs. A daemon's `Fallback` never asks
this backend for it, but the CPU's, which is numba's where it works. Whoever uses this backend bare packs slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deltad.delta import packing
from deltad.delta.backend import Changes, EncodedFrame, Lanes, Mode, Place, Segments, Stream
from deltad.delta.backend.cuda import decoding, encoding
from deltad.delta.backend.cuda.device import Device
from deltad.delta.backend.cuda.work import BATCH_BYTES, WORD, Work, packed_keys
from deltad.delta.coding import Coding
from deltad.delta.digest import BLOCK_BYTES, U64, multiplier_bases
from deltad.types import DTYPES, DType

_STEPS, _SLICES = 16, 16
_BYTES = DTYPES["U8"]


class CudaBackend:
    """Implements `deltad.delta.backend.Backend`. Every operation may also raise DeviceError."""

    name = "cupy"

    def __init__(self, device: Device) -> None:
        self.device = device
        keys = packed_keys()
        with device.session():
            self._keys = device.allocate(keys.nbytes)
            device.upload(self._keys, 0, [keys])
            device.download(self._keys, 0, keys)  # and so they are there, for every session

    def encode(
        self, old: Segments, new: Segments, places: Sequence[Place], dtype: DType, mode: Mode
    ) -> EncodedFrame | None:
        with self.device.session():
            return encoding.encode(self._work(dtype), old, new, places, mode)

    def decode(self, coding: Coding, streams: Sequence[Stream], base: Segments | None, dtype: DType) -> Changes:
        with self.device.session():
            return decoding.decode(self._work(dtype), coding, streams, base)

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        with self.device.session():
            old, share, writes = decoding.apply(self._work(dtype), target, changes, seed)
        for write in writes:
            write.do()
        return old, share

    def decode_apply(  # noqa: PLR0917
        self,
        coding: Coding,
        check: U64,
        streams: Sequence[Stream],
        target: Segments,
        places: Sequence[Place],
        dtype: DType,
    ) -> U64:
        with self.device.session():
            sums, writes = decoding.decode_apply(self._work(dtype), coding, check, streams, target, places)
        for write in writes:
            write.do()
        return sums

    def pack(self, lanes: Segments, dtype: DType) -> Sequence[Stream]:
        return packing.pack(lanes, dtype)

    def unpack(self, streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
        return packing.unpack(streams, lanes, dtype)

    def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
        with self.device.session():
            work = self._work(_BYTES)
            sums = self.device.zeros(2 * len(lanes) * WORD)
            for i, (segment, place) in enumerate(zip(lanes, places, strict=True)):
                offset = place.start * segment.itemsize
                self._sum(work, segment.view(np.uint8), offset, place.seed, sums.address + 2 * i * WORD)
            return work.take(sums, np.uint64, 2 * len(lanes)).reshape(-1, 2)

    def _sum(self, work: Work, data: Any, offset: int, seed: int, sums: int) -> None:
        """Add the share of bytes at `offset` of their tensor to the two words at `sums`."""
        size = int(data.size)
        address = self.device.adopt(data)
        lead = offset % 16  # so that what is a vector of the digest is one in memory
        buffer = self.device.allocate(size + lead if address is None else 0)
        for first in range(0, size, BATCH_BYTES):
            part = data[first : first + BATCH_BYTES]
            if address is None:
                self.device.upload(buffer, lead + first, [part])
            at = (buffer.address + lead if address is None else address) + first
            begin, end = offset + first, offset + first + int(part.size)
            blocks = -(-end // BLOCK_BYTES) - begin // BLOCK_BYTES
            work.launch(
                "sum_bytes",
                -(-blocks // _STEPS) * _SLICES,
                data=at,
                offset=begin,
                size=int(part.size),
                keys=work.keys,
                base=multiplier_bases(seed).tolist(),
                sums=sums,
            )

    def _work(self, dtype: DType) -> Work:
        return Work(self.device, dtype, self._keys)
