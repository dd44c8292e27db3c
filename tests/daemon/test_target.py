"""Holding, releasing and rolling back at a daemon: whom it concerns, what replicas are told, what is kept (P31)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import (
    Act,
    CollectRequest,
    ExportRequest,
    NextReply,
    PublishRequest,
    RegisterRequest,
    ReplicaState,
    StateRequest,
    TargetReply,
    TargetRequest,
    TargetsReply,
)
from deltad.config import load_config
from deltad.daemon.node import Node
from deltad.errors import NotFoundError, UsageError
from deltad.protocol.target import EVERYONE, Statement
from deltad.store.garbage import GRACE_SECONDS
from deltad.store.leases import LEASE_SECONDS
from deltad.store.store import Store
from deltad.types import RunId, Variant, Version, parse_version
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

RUN = RunId("r")
BF16 = Variant("bf16")
UPSTREAM = '[[upstream]]\nurl = "http://127.0.0.1:1"\ntoken_file = "token"\n'


class Host:
    """A node with its store, on a clock that stands still, and versions of its own."""

    def __init__(self, home: Path, sections: str) -> None:
        self.home = home
        self.now = 0.0
        (home / "token").write_text("a-token-that-only-the-tests-know")
        (home / "token").chmod(0o600)
        (home / "deltad.toml").write_text(f'[daemon]\nname = "a"\n[[run]]\nid = "{RUN}"\nkeep_versions = 1\n{sections}')
        self.store = Store.open(home / "store", clock=lambda: self.now)
        self.node = Node(load_config(home / "deltad.toml"), self.store)
        self.weights = {0: ArrayWeights.random(MODEL)}

    async def publish(self, *numbers: int, new_epoch: bool = False, anchor: bool = False) -> None:
        for number in numbers:
            before = self.weights[max(self.weights)]
            self.weights[number] = ArrayWeights.random(MODEL, number) if anchor else before.changed(0.01, seed=number)
            directory = write_checkpoint(self.home / f"step_{number}", self.weights[number])
            await self.node.publish(RUN, PublishRequest(str(directory), number=number, new_epoch=new_epoch))

    async def move(self, act: Act, version: str = "", fleet: str = "") -> TargetReply:
        return await self.node.move_target(RUN, TargetRequest(act, version, fleet, "because"), "root")

    def next(self, served: str) -> NextReply | None:
        return self.node.next_for(RUN, BF16, parse_version(served) if served else None)

    def hear(self, sequence: int, version: Version | None, fleet: str = EVERYONE) -> None:
        """A statement came from above."""
        said = Statement(sequence, version, fleet, "ana", "from above", 0.0, "up")
        self.store.run(RUN).move_target(lambda now: now.hear([said]))


@pytest.fixture
async def host(tmp_path: Path) -> Host:
    """Where the run is published: versions 1 to 5."""
    host = Host(tmp_path, "")
    await host.publish(1, 2, 3, 4, 5)
    return host


@pytest.fixture
async def region(tmp_path: Path) -> Host:
    """A daemon that pulls the run, and holds versions 1 to 5 of it."""
    host = Host(tmp_path, UPSTREAM)
    await host.publish(1, 2, 3, 4, 5)
    return host


def version_of(reply: TargetReply | TargetsReply) -> str:
    return reply.target.version if reply.target else ""


# What the words mean where the run is published.


async def test_hold_keeps_the_fleet_where_it_is_and_a_publish_does_not_move_it(host: Host) -> None:
    reply = await host.move(Act.HOLD)
    assert (version_of(reply), reply.latest, reply.changed) == ("v000005", "v000005", True)
    await host.publish(6)
    assert host.next("v000005") is None
    again = await host.move(Act.HOLD)
    assert (version_of(again), again.latest, again.changed) == ("v000005", "v000006", False)
    assert host.next("") == NextReply("v000005", reload=True), "a replica that joins starts at the target"
    reply = await host.move(Act.RELEASE)
    assert (reply.target, reply.changed) == (None, True)
    assert host.next("v000005").target == "v000006"
    assert not (await host.move(Act.RELEASE)).changed


async def test_a_fleet_is_led_forwards_by_deltas_and_backwards_by_an_inverse_made_when_it_asks(host: Host) -> None:
    await host.move(Act.HOLD, "v000003")
    forwards = host.next("v000001")
    assert [step.version for step in forwards.steps] == ["v000002", "v000003"]
    assert not forwards.reload
    assert host.next("v000005") is None, "a way back is being made"
    backwards = await host.node.announcements.wait_until(lambda: host.next("v000005"), 60.0)
    assert [(step.base, step.version) for step in backwards.steps] == [("v000005", "v000003")]
    assert host.next("v000003") is None


async def test_a_rollback_goes_back_once_however_often_it_is_said(host: Host) -> None:
    for changed in (True, False):
        reply = await host.move(Act.ROLLBACK)
        assert (version_of(reply), reply.changed) == ("v000004", changed)
    for changed in (True, False):
        reply = await host.move(Act.ROLLBACK, "v000002")
        assert (version_of(reply), reply.changed) == ("v000002", changed)


async def test_a_rollback_that_would_lead_forwards_is_refused(host: Host) -> None:
    with pytest.raises(UsageError, match="rollback to r/v000005: expected a version before v000005"):
        await host.move(Act.ROLLBACK, "v000005")
    await host.move(Act.HOLD, "v000002")
    with pytest.raises(UsageError, match=r"a version before v000002.*found a newer one"):
        await host.move(Act.ROLLBACK)
    assert host.next("v000002") is None


async def test_a_rollback_goes_to_what_the_newest_was_made_from_over_the_border_of_an_epoch(host: Host) -> None:
    await host.publish(7, new_epoch=True)
    assert host.store.run(RUN).latest().version == Version(2, 7)
    assert version_of(await host.move(Act.ROLLBACK)) == "v000005"


async def test_a_run_without_a_version_before_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    host = Host(tmp_path, "")
    with pytest.raises(NotFoundError, match="none yet"):
        await host.move(Act.HOLD)
    assert not (await host.move(Act.RELEASE)).changed
    await host.publish(1)
    with pytest.raises(NotFoundError, match="it is the first one of its run"):
        await host.move(Act.ROLLBACK)


async def test_a_version_that_is_not_held_here_is_a_named_error_and_changes_nothing(host: Host) -> None:
    for act in (Act.HOLD, Act.ROLLBACK):
        with pytest.raises(NotFoundError, match="r/v000000"):
            await host.move(act, "v000000")
    assert host.node.targets(RUN) == TargetsReply(RUN)


async def test_the_fleet_of_another_daemon_is_held_without_moving_this_one(host: Host) -> None:
    reply = await host.move(Act.HOLD, "v000002", fleet="b")
    assert (version_of(reply), reply.heard) == ("v000002", False), "nobody of that name has been heard of"
    assert host.next("v000005") is None
    assert [said.fleet for said in host.node.targets(RUN).standing] == ["b"]
    assert (await host.move(Act.HOLD, "v000002", fleet="a")).heard
    assert host.next("").target == "v000002"


async def test_what_stands_is_told_with_who_where_when_and_why(host: Host) -> None:
    await host.move(Act.HOLD, "v000003")
    await host.move(Act.RELEASE)
    targets = host.node.targets(RUN)
    assert targets.target is None
    assert [(said.version, said.by, said.why, said.daemon) for said in targets.moves] == [
        ("v000003", "root", "because", "a"),
        ("", "root", "because", "a"),
    ]
    assert all(said.when > 0 for said in targets.moves)


# At a daemon that pulls the run.


async def test_a_region_speaks_for_its_own_fleet_and_for_no_other(region: Host) -> None:
    await region.move(Act.HOLD, "v000003")
    assert region.next("").target == "v000003"
    assert [said.fleet for said in region.node.targets(RUN).standing] == ["a"]
    assert region.store.run(RUN).targets().after(0) == ()
    with pytest.raises(UsageError, match="fleet b: expected a, this daemon's own, since it pulls run r"):
        await region.move(Act.HOLD, "v000003", fleet="b")


async def test_at_a_region_the_last_to_speak_wins(region: Host) -> None:
    region.hear(1, Version(1, 2))
    assert region.next("").target == "v000002"
    await region.move(Act.HOLD, "v000004")
    assert region.next("").target == "v000004"
    region.hear(2, Version(1, 3))
    assert region.next("").target == "v000003"
    assert len(region.node.targets(RUN).standing) == 1, "what was replaced does not stand"


async def test_a_release_at_a_region_withdraws_what_was_said_there_and_no_more(region: Host) -> None:
    region.hear(1, Version(1, 2))
    await region.move(Act.HOLD, "v000004")
    reply = await region.move(Act.RELEASE)
    assert (version_of(reply), reply.target.daemon, reply.changed) == ("v000002", "up", True)
    reply = await region.move(Act.RELEASE)
    assert (version_of(reply), reply.changed) == ("v000002", False)


async def test_a_target_that_is_not_held_here_leaves_every_replica_where_it_is_and_says_so(region: Host) -> None:
    region.hear(1, Version(1, 9))
    assert region.next("v000004") is None
    assert region.next("") is None
    target = region.node.status().region.runs[RUN].target
    assert (target.version, target.here) == ("v000009", False)
    held = await region.move(Act.HOLD)
    assert (held.target.version, held.target.why) == ("v000009", "because"), "here is where it is, for another reason"
    assert not (await region.move(Act.HOLD)).changed
    with pytest.raises(NotFoundError, match="r/v000009"):
        await region.node.export(RUN, ExportRequest(directory=str(region.home / "out")))
    await region.publish(9)
    assert region.next("v000004").target == "v000009"


async def test_a_watch_makes_a_daemon_speak_for_all_fleets_though_it_pulls_other_runs(tmp_path: Path) -> None:
    host = Host(tmp_path, f'{UPSTREAM}[[watch]]\nrun = "r"\ndirectory = "{tmp_path}"\n')
    await host.publish(1, 2)
    await host.move(Act.HOLD, "v000001")
    assert host.store.run(RUN).targets().after(0)


# What else depends on the target.


async def test_an_export_without_a_version_is_of_the_target(host: Host) -> None:
    await host.move(Act.HOLD, "v000002")
    reply = await host.node.export(RUN, ExportRequest(directory=str(host.home / "out")))
    assert reply.version == "v000002"
    assert read_checkpoint(host.home / "out").equals(host.weights[2])


async def test_a_held_version_is_kept_and_can_be_loaded_after_a_collection(host: Host) -> None:
    await host.move(Act.HOLD, "v000002")
    await host.publish(6, anchor=True)
    host.now += GRACE_SECONDS + LEASE_SECONDS
    reply = await host.node.collect(CollectRequest())
    whys = {found.thing: found.why for found in reply.versions if found.kept}
    assert whys["r/v000002"] == "all fleets are held at it by root at a: because"
    assert whys["r/v000001"] == "on the path to v000002"
    assert host.next("v000005") == NextReply("v000002", reload=True)
    reply = await host.node.export(RUN, ExportRequest(directory=str(host.home / "out")))
    assert read_checkpoint(host.home / "out").equals(host.weights[2])


async def test_metrics_and_views_count_those_at_the_target(host: Host) -> None:
    roots = {info.version: info.root for info in host.node.versions(RUN)}
    now = time.monotonic()
    for name, version in (("r1", "v000003"), ("r2", "v000005")):
        host.node.fleet.register(RegisterRequest(name, RUN, BF16), now)
        state = StateRequest(ReplicaState.VERIFIED, version, roots[version])
        host.node.fleet.report_state(name, state, host.node.versions(RUN), now)
    await host.move(Act.ROLLBACK, "v000003")
    await host.node.chores.do()
    metrics = host.node.metrics.registry
    assert metrics.get_sample_value("deltad_target_held", {"run": RUN}) == 1
    assert metrics.get_sample_value("deltad_replicas_at_target", {"run": RUN}) == 1
    assert metrics.get_sample_value("deltad_latest_version_number", {"run": RUN}) == 5


# Real daemons.


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon, Daemon]]:
    """Three daemons, each pulling from the one before."""
    daemons: list[Daemon] = []
    above = 0
    for name in ("a", "b", "c"):
        port = free_port() + 10 * len(daemons)
        sections = f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n[backend]\nkind = "numpy"\n'
        sections += (
            f'[[upstream]]\nurl = "http://127.0.0.1:{above}"\ntoken_file = "token"\n'
            if above
            else f'[[run]]\nid = "{RUN}"\n'
        )
        daemons.append(Daemon(tmp_path / name, name, sections))
        above = port
    yield daemons[0], daemons[1], daemons[2]
    for daemon in daemons:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def test_a_target_reaches_every_daemon_of_a_chain_whatever_is_killed_on_the_way(
    chain: tuple[Daemon, Daemon, Daemon], tmp_path: Path
) -> None:
    a, b, c = (daemon.start() for daemon in chain)
    weights = ArrayWeights.random(MODEL)
    for number in range(4):
        weights = weights.changed(0.02, seed=number)
        directory = write_checkpoint(tmp_path / f"step_{number}", weights)
        a.client.publish(RUN, PublishRequest(str(directory), number=number))
    assert c.client.latest(RUN, after="v000002", wait=60) is not None

    def obeyed(daemon: Daemon, version: str) -> None:
        """Once a replica of that daemon, wherever it is led before, is led to this version."""
        daemon.client.register_replica(RegisterRequest("r1", RUN, BF16, boot="x"))
        at = ""
        while at != version:
            at = daemon.client.next("r1", after=at, wait=30.0).target or at

    a.client.move_target(RUN, TargetRequest(Act.HOLD, "v000001", why="reward fell"))
    for daemon in (a, b, c):
        obeyed(daemon, "v000001")
        target = daemon.client.status().region.runs[RUN].target
        assert (target.version, target.why, target.daemon) == ("v000001", "reward fell", "a")

    b.kill()
    a.client.move_target(RUN, TargetRequest(Act.HOLD, "v000002"))
    a.client.move_target(RUN, TargetRequest(Act.HOLD, "v000000", fleet="c"))
    c.kill()
    c.start()
    assert c.client.targets(RUN).target.version == "v000001", "what was kept outlives a kill"
    b.start()
    obeyed(b, "v000002")
    obeyed(c, "v000000")
    assert [target.fleet for target in c.client.targets(RUN).standing] == ["", "c"]
    assert c.client.targets(RUN).moves[0].version == "v000001"

    a.client.move_target(RUN, TargetRequest(Act.RELEASE))
    for daemon in (a, b, c):
        obeyed(daemon, "v000003")
        assert daemon.client.targets(RUN).target is None
    assert [daemon.stop() for daemon in (a, b, c)] == [0, 0, 0]
