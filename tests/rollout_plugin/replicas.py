"""What the tests of a replica share: what it logged, and versions and backends that fail it."""

from __future__ import annotations

import json

from deltad.client.messages import ReplicaReport, ReplicaState
from deltad.delta.backend import Changes, Lanes
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.codec import sum_weights
from deltad.delta.digest import U64, pack_sums
from deltad.delta.encoding import sha256
from deltad.delta.layout import FileSpec, Layout
from deltad.types import DType
from tests.kit.weights import ArrayWeights
from tests.rollout_plugin.conftest import Running
from tests.rollout_plugin.region import Held, Region

PROMPT = [72, 101, 108, 108, 111]


class FailingBackend(NumpyBackend):
    """Fails at the `failing` applications, counted from 1; a set may be filled while it is in use."""

    def __init__(self, failing: range) -> None:
        self.failing = failing
        self.applied = 0

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        self.applied += 1
        if self.applied in self.failing:
            raise MemoryError(f"application {self.applied}")
        return super().apply(target, changes, dtype, seed)


def fenced(report: ReplicaReport) -> bool:
    return report.state is ReplicaState.FENCED


def log_of(replica: Running, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in replica.log.getvalue().splitlines()]
    return [line for line in lines if line["event"] == event]


def states_of(replica: Running) -> list[object]:
    return [line["state"] for line in log_of(replica, "state")]


# The daemon comes and goes.


def forged(region: Region, after: Held) -> bytes:
    """A manifest of `after` that lists the chunks of another version."""
    before = region.history[region.history.index(after) - 1]
    other = Held(after.info, after.layout, before.weights.changed(0.01, seed=99), after.files)
    return region.put_delta(before, other, sums=pack_sums(sum_weights(after.layout, after.weights)))


def with_file(held: Held, name: str, data: bytes) -> tuple[Layout, ArrayWeights, dict[str, bytes]]:
    """A version's parts with other contents of one of its files."""
    files = {**held.files, name: data}
    specs = tuple(FileSpec(name, len(data), sha256(data)) for name, data in sorted(files.items()))
    return Layout(1, held.layout.tensors, specs), held.weights.copy(), files
