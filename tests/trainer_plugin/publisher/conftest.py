"""Ranks that publish to a real daemon, each a thread of the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.delta import FORMAT
from deltad.delta.layout import Layout, TensorSpec
from tests.kit.checkpoints import CONFIG, read_checkpoint
from tests.kit.daemons import Daemon
from tests.kit.weights import ArrayWeights
from trainer_plugin.publisher import Handle, Held, Outcome, Publisher
from trainer_plugin.publisher.shards import held_array

RUN = "policy"
LAYOUT = Layout(
    FORMAT,
    (
        TensorSpec("embed.weight", "BF16", (64, 24)),
        TensorSpec("experts.weight", "BF16", (4, 10, 6)),
        TensorSpec("norm.weight", "F32", (24,)),
        TensorSpec("scale", "F32", ()),
    ),
)


class Ranks:
    """A world of publishers that share what each step's weights are."""

    def __init__(
        self, daemon: Daemon, world: int, session: str = "s", hosts: Sequence[Daemon] = (), **how: Any
    ) -> None:
        """`hosts` are the daemons that ranks talk to, as many for each; without them it is `daemon` for all."""
        self.daemon = daemon
        self.world = world
        hosts = hosts or (daemon,)
        self.publishers = [
            Publisher(
                RUN,
                socket=hosts[rank * len(hosts) // world].home / "deltad.sock",
                files={"config.json": CONFIG} if rank == 0 else None,
                rank=rank,
                world=world,
                session=session,
                **how,
            )
            for rank in range(world)
        ]

    def shards(self, weights: ArrayWeights, rank: int) -> list[Held]:
        """Matrices are cut by rows, unevenly, experts by expert; what is small, all ranks hold."""
        held = []
        for spec, lanes in zip(LAYOUT.tensors, weights.arrays, strict=True):
            if len(spec.shape) < 2:
                held.append(held_array(spec.name, spec.dtype, lanes.reshape(spec.shape)))
                continue
            begin, end = (spec.shape[0] * i // self.world for i in (rank, rank + 1))
            part = np.ascontiguousarray(lanes.reshape(spec.shape)[begin:end])
            offset = (begin,) + (0,) * (len(spec.shape) - 1)
            held.append(held_array(spec.name, spec.dtype, part, spec.shape, offset))
        return held

    def begin(self, number: int, weights: ArrayWeights, ranks: range | None = None) -> list[Handle]:
        """Let ranks hand over a step; all of them unless some are named."""
        chosen = ranks or range(self.world)
        return [self.publishers[rank].publish(number, self.shards(weights, rank)) for rank in chosen]

    def publish(self, number: int, weights: ArrayWeights) -> list[Outcome]:
        """Let all ranks hand over a step, and wait for what becomes of it."""
        handles = self.begin(number, weights)
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(lambda handle: handle.wait(60), handles))

    def weights_of(self, version: str, at: Path) -> ArrayWeights:
        """A version as the daemon gives it out."""
        from deltad.client.messages import ExportRequest

        self.daemon.client.export(RUN, ExportRequest(version=version, directory=str(at)))
        return read_checkpoint(at)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    started = Daemon(tmp_path / "daemon", "trainer-host", f'[[run]]\nid = "{RUN}"\n').start()
    yield started
    started.stop()
