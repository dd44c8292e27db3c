"""A layout in words, wherever it came from: a checkpoint directory, one safetensors file, a store."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from deltad.cli.objects import open_regular
from deltad.delta import FORMAT
from deltad.delta.layout import Layout
from deltad.figures import count, size
from deltad.ops.blocks import Block, Cell, Facts, Line, Table, columns

_SHOWN = 20


def read_layout(path: Path, publish_as: str) -> Layout:
    """The layout of a checkpoint directory, or of one safetensors file alone. Raises CheckpointError and its kin."""
    if path.is_dir():
        from deltad.checkpoint.directory import open_checkpoint

        with open_checkpoint(path, publish_as=publish_as) as checkpoint:
            return checkpoint.layout
    from deltad.checkpoint.safetensors import read_header

    with open_regular(path) as file:
        header = read_header(file.fileno(), os.fstat(file.fileno()).st_size, str(path))
    return Layout(FORMAT, tuple(sorted((entry.spec for entry in header.entries), key=lambda spec: spec.name)))


def layout_json(layout: Layout) -> dict[str, Any]:
    """A layout as JSON-ready data: totals, then every tensor and file."""
    return {
        "digest": layout.digest.hex(),
        "weight_bytes": layout.weight_bytes,
        "elements": layout.elements,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.bytes, "alias_of": t.alias_of}
            for t in layout.tensors
        ],
        "files": [{"name": f.name, "size": f.size, "sha256": f.digest.hex()} for f in layout.files],
    }


def layout_blocks(title: str, layout: Layout, everything: bool) -> list[Block]:
    """A summary, the dtypes, the files, and the tensors: the largest ones, or all of them in order."""
    aliases = sum(bool(t.alias_of) for t in layout.tensors)
    facts = Facts(
        title,
        [
            ("tensors", f"{len(layout.tensors):,}" + (f", {aliases} of them tied to others" if aliases else "")),
            ("elements", f"{layout.elements:,}"),
            ("weights", size(layout.weight_bytes)),
            ("layout", layout.digest.hex()),
        ],
    )
    tensors = list(layout.tensors)
    if not everything:
        tensors = sorted(tensors, key=lambda t: (-t.bytes, t.name))[:_SHOWN]
    rows: list[tuple[Cell | str, ...]] = [
        (
            t.name,
            t.dtype,
            "×".join(map(str, t.shape)) or "scalar",
            f"tied to {t.alias_of}" if t.alias_of else size(t.bytes),
        )
        for t in tensors
    ]
    heads = columns("tensor", "dtype", "shape", ">bytes")
    title = "tensors" if len(tensors) == len(layout.tensors) else f"the {len(tensors)} largest tensors"
    more = len(layout.tensors) - len(tensors)
    blocks: list[Block] = [facts, _dtypes(layout)]
    if layout.files:
        blocks.append(Facts("files", [(file.name, size(file.size)) for file in layout.files]))
    blocks.append(Table(title, heads, rows))
    if more:
        blocks.append(Line(f"{count(more, 'more tensor')}; --all lists all of them"))
    return blocks


def _dtypes(layout: Layout) -> Table:
    tensors: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for tensor in layout.tensors:
        if not tensor.alias_of:
            tensors[tensor.dtype] += 1
            elements[tensor.dtype] += tensor.elements
            weights[tensor.dtype] += tensor.bytes
    rows: list[tuple[Cell | str, ...]] = [
        (name, f"{tensors[name]:,}", f"{elements[name]:,}", size(weights[name]))
        for name in sorted(tensors, key=lambda name: -weights[name])
    ]
    return Table("dtypes", columns("dtype", ">tensors", ">elements", ">bytes"), rows)
