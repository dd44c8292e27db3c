"""Checkpoint directories as a trainer would write them, from weights in memory."""

from __future__ import annotations

from pathlib import Path

from deltad.checkpoint.directory import open_checkpoint
from deltad.checkpoint.writer import CheckpointWriter
from deltad.delta.encoding import sha256
from deltad.delta.layout import FileSpec, Layout, TensorSpec
from tests.kit.weights import ArrayWeights

CONFIG = b'{"model_type": "llama"}'

MODEL = Layout(
    0,
    (
        TensorSpec("embed.weight", "BF16", (64, 24)),
        TensorSpec("layers.0.down.weight", "BF16", (24, 48)),
        TensorSpec("layers.0.norm.weight", "BF16", (24,)),
        TensorSpec("layers.0.up.weight", "BF16", (48, 24)),
        TensorSpec("scale", "F32", ()),
    ),
    (FileSpec("config.json", len(CONFIG), sha256(CONFIG)),),
)
"""A model small enough for a thousand versions and large enough for several tensors and dtypes."""


def write_checkpoint(
    directory: Path, weights: ArrayWeights, *, layout: Layout = MODEL, shard_bytes: int = 5_000_000_000
) -> Path:
    """Write a loadable checkpoint directory; its only file besides weights is `config.json`."""
    with CheckpointWriter(directory, layout, shard_bytes=shard_bytes) as writer:
        for i, spec in enumerate(layout.tensors):
            if spec.lanes:
                writer.lanes(i, 0, spec.lanes)[:] = weights.arrays[i]
        for file in layout.files:
            writer.write_file(file.name, CONFIG)
        writer.finish()
    return directory


def read_checkpoint(directory: Path) -> ArrayWeights:
    """All weights of a checkpoint directory, in layout order."""
    with open_checkpoint(directory) as checkpoint:
        return ArrayWeights(
            [checkpoint.lanes(i, 0, spec.lanes).copy() for i, spec in enumerate(checkpoint.layout.tensors)]
        )
