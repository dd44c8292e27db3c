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
    like,
)
from deltad.delta.backend.numba.symbols import (
    PADDING,
    measure_streams,
    read_gaps,
    read_pairs,
    read_values,
    write_streams,
)
from deltad.delta.coding import STREAMS_PER_CLASS, Coding
from deltad.delta.symbols import PAIR_LIMIT, Scheme, value_scheme
from deltad.errors import FormatError
from deltad.types import DType

Bytes = npt.NDArray[np.uint8]

_COLUMNS = ((SYMBOLS, SYMBOLS_END), (BITS, BITS_END), (VALUES, VALUES_END))
_NEEDED = tuple(2 * size * WAITING_LANES + 16 * SLACK for size in (1, 4, 8))
"""What a kernel may write to each before it asks for more, in bytes, with room to spare."""
_KINDS = len(_COLUMNS)
_KEPT_BYTES = 1 << 20
_NONE = 2**64 - 1


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory of a kernel, and where it is."""

    bytes: Bytes
    begin: int

    @classmethod
    def of(cls, size: int) -> _Buffer:
        memory = np.empty(size, np.uint8)
        return cls(memory, address(memory))


class _Local(threading.local):
    """Buffers that are kept from frame to frame: a fresh one costs more in page faults than it is written."""

    def __init__(self) -> None:
        self.kept: list[_Buffer] = []


_local = _Local()


class Output:
    """What an encoding kernel appends to: three growing buffers for each class."""

    def __init__(self, job: Job) -> None:
        self._job = job
        kept, count = _local.kept, job.classes.shape[0] * _KINDS
        kept += [_Buffer.of(2 * _NEEDED[index % _KINDS]) for index in range(len(kept), count)]
        self._buffers = kept[:count]
        for kind, (column, end) in enumerate(_COLUMNS):
            job.classes[:, column] = [buffer.begin for buffer in self._buffers[kind::_KINDS]]
            job.classes[:, end] = [buffer.begin + buffer.bytes.size for buffer in self._buffers[kind::_KINDS]]

    def enlarge(self) -> None:
        """Give every class room for all that a kernel writes before it asks again, and twice what it has used."""
        for index, buffer in enumerate(self._buffers):
            row, need = self._job.classes[index // _KINDS], _NEEDED[index % _KINDS]
            column, end = _COLUMNS[index % _KINDS]
            used = int(row[column]) - buffer.begin
            if buffer.bytes.size - used < need:
                larger = _Buffer.of(2 * used + 2 * need)
                kept = min(used + PADDING, buffer.bytes.size)  # a word that is not full yet is behind the end
                larger.bytes[:kept] = buffer.bytes[:kept]
                row[column], row[end] = larger.begin + used, larger.begin + larger.bytes.size
                self._buffers[index] = larger

    def streams(self) -> list[Stream]:
        """The plain streams, five per class. The buffers may be used again afterwards."""
        dtype, classes = self._job.dtype, self._job.classes
        scheme, of_lanes = value_scheme(dtype), like(dtype)
        begins = np.array([buffer.begin for buffer in self._buffers], np.uint64)
        places = np.empty((2, classes.shape[0] * STREAMS_PER_CLASS), np.uint64)
        count = np.uint64(classes.shape[0])
        given, begun, table = (np.uint64(address(array)) for array in (classes, begins, places))
        memory = np.empty(int(measure_streams(given, count, begun, table, of_lanes)), np.uint8)
        to, low, mantissa = (np.uint64(number) for number in (address(memory), scheme.low, scheme.mantissa))
        write_streams(given, count, begun, table, to, low, mantissa, of_lanes)
        for index, buffer in enumerate(self._buffers):
            if buffer.bytes.size <= _KEPT_BYTES:
                _local.kept[index] = buffer
        return [memory[start : start + length] for start, length in zip(*places.tolist(), strict=True)]


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
