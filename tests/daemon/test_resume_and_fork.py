"""Real daemons over loopback: a trainer resumes, another forks its run, and the other region follows both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import ExportRequest, PublishReply, PublishRequest, RunVersion, VersionInfo
from deltad.errors import ConflictError, NotFoundError, UsageError
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

WAIT = 60.0


class Regions:
    """Daemon A publishes the runs `r` and `fork`; B pulls whatever A has, and C only the fork."""

    def __init__(self, home: Path) -> None:
        self.home = home
        port = free_port()
        upstream = f'[[upstream]]\nurl = "http://127.0.0.1:{port}"\ntoken_file = "token"\n'
        relay = f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n'
        self.a = Daemon(home / "a", "a", relay + '[[run]]\nid = "r"\n[[run]]\nid = "fork"\n')
        self.b = Daemon(home / "b", "b", upstream)
        self.c = Daemon(home / "c", "c", upstream + 'runs = ["fork"]\n')
        self.weights: dict[str, ArrayWeights] = {}
        self._written = 0

    def publish(self, run: str, number: int, weights: ArrayWeights, **how: object) -> PublishReply:
        self._written += 1
        directory = write_checkpoint(self.home / f"checkpoint-{self._written}", weights)
        reply = self.a.client.publish(run, PublishRequest(str(directory), number, **how))  # type: ignore[arg-type]
        self.weights[f"{run}/{reply.version.version}"] = weights
        return reply

    def arrived(self, daemon: Daemon, run: str, version: str) -> VersionInfo:
        """A version once `daemon` holds it, bit for bit."""
        before = [info.version for info in self.a.client.versions(run) if info.version != version]
        info = daemon.client.latest(run, after=before[-1] if before else "", wait=WAIT)
        assert info is not None, daemon.log
        assert info.version == version
        assert info.root == self.a.client.version(run, version).root
        directory = self.home / f"export-{daemon.name}-{run}-{version}"
        daemon.client.export(run, ExportRequest(version=version, directory=str(directory)))
        assert read_checkpoint(directory).equals(self.weights[f"{run}/{version}"])
        return info


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    regions = Regions(tmp_path)
    yield regions
    for daemon in (regions.a, regions.b, regions.c):
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def test_the_other_region_follows_a_resume_and_a_fork_by_small_deltas(regions: Regions) -> None:
    regions.a.start()
    regions.b.start()
    weights = ArrayWeights.random(MODEL)
    anchor = regions.publish("r", 0, weights).version
    second = weights.changed(0.01, seed=1)
    regions.publish("r", 1, second)
    for number in (2, 3):
        regions.publish("r", number, second.changed(0.2, seed=number))
    regions.arrived(regions.b, "r", "v000003")

    # The trainer resumes from version 1, and its older self lives on for a while.
    resumed = second.changed(0.01, seed=7)
    reply = regions.publish("r", 2, resumed, resume_from="v000001", epoch=1)
    assert (reply.version.version, reply.version.parent, reply.already) == ("v000002@e2", "v000001", False)
    arrived = regions.arrived(regions.b, "r", "v000002@e2")
    assert arrived.kind == "delta"
    assert arrived.pulled_bytes < anchor.delta_bytes / 6
    assert arrived.pulled_bytes < regions.a.client.version("r", "v000003").delta_bytes / 2
    with pytest.raises(ConflictError, match="another trainer has opened the run since; stop this one"):
        regions.publish("r", 4, second.changed(0.2, seed=4), epoch=1)
    regions.publish("r", 3, resumed.changed(0.01, seed=8), epoch=2)
    regions.arrived(regions.b, "r", "v000003@e2")
    again = regions.publish("r", 2, resumed, resume_from="v000001", epoch=1)
    assert (again.already, again.version.version) == (True, "v000002@e2")

    # Another run begins with a version that this one left behind.
    forked = second.changed(0.01, seed=9)
    base = RunVersion("r", "v000001")
    fork = regions.publish("fork", 0, forked, fork_from=base)
    assert (fork.version.parent, fork.version.kind) == ("r/v000001", "delta")
    assert regions.arrived(regions.b, "fork", "v000000").pulled_bytes < anchor.delta_bytes / 6
    regions.publish("fork", 1, forked.changed(0.01, seed=10))
    regions.arrived(regions.b, "fork", "v000001")
    assert regions.b.client.verify("fork", "v000001").match

    # Who follows the fork alone is told what it lacks, until an anchor of the fork has been cut for it.
    regions.c.start()
    with pytest.raises(NotFoundError, match=r"fork/v000000: expected r/v000001, from which it forks.*pull run r too"):
        regions.c.client.pull("fork", 1.0)
    arrived = regions.arrived(regions.c, "fork", "v000001")
    assert arrived.kind == "anchor"


def test_what_cannot_be_is_refused_by_name(regions: Regions) -> None:
    regions.a.start()
    weights = ArrayWeights.random(MODEL)
    regions.publish("r", 0, weights)
    for how, error, words in (
        ({"resume_from": "v000007"}, NotFoundError, "r/v000007"),
        ({"resume_from": "seven"}, UsageError, "seven"),
        ({"resume_from": "v000000", "new_epoch": True}, UsageError, "one of new_epoch, resume_from and fork_from"),
        ({"fork_from": RunVersion("r", "v000000")}, UsageError, "a version of another run"),
        ({"fork_from": RunVersion("nobody", "v000000")}, NotFoundError, "run nobody"),
        ({"fork_from": RunVersion("../r", "v000000")}, UsageError, "run id"),
        ({"epoch": -1}, UsageError, "epoch -1"),
        ({"epoch": 2}, ConflictError, "epoch 2"),
    ):
        with pytest.raises(error, match=words):
            regions.publish("r", 1, weights, **how)
    assert [info.version for info in regions.a.client.versions("r")] == ["v000000"]
