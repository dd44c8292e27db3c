"""What lies where in a bucket, and what a run's pointer says. Pure.

    owner                     who writes below this prefix
    runs/<run>/latest         the pointer: which versions are whole here, and over which edges
    objects/<SHA-256 in hex>  records, layouts, manifests, pages, files and chunks, created and never changed

`owner` and the pointers are JSON after a line with the SHA-256 of it, so that a byte that changed on the way is noticed
before anything is parsed. It guards against accident; signatures of records guard against malice.

Owns two invariants: a pointer never goes back, neither in (epoch, number) nor in its serial; and one that is
malformed, or larger than its limits, is refused as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from deltad.delta.encoding import sha256
from deltad.delta.manifest import EdgeKind
from deltad.delta.record import EdgeRef
from deltad.errors import ConflictError, DeltadError, FormatError, LimitError, NotFoundError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.hints import Hint
from deltad.protocol.target import FLEETS, Statement, check_statement
from deltad.store.graph import Edge, VersionGraph
from deltad.types import DIGEST_BYTES, Digest, RunId, Variant, Version, VersionId, parse_run, parse_variant

INDEX_FORMAT = 1
OWNER = "owner"
OBJECTS = "objects/"
RUNS = "runs/"
HINTED_EDGES = 64
"""Of a longer way, the first of its edges are told."""
T = TypeVar("T", "Index", "Owner")

_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SEAL_BYTES = 65
_MOST_VERSION = 10**15


class IndexEdge(msgspec.Struct, frozen=True):
    """An edge that is whole in the bucket. `total_bytes` is all that a reader fetches: manifest, pages and chunks."""

    variant: str
    kind: EdgeKind
    base: Version | None
    manifest: bytes
    size: int
    total_bytes: int
    coders: tuple[int, ...]
    base_run: str = ""
    """Where the base is a version of another run, that run."""

    @property
    def ref(self) -> EdgeRef:
        return EdgeRef(self.kind, self.base, self.manifest, self.size)


class Entry(msgspec.Struct, frozen=True):
    """A version: the SHA-256 and size of its record, its place in its run, and the edges that lead to it."""

    version: Version
    record: bytes
    size: int
    sequence: int
    edges: tuple[IndexEdge, ...]


class Index(msgspec.Struct, frozen=True):
    """The pointer of a run. `entries` are in ascending order; `targets` are what was said about its target.

    `serial` grows with every change. `skipped` counts the versions that were passed over on the way to the newest.
    """

    format: int
    run: str
    serial: int
    entries: tuple[Entry, ...]
    targets: tuple[Statement, ...] = ()
    skipped: int = 0

    @property
    def newest(self) -> Version:
        return self.entries[-1].version

    def entry(self, version: Version) -> Entry | None:
        return next((entry for entry in self.entries if entry.version == version), None)

    def encode(self) -> bytes:
        return _sealed(msgspec.json.encode(self))


class Owner(msgspec.Struct, frozen=True):
    """Who writes below a prefix: a daemon's name, and the id of its life that claimed it last."""

    format: int
    daemon: str
    boot: str

    def encode(self) -> bytes:
        return _sealed(msgspec.json.encode(self))


def object_key(digest: bytes) -> str:
    return OBJECTS + digest.hex()


def object_of(key: str) -> Digest | None:
    """The digest that a key under `objects/` is named after; None for a foreign name."""
    name = key.removeprefix(OBJECTS)
    return Digest(bytes.fromhex(name)) if _HEX.fullmatch(name) else None


def pointer_key(run: RunId) -> str:
    return f"{RUNS}{run}/latest"


def run_of(key: str) -> RunId | None:
    """The run whose pointer a key is; None for a foreign name."""
    try:
        run = parse_run(key.removeprefix(RUNS).removesuffix("/latest"))
    except UsageError:
        return None
    return run if pointer_key(run) == key else None


def parse_index(data: bytes, run: RunId, *, limits: Limits = DEFAULT_LIMITS) -> Index:
    """Raises FormatError or LimitError for anything but the pointer of this run."""
    thing = f"pointer of {run}"
    if len(data) > limits.json_body_bytes:
        raise LimitError(thing, expected=f"at most {limits.json_body_bytes} bytes", found=f"{len(data)}")
    index = _decode(data, Index, thing)
    if index.run != run or index.serial < 1 or index.skipped < 0 or not index.entries:
        raise FormatError(thing, expected="at least one version of that run, and a serial from 1 on", found=index.run)
    before: Entry | None = None
    for entry in index.entries:
        _check_entry(entry, thing, limits)
        if before is not None and (entry.version <= before.version or entry.sequence <= before.sequence):
            raise FormatError(thing, expected="versions in ascending order", found=f"{entry.version}")
        before = entry
    if len(index.targets) > FLEETS:
        raise LimitError(thing, expected=f"statements about at most {FLEETS} fleets", found=f"{len(index.targets)}")
    for said in index.targets:
        check_statement(said)
    return index


def parse_owner(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Owner:
    """Raises FormatError."""
    return _decode(data, Owner, "owner")


def check_advance(known: Index | None, new: Index) -> None:
    """Raise ConflictError unless `new` may take the place of the pointer `known`."""
    if known is None:
        return
    if new.newest < known.newest:
        raise ConflictError(
            f"pointer of {new.run}",
            expected=f"{known.newest} or a newer version",
            found=f"{new.newest}",
            hint="the bucket is ahead of this store; give a store that was set back a prefix of its own",
        )
    if new.serial <= known.serial:
        raise ConflictError(f"pointer of {new.run}", expected=f"a serial above {known.serial}", found=f"{new.serial}")


def hints_to_newest(index: Index, after: Version | None) -> tuple[Hint, ...]:
    """The edges on the cheapest way to the newest version, from `after` where it leads there, else from an anchor."""
    run = RunId(index.run)
    hints: list[Hint] = []
    for variant in dict.fromkeys(edge.variant for edge in index.entries[-1].edges):
        graph = VersionGraph(variant)
        by_manifest: dict[Digest, tuple[Entry, IndexEdge]] = {}
        for entry in index.entries:
            graph.add_version(VersionId(run, entry.version), entry.sequence)
            for edge in entry.edges:
                if edge.variant == variant:
                    graph.add(_graph_edge(run, entry, edge))
                    by_manifest[Digest(edge.manifest)] = entry, edge
        try:
            path = graph.path(VersionId(run, index.newest), [] if after is None else [VersionId(run, after)])
        except NotFoundError:
            continue
        for hop in path.hops[: HINTED_EDGES - len(hints)]:
            entry, edge = by_manifest[hop.edge.manifest]
            hints.append(Hint(Variant(variant), entry.version, edge.ref, edge.total_bytes, edge.coders))
    return tuple(hints)


def manifests(entries: Iterable[Entry]) -> Iterator[tuple[Entry, IndexEdge]]:
    return ((entry, edge) for entry in entries for edge in entry.edges)


def _graph_edge(run: RunId, entry: Entry, edge: IndexEdge) -> Edge:
    base = None if edge.base is None else VersionId(RunId(edge.base_run or run), edge.base)
    return Edge(edge.kind, base, VersionId(run, entry.version), Digest(edge.manifest), edge.size, edge.total_bytes)


def _check_entry(entry: Entry, thing: str, limits: Limits) -> None:
    version = entry.version
    if not (1 <= version.epoch < _MOST_VERSION and 0 <= version.number < _MOST_VERSION and entry.sequence >= 1):
        raise FormatError(thing, expected="epoch ≥ 1, number ≥ 0, sequence ≥ 1", found=f"{version}, {entry.sequence}")
    if len(entry.record) != DIGEST_BYTES or not 0 < entry.size <= limits.record_bytes:
        raise LimitError(thing, expected=f"a record of 1 to {limits.record_bytes} bytes", found=f"{entry.size}")
    for edge in entry.edges:
        about = f"{thing}: edge to {version}"
        try:
            parse_variant(edge.variant)
            if edge.base_run:
                parse_run(edge.base_run)
        except DeltadError as error:
            raise FormatError(about, found=str(error)) from None
        if (edge.base is None) != (edge.kind is EdgeKind.ANCHOR) or (not edge.base_run and edge.base == version):
            raise FormatError(about, expected="another base exactly where it is no anchor", found=edge.kind)
        if len(edge.manifest) != DIGEST_BYTES or not 0 < edge.size <= min(edge.total_bytes, limits.manifest_bytes):
            raise LimitError(
                about,
                expected=f"a manifest of 1 to {limits.manifest_bytes} bytes",
                found=f"{edge.size} of {edge.total_bytes}",
            )
        if len(edge.coders) > limits.coders:
            raise LimitError(about, expected=f"at most {limits.coders} coders", found=f"{len(edge.coders)}")


def _sealed(body: bytes) -> bytes:
    return sha256(body).hex().encode() + b"\n" + body


def _decode(data: bytes, kind: type[T], thing: str) -> T:
    body = data[_SEAL_BYTES:]
    if data[:_SEAL_BYTES] != _sealed(body)[:_SEAL_BYTES]:
        raise FormatError(thing, expected="a line with the SHA-256 of what follows", found="another")
    try:
        found = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(thing, found=f"not a {kind.__name__}: {str(error)[:200]}") from None
    if found.format != INDEX_FORMAT:
        raise FormatError(
            thing, expected=f"format {INDEX_FORMAT}", found=f"{found.format}", hint="another version of deltad wrote it"
        )
    return found
