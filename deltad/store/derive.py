"""Making edges that no record names: skip deltas, inverses, and anchors cut from the mirror.

What is foldable is folded without touching weights; the rest is encoded anew between two states of the mirror. Owns
the invariant that an edge enters the catalogue only once it is proven to lead to the published root of its target.
Killed before that, or refused: unused objects are left, which a collection removes, and the same edge is made again.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from deltad.delta import FORMAT
from deltad.delta.backend import Backend, Mode
from deltad.delta.codec import EdgeEncoder
from deltad.delta.coding import WHOLE, Coder
from deltad.delta.digest import pack_sums, root_of
from deltad.delta.encoding import encode
from deltad.delta.fold import StoredDelta, fold
from deltad.delta.frame import read_headers
from deltad.delta.keys import SigningKey
from deltad.delta.layout import Layout
from deltad.delta.manifest import EdgeKind, Manifest, PageRef, State
from deltad.delta.proof import Ledger, prove_beside
from deltad.delta.record import VersionRecord
from deltad.delta.signing import sign
from deltad.delta.weights import hash_weights
from deltad.errors import ConflictError, IntegrityError, NotFoundError
from deltad.store.derived import DerivedEdge
from deltad.store.edge_chunks import store_chunks, stored_delta
from deltad.store.mirror import Mirror
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import Digest, Variant, Version

_FOLDABLE = frozenset({Coder.BLIND, *WHOLE})
_INVERTIBLE = frozenset({Coder.BLIND})
AT_ONCE = 16
"""Parts that are folded at once, since two chunks of each are held in memory. More are folded in rounds."""


@dataclass(frozen=True, slots=True)
class Made:
    """A derived edge that is in the catalogue, and how it came about, in words. `folded`: no weights were touched."""

    edge: DerivedEdge
    how: str
    folded: bool = False


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was made of an edge: all of its manifest that does not follow from its ends."""

    pages: tuple[PageRef, ...]
    chunk_bytes: int
    changed: int
    coders: tuple[int, ...]


class Deriver:
    """Makes the derived edges of one variant of one run. Methods block, and may be called from any thread."""

    def __init__(
        self,
        store: Store,
        run: RunStore,
        variant: Variant,
        mirror: Mirror,
        backend: Backend,
        *,
        key: SigningKey | None = None,
        shares: bool = True,
        threads: int = 1,
    ) -> None:
        """`key` signs what is made, for daemons that pull it; unless it `shares`, all of it stays on this host."""
        self._store = store
        self._run = run
        self._variant = variant
        self._mirror = mirror
        self._backend = backend
        self._key = key
        self._shares = shares
        self._threads = threads

    def make_edge(self, base: Version, target: Version, *, mode: Mode = "blind") -> Made:
        """The edge from one version that is held to another, in the catalogue and durable on return.

        Folded from blind deltas where they lead from one to the other, else encoded anew, by `mode`. One to an older
        version is an inverse, which stays on this host. Raises NotFoundError for a version that is not held,
        ConflictError where no delta can exist, and IntegrityError where what was made leads elsewhere.
        """
        if base == target:
            raise ValueError(f"an edge from {base} to itself")
        with self._store.leases.work(f"making {base} → {target} of {self._run.run}"):
            if known := self._known(base, target):
                return Made(known, "made before")
            start, end = self._run.record(base), self._run.record(target)
            layout = self._common_layout(start, end)
            parts = self._parts(start, end) if mode == "blind" else None
            if parts is None:
                manifest, how = self._encode(start, end, layout, mode), "encoded anew"
            else:
                manifest = self._fold(parts, start, end, layout)
                how = ("inverted" if target < base else "folded") + f" from {len(parts)} of the run's deltas"
            return Made(self._catalogue(manifest, local=target < base), how, folded=parts is not None)

    def cut_anchor(self, version: Version, reason: str) -> Made:
        """An anchor of a version that is held, cut from the mirror, in the catalogue and durable on return.

        Its chunks are those of any host that cuts one of the same version. Raises NotFoundError for a version that is
        not held, and IntegrityError where the mirror does not hold it.
        """
        with self._store.leases.work(f"cutting an anchor of {self._run.run}/{version}"):
            if known := self._known(None, version):
                return Made(known, "made before")
            record = self._run.record(version)
            layout = self._mirror.layout(record)
            with self._mirror.state(record) as weights:
                hashes = hash_weights(layout, weights, threads=self._threads)
                encoder = EdgeEncoder(layout, weights, self._backend, limits=self._store.limits, threads=self._threads)
                drawn = self._drawn(encoder)
            self._check_root(record, encoder.root)
            manifest = self._manifest(None, record, layout, drawn, reason=reason, hashes=hashes)
            return Made(self._catalogue(manifest, local=False), "cut from the mirror")

    def _known(self, base: Version | None, target: Version) -> DerivedEdge | None:
        ends = (self._variant, base, target)
        return next((e for e in self._run.derived() if (e.variant, e.base, e.target) == ends), None)

    def _common_layout(self, start: VersionRecord, end: VersionRecord) -> Layout:
        """The layout of both ends. Raises ConflictError where their tensors differ."""
        layout = self._mirror.layout(end)
        before = self._mirror.layout(start)
        if before.table_digest != layout.table_digest:
            raise ConflictError(
                f"an edge {start.version} → {end.version} of {self._run.run}",
                expected="the same tensors in both",
                found=f"tables {before.table_digest.hex()[:12]} and {layout.table_digest.hex()[:12]}",
                hint="cut an anchor instead",
            )
        return layout

    def _parts(self, start: VersionRecord, end: VersionRecord) -> list[Manifest] | None:
        """The deltas to fold, from the older end to the newer; None where they cannot be folded."""
        older, newer = sorted((start, end), key=lambda record: record.version)
        try:
            path = self._run.path(newer, self._variant, [older.version], anchors=False)
        except NotFoundError:
            return None
        parts = [self._run.read_manifest(hop.edge) for hop in path.hops]
        allowed = _FOLDABLE if start is older else _INVERTIBLE
        return parts if all(allowed.issuperset(part.coders) for part in parts) else None

    def _fold(self, parts: list[Manifest], start: VersionRecord, end: VersionRecord, layout: Layout) -> Manifest:
        deltas = [stored_delta(self._store, part, layout) for part in parts]
        while len(deltas) > AT_ONCE:
            deltas = [self._passing(deltas[at : at + AT_ONCE], layout) for at in range(0, len(deltas), AT_ONCE)]
        inverted, limits = end.version < start.version, self._store.limits
        made = fold(deltas, layout, self._backend, inverted=inverted, limits=limits)
        pages, chunk_bytes = store_chunks(self._store, made.chunks())
        manifest = self._manifest(start, end, layout, _Drawn(pages, chunk_bytes, made.changed, made.coders))
        self._prove(manifest, start, end, layout)
        return manifest

    def _passing(self, deltas: list[StoredDelta], layout: Layout) -> StoredDelta:
        """A fold that is only a part of another one: its chunks are stored, and nothing names them."""
        chunks = []
        for chunk in fold(deltas, layout, self._backend, limits=self._store.limits).chunks():
            self._store.put_chunk(chunk.data)
            chunks.append(chunk.ref)
        return StoredDelta(chunks, self._store.read)

    def _prove(self, manifest: Manifest, start: VersionRecord, end: VersionRecord, layout: Layout) -> None:
        """Raises IntegrityError unless what is stored of an edge leads from the sums of one end to the other's."""
        sums = self._mirror.sums(start), self._mirror.sums(end)
        chunks = stored_delta(self._store, manifest, layout)
        ledger = Ledger(layout)
        for data in chunks.data():
            for header, _ in read_headers(data, layout, limits=self._store.limits):
                ledger.add(header)
        try:
            if not ledger.proves(*sums):
                with self._mirror.state(start) as base:
                    prove_beside(chunks.data(), layout, base, sums, self._backend, limits=self._store.limits)
        except IntegrityError as error:
            raise IntegrityError(
                f"the edge {start.version} → {end.version} of {self._run.run} that was folded",
                expected=f"root {end.variant(self._variant).root.hex()}",
                found=str(error),
                hint="it was not kept; `deltad verify` tells whether a stored version is damaged",
            ) from error

    def _encode(self, start: VersionRecord, end: VersionRecord, layout: Layout, mode: Mode) -> Manifest:
        with ExitStack() as stack:
            base, target = (stack.enter_context(self._mirror.state(record)) for record in (start, end))
            encoder = EdgeEncoder(
                layout,
                target,
                self._backend,
                base=base,
                base_sums=self._mirror.sums(start),
                limits=self._store.limits,
                mode=mode,
                threads=self._threads,
            )
            drawn = self._drawn(encoder)
        self._check_root(end, encoder.root)
        return self._manifest(start, end, layout, drawn)

    def _drawn(self, encoder: EdgeEncoder) -> _Drawn:
        pages, chunk_bytes = store_chunks(self._store, encoder.chunks())
        return _Drawn(pages, chunk_bytes, int(encoder.changed.sum(dtype=np.uint64)), encoder.coders)

    def _check_root(self, record: VersionRecord, found: Digest) -> None:
        expected = record.variant(self._variant).root
        if found != expected:
            raise IntegrityError(
                f"{record.id} variant {self._variant}, as the mirror holds it",
                expected=f"root {expected.hex()}",
                found=f"root {found.hex()}",
                hint="nothing was made of it; `deltad verify` names the tensors",
            )

    def _manifest(  # noqa: PLR0917
        self,
        start: VersionRecord | None,
        end: VersionRecord,
        layout: Layout,
        drawn: _Drawn,
        reason: str = "",
        hashes: bytes = b"",
    ) -> Manifest:
        root = end.variant(self._variant).root
        sums = self._mirror.sums(end)
        self._check_root(end, root_of(layout, sums))
        return Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=EdgeKind.ANCHOR if start is None else EdgeKind.SKIP_DELTA,
            run=self._run.run,
            variant=self._variant,
            layout=layout.digest,
            base=None if start is None else State(start.version, start.variant(self._variant).root),
            target=State(end.version, root),
            sums=pack_sums(sums),
            pages=drawn.pages,
            coders=drawn.coders,
            changed=drawn.changed,
            elements=sum(spec.lanes for spec in layout.tensors),
            chunk_bytes=drawn.chunk_bytes,
            reason=reason,
            tensor_sha256=hashes,
        )

    def _catalogue(self, manifest: Manifest, *, local: bool) -> DerivedEdge:
        signed = sign(manifest, self._key) if self._key else manifest
        return self._run.add_edge(self._store.put(encode(signed)), local=local or not self._shares)
