"""Decoding the difference of one tensor, window by window.

A decoder is fed the old bytes in order and returns the new ones. Memory is bounded by the window and, for an
`overwrite`, by the number of changed bytes, which the tensor's size bounds.
"""

from __future__ import annotations

import io
import os
import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from deltad.checkpoint.disk_delta.index import Encoding
from deltad.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]

_COUNT = struct.Struct("<I")
_READ_BYTES = 1 << 17


class Decoder(Protocol):
    """Turns the old bytes of a tensor into the new ones."""

    def next(self, old: Bytes) -> Bytes:
        """The new bytes for the next old ones. Raises CheckpointError."""

    def end(self) -> None:
        """All old bytes were given. Raises CheckpointError if the difference is for a longer tensor."""


class Section(io.RawIOBase):
    """A part of an open file, read in order."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor, self._at, self._left = descriptor, offset, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = os.pread(self._descriptor, min(len(buffer), self._left), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        self._left -= len(data)
        return len(data)


def decoder(encoding: Encoding, section: Section, size: int, thing: str) -> Decoder:
    """The decoder of a tensor of `size` bytes, called `thing` in errors. Raises CheckpointError."""
    stream = _Stream(section, thing)
    return _Xor(stream) if encoding is Encoding.XOR else _Overwrite(stream, size)


class _Stream:
    """The content of one zstd frame."""

    def __init__(self, section: Section, thing: str) -> None:
        self.thing = thing
        self._reader = zstandard.ZstdDecompressor().stream_reader(
            io.BufferedReader(section, _READ_BYTES), read_across_frames=False
        )

    def read(self, size: int) -> Bytes:
        """Exactly `size` bytes. Raises CheckpointError."""
        data = bytearray()
        while len(data) < size and (part := self._some(size - len(data))):
            data += part
        if len(data) != size:
            raise CheckpointError(
                self.thing, expected=f"{size} more bytes of its difference", found=f"{len(data)} bytes"
            )
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        if self._some(1):
            raise CheckpointError(self.thing, expected="a difference as long as the tensor", found="a longer one")

    def _some(self, size: int) -> bytes:
        try:
            return self._reader.read(size)
        except zstandard.ZstdError as error:
            raise CheckpointError(self.thing, expected="a zstd frame", found=str(error)) from None


class _Xor:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def next(self, old: Bytes) -> Bytes:
        return old ^ self._stream.read(old.size)

    def end(self) -> None:
        self._stream.end()


class _Overwrite:
    """Positions and bytes are read at once; they need not be in order, and the last of two for one place counts."""

    def __init__(self, stream: _Stream, size: int) -> None:
        (count,) = _COUNT.unpack(stream.read(_COUNT.size).tobytes())
        if count > size:
            raise CheckpointError(stream.thing, expected=f"at most {size} changed bytes", found=f"{count}")
        positions = stream.read(4 * count).view("<u4")
        values = stream.read(count)
        if count and int(positions.max()) >= size:
            raise CheckpointError(stream.thing, expected=f"positions below {size}", found=str(int(positions.max())))
        if count > 1 and not bool((positions[1:] > positions[:-1]).all()):
            order = np.argsort(positions, kind="stable")
            positions, values = positions[order], values[order]
        self._positions, self._values, self._stream, self._at = positions, values, stream, 0

    def next(self, old: Bytes) -> Bytes:
        new = old.copy()
        first, last = np.searchsorted(self._positions, [self._at, self._at + old.size])
        new[self._positions[first:last] - self._at] = self._values[first:last]
        self._at += old.size
        return new

    def end(self) -> None:
        self._stream.end()
