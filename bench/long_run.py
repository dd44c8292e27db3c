"""A store with thousands of versions, made without encoding any; and processes that open, collect and read.

    python -m bench.long_run open|collect|read STORE        prints one JSON object

Every version has the tables of a real one (layout, sums, pages, a record) and one small chunk of random bytes:
what is measured is what the store does with versions, not with weights. Packs are as many as those of deltas of
some hundred kilobytes would be.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.memory import reset_peak, resident
from deltad.delta import FORMAT
from deltad.delta.coding import Coder
from deltad.delta.digest import SUM_BYTES, root_of, unpack_sums
from deltad.delta.encoding import encode
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.manifest import ChunkRef, EdgeKind, Manifest, State, make_pages
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.limits import Limits
from deltad.store.disk import Disk, File
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.mirror import Mirror
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import RunId, Variant, Version

RUN = RunId("bench")
VARIANT = Variant("bf16")
ANCHOR_EVERY = 100
"""Versions from one anchor to the next: what is let go must not be on the way to what is kept."""
LIMITS = replace(Limits(), pack_bytes=2 << 20)
_CHUNK_BYTES = 6000


class Unsynced(Disk):
    """The real file system in a hurry: nothing is synced, so what is made with it is made to be measured only."""

    def create(self, path: Path) -> File:
        return _UnsyncedFile(super().create(path))

    def edit(self, path: Path) -> File:
        return _UnsyncedFile(super().edit(path))

    def open(self, path: Path) -> File:
        return _UnsyncedFile(super().open(path))

    def sync_directory(self, path: Path) -> None:
        pass


class _UnsyncedFile:
    def __init__(self, file: File) -> None:
        self.read, self.write, self.allocate = file.read, file.write, file.allocate
        self.truncate, self.size, self.close = file.truncate, file.size, file.close

    def sync(self) -> None:
        pass


def layout_of(tensors: int) -> Layout:
    """Names and shapes as a large model has them."""
    names = (f"model.layers.{i // 256:04d}.mlp.experts.{i % 256:03d}.down_proj.weight" for i in range(tensors))
    return Layout(FORMAT, tuple(TensorSpec(name, "BF16", (2048, 1408)) for name in names))


def fill(path: Path, versions: int, tensors: int) -> int:
    """Make a store at `path` with so many versions of so many tensors; the bytes of its last manifest."""
    store = Store.open(path, limits=LIMITS, files=Unsynced())
    layout = layout_of(tensors)
    store.put(layout.encode())
    rng = np.random.default_rng(0)
    before: State | None = None
    size = 0
    for number in range(versions):
        kinds = (EdgeKind.DELTA,) if before else ()
        if number % ANCHOR_EVERY == 0:
            kinds += (EdgeKind.ANCHOR,)
        sums = rng.bytes(SUM_BYTES * tensors)
        target = State(Version(1, number), root_of(layout, unpack_sums(sums, tensors)))
        edges = []
        for kind in kinds:
            base = before if kind is EdgeKind.DELTA else None
            manifest = _manifest(store, layout, base, target, sums=sums, chunk=rng.bytes(_CHUNK_BYTES))
            edges.append(EdgeRef(kind, base.version if base else None, store.put(manifest), len(manifest)))
            size = len(manifest)
        variant = VariantRecord(VARIANT, layout.digest, len(layout.encode()), target.root, tuple(edges))
        record = VersionRecord(
            FORMAT, FORMAT, RUN, target.version, before.version if before else None, number + 1, (variant,)
        )
        store.run(RUN).commit(record.encode())
        before = target
    store.close()
    return size


def _manifest(store: Store, layout: Layout, base: State | None, target: State, *, sums: bytes, chunk: bytes) -> bytes:
    refs = [ChunkRef(store.put_chunk(chunk), len(chunk), 0, len(layout.tensors) - 1)]
    pages = list(make_pages(refs))
    for _, data in pages:
        store.put(data)
    return encode(
        Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=EdgeKind.DELTA if base else EdgeKind.ANCHOR,
            run=RUN,
            variant=VARIANT,
            layout=layout.digest,
            base=base,
            target=target,
            sums=sums,
            pages=tuple(ref for ref, _ in pages),
            coders=(Coder.CONTEXT if base else Coder.PACKED,),
            changed=layout.elements // 250 if base else layout.elements,
            elements=layout.elements,
            chunk_bytes=len(chunk),
        )
    )


def _open(path: Path) -> None:
    Store.open(path, limits=LIMITS)


def _collect(path: Path) -> Callable[[], None]:
    """Drop a tenth of the versions."""
    now = [0.0]
    store = Store.open(path, limits=LIMITS, clock=lambda: now[0])
    now[0] += LEASE_SECONDS + GRACE_SECONDS
    kept = len(store.run(RUN).records()) * 9 // 10

    def work() -> None:
        collect(store, {RUN: Retention(versions=kept)})

    return work


def _read(path: Path) -> Callable[[], None]:
    """Read the newest version's manifest as whoever uses it does: with its layout, pages, and sums by tensor."""
    store = Store.open(path, limits=LIMITS)
    run = store.run(RUN)
    record = run.records()[-1]

    def work() -> None:
        Mirror(store, run, VARIANT, backend=None).sums(record)

    return work


def main(what: str, path: Path) -> None:
    """Do it once, and print how long it took and what was resident meanwhile, above what was before: in bytes."""
    Store.open(path / "empty", limits=LIMITS).close()
    store = path / "store"
    work = {"open": lambda: lambda: _open(store), "collect": lambda: _collect(store), "read": lambda: _read(store)}[
        what
    ]()
    reset_peak()
    baseline = resident("VmRSS")
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    took = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    print(json.dumps({**took, "above": resident("VmHWM") - baseline}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
