"""Edges that no record names, as a host derives them: skip deltas folded from a lineage's deltas, and anchors.

made = skip_delta(lineage.versions[0:65])      # v1 → v65
made.add_to(store)                             # its objects, and its entry in the catalogue
pulling.hints.append(made.hint)                # what a peer says of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from deltad.delta.backend import choose
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.emit import EncodedChunk
from deltad.delta.encoding import encode, sha256
from deltad.delta.fold import StoredDelta, fold
from deltad.delta.frame import read_chunk
from deltad.delta.manifest import ChunkRef, EdgeKind, Manifest, State, decode_manifest, decode_page, make_pages
from deltad.delta.record import EdgeRef
from deltad.limits import Limits
from deltad.protocol.hints import Hint
from deltad.store.store import Store
from deltad.types import Digest, RunId
from tests.kit.versions import SMALL_CHUNKS, Published


@dataclass(frozen=True, slots=True)
class Derived:
    """An edge in memory: its manifest, and all objects of it by digest."""

    manifest: Manifest
    ref: EdgeRef
    objects: dict[Digest, bytes]
    chunks: frozenset[Digest]

    @property
    def bytes(self) -> int:
        """What a reader of it fetches."""
        return sum(map(len, self.objects.values()))

    @property
    def hint(self) -> Hint:
        """What a peer says of it."""
        return Hint(
            self.manifest.variant, self.manifest.target.version, self.ref, self.bytes, tuple(self.manifest.coders)
        )

    def add_to(self, store: Store, *, local: bool = False) -> Derived:
        """Store its objects, and take it into the catalogue."""
        for digest, data in self.objects.items():
            put = store.put_chunk if digest in self.chunks else store.put
            put(data)
        store.run(RunId(self.manifest.run)).add_edge(Digest(self.ref.manifest), local=local)
        return self


def edge_of(published: Published, kind: EdgeKind = EdgeKind.DELTA) -> Derived:
    """An edge that the record names, in the same shape."""
    ref = next(edge for edge in published.record.variants[0].edges if edge.kind is kind)
    manifest = decode_manifest(published.objects[Digest(ref.manifest)])
    refs = [ref.manifest, *(page.digest for page in manifest.pages)]
    chunks = [Digest(chunk.digest) for chunk in _chunks(published, manifest)]
    objects = {Digest(digest): published.objects[Digest(digest)] for digest in [*refs, *chunks]}
    return Derived(manifest, ref, objects, frozenset(chunks))


def skip_delta(versions: Sequence[Published], *, limits: Limits = SMALL_CHUNKS) -> Derived:
    """From the first of these versions to the last, folded from the delta of each in between."""
    base, target = versions[0], versions[-1]
    parts = [_stored(version, edge_of(version).manifest) for version in versions[1:]]
    data: dict[Digest, bytes] = {}

    def keep(chunks: list[EncodedChunk]) -> StoredDelta:
        data.update({Digest(chunk.ref.digest): chunk.data for chunk in chunks})
        return StoredDelta([chunk.ref for chunk in chunks], data.__getitem__)

    whole = keep(list(fold(parts, target.layout, choose(), limits=limits).chunks()))
    chunks = [EncodedChunk(ref, whole.read(Digest(ref.digest))) for ref in whole.chunks]
    return _made(target, State(base.version, base.record.variants[0].root), EdgeKind.SKIP_DELTA, chunks, limits)


def anchor(version: Published, *, limits: Limits = SMALL_CHUNKS) -> Derived:
    """A version as a whole."""
    encoder = EdgeEncoder(version.layout, version.weights, choose(), limits=limits)
    return _made(version, None, EdgeKind.ANCHOR, list(encoder.chunks()), limits)


def between(base: Published, target: Published, *, limits: Limits = SMALL_CHUNKS) -> Derived:
    """From one version to another, encoded from their weights."""
    sums = sum_weights(base.layout, base.weights)
    encoder = EdgeEncoder(target.layout, target.weights, choose(), base=base.weights, base_sums=sums, limits=limits)
    state = State(base.version, base.record.variants[0].root)
    return _made(target, state, EdgeKind.SKIP_DELTA, list(encoder.chunks()), limits)


def altered(made: Derived, **changes: object) -> Derived:
    """The same edge with other fields in its manifest."""
    objects = {digest: data for digest, data in made.objects.items() if digest != made.ref.manifest}
    manifest = msgspec.structs.replace(made.manifest, **changes)
    return _named(manifest, objects, made.chunks)


def _made(
    target: Published, base: State | None, kind: EdgeKind, chunks: Sequence[EncodedChunk], limits: Limits
) -> Derived:
    named = decode_manifest(target.objects[Digest(target.record.variants[0].edges[0].manifest)])
    pages = list(make_pages([chunk.ref for chunk in chunks], limits=limits))
    manifest = msgspec.structs.replace(
        named,
        kind=kind,
        base=base,
        pages=tuple(ref for ref, _ in pages),
        coders=tuple(sorted(_coders(target, chunks))),
        changed=named.elements,
        chunk_bytes=sum(chunk.ref.size for chunk in chunks),
    )
    objects = {Digest(chunk.ref.digest): chunk.data for chunk in chunks}
    objects |= {Digest(ref.digest): data for ref, data in pages}
    return _named(manifest, objects, frozenset(Digest(chunk.ref.digest) for chunk in chunks))


def _named(manifest: Manifest, objects: dict[Digest, bytes], chunks: frozenset[Digest]) -> Derived:
    data = encode(manifest)
    base = None if manifest.base is None else manifest.base.version
    ref = EdgeRef(manifest.kind, base, sha256(data), len(data))
    return Derived(manifest, ref, objects | {Digest(ref.manifest): data}, chunks)


def _coders(target: Published, chunks: Sequence[EncodedChunk]) -> set[int]:
    return {int(frame.header.coder) for chunk in chunks for frame in read_chunk(chunk.data, target.layout)}


def _stored(version: Published, manifest: Manifest) -> StoredDelta:
    return StoredDelta(_chunks(version, manifest), version.objects.__getitem__)


def _chunks(version: Published, manifest: Manifest) -> list[ChunkRef]:
    return [
        chunk
        for page in manifest.pages
        for chunk in decode_page(version.objects[Digest(page.digest)], page, version.layout)
    ]
