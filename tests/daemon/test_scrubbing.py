"""Rot that the scrub finds is healed from an upstream or from what is here, or told of with what follows (P16)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deltad.client.messages import PublishRequest, ScrubView, StatusView
from deltad.config import ScrubConfig, load_config
from deltad.daemon.node import Node
from deltad.daemon.scrubbing import LONGEST_REST, Scrubbing
from deltad.delta.backend import choose
from deltad.errors import IntegrityError, NotFoundError
from deltad.ops.metrics import Metrics
from deltad.protocol.pull_plan import Kind, want
from deltad.relay.client import RelayClient
from deltad.store.edge_chunks import chunks_of
from deltad.store.mirror import Mirror
from deltad.store.rederive import Rederiver
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant, Version
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.regions import RUN, TOKEN, Downstream, Upstream
from tests.kit.rot import flip
from tests.kit.versions import Lineage, Published
from tests.kit.weights import ArrayWeights
from tests.kit.whole import whole_versions

QUICKLY = ScrubConfig(every=1.0, budget=1 << 30)


class Clock:
    """Runs an hour with every look, so that whatever has to wait has waited."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 3600.0
        return self.now


class Region:
    """A daemon's store that pulls from an upstream, and its scrub."""

    def __init__(self, upstream: Upstream, downstream: Downstream, config: ScrubConfig = QUICKLY) -> None:
        self.upstream = upstream
        self.store, self.puller = downstream.store, downstream.puller
        self.metrics = Metrics.create("0")
        self.mirror = Mirror(self.store, self.store.run(RUN), Variant("bf16"), choose())
        self.scrubbing = Scrubbing(
            self.store,
            config,
            self.metrics,
            [self.puller],
            mirrors=lambda: [self.mirror],
            rederiver=lambda run, variant: Rederiver(self.store, self.mirror, choose(), lambda record: None),
            clock=Clock(),
        )

    async def scrub(self) -> ScrubView:
        """One pass, and the turn after it."""
        began = self.scrubbing._scrubber.progress.began
        while self.scrubbing._scrubber.progress.began == began:
            await self.scrubbing.turn()
        await self.scrubbing.turn()
        return self.scrubbing.view()

    def metric(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"deltad_scrub_{name}")


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(RUN)
    for _ in range(3):
        lineage.publish()
    return lineage


@pytest.fixture
async def region(tmp_path: Path, lineage: Lineage) -> AsyncIterator[Region]:
    """It holds three versions, as its upstream does."""
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(*lineage.versions)
        await downstream.reaches(lineage.versions[-1].version)
        yield Region(upstream, downstream)


def some_of_each(version: Published) -> list[Digest]:
    """A chunk, and the objects that describe a version."""
    return [next(d for d in version.objects if d in version.chunks)] + [
        digest for digest in version.objects if digest not in version.chunks
    ]


async def test_whatever_is_damaged_comes_again_from_the_upstream(region: Region, lineage: Lineage) -> None:
    damaged = {digest for version in lineage.versions[:2] for digest in some_of_each(version)}
    for digest in damaged:
        flip(region.store, digest, 7)
    view = await region.scrub()
    assert region.store.objects.quarantine.damaged() == []
    assert whole_versions(region.store, RUN) == [version.version for version in lineage.versions]
    assert (view.damaged, view.consequences, region.scrubbing.problem) == (0, "", "")
    assert len(view.damage) == len(damaged)
    assert all(one.healed for one in view.damage)
    assert any(one.thing == f"chunk of the anchor to {RUN}/v000001 (layer.000)" for one in view.damage)
    assert all(one.detail.startswith("byte 7 was 0x") for one in view.damage)
    assert (region.metric("damaged_total"), region.metric("healed_total")) == (len(damaged), len(damaged))
    assert region.metric("unhealed") == 0
    assert region.metric("covered_timestamp_seconds") == view.covered > 0
    assert region.metric("read_bytes_total") == view.read_bytes >= view.total_bytes > 0


async def test_a_damaged_chunk_is_not_held_for_a_peer_that_asks_for_it(
    region: Region, lineage: Lineage, tmp_path: Path
) -> None:
    digest = next(iter(lineage.versions[0].chunks))
    size = len(lineage.versions[0].objects[digest])
    async with (
        Upstream(tmp_path, store=region.store) as relay,
        RelayClient(relay.url, lambda: TOKEN, count=lambda count: None) as peer,
    ):
        buffer, wanted = bytearray(), want(Kind.CHUNK, digest, size)
        await peer.fetch(wanted, buffer, count=lambda count: None)
        flip(region.store, digest, 7)
        region.store.objects.examine(digest)
        with pytest.raises(NotFoundError):
            await peer.fetch(wanted, bytearray(), count=lambda count: None)
        await region.scrub()
        again = bytearray()
        await peer.fetch(wanted, again, count=lambda count: None)
        assert again == buffer


async def test_what_an_upstream_has_damaged_too_is_not_taken_and_is_tried_again(
    region: Region, lineage: Lineage
) -> None:
    version = lineage.versions[1]
    digest = next(iter(version.chunks))
    for store in (region.store, region.upstream.store):
        flip(store, digest, 7)
    view = await region.scrub()
    assert region.store.objects.quarantine.damaged() == [digest]
    assert region.metric("unhealed") == 1
    assert view.damaged == 1
    assert view.consequences == (
        f"no newcomer can be given {RUN}/v000002 to v000003 (2 versions); those that hold them go on"
    )
    assert region.scrubbing.problem.startswith(view.consequences)
    assert "fetched once an upstream has them" in region.scrubbing.problem
    region.upstream.store.put_chunk(version.objects[digest])
    view = await region.scrub()
    assert (view.damaged, view.consequences, region.scrubbing.problem) == (0, "", "")
    assert region.store.read(digest) == version.objects[digest]


async def test_a_mirror_is_healed_though_what_it_is_built_from_is_damaged_too(region: Region, lineage: Lineage) -> None:
    newest = lineage.versions[-1]
    (shard,) = region.mirror.advance(newest.record).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 2
    shard.write_bytes(data)
    flip(region.store, next(iter(lineage.versions[0].chunks)), 7)
    view = await region.scrub()
    right = int(newest.weights.arrays[-1][-1])
    (told,) = (one for one in view.damage if one.thing.startswith("mirror"))
    assert told.thing == f"mirror of {RUN}/bf16"
    assert told.detail == f"layer.002: element [63, 63] was 0x{right ^ 0x200:04x}, not 0x{right:04x}"
    assert view.damaged == 0
    assert region.metric("healed_total") == region.metric("damaged_total") == 2


async def test_a_mirror_that_cannot_be_made_anew_is_told_of_until_it_can(region: Region, lineage: Lineage) -> None:
    newest = lineage.versions[-1]
    (shard,) = region.mirror.advance(newest.record).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 2
    shard.write_bytes(data)
    digest = next(iter(lineage.versions[0].chunks))
    for store in (region.store, region.upstream.store):
        flip(store, digest, 7)
    for _ in range(2):
        view = await region.scrub()
        assert view.damaged == 2
        assert f"the mirror of {RUN}/bf16 is damaged at v000003 (layer.002)" in region.scrubbing.problem
        assert (region.metric("damaged_total"), region.metric("healed_total")) == (2, 0)
    region.upstream.store.put_chunk(lineage.versions[0].objects[digest])
    view = await region.scrub()
    assert (view.damaged, region.scrubbing.problem) == (0, "")
    assert (region.metric("damaged_total"), region.metric("healed_total")) == (2, 2)


async def test_damage_that_a_read_meets_is_healed_without_a_pass(tmp_path: Path, lineage: Lineage) -> None:
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(*lineage.versions)
        await downstream.reaches(lineage.versions[-1].version)
        region = Region(upstream, downstream, ScrubConfig(every=0.0))
        digest = lineage.versions[0].layout.digest
        flip(region.store, digest, 7)
        await region.scrubbing.turn()
        with pytest.raises(IntegrityError, match="deltad status"):
            region.store.read(digest)
        await region.scrubbing.turn()
        assert region.store.read(digest) == lineage.versions[0].layout.encode()
        assert region.scrubbing.view().read_bytes == 0
        assert region.scrubbing.view().activity == "reads nothing, as configured"


async def test_the_scrub_stands_still_while_a_pull_or_a_publish_fills_the_store(
    tmp_path: Path, lineage: Lineage
) -> None:
    store = Store.open(tmp_path / "s")
    lineage.fill(store)
    metrics = Metrics.create("0")
    scrubbing = Scrubbing(store, QUICKLY, metrics, [], mirrors=lambda: [], rederiver=no_rederiver)
    with store.leases.work("a pull"):
        assert await scrubbing.turn() > 0
        assert scrubbing.view().read_bytes == 0
        assert scrubbing.view().activity == "gives way to other work"
    await scrubbing.turn()
    assert scrubbing.view().read_bytes > 0
    store.close()


def no_rederiver(run: RunId, variant: str) -> Rederiver:
    raise AssertionError("nothing is damaged")


CONFIG = """
[daemon]
name = "a"

[[run]]
id = "r"

[scrub]
every = "1s"
budget = "1GiB"
"""


class OriginHost:
    """A node where a run is published, with nobody upstream."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "deltad.toml").write_text(CONFIG)
        self.store = Store.open(home / "store")
        self.node = Node(load_config(home / "deltad.toml"), self.store)
        self.node.scrubbing._clock = Clock()
        self.run = self.store.run(RunId("r"))
        self.weights = ArrayWeights.random(MODEL)

    async def publish(self, number: int) -> None:
        if number:
            self.weights = self.weights.changed(0.02, seed=number)
        directory = write_checkpoint(self.home / f"step_{number}", self.weights)
        await self.node.publish(RunId("r"), PublishRequest(str(directory)))

    def damage_chunk(self, number: int) -> Digest:
        """Flip a bit in the first chunk of a version, and let it be found."""
        record = self.run.record(Version(1, number))
        mirror = Mirror(self.store, self.run, Variant("bf16"), choose())
        manifest = self.run.read_manifest(record.variants[0].edges[0])
        chunk = next(chunks_of(self.store, manifest, mirror.layout(record)))
        flip(self.store, Digest(chunk.digest), 20)
        self.store.objects.examine(Digest(chunk.digest))
        return Digest(chunk.digest)


async def test_an_origin_makes_the_newest_delta_again_from_its_checkpoint(tmp_path: Path) -> None:
    host = OriginHost(tmp_path)
    for number in range(3):
        await host.publish(number)
    digest = host.damage_chunk(2)
    await host.node.scrubbing.turn()
    assert host.store.has(digest)
    assert host.node.reasons() == []
    assert host.node.status().scrub.damage[0].healed


async def test_an_origin_that_cannot_heal_says_what_follows_until_the_next_version_is_stored_whole(
    tmp_path: Path,
) -> None:
    host = OriginHost(tmp_path)
    for number in range(3):
        await host.publish(number)
    host.damage_chunk(1)
    await host.node.scrubbing.turn()
    (reason,) = host.node.reasons()
    assert reason.startswith("scrub: no newcomer can be given r/v000001 to v000002 (2 versions); those that hold")
    assert "the next version is stored whole" in reason
    await host.publish(3)
    host.node.scrubbing._clock.now += LONGEST_REST
    await host.node.scrubbing.turn()
    assert host.node.reasons() == []
    scrub = host.node.status().scrub
    assert scrub.damaged == 1
    assert scrub.consequences.startswith("no newcomer can be given r/v000001 to v000002")


def until(daemon: Daemon, true: Callable[[StatusView], bool]) -> StatusView:
    """The daemon's status once it is as it should be."""
    for _ in range(600):
        status = daemon.client.status()
        if true(status):
            return status
        time.sleep(0.05)
    raise AssertionError(f"{status.scrub}\n{daemon.log}")


def flip_byte(path: Path, at: int) -> None:
    """Flip a bit behind a daemon's back."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_real_daemon_heals_a_flipped_bit_from_the_daemon_that_it_pulls_from(tmp_path: Path) -> None:
    port = free_port()
    a = Daemon(tmp_path / "a", "a", f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n[[run]]\nid = "r"\n')
    upstream = f'[[upstream]]\nurl = "http://127.0.0.1:{port}"\ntoken_file = "token"\n'
    b = Daemon(tmp_path / "b", "b", f'{upstream}[scrub]\nevery = "1s"\nbudget = "1GiB"\n')
    weights = ArrayWeights.random(MODEL)
    try:
        heals_twice(a, b, tmp_path, weights)
    finally:
        for daemon in (a, b):
            if daemon.process is not None:
                daemon.kill()


def heals_twice(a: Daemon, b: Daemon, tmp_path: Path, weights: ArrayWeights) -> None:
    a.start()
    a.client.publish("r", PublishRequest(str(write_checkpoint(tmp_path / "step_0", weights))))
    b.start()
    assert b.client.latest("r", wait=60.0) is not None
    covered = until(b, lambda status: status.scrub.covered > 0).scrub.covered
    (pack,) = (tmp_path / "b" / "store" / "packs").glob("*.pack")
    flip_byte(pack, 1000)
    (healed,) = until(b, lambda status: any(one.healed for one in status.scrub.damage)).scrub.damage
    assert healed.thing == "chunk of the anchor to r/v000000 (embed.weight to scale)"
    assert healed.place == f"{pack} from byte 64"
    assert healed.detail.startswith("byte 936 was 0x")
    assert b.stop() == 0
    # At the end of the pack the next start takes it for a torn write, and finds the damaged chunk before it.
    flip_byte(pack, pack.stat().st_size // 2 + 1000)
    b.start()
    status = until(b, lambda status: b.log.count("object_healed") == 2 and not status.scrub.damaged)
    assert status.scrub.covered >= covered, "what a life has read, the next one knows"
    assert b.client.verify("r", "v000000").match
    assert b.stop() == 0
    assert a.stop() == 0
