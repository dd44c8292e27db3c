"""Is what a store shows whole? Every object that leads to a version is read, and each is checked by its name.

A collection does not see these reads: nobody has asked for anything.
"""

from __future__ import annotations

from deltad.delta.layout import decode_layout
from deltad.delta.manifest import decode_manifest, decode_page
from deltad.delta.record import VersionRecord
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version


def read_version(store: Store, record: VersionRecord) -> set[Digest]:
    """The digests of all objects from an anchor to a version. Raises for one that is missing or damaged."""
    run = store.run(RunId(record.run))
    found: set[Digest] = set()

    def read(digest: bytes) -> bytes:
        found.add(Digest(digest))
        return store.objects.read_unasked(Digest(digest))

    for variant in record.variants:
        layout = decode_layout(read(variant.layout), limits=store.limits)
        for file in layout.files:
            read(file.digest)
        for hop in run.path(record, variant.name).hops:
            manifest = decode_manifest(read(hop.edge.manifest), limits=store.limits)
            read(manifest.layout)
            for page in manifest.pages:
                for chunk in decode_page(read(page.digest), page, layout, limits=store.limits):
                    read(chunk.digest)
    return found


def whole_versions(store: Store, run: RunId) -> list[Version]:
    """All versions that a run shows, each read to its last byte."""
    records = store.run(run).records()
    for record in records:
        read_version(store, record)
    return [record.version for record in records]
