"""Checkpoints written by hand, so that they can lie in any way."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltad.delta.backend.numpy import UNSIGNED
from deltad.types import DTYPES
from tests.kit.weights import ArrayWeights

INDEX = "model.safetensors.index.json"

Tensor = tuple[str, Sequence[int], bytes]
"""Dtype, shape, bytes."""


def raw_file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, in JSON unless it is bytes, and this data; `length` may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def packed(tensors: Mapping[str, Tensor], **extra: Any) -> bytes:
    """A true file: tensors back to back in the given order, an unpadded header."""
    header: dict[str, Any] = dict(extra)
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return raw_file(header, data)


def bf16(count: int, seed: int = 0) -> Tensor:
    """A vector of `count` random patterns."""
    return "BF16", [count], np.random.default_rng(seed).bytes(2 * count)


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    """One tensor of every dtype and a few odd ones, under names that sort in another order than they are stored."""
    rng = np.random.default_rng(seed)
    found: dict[str, Tensor] = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        shape = [3, 8]
        found[f"{(i * 7) % 22:02d}.{name}"] = (name, shape, rng.bytes(24 * dtype.bits // 8))
    found["a scalar"] = ("F32", [], rng.bytes(4))
    found["empty"] = ("BF16", [4, 0], b"")
    found["odd"] = ("U8", [3], rng.bytes(3))
    found["unaligned"] = ("F64", [2], rng.bytes(16))
    found["Ünïcode 重み"] = ("I16", [1], rng.bytes(2))
    return found


def as_weights(tensors: Mapping[str, Tensor]) -> ArrayWeights:
    """The lanes of tensors in layout order."""
    arrays = []
    for name in sorted(tensors):
        dtype, _, content = tensors[name]
        arrays.append(np.frombuffer(content, UNSIGNED[DTYPES[dtype].lane_bytes]))
    return ArrayWeights(arrays)


def write_single(directory: Path, tensors: Mapping[str, Tensor], name: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(packed(tensors))
    return directory


def write_sharded(directory: Path, shards: Sequence[Mapping[str, Tensor]]) -> Path:
    """Shards with a true index."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i, tensors in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (directory / name).write_bytes(packed(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: Mapping[str, str], **metadata: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}))
