"""What a disk-delta directory says of itself, parsed: index, shard headers and checksums.

Owns one invariant: a `DiskDelta` is complete. Every tensor that its index names lies in the shard that is named for it,
as a vector of bytes with a checksum of the right length, and no shard holds anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from deltad.checkpoint.disk_delta.checksums import Checksum
from deltad.checkpoint.files import INDEX_NAME, WEIGHT_SUFFIX, list_names, locate, open_inside, read_bounded, unreadable
from deltad.checkpoint.safetensors import parse_json, read_header
from deltad.errors import CheckpointError, LimitError
from deltad.limits import DEFAULT_LIMITS, Limits

_NAME_CHARACTERS = 128


class Encoding(StrEnum):
    """A `delta_encoding`: all bytes XORed, or positions and the new bytes there."""

    XOR = "xor"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True)
class Piece:
    """Where the encoded difference of one tensor is, in bytes of its shard, and the checksum of its new bytes."""

    shard: str
    offset: int
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class DiskDelta:
    """A complete disk-delta directory. `home` is resolved; `pieces` are by tensor name, none for an empty delta."""

    directory: Path
    home: Path
    version: str
    base_version: str
    encoding: Encoding
    checksum: Checksum
    pieces: Mapping[str, Piece]


def is_named(version: str, name: str) -> bool:
    """Whether two spellings of a version are the same: equal, or equal numbers."""
    if version == name:
        return True
    both = version + name
    return both.isascii() and version.isdigit() and name.isdigit() and int(version) == int(name)


def find_disk_delta(directory: Path, *, limits: Limits = DEFAULT_LIMITS) -> DiskDelta | None:
    """The disk-delta in `directory`; None where there is none: a full checkpoint, or nothing at all.

    Raises CheckpointError for one that is incomplete or malformed, LimitError above a ceiling.
    """
    home = locate(directory, limits=limits).resolve()
    if INDEX_NAME not in list_names(home, limits=limits):
        return None
    path = home / INDEX_NAME
    with open_inside(home, INDEX_NAME) as file:
        index = parse_json(read_bounded(file, path, limits.index_bytes), f"{path}", what="text")
    metadata = index.get("metadata") if isinstance(index, dict) else None
    if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}", expected="an object whose weight_map gives each tensor's file", found="none")
    if len(weight_map) > limits.tensors:
        raise LimitError(f"{path}", expected=f"at most {limits.tensors} tensors", found=str(len(weight_map)))
    encoding, checksum = _formats(path, metadata)
    return DiskDelta(
        directory,
        home,
        version=_version(path, metadata, "version"),
        base_version=_version(path, metadata, "base_version"),
        encoding=encoding,
        checksum=checksum,
        pieces=_pieces(home, weight_map, checksum, limits),
    )


def _formats(path: Path, metadata: Mapping[str, Any]) -> tuple[Encoding, Checksum]:
    encoding = str(metadata["delta_encoding"])[:40].lower()
    if encoding not in tuple(Encoding):
        raise CheckpointError(f"{path}: delta_encoding", expected=" or ".join(Encoding), found=repr(encoding))
    compression = str(metadata.get("compression_format", "zstd"))[:40].lower()
    if compression != "zstd":
        raise CheckpointError(f"{path}: compression_format", expected="zstd", found=repr(compression))
    named = str(metadata.get("checksum_format", ""))[:40]
    checksum = Checksum.named(named)
    if checksum is None:
        raise CheckpointError(f"{path}: checksum_format", expected=" or ".join(Checksum), found=repr(named))
    return Encoding(encoding), checksum


def _version(path: Path, metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not 1 <= len(text) <= _NAME_CHARACTERS:
        raise CheckpointError(
            f"{path}: {key}", expected=f"a name of 1 to {_NAME_CHARACTERS} characters", found=repr(value)[:160]
        )
    return text


def _pieces(home: Path, weight_map: Mapping[str, str], checksum: Checksum, limits: Limits) -> dict[str, Piece]:
    pieces: dict[str, Piece] = {}
    for shard in sorted(set(weight_map.values())):
        path = home / shard
        if not shard.endswith(WEIGHT_SUFFIX):
            raise CheckpointError(
                f"{home / INDEX_NAME}", expected=f"{WEIGHT_SUFFIX} files in its directory", found=repr(shard[:120])
            )
        with open_inside(home, shard) as file:
            try:
                header = read_header(file.fileno(), os.fstat(file.fileno()).st_size, f"{path}", limits=limits)
            except OSError as error:
                raise unreadable(path, error) from error
        for entry in header.entries:
            name = entry.spec.name
            thing = f"{path}: tensor {name[:120]!r}"
            if weight_map.get(name) != shard:
                raise CheckpointError(thing, expected=f"only what {INDEX_NAME} says is here", found="another tensor")
            if entry.spec.dtype != "U8" or len(entry.spec.shape) != 1:
                found = f"{entry.spec.dtype} {list(entry.spec.shape)}"
                raise CheckpointError(thing, expected="a difference, as a vector of U8", found=found)
            said = header.metadata.get(name, "").lower()
            if len(said) != checksum.digits or not said.isalnum():
                raise CheckpointError(
                    thing, expected=f"a checksum of {checksum.digits} hex digits ({checksum})", found=repr(said[:80])
                )
            pieces[name] = Piece(shard, entry.offset, entry.spec.bytes, said)
    if missing := sorted(weight_map.keys() - pieces.keys()):
        raise CheckpointError(
            f"{home / INDEX_NAME}: tensor {missing[0][:120]!r}",
            expected=f"it in {weight_map[missing[0]][:120]}",
            found="no such tensor there",
        )
    return pieces
