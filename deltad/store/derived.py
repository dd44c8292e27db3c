"""The catalogue of derived edges: skip deltas and anchors that a host made, or had from a peer, and no record names.

One small file an edge, under `runs/<run>/edges/`, written once all that it names is durable. An edge whose target
or base is not held leads nowhere: it is left by a kill between it and its version's record, or by a collection
that was killed, and the next start removes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from deltad.delta.manifest import EdgeKind, Manifest
from deltad.delta.record import EdgeRef
from deltad.errors import FormatError
from deltad.store.disk import FileSystem, make_directory, read_file, store_error, write_durably
from deltad.types import Digest, Version

_NAME = re.compile(r"[0-9a-f]{64}\.edge", re.ASCII)


class DerivedEdge(msgspec.Struct, frozen=True):
    """An edge that is held whole. `total_bytes` is what a reader fetches: manifest, pages and chunks.

    `local`: it stays on this host, as an inverse does, which any host makes as well.
    """

    variant: str
    kind: EdgeKind
    base: Version | None
    target: Version
    manifest: bytes
    size: int
    total_bytes: int
    coders: tuple[int, ...]
    local: bool = False

    @property
    def ref(self) -> EdgeRef:
        return EdgeRef(self.kind, self.base, self.manifest, self.size)


def derived_edge(manifest: Manifest, digest: Digest, size: int, *, local: bool) -> DerivedEdge:
    """How the catalogue names the edge of a manifest, which is `size` bytes long."""
    return DerivedEdge(
        variant=manifest.variant,
        kind=manifest.kind,
        base=None if manifest.base is None else manifest.base.version,
        target=manifest.target.version,
        manifest=digest,
        size=size,
        total_bytes=edge_bytes(manifest, size),
        coders=manifest.coders,
        local=local,
    )


def edge_bytes(manifest: Manifest, size: int) -> int:
    """All that a reader of the edge fetches, in bytes; `size` is that of the manifest itself."""
    return size + sum(page.size for page in manifest.pages) + manifest.chunk_bytes


class DerivedEdges:
    """The derived edges of one run. The caller allows one change at a time."""

    def __init__(self, directory: Path, scratch: Path, files: FileSystem) -> None:
        self._directory = directory
        self._scratch = scratch
        self._files = files
        self._edges: dict[Digest, DerivedEdge] = {}
        self._to: dict[Version, list[DerivedEdge]] = {}
        self._hidden: dict[Digest, DerivedEdge] = {}

    def load(self, held: Collection[Version]) -> None:
        """Read the catalogue, and forget what leads to or from no version that is held.

        Raises FormatError for a foreign file.
        """
        try:
            if self._files.entry(self._directory) is None:
                return
            self._files.sync_directory(self._directory)
            for entry in self._files.entries(self._directory):
                path = self._directory / entry.name
                if not _NAME.fullmatch(entry.name):
                    raise FormatError(f"{path}", expected="an edge named by its manifest's SHA-256")
                self._note(_decode(path, read_file(path, self._files)))
        except OSError as error:
            raise store_error(error, self._directory, 0, self._files) from error
        self.keep(held)

    def keep(self, held: Collection[Version]) -> None:
        """Forget the edges of which an end is not held."""
        self.remove(
            Digest(edge.manifest)
            for edge in self.all(hidden=True)
            if edge.target not in held or (edge.base is not None and edge.base not in held)
        )

    def all(self, *, hidden: bool = False) -> list[DerivedEdge]:
        return [*self._edges.values(), *(self._hidden.values() if hidden else ())]

    def to(self, version: Version, *, hidden: bool = False) -> tuple[DerivedEdge, ...]:
        """The edges that lead to a version, with or without the hidden ones."""
        more = (edge for edge in self._hidden.values() if edge.target == version) if hidden else ()
        return (*self._to.get(version, ()), *more)

    def hide(self, manifests: Collection[Digest]) -> None:
        """Take these out of sight, and all others into it; the catalogue on the disk stays as it is."""
        known = {**self._edges, **self._hidden}
        self._edges, self._to, self._hidden = {}, {}, {}
        for manifest, edge in known.items():
            if manifest in manifests:
                self._hidden[manifest] = edge
            else:
                self._note(edge)

    def get(self, manifest: Digest) -> DerivedEdge | None:
        return self._edges.get(manifest)

    def add(self, edge: DerivedEdge) -> None:
        """Durable on return."""
        if Digest(edge.manifest) not in self._edges:
            make_directory(self._directory, self._files)
            path = self._path(Digest(edge.manifest))
            write_durably(path, msgspec.json.encode(edge), scratch=self._scratch, files=self._files)
            self._note(edge)

    def remove(self, manifests: Iterable[Digest]) -> None:
        """Forget edges. One that a power cut brings back is whole, or leads nowhere."""
        try:
            for manifest in manifests:
                if edge := self._edges.pop(manifest, None):
                    self._to[edge.target].remove(edge)
                if edge or self._hidden.pop(manifest, None):
                    with suppress(FileNotFoundError):
                        self._files.unlink(self._path(manifest))
        except OSError as error:
            raise store_error(error, self._directory, 0, self._files) from error

    def _note(self, edge: DerivedEdge) -> None:
        self._edges[Digest(edge.manifest)] = edge
        self._to.setdefault(edge.target, []).append(edge)

    def _path(self, manifest: Digest) -> Path:
        return self._directory / f"{manifest.hex()}.edge"


def _decode(path: Path, data: bytes) -> DerivedEdge:
    try:
        return msgspec.json.decode(data, type=DerivedEdge)
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}", expected="a derived edge", found=str(error)) from None
