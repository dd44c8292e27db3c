"""A daemon lets go of what its configuration does not keep, and of nothing that its fleet uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.client.messages import CollectRequest, PublishRequest, RegionReport, ReplicaReport, ReplicaState, RunReport
from deltad.config import load_config
from deltad.daemon.node import Node
from deltad.errors import NotFoundError
from deltad.store.garbage import GRACE_SECONDS
from deltad.store.leases import LEASE_SECONDS
from deltad.store.store import Store
from deltad.types import Version
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.trainer import RUN
from tests.kit.weights import ArrayWeights

CONFIG = f"""
[daemon]
name = "a"

[[run]]
id = "{RUN}"
keep_versions = 1
"""


class Daemon:
    """A node with its store, on a clock that stands still."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.now = 0.0
        (home / "deltad.toml").write_text(CONFIG)
        self.store = Store.open(home / "store", clock=lambda: self.now)
        self.node = Node(load_config(home / "deltad.toml"), self.store)
        self.weights = ArrayWeights.random(MODEL)
        self.published = 0

    async def publish(self, *, anchor: bool = False) -> None:
        """A version; an anchor, where nearly all weights are new."""
        number = self.published = self.published + 1
        self.weights = ArrayWeights.random(MODEL, number) if anchor else self.weights.changed(0.01, seed=number)
        directory = write_checkpoint(self.home / f"step_{number}", self.weights)
        await self.node.publish(RUN, PublishRequest(str(directory)))

    def wait(self) -> None:
        """Until leases have ended, and objects of no version may go."""
        self.now += GRACE_SECONDS + LEASE_SECONDS

    async def kept(self) -> list[int]:
        await self.node.collect(CollectRequest())
        return [record.version.number for record in self.store.run(RUN).records()]


@pytest.fixture
async def daemon(tmp_path: Path) -> Daemon:
    """Versions 1 to 5, of which 1 and 4 are anchors; nobody uses any of them."""
    daemon = Daemon(tmp_path)
    for number in range(1, 6):
        await daemon.publish(anchor=number in (1, 4))
    daemon.wait()
    return daemon


async def test_what_the_configuration_does_not_keep_goes_and_the_next_publish_works(daemon: Daemon) -> None:
    before = daemon.store.used_bytes()
    assert [info.version for info in daemon.node.versions(RUN)] == [f"v00000{n}" for n in range(1, 6)]
    reply = await daemon.node.collect(CollectRequest(dry_run=True))
    assert [found.kept for found in reply.versions] == [False, False, False, True, True]
    assert daemon.store.used_bytes() == before
    assert await daemon.kept() == [4, 5]
    assert [info.version for info in daemon.node.versions(RUN)] == ["v000004", "v000005"]
    assert len(list((daemon.store.run(RUN).directory / "notes").iterdir())) == 2
    assert daemon.store.used_bytes() < before
    assert reply.dropped_objects > 5
    await daemon.publish()
    daemon.wait()
    assert await daemon.kept() == [4, 5, 6]


async def test_a_region_keeps_what_it_and_its_replicas_hold_until_it_falls_silent(daemon: Daemon) -> None:
    root = daemon.node.versions(RUN)[1].root
    replica = ReplicaReport("r0", RUN, "bf16", ReplicaState.VERIFIED, version="v000002", root=root)
    daemon.node.on_report(RegionReport("b", "boot", 1, {RUN: RunReport("v000003", replicas=(replica,))}))
    assert await daemon.kept() == [1, 2, 3, 4, 5]
    daemon.node.on_report(RegionReport("b", "boot", 2, {RUN: RunReport("v000005")}))
    assert await daemon.kept() == [1, 2, 3, 4, 5], "the replica's last lease has not ended"
    daemon.wait()
    assert await daemon.kept() == [4, 5]


async def test_a_damaged_description_is_told_of_and_versions_go_on(daemon: Daemon) -> None:
    await daemon.node.chores.do()
    assert daemon.node.unwell == {}
    edge = daemon.store.run(RUN).record(Version(1, 5)).variants[0].edges[0]
    daemon.store.objects.extent(edge.manifest).path.write_bytes(b"rot")
    with pytest.raises(Exception, match=edge.manifest.hex()[2:]):
        await daemon.node.collect(CollectRequest())


async def test_a_pinned_version_stays_and_is_told_of_until_it_is_unpinned(daemon: Daemon) -> None:
    reply = await daemon.node.pin(RUN, Version(1, 2), "ana (uid 1000)", "a baseline")
    assert reply.changed
    assert reply.pin is not None
    assert reply.pin.at > 1_700_000_000
    assert not (await daemon.node.pin(RUN, Version(1, 2), "ana (uid 1000)", "a baseline")).changed
    assert [info.version for info in daemon.node.versions(RUN) if info.pin == reply.pin] == ["v000002"]
    assert await daemon.kept() == [1, 2, 4, 5]
    assert (await daemon.node.unpin(RUN, Version(1, 2))).changed
    assert not (await daemon.node.unpin(RUN, Version(1, 2))).changed
    assert all(info.pin is None for info in daemon.node.versions(RUN))
    assert await daemon.kept() == [4, 5]
    with pytest.raises(NotFoundError, match="v000002: not held here; what lay there was let go"):
        await daemon.node.pin(RUN, Version(1, 2), "ana (uid 1000)", "")


async def test_what_the_store_takes_is_told_from_the_start_and_soon_after_it_has_changed(daemon: Daemon) -> None:
    held = daemon.store.used_bytes()
    again = Node(daemon.node.config, daemon.store)
    again.describe_all()
    assert again.status().store_bytes == held > 0
    daemon.node = again
    await daemon.publish()
    assert again.status().store_bytes > held
    while again.status().store_bytes != daemon.store.used_bytes():
        await again.chores.do()
