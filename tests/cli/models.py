"""Small checkpoints on disk, whole and broken."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltad.checkpoint.safetensors import format_header
from deltad.delta.layout import TensorSpec
from tests.kit.versions import Published

Bits = dict[str, npt.NDArray[np.uint16]]
Wide = dict[str, npt.NDArray[np.uint32]]


def bits(seed: int = 0, rows: int = 64) -> Bits:
    """Three bf16 tensors of plausible weights."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> npt.NDArray[np.uint16]:
        return (rng.normal(size=shape).astype("<f4").view("<u4") >> 16).astype("<u2")

    return {"model.embed.weight": draw(rows, 128), "model.layer.weight": draw(128, 128), "model.norm.weight": draw(128)}


def noise(seed: int) -> Bits:
    """The same tensors with any bits at all."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 16, value.shape, np.uint16) for name, value in bits().items()}


def nudged(before: Bits, name: str, count: int) -> Bits:
    """A copy in which the lowest bit of the first `count` elements of one tensor is another."""
    after = {key: value.copy() for key, value in before.items()}
    after[name].reshape(-1)[:count] ^= 1
    return after


def bits_of(published: Published) -> Bits:
    """The weights of a version."""
    return {
        spec.name: lanes.reshape(spec.shape).copy()
        for spec, lanes in zip(published.layout.tensors, published.weights.arrays, strict=True)
    }


def write(directory: Path, tensors: Bits | Wide) -> Path:
    """A checkpoint in two files with an index, a config and a tokenizer."""
    directory.mkdir(parents=True)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, members in parts.items():
        header = format_header(TensorSpec(name, _dtype(tensors[name]), tensors[name].shape) for name in members)
        (directory / file).write_bytes(header + b"".join(tensors[name].tobytes() for name in members))
    weight_map = {name: file for file, members in parts.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "test"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _dtype(lanes: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]) -> str:
    return "F32" if lanes.itemsize == 4 else "BF16"


def truncated(directory: Path) -> Path:
    """The second file lacks its last bytes. Returns that file."""
    file = write(directory, bits()) / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return file


def with_wrong_index(directory: Path) -> Path:
    """The index names a file that is not there. Returns the index."""
    index = write(directory, bits()) / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("00002-of-00002", "00003-of-00002"))
    return index


def pickled(directory: Path) -> Path:
    """The weights are a pickle. Returns the pickle."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    file = directory / "pytorch_model.bin"
    file.write_bytes(pickle.dumps({"weight": [1.0]}))
    return file


def twice(directory: Path) -> Path:
    """One tensor is in both files. Returns the second file."""
    tensors = bits()
    file = write(directory, tensors) / "model-00002-of-00002.safetensors"
    names = ["model.embed.weight", "model.norm.weight"]
    header = format_header(TensorSpec(name, "BF16", tensors[name].shape) for name in names)
    file.write_bytes(header + b"".join(tensors[name].tobytes() for name in names))
    return file


def empty(directory: Path) -> Path:
    """Nothing at all."""
    directory.mkdir(parents=True)
    return directory


BROKEN = {
    "a truncated file": (truncated, ["as its header says"]),
    "a wrong index": (with_wrong_index, ["00003-of-00002", "no such file"]),
    "a pickle": (pickled, ["pickle"]),
    "a tensor that appears twice": (twice, ["model.embed.weight", "one file"]),
    "an empty directory": (empty, ["an empty directory"]),
}
"""Every kind of checkpoint that cannot be published: what makes it, and words that its refusal has."""
