"""A peer that lies, rambles or dawdles changes nothing here, and is believed again once it is honest (P18, P22)."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from deltad.delta.encoding import encode
from deltad.errors import PeerError
from deltad.protocol.pull_plan import Kind, want
from deltad.relay.client import RelayClient
from deltad.relay.wire import PREFIX, SEAL, RunNames, seal
from tests.kit.regions import RUN, TOKEN, Downstream, Upstream
from tests.kit.versions import Lineage, Published, forge

Lie = Callable[[web.Request, Published], Awaitable[web.StreamResponse]]


class Liar:
    """Answers whatever is below `path` with `lie` for as long as `lies` is set."""

    def __init__(self, path: str, lie: Lie, published: Published) -> None:
        self.path = PREFIX + path
        self.lie = lie
        self.published = published
        self.lies = True
        self.told = 0
        self._again = asyncio.Event()

    def wrap(self, app: web.Application) -> web.Application:
        app.middlewares.append(self._middleware)
        return app

    async def until_told(self, times: int) -> None:
        while self.told < times:
            self._again.clear()
            await self._again.wait()

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self.lies or not request.path.startswith(self.path):
            return await handler(request)
        self.told += 1
        self._again.set()
        return await self.lie(request, self.published)


def truth(request: web.Request, published: Published) -> tuple[bytes, dict[str, str]]:
    """The bytes and headers of an honest reply to a question for a whole object."""
    name = request.path.rsplit("/", 1)[1]
    return published.objects[bytes.fromhex(name)], {"ETag": f'"{name}"'}


async def other_bytes(request: web.Request, published: Published) -> web.StreamResponse:
    data, headers = truth(request, published)
    return web.Response(body=bytes(byte ^ 1 for byte in data), headers=headers)


async def one_byte_less(request: web.Request, published: Published) -> web.StreamResponse:
    data, headers = truth(request, published)
    return web.Response(body=data[:-1], headers=headers)


async def one_byte_more(request: web.Request, published: Published) -> web.StreamResponse:
    data, headers = truth(request, published)
    return web.Response(body=data + b"\0", headers=headers)


async def endless(request: web.Request, published: Published) -> web.StreamResponse:
    response = web.StreamResponse(headers={"ETag": f'"{request.path.rsplit("/", 1)[1]}"'})
    await response.prepare(request)
    while True:
        await response.write(bytes(4096))


async def endless_in_drops(request: web.Request, published: Published) -> web.StreamResponse:
    data, headers = truth(request, published)
    response = web.StreamResponse(headers=headers)
    response.content_length = len(data)
    await response.prepare(request)
    for i in range(len(data)):
        await response.write(data[i : i + 1])
        await asyncio.sleep(0.05)
    return response


async def longer_than_its_head_says(request: web.Request, published: Published) -> web.StreamResponse:
    data, headers = truth(request, published)
    assert request.transport is not None
    lines = ["HTTP/1.1 200 OK", f"ETag: {headers['ETag']}", f"Content-Length: {len(data)}", "", ""]
    request.transport.write("\r\n".join(lines).encode() + bytes(len(data)) + b"and much more" * 100)
    request.transport.close()
    return web.Response()


async def redirected(request: web.Request, published: Published) -> web.StreamResponse:
    raise web.HTTPFound(request.path + "?again")


async def compressed(request: web.Request, published: Published) -> web.StreamResponse:
    data, headers = truth(request, published)
    return web.Response(body=gzip.compress(data), headers={**headers, "Content-Encoding": "gzip"})


async def tagged_as_another(request: web.Request, published: Published) -> web.StreamResponse:
    data, _ = truth(request, published)
    return web.Response(body=data, headers={"ETag": f'"{"0" * 64}"'})


async def a_part_that_nobody_asked_for(request: web.Request, published: Published) -> web.StreamResponse:
    data, headers = truth(request, published)
    content_range = f"bytes 0-{len(data) - 1}/{len(data)}"
    return web.Response(status=206, body=data, headers={**headers, "Content-Range": content_range})


async def failed(request: web.Request, published: Published) -> web.StreamResponse:
    return web.Response(status=500, text="oops")


async def missing(request: web.Request, published: Published) -> web.StreamResponse:
    return web.Response(status=404)


async def not_http(request: web.Request, published: Published) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"220 mail.example ESMTP\r\n")
    request.transport.close()
    return web.Response()


OBJECT_LIES = [
    other_bytes,
    one_byte_less,
    one_byte_more,
    endless,
    endless_in_drops,
    longer_than_its_head_says,
    redirected,
    compressed,
    tagged_as_another,
    a_part_that_nobody_asked_for,
    failed,
    missing,
    not_http,
]


@pytest.mark.parametrize("lie", OBJECT_LIES)
async def test_a_lie_about_an_object_stores_nothing_and_is_got_over(tmp_path: Path, lie: Lie) -> None:
    published = Lineage(tensors=1).publish()
    liar = Liar("/objects/", lie, published)
    with capture_logs() as logs:
        async with (
            Upstream(tmp_path / "a", wrap=liar.wrap) as upstream,
            Downstream(tmp_path / "b", upstream.url) as downstream,
        ):
            upstream.publish(published)
            await liar.until_told(5)
            assert downstream.objects() == set()
            assert downstream.store.runs() == []
            assert downstream.puller.view().bytes_received < 1_000_000
            liar.lies = False
            await downstream.reaches(published.version)
            assert all(downstream.store.read(digest) == data for digest, data in published.objects.items())
        told = [entry["error"] for entry in logs if entry["event"] == "upstream_trouble"]
        assert told
        assert all(text.startswith(upstream.url) for text in told), "the peer is named"


def sealed(data: bytes) -> web.Response:
    return web.Response(body=data, headers={SEAL: seal(data)})


async def no_record(request: web.Request, published: Published) -> web.StreamResponse:
    return sealed(b"\x81\xa3not")


async def a_record_of_another_run(request: web.Request, published: Published) -> web.StreamResponse:
    return sealed(forge(published, run="other").data)


async def a_record_with_unsealed_bytes(request: web.Request, published: Published) -> web.StreamResponse:
    return web.Response(body=published.data)


async def a_record_that_another_one_seals(request: web.Request, published: Published) -> web.StreamResponse:
    return web.Response(body=published.data, headers={SEAL: seal(forge(published, identity="x").data)})


async def a_record_of_another_root(request: web.Request, published: Published) -> web.StreamResponse:
    variant = msgspec.structs.replace(published.record.variants[0], root=bytes(32))
    return sealed(forge(published, variants=(variant,)).data)


async def a_record_of_the_future(request: web.Request, published: Published) -> web.StreamResponse:
    return sealed(forge(published, format=9, least_reader=9).data)


async def a_record_whose_base_is_itself(request: web.Request, published: Published) -> web.StreamResponse:
    edge = msgspec.structs.replace(published.record.variants[0].edges[0], kind="delta", base=published.version)
    variant = msgspec.structs.replace(published.record.variants[0], edges=(edge,))
    return sealed(encode(msgspec.structs.replace(published.record, variants=(variant,))))


async def a_record_of_no_end(request: web.Request, published: Published) -> web.StreamResponse:
    response = web.StreamResponse(headers={SEAL: "sha-256=:AAAA:"})
    response.content_length = 1 << 40
    await response.prepare(request)
    return response


async def nothing_at_once(request: web.Request, published: Published) -> web.StreamResponse:
    return web.Response(status=204)


RECORD_LIES = [
    no_record,
    a_record_of_another_run,
    a_record_with_unsealed_bytes,
    a_record_that_another_one_seals,
    a_record_of_another_root,
    a_record_of_the_future,
    a_record_whose_base_is_itself,
    a_record_of_no_end,
    nothing_at_once,
    redirected,
    failed,
    missing,
    not_http,
]


@pytest.mark.parametrize("lie", RECORD_LIES)
async def test_a_lie_about_the_latest_version_commits_nothing_and_is_got_over(tmp_path: Path, lie: Lie) -> None:
    published = Lineage(tensors=1).publish()
    liar = Liar("/runs/policy/", lie, published)
    async with (
        Upstream(tmp_path / "a", wrap=liar.wrap) as upstream,
        Downstream(tmp_path / "b", upstream.url) as downstream,
    ):
        upstream.publish(published)
        await liar.until_told(5)
        assert downstream.store.runs() == []
        assert downstream.objects() <= published.objects.keys()
        liar.lies = False
        await downstream.reaches(published.version)
        assert downstream.store.run(RUN).record_bytes(published.version) == published.data


async def test_a_version_that_contradicts_itself_is_refused_and_the_peer_is_named(tmp_path: Path) -> None:
    published = Lineage(tensors=1).publish()
    liar = Liar("/runs/policy/", a_record_of_another_root, published)
    async with (
        Upstream(tmp_path / "a", wrap=liar.wrap) as upstream,
        Downstream(tmp_path / "b", upstream.url) as downstream,
    ):
        upstream.publish(published)
        with pytest.raises(
            PeerError, match=f"^{upstream.url}: policy/v000001: manifest .* target's root: expected 000"
        ):
            await downstream.puller.pull_once(RUN, 1.0)
        assert downstream.store.runs() == []


async def test_an_older_version_under_the_name_of_the_latest_is_refused(tmp_path: Path) -> None:
    lineage = Lineage(tensors=1)
    first, second = lineage.publish(), lineage.publish()

    async def the_first_one(request: web.Request, published: Published) -> web.StreamResponse:
        return sealed(first.data)

    liar = Liar("/runs/policy/latest", the_first_one, first)
    with capture_logs() as logs:
        async with (
            Upstream(tmp_path / "a", wrap=liar.wrap) as upstream,
            Downstream(tmp_path / "b", upstream.url) as downstream,
        ):
            upstream.publish(first, second)
            await downstream.reaches(first.version)
            await liar.until_told(5)
            liar.lies = False
            await downstream.reaches(second.version)
    assert any("expected a version above v000001, found v000001" in entry.get("error", "") for entry in logs)


async def not_json(request: web.Request, published: Published) -> web.StreamResponse:
    return sealed(b'{"runs": [1, 2')


async def nested_without_end(request: web.Request, published: Published) -> web.StreamResponse:
    return sealed(b"[" * 100_000)


async def names_that_are_paths(request: web.Request, published: Published) -> web.StreamResponse:
    return sealed(msgspec.json.encode(RunNames(("../../etc",))))


@pytest.mark.parametrize("lie", [not_json, nested_without_end, names_that_are_paths, redirected, failed, not_http])
@pytest.mark.parametrize("path", ["/hello", "/runs"])
async def test_nonsense_about_itself_is_got_over(tmp_path: Path, lie: Lie, path: str) -> None:
    published = Lineage(tensors=1).publish()
    liar = Liar(path, lie, published)
    async with (
        Upstream(tmp_path / "a", wrap=liar.wrap) as upstream,
        Downstream(tmp_path / "b", upstream.url, runs=("*",)) as downstream,
    ):
        await liar.until_told(3)
        upstream.publish(published)
        liar.lies = False
        await downstream.reaches(published.version)


async def test_a_peer_of_another_format_is_told_apart(tmp_path: Path) -> None:
    async def of_format_7(request: web.Request, published: Published) -> web.StreamResponse:
        return sealed(b'{"daemon": "a", "boot": "b", "formats": [7], "coders": [0]}')

    liar = Liar("/hello", of_format_7, Lineage(tensors=1).publish())
    with capture_logs() as logs:
        async with Upstream(tmp_path / "a", wrap=liar.wrap) as upstream, Downstream(tmp_path / "b", upstream.url):
            await liar.until_told(3)
    (told,) = [entry["error"] for entry in logs if entry["event"] == "upstream_trouble"]
    assert "expected a daemon that reads format 1, found formats (7,)" in told


@pytest.mark.parametrize("content_range", ["bytes 0-9/10", "bytes 5-8/9", "bytes 5-9/*", "5-9/10", ""])
async def test_a_part_other_than_was_asked_for_is_refused(tmp_path: Path, content_range: str) -> None:
    data = b"0123456789"
    wanted = want(Kind.CHUNK, bytes(32), len(data))

    async def a_part(request: web.Request, published: Published) -> web.StreamResponse:
        headers = {"ETag": f'"{wanted.digest.hex()}"', "Content-Range": content_range}
        return web.Response(status=206, body=data[5:], headers=headers)

    liar = Liar("/objects/", a_part, Lineage(tensors=1).publish())
    received: list[int] = []
    async with (
        Upstream(tmp_path / "a", wrap=liar.wrap) as upstream,
        RelayClient(upstream.url, lambda: TOKEN, count=received.append) as client,
    ):
        buffer = bytearray(data[:5])
        with pytest.raises(PeerError, match="expected bytes 5-9/10"):
            await client.fetch(wanted, buffer, count=received.append)
        assert buffer == data[:5]
        assert received == []


async def test_an_honest_peer_beside_a_hostile_one_is_enough(tmp_path: Path) -> None:
    lineage = Lineage(tensors=1)
    published = lineage.publish()
    liar = Liar("/objects/", other_bytes, published)
    async with (
        Upstream(tmp_path / "a", wrap=liar.wrap) as hostile,
        Upstream(tmp_path / "c") as honest,
        Downstream(tmp_path / "b", hostile.url) as downstream,
    ):
        hostile.publish(published)
        await liar.until_told(1)
        honest.publish(published)
        other = downstream.another(honest.url)
        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(other.run())
            await downstream.reaches(published.version)
            pulling.cancel()
