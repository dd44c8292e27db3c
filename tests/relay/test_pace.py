"""A cap over real sockets: bodies wait their turn, what is asked and told beside them does not (P26)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deltad.limits import DEFAULT_LIMITS
from deltad.protocol.pacing import Cap
from deltad.relay.bucket_client import BucketClient
from deltad.relay.pacer import Pacer
from deltad.store.bucket.obstore import ObstoreBucket
from deltad.store.bucket.twin import Twin
from deltad.store.store import Store
from deltad.types import RunId
from tests.kit.regions import RUN, Downstream, Upstream
from tests.kit.versions import Lineage

MIB = 1 << 20


class Gate(Pacer):
    """A pacer that lets nothing pass until it is told to, and counts who waits."""

    def __init__(self) -> None:
        super().__init__(())
        self.open = asyncio.Event()
        self.waiting = asyncio.Semaphore(0)
        self.taken = 0

    async def take(self, run: RunId, peer: str, count: int) -> None:
        self.taken += count
        self.waiting.release()
        await self.open.wait()


async def test_while_every_body_waits_control_messages_and_small_answers_pass(tmp_path: Path) -> None:
    lineage = Lineage(tensors=8, elements=8192)
    first, second = lineage.publish(), lineage.publish()
    gate = Gate()
    async with (
        Upstream(tmp_path / "a") as upstream,
        Downstream(tmp_path / "b", upstream.url, pacer=gate) as downstream,
    ):
        upstream.publish(first)
        await gate.waiting.acquire()
        held = gate.taken
        # Twenty rounds of questions, a report and news of a newer version, while not one body goes on.
        for _ in range(20):
            target = await downstream.puller._add(RUN).look()
            assert target == first.version
        upstream.publish(second)
        reports = len(upstream.reports)
        assert await upstream.announcements.wait_until(lambda: len(upstream.reports) > reports or None, 30)
        knows = lambda: downstream.puller._add(RUN).pull.knows(second.version) or None  # noqa: E731
        assert await downstream.announcements.wait_until(knows, 30) is not None or knows()
        assert gate.taken <= held + 2 * 256 * 1024, "no body was read on: each connection holds one piece"
        assert downstream.store.run(RUN).latest() is None
        gate.open.set()
        await downstream.reaches(second.version)


async def test_waiting_for_a_turn_is_not_taken_for_a_peer_that_stalls(tmp_path: Path) -> None:
    first = Lineage(tensors=4, elements=64 << 10, limits=DEFAULT_LIMITS).publish()
    gate = Gate()
    async with (
        Upstream(tmp_path / "a") as upstream,
        Downstream(tmp_path / "b", upstream.url, connections=1, pacer=gate) as downstream,
    ):
        upstream.publish(first)
        await gate.waiting.acquire()
        polls = len(upstream.reports)
        # Two reports are sent while the body waits, one a second: twice the time that a peer may stall.
        assert await upstream.announcements.wait_until(lambda: len(upstream.reports) > polls + 1 or None, 30)
        gate.open.set()
        await downstream.reaches(first.version)
        assert downstream.committed[0][1].bytes == first.bytes, "nothing was cut off and fetched again"


async def test_a_capped_pull_takes_turns_and_arrives_whole(tmp_path: Path) -> None:
    first = Lineage(tensors=4, elements=256 << 10, limits=DEFAULT_LIMITS).publish()
    pacer = Pacer([Cap(4 * MIB, peer="elsewhere"), Cap(8 * MIB, run=RUN)])
    loop = asyncio.get_running_loop()
    async with (
        Upstream(tmp_path / "a") as upstream,
        Downstream(tmp_path / "b", upstream.url, connections=4, pacer=pacer) as downstream,
    ):
        began = loop.time()
        upstream.publish(first)
        await downstream.reaches(first.version)
        # No more came than the cap allows for the time that passed: a fact about bytes, on however slow a machine.
        most = 8 * MIB * (loop.time() - began + 0.1) + 4 * 256 * 1024
        assert first.bytes <= most
        for digest, data in first.objects.items():
            assert downstream.store.read(digest) == data


async def test_a_bucket_is_read_and_filled_within_the_caps_too(tmp_path: Path) -> None:
    first = Lineage(tensors=2, elements=8192).publish()
    bucket = ObstoreBucket("memory:///")
    store = Store.open(tmp_path / "a")
    first.commit_into(store)
    up, down = Gate(), Gate()
    twin = Twin(store, bucket, daemon="a", boot="1", pace=lambda run, size: up.take(run, bucket.url, size))
    putting = asyncio.create_task(twin.advance(RUN))
    await up.waiting.acquire()
    assert [key async for key in bucket.keys("objects/")] == []
    up.open.set()
    advanced = await putting
    assert advanced is not None
    assert up.taken == advanced.bytes == first.bytes
    async with Downstream(
        tmp_path / "b",
        bucket.url,
        source=lambda count: BucketClient(bucket, count=count, poll=0.02),
        pacer=down,
    ) as downstream:
        await down.waiting.acquire()
        assert downstream.store.run(RUN).latest() is None
        down.open.set()
        await downstream.reaches(first.version)
        assert down.taken == first.bytes - len(first.data), "records are told, not paced"
    store.close()
