"""The mirror: the daemon's own full copy of a variant, as a base generation plus the durable deltas since.

A generation is a loadable checkpoint directory, built aside and renamed into place, never written
again. The mirror advances lazily, off the path of any commit: scattered changes touch every page, so
rewriting it per version would rewrite the model per version. Exports are built the same way, straight
into the directory that an engine is handed.

Killed while building or removing: a directory is left under a name that is no generation's (it begins
with a dot, or ends in `.removed`), and the next advance removes it.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from deltad.checkpoint.aligned import Aligned
from deltad.checkpoint.directory import open_checkpoint
from deltad.checkpoint.writer import CheckpointWriter
from deltad.delta.backend import Backend
from deltad.delta.codec import Weights, apply_chunks, sum_weights
from deltad.delta.digest import U64, root_of
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import ChunkRef, Manifest, decode_page
from deltad.delta.record import VersionRecord
from deltad.delta.threads import in_order
from deltad.delta.weights import Span, borrowed, spans_of
from deltad.errors import CheckpointError, FormatError, IntegrityError
from deltad.store.disk import FileSystem, make_directory, remove_tree, store_error
from deltad.store.path import Path as EdgePath
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import Digest, Variant, Version, VersionId

_GENERATION = re.compile(r"e([0-9]{6,})-v([0-9]{6,})", re.ASCII)
_WINDOW_BYTES = 8 << 20


class Mirror:
    """One variant of one run in one store. Methods block, and may be called from any thread."""

    def __init__(self, store: Store, run: RunStore, variant: Variant, backend: Backend, *, threads: int = 1) -> None:
        self._store = store
        self._run = run
        self._variant = variant
        self._backend = backend
        self._threads = threads
        self._files = store.files
        self._directory = run.directory / "mirror" / variant
        self._lock = threading.Lock()

    def generations(self) -> dict[Version, Path]:
        """The complete generations on disk."""
        if self._files.entry(self._directory) is None:
            return {}
        found = {}
        for entry in self._files.entries(self._directory):
            if match := _GENERATION.fullmatch(entry.name):
                found[Version(int(match[1]), int(match[2]))] = self._directory / entry.name
        return found

    def _starts(self) -> dict[VersionId, Path]:
        """The generations to build from: of the run and, for a fork, of those that it starts from.

        The latter are not ours: their own mirror lets go of them at any time, or advances.
        """
        starts = {VersionId(self._run.run, version): path for version, path in self.generations().items()}
        for run in self._run.graph.runs(self._variant):
            other = Mirror(self._store, self._store.run(run), self._variant, self._backend)
            starts |= {VersionId(run, version): path for version, path in other.generations().items()}
        return starts

    def tail(self, record: VersionRecord) -> int:
        """How many edges lie between the nearest generation (or anchor) and `record`."""
        return len(self._path(record, self._starts()).hops)

    def advance(self, record: VersionRecord) -> Path:
        """Make `record`'s version the base generation and drop the older ones; returns its directory."""
        with self._lock:
            version = record.version
            directory = self._directory / f"e{version.epoch:06d}-v{version.number:06d}"
            if self._files.entry(directory) is None:
                self._build(record, directory)
            # Older generations, and whatever a killed build left.
            for entry in self._files.entries(self._directory):
                if entry.name != directory.name:
                    _discard(self._directory / entry.name, self._files)
            return directory

    def export(self, record: VersionRecord, directory: Path) -> Digest:
        """Write a version as a loadable checkpoint at `directory`, which must not exist; returns its root.

        Everything written is read back and summed first. Raises IntegrityError if it is not the
        version's, and then `directory` does not exist.
        """
        with self._lock:
            return self._build(record, directory)

    def verify(self, record: VersionRecord, scratch: Path) -> tuple[Digest, list[str]]:
        """Rebuild a version from what is stored, in `scratch`, which is removed again.

        Returns the root that came out and the tensors whose sums are not the published ones. Raises
        IntegrityError that names the file if a stored object is damaged.
        """
        layout = self.layout(record)
        with self._lock:
            try:
                with CheckpointWriter(scratch, layout, files=self._files) as writer:
                    starts = self._starts()
                    self._write_weights(self._path(record, starts), starts, layout, writer)
                    return self._compare(record, layout, writer)
            finally:
                remove_tree(scratch, self._files)

    @contextmanager
    def state(self, record: VersionRecord) -> Iterator[Weights]:
        """The weights of a version: the generation where it is that one, else rebuilt aside and removed again.

        Nobody else waits while they are read. Raises IntegrityError if what is rebuilt is not the version's; a
        generation was checked when it was written, and whoever reads all of it sums it again.
        """
        layout = self.layout(record)
        scratch = self._store.scratch / f"state-{self._run.run}-{record.version}-{uuid.uuid4().hex}"
        directory = self.generations().get(record.version)
        try:
            if directory is None:
                self.export(record, scratch)
            with open_checkpoint(directory or scratch) as checkpoint:
                yield Aligned(layout, checkpoint)
        finally:
            remove_tree(scratch, self._files)

    def sums(self, record: VersionRecord) -> U64:
        """The published element sums of a version, shape [tensors, 2]."""
        variant = record.variant(self._variant)
        edge = self._run.edges(record.version, variant.name)[0]
        return self._run.read_manifest(edge).tensor_sums(self.layout(record))

    def layout(self, record: VersionRecord) -> Layout:
        """The layout of a version."""
        data = self._store.read(Digest(record.variant(self._variant).layout))
        return decode_layout(data, limits=self._store.limits)

    def _path(self, record: VersionRecord, starts: Collection[VersionId]) -> EdgePath:
        mine = [start.version for start in starts if start.run == self._run.run]
        elsewhere = [start for start in starts if start.run != self._run.run]
        return self._run.path(record, self._variant, mine, elsewhere=elsewhere)

    def _build(self, record: VersionRecord, directory: Path) -> Digest:
        starts = self._starts()
        while True:
            path = self._path(record, starts)
            try:
                return self._build_along(path, starts, record, directory)
            except (IntegrityError, CheckpointError, FormatError):
                if path.start is None:
                    raise
                # The generation that it started from is damaged, so that sums come out wrong or a delta cannot be
                # read beside it; or it was another run's and is gone. The deltas and the anchor are still checked
                # byte by byte: build from those, and let go of a generation of our own.
                generation = starts.pop(path.start)
                if path.start.run == self._run.run and self._files.entry(generation) is not None:
                    _discard(generation, self._files)

    def _build_along(
        self, path: EdgePath, starts: Mapping[VersionId, Path], record: VersionRecord, directory: Path
    ) -> Digest:
        layout = self.layout(record)
        partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
        make_directory(partial, self._files)
        try:
            with CheckpointWriter(partial, layout, files=self._files) as writer:
                root = self._write(path, starts, record, writer)
            self._files.rename(partial, directory)
            self._files.sync_directory(directory.parent)
        except OSError as error:
            raise store_error(error, directory, layout.weight_bytes, self._files) from error
        finally:
            remove_tree(partial, self._files)
        return root

    def _write(
        self, path: EdgePath, starts: Mapping[VersionId, Path], record: VersionRecord, writer: CheckpointWriter
    ) -> Digest:
        """Write, sum and finish a whole checkpoint; returns its root. Raises IntegrityError."""
        layout = writer.layout
        self._write_weights(path, starts, layout, writer)
        root, wrong = self._compare(record, layout, writer)
        if wrong:
            raise IntegrityError(
                f"{record.id} variant {self._variant}, rebuilt from the store",
                expected=f"root {record.variant(self._variant).root.hex()}",
                found=f"other weights in {len(wrong)} tensors, the first {wrong[0]!r}",
                hint="`deltad verify` names all of them",
            )
        for file in layout.files:
            writer.write_file(file.name, self._store.read(Digest(file.digest)))
        writer.finish()
        return root

    def _write_weights(
        self, path: EdgePath, starts: Mapping[VersionId, Path], layout: Layout, writer: CheckpointWriter
    ) -> None:
        if path.start is not None:
            with open_checkpoint(starts[path.start]) as base:
                _copy(layout, Aligned(layout, base), writer, self._threads)
        for hop in path.hops:
            self._apply(self._run.read_manifest(hop.edge), layout, writer)

    def _apply(self, manifest: Manifest, layout: Layout, writer: CheckpointWriter) -> None:
        # The sums are not followed here: everything is summed anew once all is written.
        unused = np.zeros((len(layout.tensors), 2), np.uint64)
        chunks = (self._store.read(Digest(chunk.digest)) for chunk in self._chunks(manifest, layout))
        apply_chunks(chunks, layout, writer, unused, self._backend, limits=self._store.limits, threads=self._threads)

    def _chunks(self, manifest: Manifest, layout: Layout) -> Iterator[ChunkRef]:
        for page in manifest.pages:
            yield from decode_page(self._store.read(Digest(page.digest)), page, layout, limits=self._store.limits)

    def _compare(self, record: VersionRecord, layout: Layout, weights: Weights) -> tuple[Digest, list[str]]:
        """The root of `weights`, and the names of the tensors that are not the version's."""
        found = sum_weights(layout, weights, self._backend, threads=self._threads)
        wrong = np.flatnonzero((found != self.sums(record)).any(axis=1))
        return root_of(layout, found), [layout.tensors[i].name for i in wrong]


def _discard(directory: Path, files: FileSystem) -> None:
    """Remove a directory so that no half of it is ever seen under its name."""
    removed = directory.with_name(directory.name + ".removed")
    try:
        files.rename(directory, removed)
        files.sync_directory(directory.parent)
    except OSError:
        removed = directory
    remove_tree(removed, files)


def _copy(layout: Layout, base: Weights, writer: CheckpointWriter, threads: int) -> None:
    """Copy all weights, window by window."""

    def copy(spans: list[Span]) -> None:
        for span in spans:
            with borrowed(base, span) as lanes, borrowed(writer, span) as target:
                target[:] = lanes

    for _ in in_order(copy, spans_of(layout, _WINDOW_BYTES), threads):
        pass
