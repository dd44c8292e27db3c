"""P34 with real daemons: a replica process that hangs holds up neither what is published nor what is pulled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltad.checkpoint import CheckpointWriter, open_checkpoint
from deltad.client.messages import ExportRequest, PublishRequest
from tests.kit.checkpoints import read_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights
from trainer_plugin.rl.model import prepare_tiny

WAIT = 60.0


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """A publishes, and B pulls from it."""
    port = free_port()
    relay = f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n[[run]]\nid = "r"\n'
    upstream = f'[[upstream]]\nurl = "http://127.0.0.1:{port}"\ntoken_file = "token"\n'
    both = Daemon(tmp_path / "a", "a", relay), Daemon(tmp_path / "b", "b", upstream)
    try:
        for daemon in both:
            daemon.start()
        yield both
    finally:
        for daemon in both:
            if daemon.process is not None:
                daemon.kill()


@contextmanager
def replica(daemon: Daemon) -> Iterator[subprocess.Popen[bytes]]:
    where = ("--socket", str(daemon.home / "deltad.sock"), "--run", "r", "--variant", "bf16", "--name", "r1")
    process = subprocess.Popen(
        [sys.executable, "-m", "rollout_plugin", *where],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def await_verified(daemon: Daemon, version: str) -> None:
    for _ in range(8):  # the daemon bounds one wait
        view = daemon.client.fleet("r", version=version, verified=1, wait=WAIT)
        if view.verified:
            return
    raise AssertionError(f"the replica did not get there: {view}")


def test_a_replica_that_hangs_holds_up_neither_daemon_and_follows_once_it_goes_on(
    daemons: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    a, b = daemons
    steps = [prepare_tiny(tmp_path / "step_0", seed=7)]
    weights = read_checkpoint(steps[0])
    a.client.publish("r", PublishRequest(str(steps[0]), number=0))
    assert b.client.latest("r", wait=WAIT) is not None, b.log
    with replica(b) as process:
        await_verified(b, "v000000")
        process.send_signal(signal.SIGSTOP)
        for number in (1, 2, 3):
            weights = weights.changed(0.01, seed=number)
            steps.append(changed_checkpoint(steps[0], weights, tmp_path / f"step_{number}"))
            a.client.publish("r", PublishRequest(str(steps[-1]), number=number))
            arrived = b.client.latest("r", after=f"v{number - 1:06d}", wait=WAIT)
            assert arrived is not None, b.log
            assert arrived.version == f"v{number:06d}"
        assert b.client.verify("r", "v000003").match
        b.client.export("r", ExportRequest(version="v000003", directory=str(tmp_path / "export")))
        assert read_checkpoint(tmp_path / "export").equals(weights)
        assert b.client.fleet("r", version="v000003").verified == 0

        process.send_signal(signal.SIGCONT)
        await_verified(b, "v000003")
        process.send_signal(signal.SIGSTOP)
        assert (b.stop(), a.stop()) == (0, 0)


def changed_checkpoint(model: Path, weights: ArrayWeights, directory: Path) -> Path:
    """The model's checkpoint with other weights."""
    with open_checkpoint(model) as checkpoint, CheckpointWriter(directory, checkpoint.layout) as writer:
        for i, spec in enumerate(checkpoint.layout.tensors):
            if spec.lanes:
                writer.lanes(i, 0, spec.lanes)[:] = weights.arrays[i]
        for file in checkpoint.layout.files:
            writer.write_file(file.name, checkpoint.file_bytes(file.name))
        writer.finish()
    return directory
