"""The parts of a version in words: record, manifest, pages, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltad.cli.layouts import layout_blocks
from deltad.cli.objects import Chunk, Found
from deltad.delta.coding import Coder, coder_name
from deltad.delta.frame import FrameHeader
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkPage, ChunkRef, Manifest, State
from deltad.delta.record import EdgeRef, VersionRecord
from deltad.figures import count, percent, size, when
from deltad.ops.blocks import Block, Cell, Facts, Line, Table, columns
from deltad.types import DTYPES

_SHOWN = 20

Rows = list[tuple[str, Cell | str]]


def object_blocks(path: Path, found: Found, everything: bool) -> list[Block]:
    """An object of a store: what it is, then its fields."""
    named = "which is its name" if found.named else "computed here"
    head = Facts(
        f"{path}", [("is a", found.kind), ("size", size(found.size)), ("sha256", f"{found.digest.hex()} ({named})")]
    )
    match found.value:
        case VersionRecord() as record:
            edges = [Table(f"variant {v.name}", _EDGE_HEADS, [edge_row(e) for e in v.edges]) for v in record.variants]
            return [head, record_facts(record), *edges]
        case Manifest() as manifest:
            pages: list[tuple[Cell | str, ...]] = [
                (page.digest.hex(), str(page.chunks), size(page.size)) for page in manifest.pages
            ]
            return [head, manifest_facts(manifest), Table("pages", columns("page", ">chunks", ">bytes"), pages)]
        case ChunkPage() as page:
            return [head, *chunk_blocks(page.chunks, None, everything)]
        case Layout() as layout:
            return [head, *layout_blocks("layout", layout, everything)]
        case Chunk() as chunk:
            return [head, *_frame_blocks(chunk, everything)]
    return [head, Line("a file that travels with a version; its content is not ours to read")]


def record_facts(record: VersionRecord) -> Facts:
    """What the publisher says of a version."""
    rows: Rows = [
        ("version", str(record.id)),
        ("parent", _parent(record)),
        ("sequence", str(record.sequence)),
        ("variants", ", ".join(f"{v.name} (root {v.root.hex()})" for v in record.variants)),
        ("published", when(record.created_ns / 1e9)),
        ("source", record.source or "–"),
        ("format", f"{record.format}, readers of {record.least_reader} and later"),
        ("signed by", record.key_id or "nobody"),
    ]
    if record.identity:
        rows.insert(1, ("identity", record.identity))
    return Facts("record", rows)


_EDGE_HEADS = columns("edge", "base", "manifest", ">bytes")


def edge_row(edge: EdgeRef) -> tuple[Cell | str, ...]:
    """An edge as its record names it."""
    return (edge.kind, str(edge.base or "–"), edge.manifest.hex(), size(edge.size))


def manifest_facts(manifest: Manifest) -> Facts:
    """One edge as its manifest describes it."""
    rows: Rows = [
        ("kind", f"{manifest.kind} ({manifest.reason})" if manifest.reason else str(manifest.kind)),
        ("variant", manifest.variant),
        ("base", _state(manifest.base, manifest.run) if manifest.base else "none"),
        ("target", _state(manifest.target, manifest.run)),
        ("layout", manifest.layout.hex()),
        (
            "changed",
            f"{manifest.changed:,} of {count(manifest.elements, 'element')}, {percent(manifest.density)}",
        ),
        (
            "chunks",
            f"{sum(page.chunks for page in manifest.pages):,} in {count(len(manifest.pages), 'page')}, "
            f"{size(manifest.chunk_bytes)}",
        ),
        ("coders", ", ".join(coder_name(coder) for coder in manifest.coders) or "none"),
        ("format", f"{manifest.format}, readers of {manifest.least_reader} and later"),
        ("signed by", manifest.key_id or "no key of its own; a record that names it vouches for it"),
    ]
    return Facts("manifest", rows)


def chunk_blocks(chunks: Sequence[ChunkRef], layout: Layout | None, everything: bool) -> list[Block]:
    """A chunk list; with a layout, tensors are shown by name."""
    shown = chunks if everything else chunks[:_SHOWN]
    rows: list[tuple[Cell | str, ...]] = [
        (chunk.digest.hex(), size(chunk.size), _tensor(chunk.first_tensor, layout), _tensor(chunk.last_tensor, layout))
        for chunk in shown
    ]
    heads = columns("chunk", ">bytes", "first tensor", "last tensor")
    blocks: list[Block] = [Table("chunks", heads, rows, empty="none: nothing changed")]
    if more := len(chunks) - len(shown):
        blocks.append(Line(f"{count(more, 'more chunk')}; --all lists all of them"))
    return blocks


def _frame_blocks(chunk: Chunk, everything: bool) -> list[Block]:
    shown = chunk.frames if everything else chunk.frames[:_SHOWN]
    rows: list[tuple[Cell | str, ...]] = []
    for frame in shown:
        tensors = sorted({rect.tensor for rect in frame.rects})
        span = str(tensors[0]) if len(tensors) == 1 else f"{tensors[0]} to {tensors[-1]}"
        stored = sum(length for _, length in frame.streams)
        share = percent(frame.changed / frame.lanes) if frame.lanes else "–"
        rows.append(
            (coder_name(frame.coder), frame.dtype, span, f"{frame.lanes:,}", share, size(_plain(frame)), size(stored))
        )
    heads = columns("coder", "dtype", "tensors", ">lanes", ">changed", ">plain", ">stored")
    blocks: list[Block] = [Table(count(len(chunk.frames), "frame"), heads, rows)]
    if more := len(chunk.frames) - len(shown):
        blocks.append(Line(f"{count(more, 'more frame')}; --all lists all of them"))
    return blocks


def _plain(frame: FrameHeader) -> int:
    """The size of what a frame holds before it is coded any further; a packed one's streams do not tell."""
    if frame.coder == Coder.PACKED and frame.dtype in DTYPES:
        return frame.lanes * DTYPES[frame.dtype].lane_bytes
    return sum(length for length, _ in frame.streams)


def _parent(record: VersionRecord) -> str:
    if record.parent is None:
        return "none"
    return f"{record.parent_run}/{record.parent}" if record.parent_run else str(record.parent)


def _state(state: State, run: str) -> str:
    return f"{state.run or run}/{state.version}, root {state.root.hex()}"


def _tensor(index: int, layout: Layout | None) -> str:
    return f"#{index}" if layout is None else layout.tensors[index].name
