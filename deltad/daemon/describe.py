"""A version in the words of the local API."""

from __future__ import annotations

from collections.abc import Sequence

from deltad.client.messages import PinInfo, Step, VersionInfo
from deltad.daemon.notes import Note
from deltad.delta.coding import coder_name
from deltad.delta.record import VersionRecord
from deltad.errors import IntegrityError
from deltad.store.derived import edge_bytes
from deltad.store.path import Hop
from deltad.store.pins import Pin
from deltad.store.runs import RunStore


def describe(run: RunStore, record: VersionRecord, full_bytes: int, note: Note, pin: Pin | None = None) -> VersionInfo:
    """Everything the API says about one version, in its first variant. Reads its manifest.

    Of several edges the record's own come first, so that what derives further ones later changes nothing here.
    Raises NotFoundError where no edge is held, IntegrityError or FormatError for a damaged one.
    """
    variant = record.variants[0]
    edge = run.way_in(record.version, variant.name)
    manifest = run.read_manifest(edge)
    return VersionInfo(
        run=record.run,
        version=str(record.version),
        parent=_parent(record),
        identity=record.identity,
        source=record.source,
        variant=variant.name,
        kind=edge.kind.value,
        reason=manifest.reason,
        root=variant.root.hex(),
        layout=variant.layout.hex(),
        density=manifest.density,
        elements=manifest.elements,
        changed=manifest.changed,
        full_bytes=full_bytes,
        delta_bytes=edge_bytes(manifest, edge.size) + len(record.encode()),
        chunks=sum(page.chunks for page in manifest.pages),
        created=record.created_ns / 1e9,
        pulled_bytes=note.pulled_bytes,
        seconds=note.seconds,
        coder=note.coder or coder_names(manifest.coders),
        coder_reason=note.coder_reason,
        pin=pin_info(pin),
        base="" if edge.base is None else str(edge.base),
        sequence=record.sequence,
        others={other.name: other.root.hex() for other in record.variants[1:]},
    )


def pin_info(pin: Pin | None) -> PinInfo | None:
    return None if pin is None else PinInfo(pin.by, pin.why, pin.at)


def _parent(record: VersionRecord) -> str:
    """The version that it was made from: with its run where that is another one; empty for none."""
    if record.parent is None:
        return ""
    return f"{record.parent_run}/{record.parent}" if record.parent_run else str(record.parent)


def coder_names(coders: Sequence[int]) -> str:
    """`blind+context`: the coders of an edge, in words."""
    return "+".join(map(coder_name, coders))


def describe_step(run: RunStore, hop: Hop, variant: str) -> Step:
    """One delta on a replica's way."""
    base = hop.edge.base
    if base is None:
        raise IntegrityError(f"the way to {hop.record.id}", expected="deltas alone", found="an anchor")
    return Step(
        version=str(hop.record.version),
        root=hop.record.variant(variant).root.hex(),
        base=str(base),
        base_root=run.record(base).variant(variant).root.hex(),
        manifest=hop.edge.manifest.hex(),
    )
