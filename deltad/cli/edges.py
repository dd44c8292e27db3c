"""A version taken apart through the daemon that holds it: record, variants, edges, manifests, pages, chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltad.cli.anatomy import chunk_blocks, manifest_facts, record_facts
from deltad.cli.layouts import layout_blocks, layout_json
from deltad.cli.objects import builtins
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import ChunkRef, EdgeKind, Manifest, decode_manifest, decode_page
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord, decode_record
from deltad.errors import NotFoundError
from deltad.ops.blocks import Block, Line
from deltad.types import Digest, VersionId, parse_digest, parse_version

if TYPE_CHECKING:
    from deltad.client.client import Client
    from deltad.client.messages import DerivedEdgeView


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge that a record names, or that was derived. `manifest` is None where this daemon does not hold it."""

    ref: EdgeRef
    manifest: Manifest | None
    chunks: tuple[ChunkRef, ...]
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant with its layout and all edges to it."""

    record: VariantRecord
    layout: Layout
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class VersionParts:
    """A version with all that its record names and the derived edges to it, but for the chunks' content."""

    record: VersionRecord
    variants: tuple[Variant, ...]


def read_version(client: Client, version: VersionId) -> VersionParts:
    """Fetch and decode it. Raises NotFoundError, IntegrityError or FormatError."""
    record = decode_record(client.record_bytes(version.run, version.version))
    derived = client.derived_edges(version.run, version.version)
    return VersionParts(record, tuple(_read_variant(client, variant, derived) for variant in record.variants))


def _read_variant(client: Client, variant: VariantRecord, derived: Iterable[DerivedEdgeView]) -> Variant:
    layout = decode_layout(client.object(Digest(variant.layout)))
    others = (_derived_ref(edge) for edge in derived if edge.variant == variant.name)
    return Variant(
        variant,
        layout,
        (
            *(_read_edge(client, edge, layout) for edge in variant.edges),
            *(_read_edge(client, edge, layout, derived=True) for edge in others),
        ),
    )


def _derived_ref(edge: DerivedEdgeView) -> EdgeRef:
    base = parse_version(edge.base) if edge.base else None
    return EdgeRef(EdgeKind(edge.kind), base, parse_digest(edge.manifest), edge.size)


def _read_edge(client: Client, edge: EdgeRef, layout: Layout, *, derived: bool = False) -> Edge:
    try:
        manifest = decode_manifest(client.object(Digest(edge.manifest)))
    except NotFoundError:
        return Edge(edge, None, (), derived)
    chunks: list[ChunkRef] = []
    for page in manifest.pages:
        chunks += decode_page(client.object(Digest(page.digest)), page, layout)
    return Edge(edge, manifest, tuple(chunks), derived)


def version_json(version: VersionParts) -> dict[str, Any]:
    """All fields as JSON-ready data."""
    variants = [
        {
            "name": variant.record.name,
            "root": variant.record.root.hex(),
            "layout": layout_json(variant.layout),
            "edges": [
                {
                    "kind": edge.ref.kind,
                    "base": builtins(edge.ref.base),
                    "digest": edge.ref.manifest.hex(),
                    "size": edge.ref.size,
                    "derived": edge.derived,
                    "manifest": builtins(edge.manifest),
                    "chunks": builtins(edge.chunks),
                }
                for edge in variant.edges
            ],
        }
        for variant in version.variants
    ]
    return {"version": str(version.record.id), "record": builtins(version.record), "variants": variants}


def version_blocks(version: VersionParts, everything: bool) -> list[Block]:
    """The same in words."""
    blocks: list[Block] = [record_facts(version.record)]
    for variant in version.variants:
        blocks += layout_blocks(f"variant {variant.record.name}", variant.layout, everything)
        for edge in variant.edges:
            what = f"{'derived edge' if edge.derived else 'edge'}: {edge.ref.kind} on {edge.ref.base or 'nothing'}"
            blocks.append(Line(f"{what}, manifest {edge.ref.manifest.hex()}"))
            if edge.manifest is None:
                blocks.append(Line("this daemon does not hold it: another edge led here"))
            else:
                blocks += [manifest_facts(edge.manifest), *chunk_blocks(edge.chunks, variant.layout, everything)]
    return blocks
