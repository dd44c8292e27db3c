"""Writing a disk-delta directory from two states of the same tensors.

Files carry their names only once they are synced, the index last of all: its presence means that the delta is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zstandard

from deltad.checkpoint.disk_delta.checksums import Checksum
from deltad.checkpoint.disk_delta.index import Encoding
from deltad.checkpoint.files import INDEX_NAME
from deltad.checkpoint.safetensors import format_header
from deltad.delta.backend import Lanes
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.threads import in_order
from deltad.delta.weights import Weights, borrowed
from deltad.errors import LimitError, UsageError
from deltad.store.disk import DISK, FileSystem, make_directory, store_error

SHARD_BYTES = 1 << 30
_WINDOW_BYTES = 4 << 20
_SUFFIX = ".incomplete"
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class WrittenDelta:
    """What was written: tensors that changed, and bytes of all files."""

    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Changed:
    """One changed tensor: the zstd frame of its difference, and the checksum of its new bytes."""

    name: str
    frame: bytes
    checksum: str


@dataclass(slots=True)
class _Shard:
    tensors: list[_Changed] = field(default_factory=list)
    bytes: int = 0


def write_disk_delta(
    directory: Path,
    layout: Layout,
    base: Weights,
    target: Weights,
    *,
    version: str,
    base_version: str,
    encoding: Encoding = Encoding.XOR,
    checksum: Checksum = Checksum.ADLER32,
    shard_bytes: int = SHARD_BYTES,
    threads: int = 1,
    files: FileSystem = DISK,
) -> WrittenDelta:
    """Write what turns `base` into `target`, both in `layout`, into a new or empty `directory`.

    `version` and `base_version` are what the index calls them. Aliases are not written. Memory: a shard, and for each
    thread the difference of a tensor. Raises UsageError if the directory holds something, LimitError for a tensor that
    the encoding cannot address, MissingPackageError, StoreFullError, StoreError.
    """
    checksum.begin()  # refused before anything is made
    make_directory(directory, files)
    made: list[tuple[str, _Shard]] = []
    written: list[str] = []
    try:
        if files.entries(directory):
            raise UsageError(f"{directory}", expected="a new or an empty directory", found="one with files")
        tensors = [i for i, spec in enumerate(layout.tensors) if not spec.alias_of]
        found = in_order(lambda i: _encode(layout, i, base, target, encoding, checksum), tensors, threads)
        for shard in _shards(found, shard_bytes):
            part = f"part-{len(made):05d}{_SUFFIX}"
            written.append(part)
            _write(directory / part, _shard_bytes(shard), files)
            shard.tensors = [_Changed(each.name, b"", "") for each in shard.tensors]
            made.append((part, shard))
        names = [f"model-{i:05d}-of-{len(made):05d}.safetensors" for i in range(len(made))]
        weight_map = {each.name: name for name, (_, shard) in zip(names, made, strict=True) for each in shard.tensors}
        metadata = {
            "version": version,
            "base_version": base_version,
            "delta_encoding": encoding.value,
            "compression_format": "zstd",
            "checksum_format": checksum.value,
        }
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, ensure_ascii=False, indent=1).encode()
        written.append(INDEX_NAME + _SUFFIX)
        _write(directory / (INDEX_NAME + _SUFFIX), [index], files)
        for name, (part, _) in zip(names, made, strict=True):
            files.rename(directory / part, directory / name)
        files.sync_directory(directory)
        files.rename(directory / (INDEX_NAME + _SUFFIX), directory / INDEX_NAME)
        files.sync_directory(directory)
    except BaseException as error:
        for name in written:
            with suppress(OSError):
                files.unlink(directory / name)
        if isinstance(error, OSError):
            raise store_error(error, directory, 0) from error
        raise
    return WrittenDelta(len(weight_map), len(index) + sum(shard.bytes for _, shard in made))


def _shards(found: Iterator[_Changed | None], most: int) -> Iterator[_Shard]:
    shard = _Shard()
    for changed in found:
        if changed is None:
            continue
        if shard.tensors and shard.bytes + len(changed.frame) > most:
            yield shard
            shard = _Shard()
        shard.tensors.append(changed)
        shard.bytes += len(changed.frame)
    if shard.tensors:
        yield shard


def _shard_bytes(shard: _Shard) -> Iterator[bytes]:
    specs = [TensorSpec(each.name, "U8", (len(each.frame),)) for each in shard.tensors]
    yield format_header(specs, {each.name: each.checksum for each in shard.tensors})
    for each in shard.tensors:
        yield each.frame


def _write(path: Path, pieces: Iterator[bytes] | list[bytes], files: FileSystem) -> None:
    file = files.create(path)
    try:
        at = 0
        for piece in pieces:
            file.write(piece, at)
            at += len(piece)
        file.sync()
    finally:
        file.close()


def _encode(  # noqa: PLR0917
    layout: Layout, tensor: int, base: Weights, target: Weights, encoding: Encoding, checksum: Checksum
) -> _Changed | None:
    """The difference of one tensor; None if there is none."""
    spec = layout.tensors[tensor]
    if encoding is Encoding.OVERWRITE and spec.bytes > 1 << 32:
        raise LimitError(
            f"tensor {spec.name!r} as {encoding}",
            expected=f"at most {1 << 32} bytes, which its positions reach",
            found=f"{spec.bytes}",
            hint=f"take {Encoding.XOR}",
        )
    into: _Into = _IntoXor(spec.bytes) if encoding is Encoding.XOR else _IntoOverwrite()
    total, changed = checksum.begin(), False
    step = _WINDOW_BYTES // spec.type.lane_bytes
    for start in range(0, spec.lanes, step):
        span = (tensor, start, min(step, spec.lanes - start))
        with borrowed(base, span) as old, borrowed(target, span) as new:
            total.update(_bytes(new).data)
            difference = _bytes(old) ^ _bytes(new)
            changed = changed or bool(difference.any())
            into.add(start * spec.type.lane_bytes, difference, _bytes(new))
    return _Changed(spec.name, into.frame(), total.hexdigest()) if changed else None


def _bytes(lanes: Lanes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ascontiguousarray(lanes).view(np.uint8)


class _IntoXor:
    def __init__(self, size: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=size)
        self._parts: list[bytes] = []

    def add(self, start: int, difference: Lanes, new: Lanes) -> None:
        self._parts.append(self._compressor.compress(difference.data))

    def frame(self) -> bytes:
        return b"".join([*self._parts, self._compressor.flush()])


class _IntoOverwrite:
    def __init__(self) -> None:
        self._positions: list[bytes] = []
        self._values: list[bytes] = []
        self._count = 0

    def add(self, start: int, difference: Lanes, new: Lanes) -> None:
        at = np.flatnonzero(difference)
        self._count += at.size
        self._positions.append((at + start).astype("<u4").tobytes())
        self._values.append(new[at].tobytes())

    def frame(self) -> bytes:
        content = b"".join([self._count.to_bytes(4, "little"), *self._positions, *self._values])
        return zstandard.ZstdCompressor(level=_LEVEL).compress(content)


_Into = _IntoXor | _IntoOverwrite
