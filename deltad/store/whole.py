"""Is all of an edge held here? What its record says of it is compared with what it says itself on the way."""

from __future__ import annotations

from deltad.delta.layout import decode_layout
from deltad.delta.manifest import decode_manifest, decode_page
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.errors import NotFoundError
from deltad.limits import Limits
from deltad.protocol.pull_plan import check_manifest, check_tables
from deltad.store.objects import ObjectStore
from deltad.types import Digest


class WholeEdges:
    """Looks through the objects of edges. Reads the disk."""

    def __init__(self, objects: ObjectStore, limits: Limits) -> None:
        self._objects = objects
        self._limits = limits

    def missing(
        self,
        record: VersionRecord,
        variant: VariantRecord,
        edge: EdgeRef,
        base: VersionRecord | None,
        *,
        unasked: bool = False,
    ) -> str:
        """What an edge needs that is not held here, in words; empty if it is whole. `base` is its base where held.

        `unasked`: by one who does not need its objects. Raises FormatError or IntegrityError for an edge that
        contradicts its record.
        """
        read = self._objects.read_unasked if unasked else self._objects.read
        has = self._objects.is_held if unasked else self._objects.has
        if edge.base is not None and base is None:
            return f"{edge.kind} on {edge.base}{_of_run(record, edge)}, which is not held"
        try:
            layout = decode_layout(read(Digest(variant.layout)), limits=self._limits)
            manifest = decode_manifest(read(Digest(edge.manifest)), limits=self._limits)
            root = None if base is None else base.variant(variant.name).root
            check_manifest(record, variant, edge, manifest, base_root=root)
            check_tables(manifest, layout)
            for page in manifest.pages:
                for chunk in decode_page(read(Digest(page.digest)), page, layout, limits=self._limits):
                    if not has(Digest(chunk.digest)):
                        return f"{edge.kind} without chunk {chunk.digest.hex()}"
        except NotFoundError as error:
            return f"{edge.kind} without {error.thing}"
        return ""


def _of_run(record: VersionRecord, edge: EdgeRef) -> str:
    base = record.base(edge)
    return "" if base is None or base.run == record.run else f" of run {base.run}"
