"""What objects are to the versions that lead to them, and what it means that some of them are damaged.

Reads descriptions, as far as they are whole, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import decode_manifest, decode_page
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.errors import DeltadError
from deltad.protocol.pull_plan import Kind, Wanted, want
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version, VersionId


@dataclass(frozen=True, slots=True)
class Need:
    """A version that leads to an object: in which variant, over which edge (None for its layout and files).

    `tensors` names what a chunk holds changes of.
    """

    wanted: Wanted
    version: VersionId
    variant: str
    edge: EdgeRef | None = None
    tensors: str = ""

    def __str__(self) -> str:
        way = f"the {self.edge.kind} to {self.version}" if self.edge else f"{self.version}"
        return f"{self.wanted.kind} of {way}" + (f" ({self.tensors})" if self.tensors else "")


def find_needs(store: Store, digests: Collection[Digest]) -> dict[Digest, Need]:
    """For each of these objects that a version leads to, the first such version, as far as descriptions can be read."""
    found: dict[Digest, Need] = {}
    for run in store.held_runs() if digests else ():
        for record in store.run(run).records():
            for need in _needs(store, record, digests):
                found.setdefault(need.wanted.digest, need)
    return found


def unreachable(store: Store, run: RunId, digests: Collection[Digest]) -> list[Version]:
    """The versions of a run to which nothing leads from an anchor without one of these objects, in ascending order."""
    if not digests:
        return []
    reached: set[tuple[Version, str]] = set()
    lost = []
    for record in store.run(run).records():
        needs = list(_needs(store, record, digests))
        edges = {need.edge.manifest for need in needs if need.edge is not None}
        blind = {need.variant for need in needs if need.edge is None}
        for variant in record.variants:
            ways = [edge for edge in store.run(run).known_edges(record, variant) if edge.manifest not in edges]
            if variant.name not in blind and any(e.base is None or (e.base, variant.name) in reached for e in ways):
                reached.add((record.version, variant.name))
            elif record.version not in lost:
                lost.append(record.version)
    return lost


def find_lost(store: Store, record: VersionRecord) -> tuple[int, list[Digest]]:
    """What a version needs and is not there, damaged or not; and how many bytes its descriptions take.

    A version needs one edge that is whole; of others it is not known that they ever were.
    """
    read, lost = 0, []
    for variant in record.variants:
        read += variant.layout_size
        layout = _layout(store, variant)
        first = [variant.layout, *(file.digest for file in (layout.files if layout else ()))]
        lost += [Digest(digest) for digest in first if store.objects.is_lost(Digest(digest))]
        broken: list[list[Digest]] = []
        edges = store.run(RunId(record.run)).known_edges(record, variant)
        for edge in edges:
            needs = list(_edge_needs(store, record, variant, edge, layout))
            read += sum(need.wanted.size for need in needs if need.wanted.is_read)
            broken.append([need.wanted.digest for need in needs if store.objects.is_lost(need.wanted.digest)])
        if all(broken):
            begun = [digests for edge, digests in zip(edges, broken, strict=True) if edge.manifest not in digests]
            lost += (begun or broken)[0]
    return read, lost


def _needs(store: Store, record: VersionRecord, digests: Collection[Digest]) -> Iterator[Need]:
    """What of `digests` a version leads to."""
    for variant in record.variants:
        layout = _layout(store, variant)
        wanted = want(Kind.LAYOUT, variant.layout, variant.layout_size, limits=store.limits)
        yield from _among(digests, [Need(wanted, record.id, variant.name)])
        for file in layout.files if layout else ():
            wanted = want(Kind.FILE, file.digest, file.size, limits=store.limits)
            yield from _among(digests, [Need(wanted, record.id, variant.name)])
        for edge in store.run(RunId(record.run)).known_edges(record, variant):
            yield from _among(digests, _edge_needs(store, record, variant, edge, layout))


def _edge_needs(
    store: Store, record: VersionRecord, variant: VariantRecord, edge: EdgeRef, layout: Layout | None
) -> Iterator[Need]:
    limits = store.limits
    yield Need(want(Kind.MANIFEST, edge.manifest, edge.size, limits=limits), record.id, variant.name, edge)
    try:
        manifest = decode_manifest(store.objects.read_unasked(Digest(edge.manifest)), limits=limits)
    except DeltadError:
        return
    for page in manifest.pages:
        yield Need(want(Kind.PAGE, page.digest, page.size, limits=limits), record.id, variant.name, edge)
        try:
            data = store.objects.read_unasked(Digest(page.digest))
            chunks = decode_page(data, page, layout, limits=limits) if layout else ()
        except DeltadError:
            continue
        for chunk in chunks:
            assert layout is not None
            first, last = layout.tensors[chunk.first_tensor].name, layout.tensors[chunk.last_tensor].name
            wanted = want(Kind.CHUNK, chunk.digest, chunk.size, limits=limits)
            yield Need(wanted, record.id, variant.name, edge, first if first == last else f"{first} to {last}")


def _among(digests: Collection[Digest], needs: Iterable[Need]) -> Iterator[Need]:
    return (need for need in needs if need.wanted.digest in digests)


def _layout(store: Store, variant: VariantRecord) -> Layout | None:
    try:
        return decode_layout(store.objects.read_unasked(Digest(variant.layout)), limits=store.limits)
    except DeltadError:
        return None
