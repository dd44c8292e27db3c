"""Making damaged objects again from weights that are here, where nobody can be asked for them.

Encoding is deterministic: the same weights give the same chunks on every host. So an edge is encoded again between
the states that it lies between, and of what comes out that is stored whose SHA-256 is a damaged object's. Owns one
invariant: nothing is stored but bytes with the very name that they are stored for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import structlog

from deltad.checkpoint.aligned import Aligned
from deltad.checkpoint.directory import Checkpoint, open_checkpoint
from deltad.delta.backend import Backend, Mode
from deltad.delta.codec import EdgeEncoder
from deltad.delta.coding import Coder
from deltad.delta.encoding import sha256
from deltad.delta.manifest import decode_manifest, make_pages
from deltad.delta.record import EdgeRef, VersionRecord
from deltad.errors import DeltadError, NotFoundError
from deltad.protocol.mode import MODES
from deltad.store.disk import remove_tree
from deltad.store.mirror import Mirror
from deltad.store.needs import Need
from deltad.store.store import Store
from deltad.types import Digest, VersionId

log = structlog.get_logger()

OpenBaseline = Callable[[VersionRecord], Checkpoint | None]
"""The kept files of the checkpoint that a version was published from, if they are still what they were."""


@dataclass(frozen=True, slots=True)
class Rederiver:
    """Makes objects of one variant of one run. Blocks, and takes room for two full copies of the weights at most."""

    store: Store
    mirror: Mirror
    backend: Backend
    baseline: OpenBaseline
    threads: int = 1

    def make(self, record: VersionRecord, needs: Sequence[Need]) -> None:
        """Store what of `needs`, all of this version, can be made again. What goes wrong is logged."""
        lacking = {need.wanted.digest for need in needs}
        edges = {need.edge.manifest: need.edge for need in needs if need.edge is not None}
        try:
            if any(need.edge is None for need in needs):
                with self._weights(record) as checkpoint:
                    self._keep(lacking, checkpoint.layout.encode())
                    for file in checkpoint.layout.files:
                        self._keep(lacking, checkpoint.file_bytes(file.name))
            for edge in edges.values():
                self._encode(record, edge, lacking)
        except DeltadError as error:
            log.info("not_made_again", version=str(record.id), error=str(error))

    def _encode(self, record: VersionRecord, edge: EdgeRef, lacking: set[Digest]) -> None:
        manifest = decode_manifest(self.store.read(Digest(edge.manifest)), limits=self.store.limits)
        layout = self.mirror.layout(record)
        modes: tuple[Mode, ...] = ("blind",)
        if Coder.CONTEXT in manifest.coders:
            modes = tuple(mode for mode in MODES if mode != "blind")
        start = record.base(edge)
        for mode in modes if manifest.base else modes[:1]:
            with ExitStack() as stack:
                base, sums = None, None
                if start is not None:
                    beside = self._beside(start)
                    before = beside.mirror.record(start.version)
                    base, sums = stack.enter_context(beside._weights(before)), beside.mirror.sums(before)
                target = stack.enter_context(self._weights(record))
                encoder = EdgeEncoder(
                    layout,
                    Aligned(layout, target),
                    self.backend,
                    base=None if base is None else Aligned(layout, base),
                    base_sums=sums,
                    limits=self.store.limits,
                    mode=mode,
                    threads=self.threads,
                )
                refs = []
                for chunk in encoder.chunks():
                    refs.append(chunk.ref)
                    self._keep(lacking, chunk.data, chunk=True)
            for _, data in make_pages(refs, limits=self.store.limits):
                self._keep(lacking, data)
            if not lacking & set(self.store.objects.quarantine.damaged()):
                return

    def _beside(self, base: VersionId) -> Rederiver:
        """This, for the run of a version that an edge starts from: a fork's first one starts in another run.

        Raises NotFoundError where that run is not held.
        """
        run = self.store.find_run(base.run)
        if run is None:
            raise NotFoundError(f"run {base.run}", expected="a run that is held here", found="none of that name")
        if run.run == self.mirror.run:
            return self
        mirror = Mirror(self.store, run, self.mirror.variant, self.backend, threads=self.threads)
        return replace(self, mirror=mirror, baseline=lambda _: None)

    def _keep(self, lacking: set[Digest], data: bytes, *, chunk: bool = False) -> None:
        if sha256(data) in lacking:
            (self.store.put_chunk if chunk else self.store.put)(data)

    @contextmanager
    def _weights(self, record: VersionRecord) -> Iterator[Checkpoint]:
        """All weights of a version: from the mirror, from its kept checkpoint, or built aside from what is whole."""
        if (directory := self.mirror.generations().get(record.version)) is not None:
            with open_checkpoint(directory) as checkpoint:
                yield checkpoint
            return
        if (baseline := self.baseline(record)) is not None:
            with baseline:
                yield baseline
            return
        scratch = self.store.scratch / f"rederive-{record.run}-{record.version}"
        try:
            self.mirror.export(record, scratch)
            with open_checkpoint(scratch) as checkpoint:
                yield checkpoint
        finally:
            remove_tree(scratch, self.store.files)
