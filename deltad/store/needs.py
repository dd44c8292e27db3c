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
    return Unreachable(store, run).without(digests)


class Unreachable:
    """To which versions of a run nothing leads, asked again and again while objects are damaged and healed.

    Descriptions are read once for what is damaged, and those of new edges once; not again for every question.
    """

    def __init__(self, store: Store, run: RunId) -> None:
        self._store = store
        self._run = run
        self._damaged: frozenset[Digest] = frozenset()
        self._seen: dict[tuple[Version, str, bytes], tuple[Need, ...]] = {}
        """What of the damaged each edge needs that was looked at; under no manifest, layout and files."""

    def without(self, digests: Collection[Digest]) -> list[Version]:
        """The versions to which nothing leads from an anchor without one of these objects, in ascending order."""
        damaged = frozenset(digests)
        if damaged - self._damaged or not damaged:
            self._seen.clear()
        elif healed := self._damaged - damaged:
            # What was damaged may have hidden what it leads to.
            hidden = {
                key[:2] if not key[2] else key
                for key, needs in self._seen.items()
                if any(need.wanted.digest in healed for need in needs)
            }
            self._seen = {k: v for k, v in self._seen.items() if k not in hidden and k[:2] not in hidden}
        self._damaged = damaged
        if not damaged:
            return []
        reached: set[tuple[Version, str]] = set()
        lost = []
        held = self._store.run(self._run)
        for record in held.records():
            for variant in record.variants:
                ways = [edge for edge in held.known_edges(record, variant) if not self._needs(record, variant, edge)]
                if not self._needs(record, variant) and any(
                    edge.base is None or (edge.base, variant.name) in reached for edge in ways
                ):
                    reached.add((record.version, variant.name))
                elif record.version not in lost:
                    lost.append(record.version)
        return lost

    def _needs(self, record: VersionRecord, variant: VariantRecord, edge: EdgeRef | None = None) -> tuple[Need, ...]:
        key = (record.version, variant.name, b"" if edge is None else edge.manifest)
        if key not in self._seen:
            layout = _layout(self._store, variant)
            if edge is None:
                needs = _first_needs(self._store, record, variant, layout)
            else:
                needs = _edge_needs(self._store, record, variant, edge, layout)
            self._seen[key] = tuple(_among(self._damaged, needs))
        return self._seen[key]


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
        yield from _among(digests, _first_needs(store, record, variant, layout))
        for edge in store.run(RunId(record.run)).known_edges(record, variant):
            yield from _among(digests, _edge_needs(store, record, variant, edge, layout))


def _first_needs(store: Store, record: VersionRecord, variant: VariantRecord, layout: Layout | None) -> Iterator[Need]:
    """The layout of a version and its files."""
    wanted = want(Kind.LAYOUT, variant.layout, variant.layout_size, limits=store.limits)
    yield Need(wanted, record.id, variant.name)
    for file in layout.files if layout else ():
        wanted = want(Kind.FILE, file.digest, file.size, limits=store.limits)
        yield Need(wanted, record.id, variant.name)


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
        except DeltadError:
            continue
        if layout is None:
            continue  # without it nobody can read the page
        try:
            chunks = decode_page(data, page, layout, limits=limits)
        except DeltadError:
            continue
        for chunk in chunks:
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
