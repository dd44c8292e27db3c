"""Small real versions: layouts, anchors, deltas and records made by the product's own encoder.

    lineage = Lineage("policy", seed=7)
    first = lineage.publish()                  # an anchor
    second = lineage.publish()                 # a delta from the first
    both = lineage.publish(anchor=True)        # a delta and an anchor that lead to one version
    second.put_into(store); store.run(second.run).commit(second.data)      # or: lineage.fill(store)

Nothing is written before `put_into` or `fill`; `Published.objects` holds every object by its digest.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

import msgspec

from deltad.delta import FORMAT
from deltad.delta.backend import Mode, choose
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.digest import pack_sums
from deltad.delta.encoding import encode, sha256
from deltad.delta.layout import FileSpec, Layout, TensorSpec
from deltad.delta.manifest import EdgeKind, Manifest, State, make_pages
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.limits import Limits
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version
from tests.kit.weights import ArrayWeights

SMALL_CHUNKS = Limits(chunk_bytes=4096, frame_lanes=2048, page_chunks=4)
"""Cuts even a small model into many chunks and several pages."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version as its publisher made it."""

    record: VersionRecord
    data: bytes
    """The record's bytes."""
    objects: dict[Digest, bytes]
    """Layout, files, and the manifest, pages and chunks of every edge."""
    chunks: frozenset[Digest]
    """Which of them are chunks."""
    weights: ArrayWeights
    layout: Layout

    @property
    def run(self) -> RunId:
        return RunId(self.record.run)

    @property
    def version(self) -> Version:
        return self.record.version

    @property
    def bytes(self) -> int:
        """The record and all objects."""
        return len(self.data) + sum(len(data) for data in self.objects.values())

    def put_into(self, store: Store) -> None:
        """Store all objects, and not the record."""
        _put(store, self.objects, self.chunks)

    def commit_into(self, store: Store) -> None:
        """Store all objects and the record."""
        self.put_into(store)
        store.run(self.run).commit(self.data)


@dataclass(frozen=True, slots=True)
class Skip:
    """An edge that no record names."""

    manifest: Digest
    objects: dict[Digest, bytes]
    """Manifest, pages and chunks."""
    chunks: frozenset[Digest]

    @property
    def bytes(self) -> int:
        return sum(len(data) for data in self.objects.values())

    def put_into(self, store: Store) -> None:
        """Store all objects, and nothing in the catalogue."""
        _put(store, self.objects, self.chunks)


def _put(store: Store, objects: dict[Digest, bytes], chunks: Container[Digest]) -> None:
    for digest, data in objects.items():
        if digest in chunks:
            store.put_chunk(data)
        else:
            store.put(data)


@dataclass
class Lineage:
    """A run that grows by one version with every `publish`.

    The model has `tensors` bf16 matrices of `elements` elements each and one config file. `limits` cut
    frames, chunks and pages; a reader with the default limits takes them all. With `forks`, the first version is made
    from that one, of another run.
    """

    run: str = "policy"
    tensors: int = 3
    elements: int = 4096
    density: float = 0.02
    seed: int = 0
    limits: Limits = SMALL_CHUNKS
    mode: Mode = "blind"
    variant: str = "bf16"
    forks: Published | None = None
    versions: list[Published] = field(default_factory=list)

    def publish(self, *, anchor: bool = False, delta: bool = True, number: int | None = None) -> Published:
        """The next version: other weights, reached by a delta from the one before and/or by an anchor.

        The first version has an anchor in any case. With `number`, versions in between are skipped.
        """
        before = self.versions[-1] if self.versions else self.forks
        files = {"config.json": b'{"model_type": "test"}'}
        specs = tuple(TensorSpec(f"layer.{i:03d}", "BF16", (self.elements // 64, 64)) for i in range(self.tensors))
        layout = Layout(
            FORMAT, specs, tuple(FileSpec(name, len(data), sha256(data)) for name, data in sorted(files.items()))
        )
        seed = 1000 * self.seed + len(self.versions)
        weights = (
            ArrayWeights.random(layout, seed) if before is None else before.weights.changed(self.density, seed=seed)
        )
        version = Version(
            1, (self.versions[-1].version.number + 1 if self.versions else 1) if number is None else number
        )
        objects = {sha256(data): data for data in files.values()}
        objects[layout.digest] = layout.encode()
        edges, chunks = [], set[Digest]()
        if before is not None and delta:
            edges.append(self._edge(layout, weights, version, before, objects, named=chunks))
        if before is None or anchor or not delta:
            edges.append(self._edge(layout, weights, version, None, objects, named=chunks))
        record = VersionRecord(
            format=FORMAT,
            least_reader=FORMAT,
            run=self.run,
            version=version,
            parent=before.version if before else None,
            parent_run=before.run if before and before.run != self.run else "",
            sequence=len(self.versions) + 1,
            variants=(
                VariantRecord(
                    self.variant,
                    layout.digest,
                    len(layout.encode()),
                    edges[0][1].target.root,
                    tuple(ref for ref, _ in edges),
                ),
            ),
        )
        published = Published(record, record.encode(), objects, frozenset(chunks), weights, layout)
        self.versions.append(published)
        return published

    def skip(self, base: Published, target: Published) -> Skip:
        """A skip delta from one version of this run to another; an anchor if both are the same one."""
        objects: dict[Digest, bytes] = {}
        chunks = set[Digest]()
        before, kind = (None, EdgeKind.ANCHOR) if base is target else (base, EdgeKind.SKIP_DELTA)
        ref, _ = self._edge(target.layout, target.weights, target.version, before, objects, named=chunks, kind=kind)
        return Skip(Digest(ref.manifest), objects, frozenset(chunks))

    def fill(self, store: Store) -> None:
        """Commit every version into a store."""
        for published in self.versions:
            published.commit_into(store)

    def objects(self) -> dict[Digest, bytes]:
        """The objects of all versions."""
        return {digest: data for published in self.versions for digest, data in published.objects.items()}

    def _edge(
        self,
        layout: Layout,
        weights: ArrayWeights,
        version: Version,
        before: Published | None,
        objects: dict[Digest, bytes],
        *,
        named: set[Digest],
        kind: EdgeKind | None = None,
    ) -> tuple[EdgeRef, Manifest]:
        base = None if before is None else before.weights
        sums = None if base is None else sum_weights(layout, base)
        encoder = EdgeEncoder(layout, weights, choose(), base=base, base_sums=sums, limits=self.limits, mode=self.mode)
        chunks = list(encoder.chunks())
        objects |= {Digest(chunk.ref.digest): chunk.data for chunk in chunks}
        named |= {Digest(chunk.ref.digest) for chunk in chunks}
        pages = list(make_pages([chunk.ref for chunk in chunks], limits=self.limits))
        objects |= {Digest(ref.digest): data for ref, data in pages}
        kind = kind or (EdgeKind.ANCHOR if before is None else EdgeKind.DELTA)
        state = None
        if before is not None:
            run = "" if before.run == self.run else before.run
            state = State(before.version, before.record.variants[0].root, run)
        manifest = Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=kind,
            run=self.run,
            variant=self.variant,
            layout=layout.digest,
            base=state,
            target=State(version, encoder.root),
            sums=pack_sums(encoder.sums),
            pages=tuple(ref for ref, _ in pages),
            coders=encoder.coders,
            changed=int(encoder.changed.sum()),
            elements=layout.elements,
            chunk_bytes=sum(chunk.ref.size for chunk in chunks),
        )
        data = encode(manifest)
        objects[sha256(data)] = data
        return EdgeRef(kind, None if before is None else before.version, sha256(data), len(data)), manifest


def joined(first: Published, second: Published) -> Published:
    """One version with the variants of both."""
    made = forge(first, variants=(*first.record.variants, *second.record.variants))
    return replace(made, objects=first.objects | second.objects, chunks=first.chunks | second.chunks)


def forge(published: Published, **changes: object) -> Published:
    """The same version with other fields in its record."""
    record = msgspec.structs.replace(published.record, **changes)
    return replace(published, record=record, data=record.encode())
