"""What the relay server says, to whom, and that no request makes it stumble (P39, P40)."""

import asyncio
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from deltad.client.messages import ErrorReply, RegionReport, ReplicaReport, ReplicaState, RunReport
from deltad.errors import UsageError
from deltad.limits import Limits
from deltad.relay.wire import (
    SEAL,
    Hello,
    RunNames,
    VersionNames,
    dotted,
    parse_dotted,
    parse_range,
    parse_seconds,
    seal,
)
from deltad.types import Version
from tests.kit.regions import TOKEN, Upstream
from tests.kit.versions import Lineage, Published

AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
ABSENT = "00" * 32


@pytest.fixture(scope="module")
def versions() -> list[Published]:
    lineage = Lineage()
    return [lineage.publish() for _ in range(3)]


@pytest.fixture
async def upstream(tmp_path: Path, versions: list[Published]) -> AsyncIterator[Upstream]:
    async with Upstream(tmp_path / "store", limits=Limits(report_bytes=4096)) as served:
        served.publish(*versions)
        yield served


@pytest.fixture
async def http(upstream: Upstream) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(upstream.url, headers=AUTHORISED, auto_decompress=False) as session:
        yield session


async def body(response: aiohttp.ClientResponse, kind: type) -> object:
    """The parsed body of a 200, which must be sealed."""
    data = await response.read()
    assert response.status == 200
    assert response.headers[SEAL] == seal(data)
    return msgspec.json.decode(data, type=kind)


async def refusal(response: aiohttp.ClientResponse, status: int) -> ErrorReply:
    assert response.status == status
    return msgspec.json.decode(await response.read(), type=ErrorReply)


async def test_it_says_who_it_is_and_what_it_has(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/relay/hello") as response:
        assert await body(response, Hello) == Hello("upstream", "boot-1", (1,), (0, 1, 2, 3))
    async with http.get("/v1/relay/runs") as response:
        assert await body(response, RunNames) == RunNames(("policy",))
    async with http.get("/v1/relay/runs/policy/records") as response:
        assert await body(response, VersionNames) == VersionNames(("1.1", "1.2", "1.3"))
    async with http.get("/v1/relay/runs/policy/records?after=1.2") as response:
        assert await body(response, VersionNames) == VersionNames(("1.3",))


async def test_records_are_served_verbatim(http: aiohttp.ClientSession, versions: list[Published]) -> None:
    for published in versions:
        async with http.get(f"/v1/relay/runs/policy/records/{dotted(published.version)}") as response:
            data = await response.read()
            assert data == published.data
            assert response.headers[SEAL] == seal(data)


async def test_latest_answers_at_once_if_there_is_something_newer(
    http: aiohttp.ClientSession, versions: list[Published]
) -> None:
    for query in ("", "?after=1.2", "?after=1.1&wait=30"):
        async with http.get(f"/v1/relay/runs/policy/latest{query}") as response:
            assert await response.read() == versions[-1].data
    async with http.get("/v1/relay/runs/policy/latest?after=1.3&wait=0.01") as response:
        assert response.status == 204


async def test_latest_waits_for_the_next_version(
    upstream: Upstream, http: aiohttp.ClientSession, versions: list[Published]
) -> None:
    lineage = Lineage("policy", versions=list(versions))
    waiting = asyncio.create_task(http.get("/v1/relay/runs/policy/latest?after=1.3&wait=60"))
    await asyncio.sleep(0)
    fourth = lineage.publish()
    upstream.publish(fourth)
    async with await waiting as response:
        assert await response.read() == fourth.data


async def test_latest_waits_for_a_run_that_does_not_exist_yet(upstream: Upstream, http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/relay/runs/other/latest?wait=0.01") as response:
        await refusal(response, 404)
    waiting = asyncio.create_task(http.get("/v1/relay/runs/other/latest?wait=60"))
    await asyncio.sleep(0)
    first = Lineage("other").publish()
    upstream.publish(first)
    async with await waiting as response:
        assert await response.read() == first.data


async def test_stopping_answers_long_polls_at_once(upstream: Upstream, http: aiohttp.ClientSession) -> None:
    waiting = asyncio.create_task(http.get("/v1/relay/runs/policy/latest?after=1.3&wait=60"))
    async with http.get("/v1/relay/hello"):
        pass  # by now the poll has been taken in
    await upstream.stop()
    async with await waiting as response:
        assert response.status == 204


async def test_objects_are_served_whole_or_from_any_byte_on(
    http: aiohttp.ClientSession, versions: list[Published]
) -> None:
    for digest, data in versions[0].objects.items():
        path = f"/v1/relay/objects/{digest.hex()}"
        async with http.get(path, headers={"Accept-Encoding": "gzip, zstd"}) as response:
            assert response.status == 200
            assert response.headers["ETag"] == f'"{digest.hex()}"'
            assert "Content-Encoding" not in response.headers
            assert await response.read() == data
        for start in {0, 1, len(data) // 2, len(data) - 1}:
            async with http.get(path, headers={"Range": f"bytes={start}-"}) as response:
                assert response.status == 206
                assert response.headers["Content-Range"] == f"bytes {start}-{len(data) - 1}/{len(data)}"
                assert await response.read() == data[start:]
        async with http.get(path, headers={"Range": f"bytes={len(data)}-"}) as response:
            await refusal(response, 416)
            assert response.headers["Content-Range"] == f"bytes */{len(data)}"
        for other in ("bytes=0-1,3-4", "bytes=-5", "lines=1-", "bytes=1-2", "bytes=9" + "9" * 20 + "-"):
            async with http.get(path, headers={"Range": other}) as response:
                assert response.status == 200
                assert await response.read() == data


ROUTES = [
    ("GET", "/v1/relay/hello"),
    ("GET", "/v1/relay/runs"),
    ("GET", "/v1/relay/runs/policy/latest"),
    ("GET", "/v1/relay/runs/policy/records"),
    ("GET", "/v1/relay/runs/policy/records/1.1"),
    ("GET", "/v1/relay/runs/policy/edges"),
    ("GET", f"/v1/relay/objects/{ABSENT}"),
    ("POST", "/v1/relay/report"),
    ("GET", "/v1/relay/nothing"),
    ("DELETE", "/v1/relay/hello"),
    ("GET", "/"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("credentials", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
async def test_without_the_token_every_route_says_the_same(
    upstream: Upstream, method: str, path: str, credentials: dict[str, str]
) -> None:
    async with (
        aiohttp.ClientSession(upstream.url, headers=credentials) as session,
        session.request(method, path) as response,
    ):
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert await refusal(response, 401) == ErrorReply(
            "Denied", "relay: expected a bearer token or a certificate that this daemon accepts", False, 77
        )
    assert upstream.reports == []


async def test_the_token_is_read_anew_for_every_request(upstream: Upstream, http: aiohttp.ClientSession) -> None:
    upstream.token = "another"
    async with http.get("/v1/relay/hello") as response:
        assert response.status == 401
    async with http.get("/v1/relay/hello", headers={"Authorization": "Bearer another"}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/relay/nothing", 404),
        ("/v1/relay/runs/other/records", 404),
        ("/v1/relay/runs/other/records/1.1", 404),
        ("/v1/relay/runs/policy/records/1.4", 404),
        (f"/v1/relay/objects/{ABSENT}", 404),
        ("/v1/relay/objects/..%2f..%2f..%2fetc%2fpasswd", 400),
        ("/v1/relay/objects/" + ABSENT.upper().replace("0", "A"), 400),
        ("/v1/relay/runs/..%2fpolicy/records", 400),
        ("/v1/relay/runs/policy/records/0.1", 400),
        ("/v1/relay/runs/policy/records/1", 400),
        ("/v1/relay/runs/other/edges", 404),
        ("/v1/relay/runs/..%2fpolicy/edges", 400),
        ("/v1/relay/runs/policy/edges?after=x", 400),
        ("/v1/relay/runs/policy/latest?after=x", 400),
        ("/v1/relay/runs/policy/latest?wait=-1", 400),
        ("/v1/relay/runs/policy/latest?wait=nan", 400),
        ("/v1/relay/report", 405),
    ],
)
async def test_what_is_unknown_or_malformed_is_refused_in_json(
    http: aiohttp.ClientSession, path: str, status: int
) -> None:
    async with http.get(URL(path, encoded=True)) as response:
        assert (await refusal(response, status)).message


async def test_asking_for_unknown_runs_leaves_nothing_behind(upstream: Upstream, http: aiohttp.ClientSession) -> None:
    before = sorted(upstream.store.path.rglob("*"))
    for name in ("other", "another"):
        for path in ("latest", "records", "records/1.1", "edges"):
            async with http.get(f"/v1/relay/runs/{name}/{path}") as response:
                assert response.status == 404
    assert sorted(upstream.store.path.rglob("*")) == before
    assert upstream.store.runs() == ["policy"]


REPORT = RegionReport(
    "region-2",
    "boot-9",
    3,
    {"policy": RunReport("v000003", "up to date", (ReplicaReport("r1", "policy", "bf16", ReplicaState.VERIFIED),))},
)


async def test_a_report_is_handed_on(upstream: Upstream, http: aiohttp.ClientSession) -> None:
    data = msgspec.json.encode(REPORT)
    async with http.post("/v1/relay/report", data=data, headers={SEAL: seal(data)}) as response:
        assert response.status == 200
    assert upstream.reports == [REPORT]


@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        (b"{", {}, 422),
        (b"\xff", {}, 422),
        (b"[" * 4000, {}, 422),
        (msgspec.json.encode(REPORT).replace(b"region-2", b"../../x2"), {}, 400),
        (msgspec.json.encode(REPORT).replace(b'"policy"', b'"po/icy"'), {}, 400),
        (msgspec.json.encode(REPORT).replace(b"verified", b"perfect!"), {}, 422),
        (msgspec.json.encode(REPORT), {SEAL: seal(b"other")}, 422),
        (b" " * 5000, {}, 413),
        (b"not gzip", {"Content-Encoding": "gzip"}, 400),
    ],
)
async def test_a_report_that_is_malformed_is_refused(
    upstream: Upstream, http: aiohttp.ClientSession, data: bytes, headers: dict[str, str], status: int
) -> None:
    async with http.post("/v1/relay/report", data=data, headers=headers) as response:
        assert response.status == status
    assert upstream.reports == []


async def test_a_client_that_stops_reading_is_cut_off(tmp_path: Path) -> None:
    big = Lineage(tensors=1, elements=1 << 22, limits=Limits()).publish()
    largest = max(big.objects, key=lambda digest: len(big.objects[digest]))
    cut: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()

    def listen(logger: object, name: str, entry: MutableMapping[str, object]) -> str:
        if entry["event"] == "relay_send_cut" and not cut.done():
            cut.set_result(dict(entry))
        raise structlog.DropEvent

    async with (
        Upstream(tmp_path / "store", stall_seconds=0.2) as upstream,
        aiohttp.ClientSession(upstream.url, headers=AUTHORISED) as others,
        AsyncExitStack() as stack,
    ):
        upstream.publish(big)
        structlog.configure(processors=[listen])
        stack.callback(structlog.reset_defaults)
        with socket.socket() as connection:
            # So that the kernel does not take in the whole object on the client's behalf.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", upstream.port))
            head = f"GET /v1/relay/objects/{largest.hex()} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            connection.sendall(head.encode())
            async with others.get("/v1/relay/hello") as response:
                assert response.status == 200, "others are served meanwhile"
            entry = await asyncio.wait_for(cut, 60)
        assert entry["error"] == "no progress"
        assert entry["size"] == len(big.objects[largest])


async def test_a_client_that_never_finishes_its_report_is_cut_off(tmp_path: Path) -> None:
    async with Upstream(tmp_path / "store", stall_seconds=0.2) as upstream:
        reader, writer = await asyncio.open_connection("127.0.0.1", upstream.port)
        writer.write(
            f"POST /v1/relay/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


PATHS = st.one_of(
    st.sampled_from([path for _, path in ROUTES]).map(str.encode),
    st.binary(max_size=60),
    st.builds(
        lambda route, text: f"/v1/relay/{route}".encode() + text,
        st.sampled_from(["objects/", "runs/", "runs/policy/records/", "runs/policy/latest?after=", "report?"]),
        st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))),
    ),
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"Range", b"Content-Length", b"Transfer-Encoding", b"Content-Encoding", b"Expect", b"Cookie"]),
        st.one_of(
            st.binary(max_size=20), st.sampled_from([b"bytes=1-", b"5", b"-1", b"chunked", b"gzip", b"100-continue"])
        ),
    ),
    max_size=3,
)


async def ask_raw(port: int, request: bytes) -> bytes:
    """All that comes back, with no more sent than `request`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_no_bytes_at_all_give_a_5xx_or_touch_a_foreign_file(upstream: Upstream) -> None:
    opened = sorted(upstream.store.path.rglob("*"))
    loop = asyncio.get_running_loop()

    def fuzz() -> None:
        @settings(max_examples=300, suppress_health_check=list(HealthCheck))
        @given(
            method=st.one_of(st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT"]), st.binary(max_size=6)),
            path=PATHS,
            headers=HEADERS,
            data=st.binary(max_size=50),
        )
        def request(method: bytes, path: bytes, headers: list[tuple[bytes, bytes]], data: bytes) -> None:
            lines = [
                method + b" " + path + b" HTTP/1.1",
                b"Host: x",
                b"Connection: close",
                f"Authorization: Bearer {TOKEN}".encode(),
                *(name + b": " + value for name, value in headers),
            ]
            raw = b"\r\n".join([*lines, b"", data])
            reply = asyncio.run_coroutine_threadsafe(ask_raw(upstream.port, raw), loop).result(60)
            status = reply.split(b" ", 2)[1] if reply.startswith(b"HTTP/1.1 ") else b""
            assert not status.startswith(b"5"), (raw, reply)
            assert b"root:" not in reply

        request()

    await asyncio.to_thread(fuzz)
    assert sorted(upstream.store.path.rglob("*")) == opened


@given(st.integers(1, 10**9 - 1), st.integers(0, 10**15 - 1))
def test_versions_are_spelled_one_way(epoch: int, number: int) -> None:
    version = Version(epoch, number)
    assert parse_dotted(dotted(version)) == version


@given(st.text(max_size=30))
def test_no_text_is_parsed_as_something_else(text: str) -> None:
    for parse in (parse_dotted, parse_seconds):
        try:
            parse(text)
        except UsageError:
            continue
        assert all(character in "0123456789." for character in text)
    if (start := parse_range(text)) is not None:
        assert start >= 0
        assert text.startswith("bytes=")
