"""The target travels down, through daemons in between, over cuts and restarts; malformed, it is refused (P31)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from deltad.client.messages import ErrorReply
from deltad.errors import UsageError
from deltad.protocol.target import EVERYONE, FLEETS, MOST_SEQUENCE, REASON_CHARACTERS, Statement
from deltad.relay.wire import PREFIX, SEAL, TargetNotice, parse_sequence, seal
from deltad.types import Version
from tests.kit.chaos import ChaosProxy, Fault, Mishap
from tests.kit.regions import RUN, TOKEN, Downstream, Upstream
from tests.kit.versions import Lineage, Published

V1, V2 = Version(1, 1), Version(1, 2)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(scope="module")
def versions() -> list[Published]:
    lineage = Lineage(tensors=1)
    return [lineage.publish() for _ in range(2)]


def say(upstream: Upstream, version: Version | None, fleet: str = EVERYONE) -> None:
    """Somebody says it at the daemon where the run is published."""
    upstream.store.run(RUN).move_target(
        lambda now: now.say(version, fleet, by="root", why="because", when=1.0, daemon="upstream")
    )
    upstream.announcements.announce()


def held(daemon: Upstream | Downstream, fleet: str = "downstream") -> Version | None:
    said = daemon.store.run(RUN).targets().held(fleet)
    return None if said is None else said.version


async def heard(downstream: Downstream, sequence: int) -> None:
    """Wait until the statement of this number is durable there."""
    found = await downstream.announcements.wait_until(
        lambda: downstream.store.run(RUN).targets().sequence >= sequence or None, 60.0
    )
    assert found, downstream.puller.view()


async def test_a_statement_arrives_as_it_was_said_and_outlives_the_daemon(
    tmp_path: Path, versions: list[Published]
) -> None:
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        upstream.publish(*versions)
        await downstream.reaches(V2)
        say(upstream, V1)
        await heard(downstream, 1)
        assert downstream.store.run(RUN).targets().heard == upstream.store.run(RUN).targets().heard
        say(upstream, V2, "elsewhere")
        await heard(downstream, 2)
        assert (held(downstream), held(downstream, "elsewhere")) == (V1, V2)
    async with Upstream(tmp_path / "a") as upstream, Downstream(tmp_path / "b", upstream.url) as downstream:
        assert (held(downstream), held(downstream, "elsewhere")) == (V1, V2)
        say(upstream, None)
        await heard(downstream, 3)
        assert held(downstream) is held(downstream, "elsewhere") is None


@asynccontextmanager
async def serving(downstream: Downstream) -> AsyncIterator[Upstream]:
    """The relay server of a daemon that pulls itself."""
    server = Upstream(Path(), store=downstream.store)
    server.announcements = downstream.announcements
    async with server:
        yield server


async def test_it_passes_through_a_daemon_in_between_in_a_chain_of_three(
    tmp_path: Path, versions: list[Published]
) -> None:
    async with (
        Upstream(tmp_path / "a") as a,
        Downstream(tmp_path / "b", a.url) as b,
        serving(b) as between,
        Downstream(tmp_path / "c", between.url) as c,
    ):
        a.publish(*versions)
        say(a, V1)
        await heard(c, 1)
        assert held(c) == V1
        b.store.run(RUN).move_target(lambda now: now.say_here(V2, by="ana", why="", when=2.0, daemon="b"))
        b.announcements.announce()
        say(a, None, "d")
        await heard(c, 2)
        assert (held(b, "b"), held(c, "c"), held(c, "d")) == (V2, V1, None), "what is said at b is for its own fleet"
        assert all(said.daemon == "upstream" for said in c.store.run(RUN).targets().heard)
        await c.stop()
        say(a, V1)
        await heard(b, 3)
        assert held(b, "b") == V1, "the last to speak wins"
        c.start()
        await heard(c, 3)
        assert held(c, "c") == held(c, "d") == V1


async def test_an_upstream_that_was_cut_off_tells_of_it_when_it_is_back(
    tmp_path: Path, versions: list[Published]
) -> None:
    async with (
        Upstream(tmp_path / "a") as upstream,
        ChaosProxy(upstream.port) as proxy,
        Downstream(tmp_path / "b", f"http://127.0.0.1:{proxy.port}") as downstream,
    ):
        upstream.publish(*versions)
        await downstream.reaches(V2)
        proxy.plan(*(Mishap(at, fault) for at, fault in ((3, Fault.CUT), (90, Fault.FLIP), (400, Fault.STALL))))
        say(upstream, V1)
        await heard(downstream, 1)
        await upstream.stop()
        say(upstream, None)
        await upstream.start()
        await heard(downstream, 2)
        assert downstream.store.run(RUN).targets().heard == upstream.store.run(RUN).targets().heard


async def test_an_upstream_that_lags_behind_changes_nothing(tmp_path: Path, versions: list[Published]) -> None:
    async with (
        Upstream(tmp_path / "a") as upstream,
        Upstream(tmp_path / "old") as lagging,
        Downstream(tmp_path / "b", upstream.url) as downstream,
    ):
        for one in (upstream, lagging):
            one.publish(*versions)
            say(one, V1)
        say(upstream, None)
        await heard(downstream, 2)
        another = asyncio.create_task(downstream.another(lagging.url).run())
        async with aiohttp.ClientSession() as http:
            query, headers = {"after": "0"}, {"Authorization": f"Bearer {TOKEN}"}
            async with http.get(f"{lagging.url}{PREFIX}/runs/{RUN}/target", params=query, headers=headers) as reply:
                assert [said.sequence for said in msgspec.json.decode(await reply.read(), type=TargetNotice).statements]
        say(lagging, V2)  # its second statement, which is another than the one that is known
        say(upstream, V2)
        await heard(downstream, 3)
        assert held(downstream) == V2
        assert [said.version for said in downstream.store.run(RUN).targets().history] == [None, V2]
        another.cancel()


# What no upstream may say.


def said(**changes: object) -> Statement:
    return msgspec.structs.replace(Statement(1, V1, EVERYONE, "root", "", 0.0, "a"), **changes)


def notice(*statements: Statement) -> bytes:
    return msgspec.json.encode(TargetNotice(statements))


LIES = {
    "no JSON": b'{"statements": [',
    "nesting without end": b"[" * 100_000,
    "another struct": b'{"runs": []}',
    "no statement": notice(),
    "a number that is no number": notice(said()).replace(b'"sequence":1', b'"sequence":"1"'),
    "a number that is known": notice(said(sequence=0)),
    "a number beyond all": notice(said(sequence=MOST_SEQUENCE + 1)),
    "one number twice": notice(said(), said(fleet="b")),
    "descending numbers": notice(said(sequence=2), said()),
    "a version of epoch 0": notice(said(version=Version(0, 1))),
    "a version that is a name": notice(said()).replace(b"[1,1]", b'"../v1"'),
    "a fleet that is a path": notice(said(fleet="../../etc")),
    "a reason without end": notice(said(why="x" * (REASON_CHARACTERS + 1))),
    "a thousand fleets": notice(*(said(sequence=n, fleet=f"f{n}") for n in range(1, FLEETS + 2))),
    "two megabytes": notice(said(why="x" * (2 << 20))),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_malformed_statement_changes_nothing_and_its_upstream_is_named(
    tmp_path: Path, versions: list[Published], lie: bytes
) -> None:
    lies, told = [True], asyncio.Semaphore(0)

    @web.middleware
    async def lying(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not lies[0] or not request.path.endswith("/target"):
            return await handler(request)
        told.release()
        return web.Response(body=lie, content_type="application/json", headers={SEAL: seal(lie)})

    def wrap(app: web.Application) -> web.Application:
        app.middlewares.append(lying)
        return app

    with capture_logs() as logs:
        async with (
            Upstream(tmp_path / "a", wrap=wrap) as upstream,
            Downstream(tmp_path / "b", upstream.url) as downstream,
        ):
            await told.acquire()
            await told.acquire()  # by now the first answer has been dealt with
            upstream.publish(*versions)
            await downstream.reaches(V2)
            assert "target" in downstream.puller.view().error
            assert downstream.store.run(RUN).targets().heard == ()
            lies[0] = False
            say(upstream, V1)
            await heard(downstream, 1)
            assert held(downstream) == V1
            assert downstream.puller.view().error == ""
    refusals = [entry for entry in logs if entry["event"] == "target_not_kept"]
    assert refusals
    assert all(entry["upstream"] == upstream.url and upstream.url in entry["error"] for entry in refusals)
    assert len({entry["error"] for entry in refusals}) == len(refusals), "each trouble is told of once"


# The route.


async def test_the_route_waits_tells_what_is_new_and_refuses_nonsense(
    tmp_path: Path, versions: list[Published]
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with Upstream(tmp_path / "a") as upstream, aiohttp.ClientSession(upstream.url, headers=headers) as http:
        async with http.get(f"{PREFIX}/runs/{RUN}/target?wait=0.01") as reply:
            assert reply.status == 404
        upstream.publish(*versions)
        async with http.get(f"{PREFIX}/runs/{RUN}/target") as reply:
            assert reply.status == 204
        waiting = asyncio.create_task(http.get(f"{PREFIX}/runs/{RUN}/target?after=0&wait=60"))
        async with http.get(f"{PREFIX}/hello"):
            pass  # by now the poll has been taken in
        say(upstream, V1)
        async with await waiting as reply:
            data = await reply.read()
            assert reply.headers[SEAL] == seal(data)
            assert msgspec.json.decode(data, type=TargetNotice).statements[0].version == V1
        for query in ("after=-1", "after=x", f"after={MOST_SEQUENCE + 1}", "wait=soon"):
            async with http.get(f"{PREFIX}/runs/{RUN}/target?{query}") as reply:
                assert reply.status == 400
                assert msgspec.json.decode(await reply.read(), type=ErrorReply).error == "Usage"
        before = upstream.store.held_runs()
        async with http.get(f"{PREFIX}/runs/unheard-of/target") as reply:
            assert reply.status == 404
        assert upstream.store.held_runs() == before, "asking makes no run"
        waiting = asyncio.create_task(http.get(f"{PREFIX}/runs/{RUN}/target?after=1&wait=60"))
        async with http.get(f"{PREFIX}/hello"):
            pass
        await upstream.stop()
        async with await waiting as reply:
            assert reply.status == 204


def test_a_number_is_plain_digits() -> None:
    assert parse_sequence("0") == 0
    assert parse_sequence(str(MOST_SEQUENCE)) == MOST_SEQUENCE
    for text in ("", "-1", "1.0", "١", "9" * 17):
        with pytest.raises(UsageError):
            parse_sequence(text)
