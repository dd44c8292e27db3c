"""A trainer in miniature: steps its weights, writes checkpoints, publishes them into a store of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from deltad.daemon.origin import Origin
from deltad.delta.backend import choose
from deltad.delta.manifest import EdgeKind
from deltad.delta.record import VersionRecord
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import RunId, Variant, Version, VersionId, parse_run
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.weights import ArrayWeights

RUN = parse_run("r")
VARIANT = Variant("bf16")


def edges_since(mirror: Mirror, record: VersionRecord, store: Store, *others: Mirror) -> int:
    """How many edges lie between the nearest generation, of this mirror or of others, or an anchor, and a version."""
    elsewhere = [VersionId(other.run, version) for other in others for version in other.generations()]
    path = store.run(mirror.run).path(record, mirror.variant, mirror.generations(), elsewhere=elsewhere)
    return len(path.hops)


class Trainer:
    """Writes checkpoints and publishes them into a store."""

    def __init__(
        self,
        tmp_path: Path,
        run: RunId = RUN,
        store: Store | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store or Store.open(tmp_path / "store", clock=clock)
        self.run = self.store.run(run)
        self.origin = Origin(self.store, run, VARIANT, choose())
        self.mirror = Mirror(self.store, self.run, VARIANT, choose())
        self.checkpoints = tmp_path / "checkpoints"
        self.exports = tmp_path / "exports"
        self.weights = ArrayWeights.random(MODEL)

    def write(self, number: int, weights: ArrayWeights | None = None) -> Path:
        directory = self.checkpoints / f"step_{number:06d}"
        shutil.rmtree(directory, ignore_errors=True)
        return write_checkpoint(directory, weights or self.weights)

    def step(self, number: int, density: float = 0.01) -> Version:
        if number:
            self.weights = self.weights.changed(density, seed=number)
        return self.origin.publish(self.write(number), number).record.version

    def kind(self, number: int, epoch: int = 1) -> EdgeKind:
        return self.run.record(Version(epoch, number)).variants[0].edges[0].kind

    def export(self, version: Version) -> ArrayWeights:
        directory = self.exports / str(version)
        self.mirror.export(self.run.record(version), directory)
        return read_checkpoint(directory)
