"""The mirror: the daemon's own full copy of a variant, as a base generation plus the durable deltas since.

A generation is a loadable checkpoint directory, built aside and renamed into place, never written
again. The mirror advances lazily, off the path of any commit: scattered changes touch every page, so
rewriting it per version would rewrite the model per version. An advance is one pass over the weights,
however many deltas it goes through. Exports are built the same way, straight into the directory that an
engine is handed; where the file system shares blocks between files, they are reflinks of a generation.

Killed while building or removing: a directory is left under a name that is no generation's (it begins
with a dot, or ends in `.removed`), and the next advance removes it.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import structlog

from deltad.checkpoint.aligned import Aligned
from deltad.checkpoint.directory import open_checkpoint
from deltad.checkpoint.writer import CheckpointWriter
from deltad.delta.backend import Backend, Lanes
from deltad.delta.chain import apply_chain, nests
from deltad.delta.codec import Weights, apply_chunks, sum_weights
from deltad.delta.digest import U64, root_of
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import Manifest
from deltad.delta.record import VersionRecord
from deltad.delta.threads import in_order
from deltad.delta.weights import Span, borrowed, hash_weights, spans_of
from deltad.errors import CheckpointError, FormatError, IntegrityError, NotFoundError
from deltad.store.disk import FileSystem, make_directory, remove_tree, store_error
from deltad.store.edge_chunks import chunks_of
from deltad.store.generation import Checked, check_generation, differences
from deltad.store.path import Hop
from deltad.store.path import Path as EdgePath
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import DIGEST_BYTES, Digest, RunId, Variant, Version, VersionId

log = structlog.get_logger()

_GENERATION = re.compile(r"e([0-9]{6,})-v([0-9]{6,})", re.ASCII)
_OWN = re.compile(r"\.{0,2}e[0-9]{6,}-v[0-9]{6,}(\.[0-9a-f]{32}){0,2}(\.removed)?", re.ASCII)
"""Generations, whole, in the making or on their way out; what else lies beside them is not ours to remove."""
_WINDOW_BYTES = 8 << 20
_PROBE_BYTES = 4096
LONG_WALK = 16
"""More edges than this between the generation and a version that is read let the mirror advance afterwards."""
_AT_ONCE = 32
"""Deltas that are applied in one pass. Of each a chunk is held meanwhile."""
_RENEW_SECONDS = 24 * 3600.0
"""How long making a generation anew may take, at most."""


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
        self._sizes: dict[bytes, int] = {}
        """What the deltas since the generation take, by the name of their manifest."""
        self._walked = 0
        """The most edges that a reader went through since the last advance."""

    @property
    def run(self) -> RunId:
        return self._run.run

    @property
    def variant(self) -> Variant:
        return self._variant

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

    def advance(self, record: VersionRecord) -> Path:
        """Make `record`'s version the base generation and drop the older ones; returns its directory."""
        with self._lock:
            return self._advance(record)

    def is_due(self, record: VersionRecord) -> bool:
        """Whether it is time to advance to `record`.

        The deltas that have come since take as much as the weights, so that advances never write more than deltas
        do; or a reader had to go through so many of them that the next one should not.
        """
        with self._lock:
            hops = self._path(record).hops
            sizes = {}
            for hop in hops:
                if hop.edge.base is not None:
                    known = self._sizes.get(hop.edge.manifest)
                    sizes[hop.edge.manifest] = self._size(hop) if known is None else known
            self._sizes = sizes
            if not sizes:
                return False
            return len(hops) > 1 and (
                self._walked > LONG_WALK or sum(sizes.values()) >= self.layout(record).weight_bytes
            )

    def _size(self, hop: Hop) -> int:
        return hop.edge.size + self._run.read_manifest(hop.edge).chunk_bytes

    def _advance(self, record: VersionRecord) -> Path:
        version = record.version
        directory = self._directory / f"e{version.epoch:06d}-v{version.number:06d}"
        if self._files.entry(directory) is None:
            self._build(record, directory)
        self._walked = 0
        # Older generations, and whatever a killed build left.
        for entry in self._files.entries(self._directory):
            if entry.name != directory.name and _OWN.fullmatch(entry.name):
                _discard(self._directory / entry.name, self._files)
        return directory

    def export(self, record: VersionRecord, directory: Path) -> Digest:
        """Write a version as a loadable checkpoint at `directory`, which must not exist; returns its root.

        Everything written is read back and summed first. Raises IntegrityError if it is not the
        version's, and then `directory` does not exist.
        """
        with self._lock:
            self._walk(record)
            newer = any(version > record.version for version in self.generations())
            if self._path(record).hops and not newer and self._shares_blocks_with(directory.parent):
                # Then the export itself costs nothing, nor does the next one.
                self._advance(record)
            return self._build(record, directory)

    def _walk(self, record: VersionRecord) -> None:
        self._walked = max(self._walked, len(self._path(record).hops))

    def _shares_blocks_with(self, directory: Path) -> bool:
        """Whether a generation's files can be reflinked into `directory`, which is made."""
        name = f".probe.{uuid.uuid4().hex}"
        probe, copy = self._directory / name, directory / name
        for parent in (self._directory, directory):
            make_directory(parent, self._files)
        try:
            file = self._files.create(probe)
            try:
                file.write(bytes(_PROBE_BYTES), 0)
            finally:
                file.close()
            if shares := self._files.reflink(probe, copy):
                self._files.unlink(copy)
        except OSError:
            return False
        finally:
            with suppress(OSError):
                self._files.unlink(probe)
        return shares

    def verify(self, record: VersionRecord, scratch: Path) -> tuple[Digest, list[str]]:
        """Rebuild a version from what is stored, in `scratch`, which is removed again.

        Returns the root that came out and the tensors whose sums are not the published ones. Raises
        IntegrityError that names the file if a stored object is damaged.
        """
        layout = self.layout(record)
        with self._lock:
            self._walk(record)
            try:
                with CheckpointWriter(scratch, layout, files=self._files) as writer:
                    starts = self._starts()
                    self._write_weights(self._path(record, starts), starts, layout, writer)
                    return self._compare(record, layout, writer)
            finally:
                remove_tree(scratch, self._files)

    @property
    def name(self) -> str:
        """The run and the variant, as a path tells them."""
        return f"{self._run.run}/{self._variant}"

    def record(self, version: Version) -> VersionRecord:
        """Raises NotFoundError for a version that is not held here."""
        return self._run.record(version)

    def has_generation(self, version: Version) -> bool:
        """Whether a generation of this version is on disk, and the version is held."""
        return version in self.generations() and version in {record.version for record in self._run.records()}

    def check(self, version: Version, *, first: int = 0) -> Iterator[Checked]:
        """Read the generation of a version piece by piece, from tensor number `first` on. See `check_generation`.

        Raises NotFoundError for one that is not there.
        """
        record = self._run.record(version)
        directory = self._generation(version)
        return check_generation(directory, self.layout(record), self.sums(record), self._backend, first=first)

    def renew(self, version: Version) -> list[str]:
        """Put a generation that is damaged in place anew, built and checked without it.

        Returns what was wrong in the old one, in words, one text a tensor. Raises NotFoundError, IntegrityError or
        FormatError if what leads to the version is not whole either, StoreFullError or StoreError; then the damaged
        generation is still there.
        """
        record = self._run.record(version)
        holder = f"the renewal of {self.name} at {version}"
        self._run.lease(holder, version, _RENEW_SECONDS)
        try:
            with self._lock:
                # Looked up only now: while this one waited for the lock, the mirror may have advanced.
                return self._renew(record, self._generation(version))
        except OSError as error:
            raise store_error(error, self._directory, 0, self._files) from error
        finally:
            self._store.leases.release(holder)

    def _renew(self, record: VersionRecord, damaged: Path) -> list[str]:
        starts = self._starts()
        starts.pop(record.id, None)
        aside = damaged.with_name(f".{damaged.name}.{uuid.uuid4().hex}")
        try:
            return self._renew_from(starts, record, damaged, aside)
        finally:
            remove_tree(aside, self._files)

    def _renew_from(
        self, starts: dict[VersionId, Path], record: VersionRecord, damaged: Path, aside: Path
    ) -> list[str]:
        self._build_from(starts, record, aside)
        try:
            wrong = differences(self.layout(record), damaged, aside)
        except (CheckpointError, FormatError, IntegrityError) as error:
            wrong = [str(error)]
        _discard(damaged, self._files)
        self._files.rename(aside, damaged)
        self._files.sync_directory(damaged.parent)
        return wrong

    def _generation(self, version: Version) -> Path:
        directory = self.generations().get(version)
        if directory is None:
            raise NotFoundError(f"the mirror of {self.name} at {version}", found="not there")
        return directory

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
        edge = self._run.way_in(record.version, variant.name)
        return self._run.read_manifest(edge).tensor_sums(self.layout(record))

    def layout(self, record: VersionRecord) -> Layout:
        """The layout of a version."""
        data = self._store.read(Digest(record.variant(self._variant).layout))
        return decode_layout(data, limits=self._store.limits)

    def _path(
        self, record: VersionRecord, starts: Collection[VersionId] | None = None, avoid: Collection[Digest] = ()
    ) -> EdgePath:
        """From one of `starts`, all generations if they are not given."""
        starts = self._starts() if starts is None else starts
        mine = [start.version for start in starts if start.run == self._run.run]
        elsewhere = [start for start in starts if start.run != self._run.run]
        return self._run.path(record, self._variant, mine, elsewhere=elsewhere, avoid=avoid)

    def _build(self, record: VersionRecord, directory: Path) -> Digest:
        starts = self._starts()
        ours = {start: path for start, path in starts.items() if start.run == self._run.run}
        root = self._build_from(starts, record, directory)
        # Without them it was built, and not with them. Only now, that there is another one, they may go.
        for start in ours.keys() - starts.keys():
            if ours[start] != directory and self._files.entry(ours[start]) is not None:
                _discard(ours[start], self._files)
        return root

    def _build_from(self, starts: dict[VersionId, Path], record: VersionRecord, directory: Path) -> Digest:
        """Build along the cheapest path, or else the next; those of `starts` that led nowhere are taken out of it.

        What can be wrong along a path, though every byte of every edge is checked, is an edge that was derived and
        leads elsewhere, or the generation, which is damaged, or another run's and gone. They are done without in this
        order. Raises what the last attempt raised.
        """
        avoid: frozenset[Digest] = frozenset()
        path = self._path(record, starts)
        while True:
            try:
                return self._build_along(path, starts, record, directory)
            except (IntegrityError, CheckpointError, FormatError) as error:
                doubtful = avoid | self._run.derived_on(path)
                other = self._path_without(doubtful, record, starts) if doubtful > avoid else None
                if other is not None:
                    avoid = doubtful
                elif path.start is not None:
                    del starts[path.start]
                    other = self._path_without(avoid, record, starts)
                    if other is None and avoid:
                        avoid = frozenset()
                        other = self._path_without(avoid, record, starts)
                if other is None:
                    raise
                log.warning("built_another_way", version=str(record.id), variant=self._variant, error=str(error))
                path = other

    def _path_without(
        self, avoid: Collection[Digest], record: VersionRecord, starts: Collection[VersionId]
    ) -> EdgePath | None:
        try:
            return self._path(record, starts, avoid)
        except NotFoundError:
            return None

    def _build_along(
        self, path: EdgePath, starts: Mapping[VersionId, Path], record: VersionRecord, directory: Path
    ) -> Digest:
        layout = self.layout(record)
        partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
        make_directory(partial, self._files)
        # Where nothing lies between the generation and the version, its files are shared or copied as they are.
        like = starts[path.start] if path.start is not None and not path.hops else None
        try:
            with CheckpointWriter(partial, layout, files=self._files, like=like) as writer:
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
        hops = path.hops
        if path.start is None:
            self._apply(hops[0], layout, writer)
            base, hops = None, hops[1:]
        with ExitStack() as stack:
            if path.start is not None:
                generation = stack.enter_context(open_checkpoint(starts[path.start]))
                base = Aligned(layout, generation)
                if not hops:
                    _copy(layout, base, writer, self._threads)
            for start in range(0, len(hops), _AT_ONCE):
                self._apply_all(hops[start : start + _AT_ONCE], layout, base, writer)
                base = None

    def _apply_all(self, hops: Sequence[Hop], layout: Layout, base: Weights | None, writer: CheckpointWriter) -> None:
        """Write `base`, or what the writer holds already, as it is after some deltas: in one pass where that can be."""
        limits, threads = self._store.limits, self._threads

        def put(span: Span, lanes: Lanes) -> None:
            writer.put(span[0], span[1], lanes)

        def edges() -> list[Iterator[bytes]]:
            return [self._read_chunks(hop, layout) for hop in hops]

        # What is written in place cannot be begun again, so there it is found out first.
        source = writer if base is None else base
        if (base is not None or nests(edges(), layout, limits=limits)) and apply_chain(
            edges(), layout, source, put, self._backend, limits=limits, threads=threads
        ):
            return
        if base is not None:
            _copy(layout, base, writer, threads)
        for hop in hops:
            self._apply(hop, layout, writer)

    def _apply(self, hop: Hop, layout: Layout, writer: CheckpointWriter) -> None:
        # The sums are not followed here: everything is summed anew once all is written.
        unused = np.zeros((len(layout.tensors), 2), np.uint64)
        chunks = self._read_chunks(hop, layout)
        apply_chunks(chunks, layout, writer, unused, self._backend, limits=self._store.limits, threads=self._threads)
        manifest = self._run.read_manifest(hop.edge)
        if manifest.tensor_sha256:
            self._check_hashes(manifest, layout, writer)

    def _read_chunks(self, hop: Hop, layout: Layout) -> Iterator[bytes]:
        for chunk in chunks_of(self._store, self._run.read_manifest(hop.edge), layout):
            yield self._store.read(Digest(chunk.digest))

    def _check_hashes(self, manifest: Manifest, layout: Layout, written: Weights) -> None:
        """Raises IntegrityError, which names a tensor, unless the weights are those that the manifest vouches for."""
        found = hash_weights(layout, written, threads=self._threads)
        for i, spec in enumerate(layout.tensors):
            part = slice(DIGEST_BYTES * i, DIGEST_BYTES * (i + 1))
            if found[part] != manifest.tensor_sha256[part]:
                raise IntegrityError(
                    f"the {manifest.kind} of {self._run.run}/{manifest.target.version}: tensor {spec.name!r}",
                    expected=f"SHA-256 {manifest.tensor_sha256[part].hex()}",
                    found=found[part].hex(),
                    hint="whoever made it wrote other weights than it says; take the version by another edge",
                )

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
    """Copy all weights that are not there yet, window by window."""

    def copy(spans: list[Span]) -> None:
        for span in spans:
            if span[0] not in writer.taken:
                with borrowed(base, span) as lanes:
                    writer.put(span[0], span[1], lanes)

    for _ in in_order(copy, spans_of(layout, _WINDOW_BYTES), threads):
        pass
