"""A daemon whose GPU fails in the midst of its work: the versions are the same, and it says what happened."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import structlog

from deltad.config import load_config
from deltad.daemon.node import Node
from deltad.delta.backend.choice import Candidates
from deltad.delta.backend.numpy import NumpyBackend
from deltad.errors import ConfigError
from deltad.ops.logs import configure
from deltad.store.store import Store
from deltad.types import Digest, RunId
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.devices import FakeDevice
from tests.kit.weights import ArrayWeights

RUN = RunId("r")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure(json=True, stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def with_gpu(device: FakeDevice) -> Candidates:
    return {"cupy": lambda: (device, ""), "numba": lambda: (NumpyBackend(), "stands in for numba")}


Start = Callable[[str, str, Candidates], Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a daemon by its name, with `[backend] kind` and the backends that are there."""
    with ExitStack() as stack:

        def start(name: str, kind: str, backends: Candidates) -> Node:
            home = tmp_path / name
            home.mkdir()
            file = home / "deltad.toml"
            file.write_text(f'[daemon]\nname = "{name}"\n[[run]]\nid = "{RUN}"\n[backend]\nkind = "{kind}"\n')
            store = stack.enter_context(closing(Store.open(home / "store")))
            return Node(load_config(file), store, backends=backends)

        yield start


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    weights = ArrayWeights.random(MODEL)
    return [
        write_checkpoint(tmp_path / f"step_{number}", state)
        for number, state in enumerate([weights, weights.changed(0.01), weights.changed(0.02)])
    ]


async def published(node: Node, checkpoints: list[Path]) -> list[tuple[str, str, int, int]]:
    """What a region would pull of each version: its root, and what its edge comes to."""
    infos = [
        (await node.publish_checkpoint(RUN, checkpoint, number)).version
        for number, checkpoint in enumerate(checkpoints)
    ]
    return [(info.version, info.root, info.chunks, info.delta_bytes) for info in infos]


def objects(node: Node) -> set[Digest]:
    """The names of all chunks, pages, manifests and layouts, which are digests of their bytes."""
    return set(node.store.objects.sizes())


async def test_no_version_is_lost_when_the_gpu_is_and_what_took_over_is_said(
    start: Start, checkpoints: list[Path], log: io.StringIO
) -> None:
    proof = FakeDevice()
    start("proof", "cupy", with_gpu(proof))
    fails_in_work = FakeDevice(lambda number: number >= proof.calls + 8)
    with_a_gpu = start("a", "cupy", with_gpu(fails_in_work))
    before = with_a_gpu.status()
    assert (before.backend, before.backend_reason) == ("cupy", "as configured")

    without = start("b", "numpy", with_gpu(fails_in_work))
    assert await published(with_a_gpu, checkpoints) == await published(without, checkpoints)
    assert len(objects(without)) > 3 * len(checkpoints)
    assert objects(with_a_gpu) == objects(without)

    after = with_a_gpu.status()
    assert after.backend == "numpy"
    assert "cupy failed" in after.backend_reason
    assert f"lost in call {proof.calls + 8}" in after.backend_reason
    metrics = with_a_gpu.metrics.registry
    labels = {"backend": "numpy", "reason": after.backend_reason}
    assert metrics.get_sample_value("deltad_backend_info", labels) == 1
    assert metrics.get_sample_value("deltad_backend_fallbacks_total", {"backend": "cupy"}) == 1
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (said,) = [line for line in lines if line["event"] == "backend_switched"]
    assert (said["level"], said["backend"], said["backend_reason"]) == ("warning", "numpy", after.backend_reason)


async def test_a_backend_that_is_named_and_does_not_work_refuses_the_start(start: Start) -> None:
    backends: Candidates = {"cupy": lambda: (None, "cupy is not installed"), "numba": lambda: (None, "broken")}
    with pytest.raises(ConfigError, match="expected cupy that works here, found cupy is not installed"):
        start("a", "cupy", backends)
    chosen = start("b", "auto", backends).status()
    assert chosen.backend == "numpy"
    assert chosen.backend_reason == "no GPU (cupy is not installed); numba does not work here: broken"
