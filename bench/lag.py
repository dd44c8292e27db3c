"""A hundred real deltas, the policy that decides what to fold of them, and what somebody 100 versions behind pulls.

The versions are steps of a simulated training; every delta is encoded blind, and whatever the policy decides to fold
is folded from the stored chunks alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.harness import Measurement, Spec
from bench.pairs import SIMULATED, Bits
from bench.simulated import tensors, walk
from bench.subject import Memory
from deltad.delta import FORMAT
from deltad.delta.backend import Backend
from deltad.delta.codec import EdgeEncoder, apply_chunks, sum_weights
from deltad.delta.emit import EncodedChunk
from deltad.delta.fold import StoredDelta, fold
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.manifest import EdgeKind
from deltad.store.graph import Budget, Drop, Edge, Fold, Path, Reader, VersionGraph, plan
from deltad.store.graph.policy import estimate
from deltad.types import Digest, RunId, Version, VersionId

BEHIND = 100

_ONE_PERCENT = next(run for run in SIMULATED if run.density == 0.01)
_ENOUGH = 1 << 60

SPECS = (
    Spec(name="100 behind, edges", unit="", direction="min", must=8),
    Spec(name="100 behind, bytes / 100 single deltas", unit="×", direction="min", must=0.35),
    Spec(name="100 behind, edges, by the ladder alone", unit="", direction="min"),
    Spec(name="100 behind, bytes / 100 single deltas, by the ladder alone", unit="×", direction="min"),
    Spec(name="0 to 99 behind, most edges by the ladder alone", unit="", direction="min"),
    Spec(name="folded bytes / the policy's estimate", unit="×", direction="min"),
)


def measure(coder: Backend, *, part: int) -> Iterator[Measurement]:
    """A hundred steps of a `part`-th of a layer, and a reader that comes back at the end.

    Raises ValueError where it would get other bits.
    """
    layout = Layout(FORMAT, tuple(TensorSpec(extent.name, "BF16", extent.shape) for extent in tensors(part=part)))
    run = _Run(part, layout, coder)
    before, first = None, None
    for state in walk(_ONE_PERCENT, BEHIND, part=part):
        run.publish(before, state)
        run.obey([], state.nbytes)
        first = state if first is None else first
        before = state
    assert first is not None
    assert before is not None
    singles = sum(edge.bytes for edge in run.graph.edges() if not edge.derived)
    ladder = run.path(0)
    most = max(len(run.path(held).hops) for held in range(BEHIND))
    newest = run.line[-1][1]
    run.obey([Reader("laggard", run.line[0][1], newest)], before.nbytes)
    path = run.path(0)
    if not np.array_equal(run.walked(path, first), before):
        raise ValueError("what the path leads to is not the newest state")
    lanes = sum(tensor.lanes for tensor in layout.tensors)
    each = singles / BEHIND / (2 * lanes)
    note = f"{lanes / 1e6:.1f} M weights, simulated, 1 % changed a step; a single delta is {100 * each:.2f} % of them"
    yield _one("100 behind, edges", len(path.hops), "folded for it alone, since its way had more than 8 edges")
    yield _one("100 behind, bytes / 100 single deltas", path.bytes / singles, note)
    yield _one(
        "100 behind, edges, by the ladder alone", len(ladder.hops), "from sequence 1 to 101: the ladder fits badly"
    )
    yield _one("100 behind, bytes / 100 single deltas, by the ladder alone", ladder.bytes / singles, note)
    yield _one("0 to 99 behind, most edges by the ladder alone", most, "")
    yield Measurement(
        name="folded bytes / the policy's estimate",
        value=statistics.median(run.surprise),
        spread=(min(run.surprise), max(run.surprise)),
        runs=len(run.surprise),
        note="every fold of the hundred versions",
    )


def _one(name: str, value: float, note: str) -> Measurement:
    return Measurement(name=name, value=float(value), runs=1, note=note)


def _held(chunks: list[EncodedChunk]) -> StoredDelta:
    data = {chunk.ref.digest: chunk.data for chunk in chunks}
    return StoredDelta([chunk.ref for chunk in chunks], lambda digest: data[digest])


@dataclass(slots=True)
class _Run:
    """A run whose deltas are in memory."""

    part: int
    layout: Layout
    backend: Backend
    graph: VersionGraph = field(default_factory=lambda: VersionGraph("bf16"))
    stored: dict[Digest, StoredDelta] = field(default_factory=dict)
    line: list[tuple[int, VersionId]] = field(default_factory=list)
    surprise: list[float] = field(default_factory=list)

    def publish(self, before: Bits | None, state: Bits) -> None:
        """One more version, by a blind delta from the one before. Sequences begin with 1, as in every run."""
        version = VersionId(RunId("bench"), Version(1, len(self.line)))
        self.graph.add_version(version)
        if before is not None:
            base, target = (Memory(tensors(part=self.part), bits) for bits in (before, state))
            sums = sum_weights(self.layout, base, self.backend)
            encoder = EdgeEncoder(self.layout, target, self.backend, base=base, base_sums=sums)
            self._add(EdgeKind.DELTA, self.line[-1][1], version, list(encoder.chunks()), encoder.coders)
        self.line.append((len(self.line) + 1, version))

    def walked(self, path: Path, state: Bits) -> Bits:
        """What a path makes of a state."""
        state = state.copy()
        weights = Memory(tensors(part=self.part), state)
        for hop in path.hops:
            sums = sum_weights(self.layout, weights, self.backend)
            apply_chunks(self.stored[hop.edge.manifest].data(), self.layout, weights, sums, self.backend)
        return state

    def obey(self, readers: list[Reader], anchor: int) -> None:
        """Do what the policy decides, where nothing but the ladder's own measure limits it."""
        for action in plan(self.graph, self.line, readers, Budget(None, _ENOUGH, None, anchor)).actions:
            match action:
                case Drop(edge):
                    self.graph.remove(edge.manifest)
                case Fold(base, target, parts):
                    self._fold(base, target, parts)

    def path(self, held: int) -> Path:
        return self.graph.path(self.line[-1][1], {self.line[held][1]}, anchors=False)

    def _fold(self, base: VersionId, target: VersionId, parts: tuple[Edge, ...]) -> None:
        made = fold([self.stored[part.manifest] for part in parts], self.layout, self.backend)
        chunks = list(made.chunks())
        self._add(EdgeKind.SKIP_DELTA, base, target, chunks, made.coders)
        size = sum(chunk.ref.size for chunk in chunks)
        self.surprise.append(size / estimate([part.bytes for part in parts]))

    def _add(
        self, kind: EdgeKind, base: VersionId, target: VersionId, chunks: list[EncodedChunk], coders: tuple[int, ...]
    ) -> None:
        # Manifests take a few hundred bytes each, and are not made; a number stands for their digest.
        name = Digest(len(self.stored).to_bytes(32, "big"))
        size = sum(chunk.ref.size for chunk in chunks)
        self.graph.add(Edge(kind, base, target, name, 1, size, coders, kind is EdgeKind.SKIP_DELTA))
        self.stored[name] = _held(chunks)
