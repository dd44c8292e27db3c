"""P21: a peer that is slow, or stalls, never holds up what a better one brings, nor other runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deltad.relay.puller import Puller
from tests.kit.chaos import ChaosProxy, Fault, Mishap
from tests.kit.regions import RUN, Downstream, Upstream
from tests.kit.versions import Lineage


@asynccontextmanager
async def also_pulling(downstream: Downstream, url: str) -> AsyncIterator[Puller]:
    """A second peer that brings the same run."""
    puller = downstream.another(url)
    task = asyncio.create_task(puller.run())
    try:
        yield puller
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("fault", ["stalls", "is slow"])
async def test_versions_come_from_the_better_peer_while_the_other_one_holds_its_own(tmp_path: Path, fault: str) -> None:
    lineage = Lineage(tensors=4, elements=16 << 10)
    versions = [lineage.publish() for _ in range(4)]
    async with (
        Upstream(tmp_path / "bad") as bad,
        Upstream(tmp_path / "good") as good,
        ChaosProxy(bad.port, rate=20_000 if fault == "is slow" else None) as proxy,
        Downstream(tmp_path / "b", proxy.url) as downstream,
    ):
        size = versions[0].bytes
        if fault == "stalls":
            # Often enough that whatever it is asked for, in whatever order, stalls again and again.
            proxy.plan(*(Mishap(2000 * i, Fault.STALL) for i in range(1, 2000)))
        bad.publish(versions[0])
        begun = lambda: downstream.puller.view().bytes_received or None  # noqa: E731
        while begun() is None:
            await downstream.announcements.wait_until(begun, 0.05)
        async with also_pulling(downstream, good.url) as better:
            for published in versions:
                if published is not versions[0]:
                    bad.publish(published)
                good.publish(published)
                await downstream.reaches(published.version)
            brought = better.view().bytes_received
        for published in versions:
            assert downstream.store.run(RUN).record_bytes(published.version) == published.data
        assert brought > size / 2, "the better one brought what the other one had not"


async def test_a_run_whose_objects_stall_holds_up_no_other_run_of_that_peer(tmp_path: Path) -> None:
    ours, theirs = Lineage("ours", tensors=8, elements=8192), Lineage("theirs", seed=1)
    async with (
        Upstream(tmp_path / "a") as upstream,
        ChaosProxy(upstream.port) as proxy,
        Downstream(tmp_path / "b", proxy.url, runs=("ours", "theirs"), connections=4) as downstream,
    ):
        first, other = ours.publish(), theirs.publish()
        proxy.plan(*(Mishap(6000 * i, Fault.STALL) for i in range(1, 4)))
        upstream.publish(first, other)
        await downstream.reaches(other.version, run=other.run)
        await downstream.reaches(first.version, run=first.run)
