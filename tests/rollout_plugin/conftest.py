"""The tiny model, and a region with one replica in it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deltad.delta.backend import Backend, choose
from deltad.delta.codec import sum_weights
from deltad.delta.digest import root_of
from deltad.types import Variant
from rollout_plugin.engines.transformers import TransformersEngine, load
from rollout_plugin.log import Log
from rollout_plugin.replica import Replica
from rollout_plugin.server import Endpoint
from rollout_plugin.serving import Serving
from tests.rollout_plugin.region import RUN, Region, running
from trainer_plugin.rl.model import prepare_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model."""
    return prepare_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=7)


@pytest.fixture
def region(tmp_path: Path, tiny: Path) -> Iterator[Region]:
    """A region that holds version 0, the tiny model."""
    with running(tmp_path / "region") as region:
        region.publish_checkpoint(tiny)
        yield region


@dataclass
class Running:
    """A replica that runs in threads of this process."""

    replica: Replica
    serving: Serving
    endpoint: Endpoint
    url: str
    thread: threading.Thread
    log: io.StringIO

    @property
    def engine(self) -> TransformersEngine:
        engine = self.serving.engine(wait=60)
        assert isinstance(engine, TransformersEngine)
        return engine

    def root(self) -> str:
        """The root of what the engine computes with at this moment."""
        live = self.engine.live
        return root_of(live.layout, sum_weights(live.layout, live)).hex()

    def stop(self) -> None:
        self.replica.finish()
        self.endpoint.stop()
        self.thread.join()


StartReplica = Callable[..., Running]


@pytest.fixture
def start_replica(region: Region) -> Iterator[StartReplica]:
    """Start replicas at the region; all are stopped in the end."""
    started: list[Running] = []

    def start(name: str = "r1", *, backend: Backend | None = None, at: Region = region) -> Running:
        serving, log = Serving(), io.StringIO()
        endpoint = Endpoint(serving, replica=name, run=RUN, variant="bf16", host="127.0.0.1", port=0, log=Log(log))
        url = endpoint.start()
        replica = Replica(
            at.client,
            run=RUN,
            variant=Variant("bf16"),
            name=name,
            address=url,
            load=load,
            serving=serving,
            backend=backend or choose(),
            log=Log(log),
            poll_seconds=0.5,
        )
        thread = threading.Thread(target=replica.run, name=name)
        thread.start()
        started.append(Running(replica, serving, endpoint, url, thread, log))
        return started[-1]

    yield start
    for running_replica in started:
        running_replica.stop()
