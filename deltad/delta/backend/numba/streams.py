"""Between kernels and the five streams of a class: buffers to write into, arrays to read out of.

Owns the memory: what a kernel is given an address of is at least as large as the kernel may go, and lives
as long as the job does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Lanes, Stream
from deltad.delta.backend.numba.job import (
    BITS,
    BITS_END,
    FILLED,
    MARKS,
    MARKS_END,
    SLACK,
    SYMBOLS,
    SYMBOLS_END,
    VALUES,
    VALUES_END,
    WAITING_LANES,
    Job,
    address,
)
from deltad.delta.backend.numba.symbols import (
    PADDING,
    count_large,
    read_gaps,
    read_pairs,
    read_values,
    write_pairs,
    write_values,
)
from deltad.delta.coding import STREAMS_PER_CLASS, Coding
from deltad.delta.symbols import PAIR_LIMIT, Scheme, value_scheme
from deltad.errors import FormatError
from deltad.types import DType

Bytes = npt.NDArray[np.uint8]

_COLUMNS = ((SYMBOLS, SYMBOLS_END), (BITS, BITS_END), (VALUES, VALUES_END))
_NEEDED = tuple(2 * size * WAITING_LANES + 16 * SLACK for size in (1, 4, 8))
"""What a kernel may write to each before it asks for more, in bytes, with room to spare."""
_KEPT_BYTES = 1 << 20
_NONE = 2**64 - 1


class _Local(threading.local):
    """Buffers that are kept from frame to frame: a fresh one costs more in page faults than it is written."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], Bytes] = {}


_local = _Local()


class Output:
    """What an encoding kernel appends to: three growing buffers for each class."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._buffers: list[list[Bytes]] = []
        for index in range(job.classes.shape[0]):
            row = [_local.kept.get((index, kind)) for kind in range(3)]
            held = [np.empty(2 * need, np.uint8) if b is None else b for b, need in zip(row, _NEEDED, strict=True)]
            self._buffers.append(held)
            for kind in range(3):
                self._place(index, kind, 0)

    def enlarge(self) -> None:
        """Give every class room for another block, and twice what it has used."""
        for index, row in enumerate(self._buffers):
            for kind, need in enumerate(_NEEDED):
                used = self._used(index, kind)
                if row[kind].size - used < need:
                    larger = np.empty(2 * used + 2 * need, np.uint8)
                    kept = min(used + PADDING, row[kind].size)  # a word that is not full yet is behind the end
                    larger[:kept] = row[kind][:kept]
                    row[kind] = larger
                    self._place(index, kind, used)

    def streams(self) -> list[Stream]:
        """The plain streams, five per class. The buffers may be used again afterwards."""
        streams: list[Stream] = []
        dtype = self._job.dtype
        lane_type = UNSIGNED[dtype.lane_bytes]
        for index, (symbols, bits, values) in enumerate(self._buffers):
            # Bits that do not fill a byte yet have been written behind the end, and zeros behind them.
            ended = self._used(index, 1) + bool(self._job.classes[index, FILLED])
            streams.append(symbols[: self._used(index, 0)].tobytes())
            streams.append(bits[: -(-ended // 4) * 4].tobytes())
            streams += _value_streams(values[: self._used(index, 2)].view(lane_type), dtype)
        self._keep()
        return streams

    def _place(self, index: int, kind: int, used: int) -> None:
        buffer = self._buffers[index][kind]
        column, end = _COLUMNS[kind]
        self._job.classes[index, column] = address(buffer) + used
        self._job.classes[index, end] = address(buffer) + buffer.size

    def _used(self, index: int, kind: int) -> int:
        return int(self._job.classes[index, _COLUMNS[kind][0]]) - address(self._buffers[index][kind])

    def _keep(self) -> None:
        for index, row in enumerate(self._buffers):
            for kind, buffer in enumerate(row):
                if buffer.size <= _KEPT_BYTES:
                    _local.kept[index, kind] = buffer


def _value_streams(values: Lanes, dtype: DType) -> list[Stream]:
    """Pair codes, value symbols, value bits. Behind the values there is room for another group."""
    count = np.uint64(values.size)
    pairs: Stream = b""
    large = int(count_large(values, count))
    if values.size and 4 * large <= values.size:
        packed = np.empty((values.size + 63) // 64 * 16, np.uint8)
        exceptions = np.empty(large, values.dtype)
        write_pairs(np.uint64(address(values)), count, np.uint64(address(packed)), exceptions)
        pairs, values = packed[: (values.size + 3) // 4], exceptions
    symbols = np.empty(values.size, np.uint8)
    bits = np.empty((dtype.lane_bytes * values.size + 3) // 4 * 4 + PADDING, np.uint8)
    scheme = value_scheme(dtype)
    used = write_values(
        values,
        np.uint64(values.size),
        np.uint64(scheme.low),
        np.uint64(scheme.mantissa),
        np.uint64(address(symbols)),
        np.uint64(address(bits)),
    )
    return [pairs, symbols, bits[: int(used)]]


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a class as far as its streams tell: pair codes may end in up to three that are none."""

    lanes: Lanes
    pairs: Bytes
    count: int

    def check(self, used: int) -> None:
        """Raises FormatError unless exactly `used` values are here."""
        if not self.pairs.size:
            if used != self.count:
                raise FormatError("frame: values", expected=f"{used} of them", found=str(self.count))
        elif self.pairs.size != (used + 3) // 4 or (used % 4 and self.pairs[-1] >> 2 * (used % 4)):
            raise FormatError("frame: pair codes", expected=f"{used} of them, zeros behind", found="others")


class Input:
    """The streams of a frame as ranks and values, for a decoding kernel. Raises FormatError for any lie."""

    def __init__(self, coding: Coding, streams: Sequence[Stream], dtype: DType) -> None:
        plain = [np.frombuffer(stream, np.uint8) for stream in streams]
        self.marks: list[npt.NDArray[np.uint32]] = []
        self._values: list[_Values] = []
        for index in range(coding.classes):
            symbols, bits, pairs, value_symbols, value_bits = plain[index * STREAMS_PER_CLASS :][:STREAMS_PER_CLASS]
            self.marks.append(_read_marks(symbols, bits, coding.lanes))
            self._values.append(_read_values(pairs, value_symbols, value_bits, dtype))

    def values(self, index: int) -> Lanes:
        return self._values[index].lanes

    def give_to(self, job: Job) -> None:
        for index, (marks, values) in enumerate(zip(self.marks, self._values, strict=True)):
            job.classes[index, MARKS] = address(marks)
            job.classes[index, MARKS_END] = address(marks) + 4 * (marks.size - 1)
            job.classes[index, VALUES] = address(values.lanes)
            job.classes[index, VALUES_END] = address(values.lanes) + values.count * values.lanes.itemsize

    def check_used(self, job: Job) -> None:
        """Raises FormatError unless the kernel has taken every value."""
        for index, values in enumerate(self._values):
            used = int(job.classes[index, VALUES]) - address(values.lanes)
            values.check(used // values.lanes.itemsize)

    def check_count(self, index: int, count: int) -> None:
        self._values[index].check(count)


def _read_marks(symbols: Bytes, bits: Bytes, lanes: int) -> npt.NDArray[np.uint32]:
    """The marked ranks, and behind them one that no class reaches."""
    marks = np.empty(symbols.size + 1, np.uint32)
    marks[-1] = 2**32 - 1
    padded = _padded(bits)
    beyond = int(
        read_gaps(
            np.uint64(address(symbols)),
            np.uint64(symbols.size),
            np.uint64(address(padded)),
            np.uint64(bits.size),
            marks,
        )
    )
    if beyond > lanes:
        found = "bits that do not fit" if beyond == _NONE else str(beyond - 1)
        raise FormatError("frame: gaps", expected=f"lanes below {lanes}", found=found)
    return marks


def _read_values(pairs: Bytes, symbols: Bytes, bits: Bytes, dtype: DType) -> _Values:
    lane_type = UNSIGNED[dtype.lane_bytes]
    scheme = value_scheme(dtype)
    numbers = np.zeros(symbols.size + 1, lane_type)
    limit = scheme.top - (PAIR_LIMIT if pairs.size else 0)
    if not _read_numbers(symbols, bits, scheme, limit, numbers):
        raise FormatError("frame: values", expected=f"numbers up to {limit}, and bits for them", found="others")
    if not pairs.size:
        return _Values(numbers, pairs, symbols.size)
    words = np.zeros(-(-pairs.size // 8) * 8, np.uint8)
    words[: pairs.size] = pairs
    lanes = np.empty(4 * words.size, lane_type)
    arguments = (np.uint64(address(words)), np.uint64(words.size), numbers, np.uint64(symbols.size), lanes)
    if not read_pairs(*arguments):
        raise FormatError("frame: pair codes", expected=f"{symbols.size} exceptions", found="others")
    return _Values(lanes, pairs, 4 * pairs.size)


def _read_numbers(symbols: Bytes, bits: Bytes, scheme: Scheme, limit: int, numbers: Lanes) -> bool:
    padded = _padded(bits)
    good = read_values(
        np.uint64(address(symbols)),
        np.uint64(symbols.size),
        np.uint64(address(padded)),
        np.uint64(bits.size),
        np.uint64(scheme.low),
        np.uint64(scheme.mantissa),
        np.uint64(limit),
        numbers,
    )
    return bool(good)


def _padded(bits: Bytes) -> npt.NDArray[Any]:
    padded = np.zeros(bits.size + PADDING, np.uint8)
    padded[: bits.size] = bits
    return padded
