"""From store to store over real HTTP: what arrives, what it costs, and what happens when things break (P18-P20)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from deltad.client.messages import RegionReport, RunReport
from deltad.delta.backend import choose
from deltad.delta.coding import CODERS, Coder
from deltad.errors import CoderError, DeniedError, NotFoundError, UnavailableError
from deltad.limits import DEFAULT_LIMITS
from deltad.store.mirror import Mirror
from deltad.types import RunId, Variant
from tests.kit.chaos import ChaosProxy, Fault, Mishap, random_mishaps
from tests.kit.regions import QUICK, READ, RUN, Downstream, Upstream
from tests.kit.versions import Lineage, Published

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def assert_whole(downstream: Downstream, *versions: Published) -> None:
    """The records are there, verbatim, and every object of theirs is there and is what its name says."""
    for published in versions:
        assert downstream.store.run(published.run).record_bytes(published.version) == published.data
        for digest, data in published.objects.items():
            assert downstream.store.read(digest) == data


async def test_a_version_arrives_verbatim_and_every_body_byte_is_counted(tmp_path: Path) -> None:
    first = Lineage().publish()
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(first)
        await downstream.reaches(first.version)
        assert_whole(downstream, first)
        record, stats = downstream.committed[0]
        assert record == first.record
        assert stats.bytes == first.bytes
        assert stats.record == len(first.data)
        assert stats.layout == len(first.layout.encode())
        assert stats.seconds > 0


async def test_the_next_version_costs_only_what_is_not_held(tmp_path: Path) -> None:
    lineage = Lineage()
    first, second = lineage.publish(), lineage.publish()
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(first)
        await downstream.reaches(first.version)
        upstream.publish(second)
        await downstream.reaches(second.version)
        assert_whole(downstream, first, second)
        new = [data for digest, data in second.objects.items() if digest not in first.objects]
        assert downstream.committed[1][1].bytes == len(second.data) + sum(map(len, new))


async def test_a_late_joiner_starts_at_the_newest_anchor(tmp_path: Path) -> None:
    lineage = Lineage()
    versions = [lineage.publish(anchor=i == 3) for i in range(6)]
    async with Upstream(tmp_path / "a") as upstream:
        upstream.publish(*versions)
        async with Downstream(tmp_path / "b", upstream.url) as downstream:
            await downstream.reaches(versions[-1].version)
            held = [record.version.number for record in downstream.store.run(RUN).records()]
            assert held == [4, 5, 6]


async def test_a_daemon_that_was_away_takes_the_deltas_and_no_anchor_again(tmp_path: Path) -> None:
    lineage = Lineage()
    versions = [lineage.publish() for _ in range(3)]
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(*versions)
        await downstream.reaches(versions[-1].version)
        await downstream.stop()
        later = [lineage.publish(anchor=i % 3 == 0) for i in range(7)]
        upstream.publish(*later)
        downstream.start()
        await downstream.reaches(later[-1].version)
        assert [r.version for r in downstream.store.run(RUN).records()] == [v.version for v in (*versions, *later)]
        anchor = max(len(data) for data in later[0].objects.values())
        assert all(stats.chunk < anchor for _, stats in downstream.committed[3:])


@pytest.mark.parametrize("runs", [("*",), (RUN,)])
async def test_a_run_that_does_not_exist_yet_is_picked_up_when_it_does(tmp_path: Path, runs: tuple[str, ...]) -> None:
    first = Lineage().publish()
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url, runs=runs) as downstream:
        assert await downstream.puller.pull_once(RUN, 10) is True
        upstream.publish(first)
        await downstream.reaches(first.version)


async def test_several_runs_are_pulled_side_by_side_and_others_are_left_alone(tmp_path: Path) -> None:
    ours, theirs, other = Lineage("ours").publish(), Lineage("theirs", seed=1).publish(), Lineage("other").publish()
    async with (
        Upstream(tmp_path / "a") as upstream,
        Downstream(tmp_path / "b", upstream.url, runs=("ours", "theirs")) as downstream,
    ):
        upstream.publish(ours, theirs, other)
        await downstream.reaches(ours.version, run=ours.run)
        await downstream.reaches(theirs.version, run=theirs.run)
        assert downstream.store.runs() == ["ours", "theirs"]
        assert not downstream.puller.follows(RunId("other"))
        with pytest.raises(NotFoundError, match="not pulled from"):
            await downstream.puller.pull_once(RunId("other"), 1)


async def test_pull_once_answers_when_all_that_the_upstream_had_is_durable(tmp_path: Path) -> None:
    lineage = Lineage()
    versions = [lineage.publish() for _ in range(3)]
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        for published in versions:
            published.commit_into(upstream.store)  # and nobody is told
        assert await downstream.puller.pull_once(RUN, 30) is True
        assert_whole(downstream, *versions)


async def test_a_run_that_nobody_has_is_not_followed_after_it_was_asked_for_once(tmp_path: Path) -> None:
    lineage = Lineage()
    async with (
        Upstream(tmp_path / "a") as upstream,
        Downstream(tmp_path / "b", upstream.url, runs=("*",)) as downstream,
    ):
        published = lineage.publish()
        upstream.publish(published)
        await downstream.reaches(published.version)
        assert await downstream.puller.pull_once(RunId("nope"), 10) is True
        assert "nope" not in downstream.puller.view().activity
        assert downstream.puller.activity(RunId("nope")) == ""


async def test_pull_once_says_what_is_in_the_way(tmp_path: Path) -> None:
    async with Upstream(tmp_path / "a") as upstream:
        async with Downstream(tmp_path / "b", upstream.url) as downstream:
            await upstream.stop()
            with pytest.raises(UnavailableError, match=f"{upstream.url}: connection refused"):
                await downstream.puller.pull_once(RUN, 0.2)
        with pytest.raises(UnavailableError, match="not begun"):
            await downstream.puller.pull_once(RUN, 0.2)


async def test_a_wrong_token_is_said_once_and_a_corrected_one_is_used(tmp_path: Path) -> None:
    first = Lineage().publish()
    async with Upstream(tmp_path / "a") as upstream:
        upstream.publish(first)
        with capture_logs() as logs:
            async with Downstream(tmp_path / "b", upstream.url, token="wrong") as downstream:
                for _ in range(3):
                    with pytest.raises(DeniedError, match="a token that it accepts"):
                        await downstream.puller.pull_once(RUN, 10)
                view = downstream.puller.view()
                assert not view.up
                assert "token" in view.error
                assert downstream.objects() == set()
                assert [entry["kind"] for entry in logs if entry["event"] == "upstream_trouble"] == ["Denied"]
                downstream.token = upstream.token
                await downstream.reaches(first.version)
                assert downstream.puller.view().error == ""


async def test_pulling_goes_on_by_itself_when_the_upstream_comes_back(tmp_path: Path) -> None:
    lineage = Lineage()
    first, second = lineage.publish(), lineage.publish()
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(first)
        await downstream.reaches(first.version)
        await upstream.stop()
        with pytest.raises(UnavailableError):
            await downstream.puller.pull_once(RUN, 0.2)
        assert "connection refused" in downstream.puller.view().error
        second.commit_into(upstream.store)
        await upstream.start()
        await downstream.reaches(second.version)


async def test_no_more_objects_are_fetched_at_a_time_than_there_are_connections(tmp_path: Path) -> None:
    versions = [Lineage(run).publish() for run in ("one", "two", "three")]
    held_back = 0
    go = asyncio.Event()

    @web.middleware
    async def hold_objects_back(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal held_back
        if "/objects/" in request.path:
            held_back += 1
            await go.wait()
        return await handler(request)

    def wrap(app: web.Application) -> web.Application:
        app.middlewares.append(hold_objects_back)
        return app

    patient = replace(QUICK, stall=30.0, report=0.01)
    async with (
        Upstream(tmp_path / "a", wrap=wrap) as upstream,
        Downstream(tmp_path / "b", upstream.url, runs=("*",), connections=2, policy=patient) as downstream,
    ):
        upstream.publish(*versions)
        assert await upstream.announcements.wait_until(lambda: held_back == 2 or None, 60)
        seen = len(upstream.reports)
        assert await upstream.announcements.wait_until(lambda: len(upstream.reports) > seen + 10 or None, 60)
        assert held_back == 2
        go.set()
        for published in versions:
            await downstream.reaches(published.version, run=published.run)


async def test_a_cut_download_goes_on_inside_the_object(tmp_path: Path) -> None:
    lineage = Lineage(tensors=1, elements=1 << 18, limits=DEFAULT_LIMITS)
    first = lineage.publish()
    largest = max(map(len, first.objects.values()))
    assert largest > 400_000
    async with (
        Upstream(tmp_path / "a") as upstream,
        ChaosProxy(upstream.port) as proxy,
        Downstream(tmp_path / "b", proxy.url, connections=1) as downstream,
    ):
        upstream.publish(first)
        # Heads and small objects take a few kilobytes, so these fall into the one large chunk.
        proxy.plan(*(Mishap(at, Fault.CUT) for at in (100_000, 200_000, 300_000)))
        await downstream.reaches(first.version)
        assert_whole(downstream, first)
        assert len(proxy.happened) == 3
        wasted = downstream.committed[0][1].bytes - first.bytes
        assert wasted < 3 * 64 * 1024, "what had come before a cut is not fetched again"


async def test_a_restart_half_way_fetches_at_most_what_was_in_flight_again(tmp_path: Path) -> None:
    lineage = Lineage(tensors=8, elements=8192)
    first = lineage.publish()
    largest = max(map(len, first.objects.values()))
    connections = 2
    async with Upstream(tmp_path / "a") as upstream, ChaosProxy(upstream.port) as proxy:
        upstream.publish(first)
        received, restarts = 0, 4
        async with Downstream(tmp_path / "b", proxy.url, connections=connections) as downstream:
            for _ in range(restarts):
                at = first.bytes // 8
                proxy.plan(Mishap(at, Fault.STALL), Mishap(at + 1, Fault.STALL))
                await proxy.until_happened(1)
                received += downstream.puller.view().bytes_received
                await downstream.stop()
                assert downstream.store.run(RUN).latest() is None
                downstream.start()
            proxy.plan()
            await downstream.reaches(first.version)
            received += downstream.puller.view().bytes_received
            assert_whole(downstream, first)
            # Per life: what was in flight or just being stored, the record, and who the upstream is.
            assert received - first.bytes <= restarts * (2 * connections * largest + 4096)


async def test_what_a_pull_asked_for_stays_while_another_upstream_has_nothing_to_bring(tmp_path: Path) -> None:
    first = Lineage(tensors=8, elements=8192).publish()
    async with (
        Upstream(tmp_path / "a") as upstream,
        Upstream(tmp_path / "c") as bare,
        ChaosProxy(upstream.port) as proxy,
    ):
        upstream.publish(first)
        proxy.plan(*(Mishap(first.bytes // 2 + i, Fault.STALL) for i in range(2)))
        async with Downstream(tmp_path / "b", proxy.url) as downstream:
            await proxy.until_happened(1)
            under_way = downstream.store.leases.oldest_work()
            assert under_way is not None
            other = downstream.another(bare.url)
            running = asyncio.create_task(other.run())
            assert await other.pull_once(RUN, 10) is True
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert downstream.store.leases.oldest_work() == under_way
            proxy.plan()
            await downstream.reaches(first.version)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_to_the_bytes_only_the_true_ones_are_kept(tmp_path: Path, seed: int) -> None:
    lineage = Lineage(tensors=2, seed=seed)
    versions = [lineage.publish() for _ in range(3)]
    async with (
        Upstream(tmp_path / "a") as upstream,
        ChaosProxy(upstream.port) as proxy,
        Downstream(tmp_path / "b", proxy.url, connections=3) as downstream,
    ):
        upstream.publish(*versions)
        proxy.plan(*random_mishaps(seed, count=40, within=2 * sum(v.bytes for v in versions)))
        await downstream.reaches(versions[-1].version)
        assert_whole(downstream, *(v for v in versions if downstream.store.run(RUN).latest()))
        known = lineage.objects()
        assert downstream.objects() <= known.keys(), "nothing else was stored"


async def test_a_flipped_byte_names_the_peer_that_sent_it(tmp_path: Path) -> None:
    first = Lineage(tensors=1, elements=1 << 16, limits=DEFAULT_LIMITS).publish()
    async with (
        Upstream(tmp_path / "a") as upstream,
        ChaosProxy(upstream.port) as proxy,
        Downstream(tmp_path / "b", proxy.url, connections=1) as downstream,
    ):
        with capture_logs() as logs:
            proxy.plan(Mishap(60_000, Fault.FLIP))
            upstream.publish(first)
            await downstream.reaches(first.version)
        assert_whole(downstream, first)
        errors = [entry["error"] for entry in logs if entry.get("kind") == "Peer"]
        assert len(errors) == 1
        assert errors[0].startswith(f"{proxy.url}: chunk ")
        assert "SHA-256" in errors[0]


async def test_a_stalled_reply_is_cut_and_asked_for_again(tmp_path: Path) -> None:
    first = Lineage().publish()
    async with (
        Upstream(tmp_path / "a") as upstream,
        ChaosProxy(upstream.port) as proxy,
        Downstream(tmp_path / "b", proxy.url) as downstream,
    ):
        upstream.publish(first)
        proxy.plan(Mishap(5000, Fault.STALL), Mishap(9000, Fault.STALL))
        await downstream.reaches(first.version)
        assert_whole(downstream, first)
        assert len(proxy.happened) == 2


async def test_a_report_goes_up_when_it_changes_and_again_before_it_grows_old(tmp_path: Path) -> None:
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        assert await upstream.announcements.wait_until(lambda: upstream.reports or None, 30)
        changed = RegionReport("downstream", "boot-1", 7, {"policy": RunReport(latest="v000009")}, coders=READ)
        downstream.report = changed
        downstream.announcements.announce()
        assert await upstream.announcements.wait_until(lambda: changed in upstream.reports or None, 30)
        count = len(upstream.reports)
        assert await upstream.announcements.wait_until(lambda: len(upstream.reports) > count or None, 30)


async def test_a_report_that_has_not_changed_is_not_sent_again_for_every_announcement(tmp_path: Path) -> None:
    seldom = replace(QUICK, report=10_000.0)
    async with (
        Upstream(tmp_path / "a") as upstream,
        Downstream(tmp_path / "b", upstream.url, policy=seldom) as downstream,
    ):
        first = RegionReport("downstream", "boot-1", 1, coders=READ)
        second = RegionReport("downstream", "boot-1", 2, {"policy": RunReport("v000001")}, coders=READ)
        downstream.announcements.announce()
        assert await upstream.announcements.wait_until(lambda: upstream.reports or None, 30)
        for sequence in range(3, 20):
            downstream.report = RegionReport("downstream", "boot-1", sequence)
            downstream.announcements.announce()
            assert await downstream.puller.pull_once(RUN, 10)
        downstream.report = second
        downstream.announcements.announce()
        assert await upstream.announcements.wait_until(lambda: second in upstream.reports or None, 30)
        assert upstream.reports == [first, second]


async def test_a_report_tells_what_was_pulled_at_while_bytes_came_and_which_coders_are_read(tmp_path: Path) -> None:
    first = Lineage(tensors=4, elements=128 << 10, limits=DEFAULT_LIMITS).publish()
    rate = 2e6
    async with (
        Upstream(tmp_path / "a") as upstream,
        ChaosProxy(upstream.port, rate=rate) as proxy,
        Downstream(tmp_path / "b", proxy.url) as downstream,
    ):
        assert await upstream.announcements.wait_until(lambda: upstream.reports or None, 30)
        assert (upstream.reports[0].pull_rate, upstream.reports[0].coders) == (0.0, READ)
        upstream.publish(first)
        await downstream.reaches(first.version)
        count = len(upstream.reports)
        assert await upstream.announcements.wait_until(lambda: len(upstream.reports) > count + 1 or None, 30)
        assert 0 < upstream.reports[-1].pull_rate < 1.5 * rate


async def test_deltas_by_context_cross_two_relays_verbatim(tmp_path: Path) -> None:
    lineage = Lineage(mode="dense")
    versions = [lineage.publish() for _ in range(4)]
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as between:
        upstream.publish(*versions)
        await between.reaches(versions[-1].version)
        border = Upstream(tmp_path / "b", store=between.store)
        async with border, Downstream(tmp_path / "c", border.url) as far:
            await far.reaches(versions[-1].version)
            assert_whole(far, *versions)
            mirror = Mirror(far.store, far.store.run(RUN), Variant("bf16"), choose())
            root = await asyncio.to_thread(mirror.export, versions[-1].record, tmp_path / "export")
            assert root == versions[-1].record.variants[0].root


async def test_a_daemon_that_reads_no_context_coder_says_so_and_takes_every_other_version(tmp_path: Path) -> None:
    lineage = Lineage()
    first = lineage.publish()
    lineage.mode = "dense"
    second, third = lineage.publish(), lineage.publish(anchor=True)
    lineage.mode = "blind"
    fourth = lineage.publish()
    old = replace(QUICK, pull=replace(QUICK.pull, coders=CODERS - {Coder.CONTEXT}))
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url, policy=old) as downstream:
        upstream.publish(first)
        await downstream.reaches(first.version)
        upstream.publish(second)
        with pytest.raises(CoderError, match=r"v000001 → v000002 .* found 2 \(context\); update deltad here"):
            await downstream.puller.pull_once(RUN, 3)
        assert "found 2 (context); update deltad here" in downstream.puller.view().error
        assert {Coder.CONTEXT in report.coders for report in upstream.reports} == {False}
        upstream.publish(third, fourth)
        await downstream.reaches(fourth.version)
        assert [r.version.number for r in downstream.store.run(RUN).records()] == [1, 3, 4]
        assert downstream.puller.view().error == ""


async def test_while_the_token_is_refused_nothing_else_is_asked(tmp_path: Path) -> None:
    first = Lineage(tensors=8, elements=8192).publish()
    asked = refused = 0

    @web.middleware
    async def count_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal asked, refused
        asked += "/objects/" in request.path
        upstream.announcements.announce()
        response = await handler(request)
        refused += response.status == 401
        return response

    def wrap(app: web.Application) -> web.Application:
        app.middlewares.insert(0, count_refusals)
        return app

    patient = replace(QUICK, denied_rest=10_000.0)
    async with (
        Upstream(tmp_path / "a", wrap=wrap) as upstream,
        Downstream(tmp_path / "b", upstream.url, connections=2, policy=patient) as downstream,
    ):
        upstream.publish(first)
        assert await upstream.announcements.wait_until(lambda: asked > 5 or None, 30)
        upstream.token = "another"
        async with aiohttp.ClientSession(upstream.url, headers={"Authorization": "Bearer another"}) as session:
            for _ in range(50):
                async with session.get("/v1/relay/hello") as response:
                    assert response.status == 200
        # Twice as many fetches as connections, the poll, the greeting and the report may have been on their way.
        assert 1 <= refused <= 7
        downstream.token = "another"
        assert await downstream.puller.pull_once(RUN, 30)
        assert_whole(downstream, first)


async def test_the_view_tells_what_is_going_on_in_words(tmp_path: Path) -> None:
    first = Lineage().publish()
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        assert await downstream.puller.pull_once(RUN, 10)
        assert downstream.puller.view().activity == "no version yet"
        upstream.publish(first)
        await downstream.reaches(first.version)
        view = downstream.puller.view()
        assert view.activity == downstream.puller.activity(RUN) == "up to date at v000001"
        assert view.up
        assert view.rtt > 0
        assert view.bytes_received >= first.bytes
        await upstream.stop()
        with pytest.raises(UnavailableError):
            await downstream.puller.pull_once(RUN, 0.2)
        downstream.puller.link.rests_until = asyncio.get_running_loop().time() + 65
        activity = downstream.puller.view().activity
        assert activity.startswith("waiting 6")
        assert activity.endswith("s before trying again: connection refused")
