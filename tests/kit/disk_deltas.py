"""Disk-delta directories as slime, miles, stitch and cwtrain write them, by the letter of the layout alone.

Nothing here uses what deltad writes or reads them with.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import blake3
import numpy as np
import xxhash
import zstandard

from deltad.delta.layout import Layout
from tests.kit.checkpoints import MODEL
from tests.kit.weights import ArrayWeights

INDEX = "model.safetensors.index.json"
SUMS: Mapping[str, Callable[[bytes], str]] = {
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
}


def difference(old: bytes, new: bytes, encoding: str) -> bytes:
    """The encoded difference of one tensor, before compression."""
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return (before ^ after).tobytes()
    at = np.flatnonzero(before != after).astype("<u4")
    return struct.pack("<I", at.size) + at.tobytes() + after[at].tobytes()


def shard_bytes(tensors: Mapping[str, bytes], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of U8 vectors."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def tensor_bytes(weights: ArrayWeights, layout: Layout = MODEL) -> dict[str, bytes]:
    return {spec.name: array.tobytes() for spec, array in zip(layout.tensors, weights.arrays, strict=True)}


def write_delta(
    directory: Path,
    old: Mapping[str, bytes],
    new: Mapping[str, bytes],
    *,
    version: str,
    base_version: str,
    encoding: str = "xor",
    checksum: str = "adler32",
    shards: int = 2,
) -> Path:
    """Write the delta from `old` to `new`, bytes by tensor name, into `directory`."""
    directory.mkdir(parents=True)
    changed = [name for name in new if old[name] != new[name]]
    compress = zstandard.ZstdCompressor(level=1).compress
    weight_map = {}
    for i in range(shards if changed else 0):
        name = f"model-{i:05d}-of-{shards:05d}.safetensors"
        mine = changed[i::shards]
        weight_map |= dict.fromkeys(mine, name)
        data = {tensor: compress(difference(old[tensor], new[tensor], encoding)) for tensor in mine}
        (directory / name).write_bytes(shard_bytes(data, {tensor: SUMS[checksum](new[tensor]) for tensor in mine}))
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return directory


def apply_delta(directory: Path, old: Mapping[str, bytes]) -> dict[str, bytes]:
    """What a delta makes of `old`; asserts its checksums."""
    index = json.loads((directory / INDEX).read_text())
    metadata, new = index["metadata"], dict(old)
    for name, shard in index["weight_map"].items():
        data = (directory / shard).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        begin, end = (8 + size + offset for offset in header[name]["data_offsets"])
        plain = zstandard.ZstdDecompressor().decompress(data[begin:end], max_output_size=5 * len(old[name]) + 4)
        lanes = np.frombuffer(old[name], np.uint8).copy()
        if metadata["delta_encoding"] == "xor":
            lanes ^= np.frombuffer(plain, np.uint8)
        else:
            (count,) = struct.unpack("<I", plain[:4])
            at = np.frombuffer(plain, "<u4", count, 4)
            lanes[at] = np.frombuffer(plain, np.uint8, count, 4 + 4 * count)
        new[name] = lanes.tobytes()
        assert header["__metadata__"][name] == SUMS[metadata["checksum_format"]](new[name])
    return new
