"""What an object of the store is, told from its bytes alone, and its fields as plain data.

Reads with the same decoders and limits as the daemon, so what is shown here is what a daemon would
take, and what a daemon would refuse is refused here with the same words.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

import msgspec

from deltad.checkpoint.foreign import recognise
from deltad.delta.encoding import check_format, decode, sha256
from deltad.delta.frame import FrameHeader
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import ChunkPage, Manifest, decode_manifest
from deltad.delta.record import VersionRecord, decode_record
from deltad.errors import DeltadError, FormatError, IntegrityError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import Digest, Version, parse_digest

_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The frames of a chunk. Their streams are skipped: what they mean takes a layout to tell."""

    size: int
    frames: tuple[FrameHeader, ...]


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A non-weight file that travels with a version, such as a tokenizer."""

    size: int


Object = VersionRecord | Manifest | ChunkPage | Layout | Chunk | PlainFile


@dataclass(frozen=True, slots=True)
class Found:
    """An object, what it is called, and its digest. `named` tells that the file's name is that digest."""

    kind: str
    value: Object
    digest: Digest
    size: int
    named: bool


def open_regular(path: Path) -> BinaryIO:
    """The file, open. Raises FormatError for a pipe, a device or a directory, which might never end; OSError."""
    # Not blocking, so that a pipe in this place cannot hang the command.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FormatError(f"{path}", expected="a regular file", found="a pipe, a device or a directory")
    return file


def read_object(path: Path, *, limits: Limits = DEFAULT_LIMITS) -> Found:
    """Read and recognise a file of a store.

    Raises LimitError for a file larger than any object, FormatError for one that is no object, and
    IntegrityError where the file's name is a digest that its bytes do not have.
    """
    with open_regular(path) as file:
        data = file.read(limits.object_bytes + 1)
    if len(data) > limits.object_bytes:
        raise LimitError(f"{path}", expected=f"an object of at most {limits.object_bytes} bytes", found="a larger file")
    digest = sha256(data)
    name = _name(path)
    if name is not None and name != digest:
        raise IntegrityError(
            f"{path}", expected=f"SHA-256 {name.hex()}", found=digest.hex(), hint="the file is damaged"
        )
    try:
        kind, value = _recognise(data, limits=limits)
    except DeltadError as error:
        raise type(error)(
            f"{path}: {error.thing}", expected=error.expected, found=error.found, hint=error.hint
        ) from None
    if name is None and isinstance(value, PlainFile):
        raise _foreign(path, data)
    return Found(kind, value, digest, len(data), name is not None)


def _foreign(path: Path, data: bytes) -> FormatError:
    expected = "a safetensors file, or a store's record, manifest, page, layout or chunk"
    if known := recognise([path.name]):
        layout, _ = known
        hint = layout.convert.format(directory=path.parent, folder=path.parent)
        return FormatError(f"{path}", expected=expected, found=f"a part of {layout.name}", hint=hint)
    found = f"other bytes, starting with {data[:8]!r}" if data else "an empty file"
    return FormatError(f"{path}", expected=expected, found=found)


def _name(path: Path) -> Digest | None:
    """The digest that a store's path spells: 2 hex digits of directory, 62 of file; or all 64 in the file's name."""
    for text in (path.name, path.absolute().parent.name + path.name):
        try:
            return parse_digest(text)
        except DeltadError:
            continue
    return None


def _recognise(data: bytes, *, limits: Limits) -> tuple[str, Object]:
    match _keys(data):
        case keys if "variants" in keys:
            return "version record", decode_record(data, limits=limits)
        case keys if "pages" in keys:
            return "manifest", decode_manifest(data, limits=limits)
        case keys if "tensors" in keys:
            return "layout", decode_layout(data, limits=limits)
        case keys if "chunks" in keys:
            return "manifest page", decode(ChunkPage, data, what="manifest page", limit=limits.page_bytes)
    if _starts_with_frame(data, limits):
        return "chunk", read_frames(data, limits=limits)
    return "file", PlainFile(len(data))


def _keys(data: bytes) -> frozenset[str]:
    """The keys of a MessagePack map; none for anything else."""
    try:
        return frozenset(msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frozenset()


def _starts_with_frame(data: bytes, limits: Limits) -> bool:
    try:
        _header(memoryview(data), 0, limits)
    except FormatError:
        return False
    return True


def read_frames(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Chunk:
    """The headers of a chunk's frames. Raises FormatError or LimitError."""
    if len(data) > limits.chunk_bytes:
        raise LimitError("chunk", expected=f"at most {limits.chunk_bytes} bytes", found=f"{len(data)} bytes")
    view = memoryview(data)
    frames = []
    at = 0
    while at < len(view):
        header, at = _header(view, at, limits)
        stored = sum(stored for _, stored in header.streams)
        if min((stored for _, stored in header.streams), default=0) < 0 or stored > len(view) - at:
            raise FormatError("frame", expected=f"streams of {stored} bytes", found=f"{len(view) - at} to the end")
        at += stored
        frames.append(header)
    return Chunk(len(data), tuple(frames))


def _header(view: memoryview, at: int, limits: Limits) -> tuple[FrameHeader, int]:
    left = len(view) - at - _U32.size
    if left < 0:
        raise FormatError("frame", expected="a header length of 4 bytes", found=f"{len(view) - at} bytes to the end")
    (length,) = _U32.unpack_from(view, at)
    at += _U32.size
    if length > min(left, limits.frame_header_bytes):
        raise FormatError("frame", expected=f"a header within the {left} bytes that are left", found=f"{length} bytes")
    header = decode(FrameHeader, bytes(view[at : at + length]), what="frame header", limit=limits.frame_header_bytes)
    check_format(header.format, "frame")
    return header, at + length


def builtins(value: object) -> object:
    """A decoded object as JSON-ready data: digests in hex, versions as people write them."""
    match value:
        case Version():
            return str(value)
        case bytes():
            return value.hex()
        case msgspec.Struct():
            return {name: builtins(getattr(value, name)) for name in value.__struct_fields__}
        case Chunk() | PlainFile():
            return {field.name: builtins(getattr(value, field.name)) for field in fields(value)}
        case tuple() | list():
            return [builtins(item) for item in value]
    return value
