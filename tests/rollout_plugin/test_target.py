"""A real replica at a real daemon is held, brought back and let go again, and proves each time what it serves (P31)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import Act, PublishRequest, ReplicaReport, ReplicaState, TargetRequest
from tests.kit.daemons import Daemon
from tests.rollout_plugin.conftest import StartReplica
from tests.rollout_plugin.region import RUN, Held, Region, write_export


class Origin:
    """A daemon that publishes the versions of a region's history. The region itself serves nobody."""

    def __init__(self, daemon: Daemon, region: Region, home: Path) -> None:
        self.daemon = daemon
        self.client = daemon.client
        self._region = region
        self._home = home

    def publish(self) -> Held:
        """The next version: the tiny model first, and then one with some weights changed."""
        published = len(self.client.versions(RUN))
        held = self._region.history[0] if not published else self._region.publish_changed(seed=published)
        directory = self._home / f"step_{published}"
        write_export(held, directory)
        info = self.client.publish(RUN, PublishRequest(str(directory), number=published)).version
        assert info.root == held.info.root
        return held

    def move(self, act: Act, version: str = "") -> None:
        assert self.client.move_target(RUN, TargetRequest(act, version, why="because")).changed

    def await_at_target(self, held: Held) -> ReplicaReport:
        """The one replica's report, once it counts as verified at the target, which is this version."""
        view = self.client.fleet(RUN, verified=1, wait=60.0)
        assert (view.version, view.verified, view.replicas) == (held.info.version, 1, 1), self.daemon.log[-2000:]
        [report] = view.regions[0].report.runs[RUN].replicas
        assert (report.version, report.root) == (held.info.version, held.info.root)
        return report


@pytest.fixture
def origin(tmp_path: Path, region: Region) -> Iterator[Origin]:
    sections = f'[[run]]\nid = "{RUN}"\n[backend]\nkind = "numpy"\n'
    daemon = Daemon(tmp_path / "origin", "origin", sections).start()
    yield Origin(daemon, region, tmp_path)
    daemon.kill()


def test_a_rollback_of_three_versions_holds_over_a_publish_until_the_release(
    origin: Origin, start_replica: StartReplica
) -> None:
    first, *others = [origin.publish() for _ in range(5)]
    replica = start_replica(at=origin)
    newest = others[-1]
    origin.await_at_target(newest)
    assert replica.root() == newest.info.root

    back = others[0]
    origin.move(Act.ROLLBACK, back.info.version)
    assert origin.await_at_target(back).staleness == 3
    assert replica.root() == back.info.root

    newer = origin.publish()
    joined = start_replica("r2", at=origin)
    view = origin.client.fleet(RUN, verified=2, wait=60.0)
    assert (view.version, view.verified) == (back.info.version, 2)
    assert replica.root() == joined.root() == back.info.root, "neither the publish nor a newcomer moves the target"
    assert [r.staleness for r in view.regions[0].report.runs[RUN].replicas] == [4, 4]
    joined.stop()

    origin.move(Act.HOLD, others[1].info.version)
    origin.await_at_target(others[1])
    assert replica.root() == others[1].info.root

    origin.move(Act.RELEASE)
    report = origin.await_at_target(newer)
    assert replica.root() == newer.info.root
    assert (report.state, report.staleness) == (ReplicaState.VERIFIED, 0)
    assert first.info.version == "v000000"
