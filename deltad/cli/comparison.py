"""The edge that a publisher would make between two checkpoint directories, encoded and counted, never stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltad.checkpoint.directory import Checkpoint, open_checkpoint
from deltad.daemon.break_even import may_win, smaller_anchor
from deltad.daemon.describe import coder_names
from deltad.daemon.same_model import check_same_model
from deltad.delta import FORMAT
from deltad.delta.backend import Mode, choose
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.digest import pack_sums
from deltad.delta.encoding import encode
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkRef, EdgeKind, Manifest, State, make_pages
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.delta.threads import default_threads
from deltad.protocol.mode import AUTO, choose_mode
from deltad.types import Version


class TensorDiff(msgspec.Struct, frozen=True):
    """One tensor of the newer checkpoint. Packed 4- and 6-bit types count in bytes, as the codec does."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    density: float


class Comparison(msgspec.Struct, frozen=True):
    """What a publish of `new` after `old` would make.

    `reason` says why it is an anchor, where it is one. `delta_bytes` is all that a region pulls: chunks,
    pages, manifest and record; exact but for a few bytes, since the run has no name here. `density` and
    `tensors` (the most changed first) compare element by element wherever the tensor tables are equal. `coder`
    is the mode that a delta was coded in; for an anchor, the coder of its frames.
    """

    old: str
    new: str
    kind: str
    reason: str
    density: float
    elements: int
    changed: int
    full_bytes: int
    delta_bytes: int
    chunk_bytes: int
    chunks: int
    root: str
    coder: str
    tensors: tuple[TensorDiff, ...]


@dataclass(frozen=True, slots=True)
class _Edge:
    encoder: EdgeEncoder
    chunks: tuple[ChunkRef, ...]

    @property
    def chunk_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks)


def compare(old: Path, new: Path, publish_as: str, coder: str = AUTO) -> Comparison:
    """Encode the edge from `old` to `new` into nothing, as `coder` says.

    Raises CheckpointError and its kin, also where a publish would refuse `new` as another model.
    """
    mode = choose_mode(coder, ()).mode
    with open_checkpoint(old, publish_as=publish_as) as base, open_checkpoint(new, publish_as=publish_as) as target:
        check_same_model(base.layout, target.layout, new, str(old))
        reason = why_anchor(base.layout, target.layout)
        edge = _cut(_encoder(target, None if reason else base, mode))
        changed = edge.encoder.changed
        full_bytes = target.layout.weight_bytes
        if not reason and may_win(edge.chunk_bytes, full_bytes):
            density = int(changed.sum()) / max(sum(spec.lanes for spec in target.layout.tensors), 1)
            reason = smaller_anchor(_encoder(target, None, mode), edge.chunk_bytes, density)
            edge = _cut(_encoder(target, None, mode)) if reason else edge
        base.check_unchanged()
        target.check_unchanged()
    tensors = _tensor_diffs(target.layout, changed.tolist())
    elements, total = sum(t.elements for t in tensors), sum(t.changed for t in tensors)
    return Comparison(
        old=str(old),
        new=str(new),
        kind="anchor" if reason else "delta",
        reason=reason,
        density=total / elements if elements else 0.0,
        elements=elements,
        changed=total,
        full_bytes=full_bytes,
        delta_bytes=edge.chunk_bytes + _described_bytes(edge),
        chunk_bytes=edge.chunk_bytes,
        chunks=len(edge.chunks),
        root=edge.encoder.root.hex(),
        coder=coder_names(edge.encoder.coders) if reason else mode,
        tensors=tensors,
    )


def why_anchor(old: Layout, new: Layout) -> str:
    """Why no delta leads from one layout to the other, naming the first tensor in the way; empty if one does."""
    if old.table_digest == new.table_digest:
        return ""
    for name in sorted(old.index.keys() | new.index.keys()):
        i, j = old.index.get(name), new.index.get(name)
        if j is None:
            return f"tensor {name} is gone"
        if i is None:
            return f"tensor {name} is new"
        was, now = old.tensors[i], new.tensors[j]
        if was.alias_of != now.alias_of:
            return f"tensor {name} was {_tie(was.alias_of)} and is {_tie(now.alias_of)}"
        if was != now:
            return f"tensor {name} was {was.dtype} {list(was.shape)} and is {now.dtype} {list(now.shape)}"
    raise AssertionError("equal tables have equal digests")


def _tie(alias_of: str) -> str:
    return f"tied to {alias_of}" if alias_of else "on its own"


def _encoder(target: Checkpoint, base: Checkpoint | None, mode: Mode) -> EdgeEncoder:
    backend, threads = choose(), default_threads()
    sums = None if base is None else sum_weights(base.layout, base, backend, threads=threads)
    return EdgeEncoder(target.layout, target, backend, base, sums, mode=mode, threads=threads)


def _cut(encoder: EdgeEncoder) -> _Edge:
    return _Edge(encoder, tuple(chunk.ref for chunk in encoder.chunks()))


def _described_bytes(edge: _Edge) -> int:
    """Size of pages, manifest and record, under names of ordinary length."""
    layout, root = edge.encoder.layout, edge.encoder.root
    kind = EdgeKind.ANCHOR if edge.encoder.base is None else EdgeKind.DELTA
    before, after = Version(1, 1000), Version(1, 1001)
    pages = tuple(page for page, _ in make_pages(edge.chunks))
    manifest = Manifest(
        format=FORMAT,
        least_reader=FORMAT,
        kind=kind,
        run="policy",
        variant="bf16",
        layout=layout.digest,
        base=None if kind is EdgeKind.ANCHOR else State(before, root),
        target=State(after, root),
        sums=pack_sums(edge.encoder.sums),
        pages=pages,
        coders=edge.encoder.coders,
        changed=int(edge.encoder.changed.sum()),
        elements=layout.elements,
        chunk_bytes=edge.chunk_bytes,
    )
    size = len(encode(manifest))
    ref = EdgeRef(kind, None if kind is EdgeKind.ANCHOR else before, layout.digest, size)
    record = VersionRecord(
        format=FORMAT,
        least_reader=FORMAT,
        run=manifest.run,
        version=after,
        parent=before,
        sequence=1000,
        variants=(VariantRecord(manifest.variant, layout.digest, len(layout.encode()), root, (ref,)),),
        created_ns=1 << 60,
        source="step_001001",
    )
    return sum(page.size for page in pages) + size + len(encode(record))


def _tensor_diffs(layout: Layout, changed: Sequence[int]) -> tuple[TensorDiff, ...]:
    """Every tensor that holds weights, the most changed ones first."""
    found = [
        TensorDiff(spec.name, spec.dtype, spec.shape, spec.lanes, lanes, lanes / spec.lanes if spec.lanes else 0.0)
        for spec, lanes in zip(layout.tensors, changed, strict=True)
        if not spec.alias_of
    ]
    return tuple(sorted(found, key=lambda tensor: (-tensor.density, tensor.name)))
