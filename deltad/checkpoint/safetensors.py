"""The safetensors header, read with limits and written.

    file := u64 header length | header (JSON, padded with spaces) | the tensors' bytes

Nothing in a header is believed. Owns one invariant: the entries of a parsed header cover the rest of the
file exactly, without overlap or hole, each of the size that its shape and dtype give.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deltad.delta.layout import TensorSpec, check_tensor
from deltad.errors import CheckpointError, FormatError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: what it is, and where its bytes begin, counted from the start of the file."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: its entries in the order of their bytes, and its free metadata."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]


class _RepeatedNameError(ValueError):
    """A JSON object names something twice."""


def read_header(descriptor: int, size: int, thing: str, *, limits: Limits = DEFAULT_LIMITS) -> Header:
    """The header of an open file of `size` bytes, called `thing` in errors.

    Raises CheckpointError if the file is cut short, lies or is no safetensors file, LimitError above a
    ceiling, OSError if it cannot be read.
    """
    prefix = os.pread(descriptor, _LENGTH.size, 0)
    if len(prefix) < _LENGTH.size:
        raise CheckpointError(thing, expected="a safetensors file", found=f"a file of {size} bytes")
    (length,) = _LENGTH.unpack(prefix)
    if not length:
        raise CheckpointError(
            thing, expected="a header", found="one of 0 bytes", hint="the file is not written yet, or is no safetensors"
        )
    if length > size - _LENGTH.size:
        raise CheckpointError(
            thing,
            expected=f"a header of {length} bytes, as its first 8 bytes say",
            found=f"a file of {size} bytes",
            hint="the file is cut short, or it is no safetensors file",
        )
    if length > limits.safetensors_header_bytes:
        raise LimitError(
            thing, expected=f"a header of at most {limits.safetensors_header_bytes} bytes", found=f"{length} bytes"
        )
    text = bytearray()
    while len(text) < length and (part := os.pread(descriptor, length - len(text), _LENGTH.size + len(text))):
        text += part
    return parse_header(bytes(text), size, thing, limits=limits)


def parse_header(text: bytes, file_size: int, thing: str, *, limits: Limits = DEFAULT_LIMITS) -> Header:
    """Parse the JSON of a header whose file has `file_size` bytes. Raises CheckpointError or LimitError."""
    try:
        return _parse_once(text, file_size, limits)
    except (CheckpointError, LimitError):
        return _parse(text, file_size, thing, limits)  # once more, for an error that names the thing


@lru_cache(maxsize=1)
def _parse_once(text: bytes, file_size: int, limits: Limits) -> Header:
    """The last header is kept: a trainer writes the same one at every step, and base and target have it both."""
    return _parse(text, file_size, "", limits)


def _parse(text: bytes, file_size: int, thing: str, limits: Limits) -> Header:
    table = parse_json(text, thing, what="header")
    if not isinstance(table, dict) or not text.startswith(b"{"):
        raise CheckpointError(thing, expected="a header that is a JSON object", found=repr(text[:40]))
    metadata = _parse_metadata(table.pop(_METADATA, {}), thing)
    if len(table) > limits.tensors:
        raise LimitError(thing, expected=f"at most {limits.tensors} tensors", found=str(len(table)))
    found = [_parse_entry(name, value, thing, limits) for name, value in table.items()]
    found.sort(key=lambda part: part[1:])
    at = 0
    for spec, begin, end in found:
        if begin != at:
            raise CheckpointError(
                f"{thing}: tensor {spec.name[:120]!r}",
                expected=f"bytes from {at} on, without overlap or hole",
                found=f"data_offsets {_in_words([begin, end])}",
            )
        at = end
    data_start = _LENGTH.size + len(text)
    if data_start + at != file_size:
        raise CheckpointError(
            thing,
            expected=f"a file of {data_start + at} bytes, as its header says",
            found=f"{file_size} bytes",
            hint="the file is cut short or was not written to its end" if data_start + at > file_size else "",
        )
    return Header(tuple(Entry(spec, data_start + begin) for spec, begin, _ in found), metadata)


def format_header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes before the data of a file that holds `tensors` back to back, a multiple of 8 bytes long."""
    table: dict[str, Any] = {_METADATA: {"format": "pt"} if metadata is None else dict(metadata)}
    at = 0
    for spec in tensors:
        table[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (at, at + spec.bytes)}
        at += spec.bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def parse_json(text: bytes, thing: str, *, what: str) -> Any:
    """JSON in UTF-8 in which no object names anything twice. Raises CheckpointError."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_without_repetition)
    except _RepeatedNameError as error:
        raise CheckpointError(thing, expected=f"each name once in its {what}", found=str(error)) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(thing, found=f"its {what} is not JSON: {reason}") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RepeatedNameError(f"{name[:120]!r} twice")
            seen.add(name)
    return table


def _parse_metadata(value: Any, thing: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{thing}: {_METADATA}", expected="an object of strings", found=_in_words(value))
    return value


def _parse_entry(name: str, value: Any, thing: str, limits: Limits) -> tuple[TensorSpec, int, int]:
    thing = f"{thing}: tensor {name[:120]!r}"
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(thing, expected="a name in Unicode", found="half of a surrogate pair") from None
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(thing, expected="an object of dtype, shape and data_offsets", found=_in_words(value))
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(thing, expected="the name of a dtype", found=_in_words(dtype))
    if not _are_sizes(shape):
        raise CheckpointError(thing, expected="a shape of integers from 0 on", found=_in_words(shape))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(thing, expected="data_offsets of a begin and an end", found=_in_words(offsets))
    spec = TensorSpec(name, dtype, tuple(shape))
    try:
        check_tensor(spec, limits=limits)
    except LimitError as error:
        raise LimitError(thing, expected=error.expected, found=error.found[:120]) from None
    except FormatError as error:
        raise CheckpointError(thing, expected=error.expected, found=error.found[:120]) from None
    if offsets[1] - offsets[0] != spec.bytes:
        raise CheckpointError(
            thing,
            expected=f"{spec.bytes} bytes, as {dtype} {shape} needs",
            found=f"data_offsets {_in_words(offsets)}",
        )
    return spec, offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _in_words(value: Any) -> str:
    """A JSON value for an error message: short, and never by recursion into what a hostile file nests."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, list) and all(type(item) in (int, float, bool) for item in value[:16]):
        return repr(value[:16])[:80]
    if isinstance(value, (list, dict)):
        return f"a JSON {'array' if isinstance(value, list) else 'object'} of {len(value)}"
    return repr(value)[:80]
