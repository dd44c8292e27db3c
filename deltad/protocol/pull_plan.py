"""One version in the making at a daemon that pulls it: which objects it still lacks.

Pure. It may not decide when to ask or whom. Owns one invariant: nothing is wanted that was not named,
with its exact size and within the limits, by bytes that were checked before; and nothing is believed
that contradicts the version's record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from deltad.delta.coding import CODERS, coder_name
from deltad.delta.encoding import sha256
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import Manifest, PageRef, decode_manifest, decode_page
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord, decode_record
from deltad.errors import CoderError, DeltadError, FormatError, IntegrityError, LimitError, PeerError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.trust import TrustList
from deltad.types import DIGEST_BYTES, Digest, RunId, Version, VersionId


class Kind(StrEnum):
    """What an object is to the version that needs it."""

    LAYOUT = "layout"
    MANIFEST = "manifest"
    PAGE = "page"
    FILE = "file"
    CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object by its content, with the size that it must have. Made by `want` alone."""

    kind: Kind
    digest: Digest
    size: int

    @property
    def is_read(self) -> bool:
        """Whether its bytes say what else is needed, so that holding it is not enough."""
        return _RULES[self.kind].is_read

    def __str__(self) -> str:
        return f"{self.kind} {self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class _Rule:
    least: int
    most: Callable[[Limits], int]
    is_read: bool
    parse: Callable[[bytes, Limits], Layout | Manifest] | None = None


_RULES = {
    Kind.LAYOUT: _Rule(1, lambda lim: lim.layout_bytes, True, lambda data, lim: decode_layout(data, limits=lim)),
    Kind.MANIFEST: _Rule(1, lambda lim: lim.manifest_bytes, True, lambda data, lim: decode_manifest(data, limits=lim)),
    Kind.PAGE: _Rule(1, lambda lim: lim.page_bytes, True),
    Kind.FILE: _Rule(0, lambda lim: lim.file_bytes, False),
    Kind.CHUNK: _Rule(1, lambda lim: lim.chunk_bytes, False),
}


def want(kind: Kind, digest: bytes, size: int, *, limits: Limits = DEFAULT_LIMITS) -> Wanted:
    """An object to fetch. Raises LimitError for a size that its kind may not have."""
    rule = _RULES[kind]
    if not rule.least <= size <= rule.most(limits):
        raise LimitError(
            f"{kind} {digest.hex()}", expected=f"{rule.least} to {rule.most(limits)} bytes", found=f"{size} bytes"
        )
    return Wanted(kind, Digest(digest), size)


def parse_record(
    data: bytes, run: RunId, peer: str, asked: Version | None, *, limits: Limits = DEFAULT_LIMITS
) -> VersionRecord:
    """A record of `run` that `peer` sent, that of `asked` if it was asked for one. Raises PeerError."""
    thing = f"{peer}: record of {VersionId(run, asked) if asked else run}"
    try:
        record = decode_record(data, limits=limits)
    except DeltadError as error:
        raise PeerError(thing, found=str(error)) from None
    if record.run != run or (asked is not None and record.version != asked):
        raise PeerError(thing, found=f"that of {record.id}")
    if len({variant.name for variant in record.variants}) != len(record.variants):
        raise PeerError(thing, expected="each variant once")
    for edge in (edge for variant in record.variants for edge in variant.edges):
        if edge.base is not None and not record.parent_run and edge.base >= record.version:
            raise PeerError(thing, expected=f"edges from versions below {record.version}", found=str(edge.base))
    return record


@dataclass(frozen=True, slots=True)
class Arrived:
    """Bytes that are exactly what was wanted. Made by `check_arrival` alone.

    `content` is what a layout or manifest says. `flaw` is set where the right bytes are not what their
    kind requires: then whoever named them is to blame, and asking again cannot help.
    """

    wanted: Wanted
    data: bytes
    content: Layout | Manifest | None = None
    flaw: DeltadError | None = None


def check_arrival(wanted: Wanted, data: bytes, peer: str, *, limits: Limits = DEFAULT_LIMITS) -> Arrived:
    """Compare what `peer` sent with what was wanted, and parse it. Takes time: call it in a worker thread.

    Raises PeerError, which names the peer, for any other length or SHA-256.
    """
    if len(data) != wanted.size:
        raise PeerError(f"{peer}: {wanted}", expected=f"{wanted.size} bytes", found=f"{len(data)} bytes")
    found = sha256(data)
    if found != wanted.digest:
        raise PeerError(f"{peer}: {wanted}", expected="bytes with that SHA-256", found=found.hex())
    parse = _RULES[wanted.kind].parse
    if parse is None:
        return Arrived(wanted, data)
    try:
        return Arrived(wanted, data, content=parse(data, limits))
    except DeltadError as error:
        return Arrived(wanted, data, flaw=error)


@dataclass(slots=True)
class _Part:
    """One variant of the version and the edge that was chosen for it."""

    variant: VariantRecord
    edge: EdgeRef
    base_root: bytes | None
    layout: Layout | None = None
    manifest: Manifest | None = None
    pages: deque[PageRef] = field(default_factory=deque)
    """Pages that are not wanted yet."""
    pages_unread: int = 0
    chunk_bytes: int = 0
    got: int = 0
    """Bytes of its manifest, pages and chunks that are here."""


class VersionPlan:
    """What has to be fetched for one version over the chosen edges, opened up step by step.

    record → layouts + manifests → pages + layout files → chunks. Pages are opened a few at a time
    (`refill`), so that a very long chunk list is never in memory as a whole.
    """

    def __init__(
        self,
        record: VersionRecord,
        data: bytes,
        edges: Mapping[str, EdgeRef],
        base_roots: Mapping[str, bytes],
        *,
        coders: frozenset[int] = CODERS,
        trust: TrustList | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`edges` and, for deltas, `base_roots` by name of variant; `coders` are those read here, and `trust` says
        whose derived edges are believed. Raises LimitError."""
        self.record = record
        self.data = data
        self.edges = dict(edges)
        self._coders = coders
        self._trust = trust or TrustList()
        self._limits = limits
        self._open: dict[Wanted, list[tuple[_Part, PageRef | None]]] = {}
        self._storing: set[Wanted] = set()
        self._total = 1
        self._unopened = 0
        self._coming = 0  # chunks that open pages will name
        self._parts = [_Part(v, edges[v.name], base_roots.get(v.name)) for v in record.variants]
        for part in self._parts:
            self._want(Kind.LAYOUT, part.variant.layout, part.variant.layout_size, part)
            self._want(Kind.MANIFEST, part.edge.manifest, part.edge.size, part)
        self._total += len(self._open)

    @property
    def complete(self) -> bool:
        """Whether every object of the version is durable here."""
        return not self._open and not self._storing and not any(part.pages for part in self._parts)

    @property
    def progress(self) -> tuple[int, int]:
        """Objects that are here, and all that are known to be needed, the record included."""
        return self._total - len(self._open) - len(self._storing) - self._unopened, self._total

    @property
    def derived(self) -> tuple[Digest, ...]:
        """Manifests of the chosen edges that the record does not name."""
        chosen = ((part.edge.manifest, part.variant.edges) for part in self._parts)
        return tuple(Digest(m) for m, named in chosen if all(m != edge.manifest for edge in named))

    def left(self) -> dict[bytes, int]:
        """For each edge whose manifest is here, the bytes of it that are not."""
        left: dict[bytes, int] = {}
        for part in self._parts:
            if part.manifest is not None:
                pages = sum(page.size for page in part.manifest.pages)
                total = part.edge.size + pages + part.manifest.chunk_bytes
                left[part.edge.manifest] = max(total - part.got, 0)
        return left

    def open(self) -> tuple[Wanted, ...]:
        """What is lacking and known by name, in the order in which to ask for it."""
        return tuple(self._open)

    def wants(self, wanted: Wanted) -> bool:
        return wanted in self._open

    def is_storing(self, wanted: Wanted) -> bool:
        """Whether the object has arrived and is not durable yet."""
        return wanted in self._storing

    def needed_by(self, wanted: Wanted) -> Iterable[bytes]:
        """Digests of the manifests of the edges that need an open object."""
        return {part.edge.manifest for part, _ in self._open.get(wanted, ())}

    def refill(self, enough: int) -> None:
        """Open further pages while fewer than `enough` objects are open, counting those they will name."""
        for part in self._parts:
            while part.pages and len(self._open) + self._coming < enough:
                page = part.pages.popleft()
                self._unopened -= 1
                self._coming += page.chunks
                self._want(Kind.PAGE, page.digest, page.size, part, page)

    def take(self, arrived: Arrived, *, durable: bool) -> None:
        """Believe an object that arrived and want what it names. Ignores what is not open.

        Unless it is `durable` already, the plan is complete only after `stored`. Raises CoderError for the
        manifest of an edge that is not read here, and DeltadError if it contradicts the record; then the plan is
        of no more use.
        """
        openings = self._open.pop(arrived.wanted, None)
        if openings is None:
            return
        if arrived.flaw is not None:
            raise arrived.flaw
        if not durable:
            self._storing.add(arrived.wanted)
        _count(arrived.wanted, openings)
        for part, page in openings:
            if isinstance(arrived.content, Layout):
                part.layout = arrived.content
                self._want_files(part, arrived.content)
                self._agree(part)
            elif isinstance(arrived.content, Manifest):
                check_coders(arrived.content, self._coders)
                if arrived.wanted.digest in self.derived:
                    self._trust.check_derived(arrived.content)
                part.manifest = arrived.content
                self._agree(part)
            elif page is not None:
                self._read_page(part, page, arrived.data)

    def close(self, wanted: Wanted) -> None:
        """An open object whose bytes need not be read is held here."""
        _count(wanted, self._open.pop(wanted, []))

    def stored(self, wanted: Wanted) -> None:
        """An object that was taken is durable now."""
        self._storing.discard(wanted)

    def _want(self, kind: Kind, digest: bytes, size: int, part: _Part, page: PageRef | None = None) -> None:
        wanted = want(kind, digest, size, limits=self._limits)
        self._open.setdefault(wanted, []).append((part, page))

    def _want_files(self, part: _Part, layout: Layout) -> None:
        before = len(self._open)
        for file in layout.files:
            self._want(Kind.FILE, file.digest, file.size, part)
        self._total += len(self._open) - before

    def _agree(self, part: _Part) -> None:
        if part.layout is None or part.manifest is None:
            return
        check_manifest(self.record, part.variant, part.edge, part.manifest, base_root=part.base_root)
        check_tables(part.manifest, part.layout)
        part.pages.extend(part.manifest.pages)
        part.pages_unread = len(part.pages)
        objects = sum(page.chunks + 1 for page in part.pages)
        self._total += objects
        self._unopened += objects
        self._check_chunk_bytes(part, part.manifest)

    def _read_page(self, part: _Part, page: PageRef, data: bytes) -> None:
        assert part.layout is not None
        assert part.manifest is not None
        chunks = decode_page(data, page, part.layout, limits=self._limits)
        self._unopened -= len(chunks)
        self._coming -= len(chunks)
        part.pages_unread -= 1
        part.chunk_bytes += sum(chunk.size for chunk in chunks)
        self._check_chunk_bytes(part, part.manifest)
        for chunk in chunks:
            self._want(Kind.CHUNK, chunk.digest, chunk.size, part)

    def _check_chunk_bytes(self, part: _Part, manifest: Manifest) -> None:
        if not part.pages_unread and part.chunk_bytes != manifest.chunk_bytes:
            raise FormatError(
                f"manifest {part.edge.manifest.hex()} of {self.record.id}",
                expected=f"chunks of {manifest.chunk_bytes} bytes together",
                found=f"pages that list {part.chunk_bytes}",
            )


def _count(wanted: Wanted, openings: Iterable[tuple[_Part, PageRef | None]]) -> None:
    if wanted.kind in (Kind.MANIFEST, Kind.PAGE, Kind.CHUNK):
        for part, _ in openings:
            part.got += wanted.size


def check_manifest(
    record: VersionRecord, variant: VariantRecord, edge: EdgeRef, manifest: Manifest, *, base_root: bytes | None
) -> None:
    """Raise IntegrityError unless a manifest is that of the edge which its record names.

    `base_root` is the root of the edge's base, None for an anchor.
    """
    base, target = manifest.base, manifest.target
    start = record.base(edge)
    for what, expected, found in (
        ("run", record.run, manifest.run),
        ("variant", variant.name, manifest.variant),
        ("kind", edge.kind, manifest.kind),
        ("layout", variant.layout.hex(), manifest.layout.hex()),
        ("target", record.version, target.version),
        ("target's run", record.run, target.run or record.run),
        ("target's root", variant.root.hex(), target.root.hex()),
        ("base", edge.base, base.version if base else None),
        ("base's run", start.run if start else None, base.run or record.run if base else None),
        ("base's root", base_root.hex() if base_root else None, base.root.hex() if base else None),
    ):
        if expected != found:
            thing = f"manifest {edge.manifest.hex()} of {record.id}: {what}"
            raise IntegrityError(thing, expected=str(expected), found=str(found))


def check_tables(manifest: Manifest, layout: Layout) -> None:
    """Raise FormatError or IntegrityError unless a manifest can be read with its layout by this build."""
    check_coders(manifest, CODERS)
    if len(manifest.tensor_sha256) not in (0, DIGEST_BYTES * len(layout.tensors)):
        raise FormatError(
            "manifest",
            expected=f"SHA-256 of all {len(layout.tensors)} tensors or none",
            found=f"{len(manifest.tensor_sha256)} bytes",
        )
    manifest.tensor_sums(layout)


def check_coders(manifest: Manifest, coders: frozenset[int]) -> None:
    """Raise CoderError unless all frames of an edge are in `coders`."""
    if unknown := set(manifest.coders) - coders:
        way = f"{manifest.base.version} → {manifest.target.version}" if manifest.base else str(manifest.target.version)
        raise CoderError(
            f"{manifest.kind} {way} of {manifest.run}",
            expected=f"the coders that are read here, {_named(coders)}",
            found=_named(unknown),
            hint='update deltad here, or set `coder = "blind"` for the run where it is published',
        )


def _named(coders: Iterable[int]) -> str:
    return ", ".join(f"{coder} ({coder_name(coder)})" if coder in CODERS else str(coder) for coder in sorted(coders))
