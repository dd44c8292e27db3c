"""No bytes in a path, query, header or body give a 5xx or touch a file outside the store (P40)."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.operations import RUN, LocalDaemon

SEGMENTS = st.one_of(
    st.sampled_from(
        [RUN, "v000001", "1@e2", "..", ".", "", "r0", "0" * 64, "%00", "..%2f..%2fetc%2fpasswd", "%ff", "%", "%zz", "*"]
    ),
    st.text(max_size=12).map(lambda text: quote(text, safe="")),
    st.binary(max_size=6).map(lambda data: quote(data, safe="")),
    st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#"), max_size=8),
)
WORDS = ["versions", "latest", "fleet", "publish", "pull", "target", "plan"]
PATHS = st.one_of(
    st.builds(
        "/v1/runs/{}/{}".format,
        SEGMENTS,
        st.sampled_from(["versions", "latest", "fleet", "publish", "pull", "target", "plan"]),
    ),
    st.builds("/v1/runs/{}/{}/{}".format, SEGMENTS, st.sampled_from(["versions", "records", "edges"]), SEGMENTS),
    st.builds("/v1/runs/{}/versions/{}/pin".format, SEGMENTS, SEGMENTS),
    st.builds("/v1/objects/{}".format, SEGMENTS),
    st.builds("/v1/replicas/{}/{}".format, SEGMENTS, st.sampled_from(["next", "state", ""])),
    st.lists(SEGMENTS, max_size=5).map(lambda parts: "/" + "/".join(parts)),
)
QUERIES = st.dictionaries(
    st.one_of(st.sampled_from(["after", "version", "verified"]), SEGMENTS.filter(lambda name: name != "wait")),
    SEGMENTS,
    max_size=3,
).map(lambda query: "&".join(f"{name}={value}" for name, value in query.items()))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
STATES = st.sampled_from(["verified", "unknown", "staging", "flying", None])
BODIES = st.one_of(
    st.binary(max_size=64),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional={
            "directory": st.one_of(st.text(max_size=8), st.text(max_size=8).map("/{}".format)),
            "number": st.integers(),
            "identity": st.text(max_size=4),
            "version": st.sampled_from(["", "v1", "v000001@e9", "x"]),
            "replica": st.sampled_from(["r0", "r1", "", "../r"]),
            "run": st.sampled_from([RUN, "..", "other"]),
            "variant": st.sampled_from(["bf16", ""]),
            "state": STATES,
            "root": st.sampled_from(["", "0" * 64, "zz"]),
            "wait": st.sampled_from([-1, 0, 1e300, "1"]),
            "error": st.text(max_size=8),
            "act": st.sampled_from(["hold", "release", "rollback", "drop", 1]),
            "fleet": st.sampled_from(["", "b", "../b"]),
            "why": st.text(max_size=300),
        },
    ).map(lambda value: json.dumps(value).encode()),
)
FUZZED = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


async def exchange(daemon: LocalDaemon, data: bytes, *, hang_up: bool = False) -> bytes:
    """All that comes back for some bytes; with `hang_up`, which incomplete ones need, that may be nothing."""
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
    try:
        writer.write(data)
        if hang_up:
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@given(method=st.sampled_from(["GET", "POST", "DELETE", "HEAD", "PUT"]), path=PATHS, query=QUERIES, body=BODIES)
@FUZZED
async def test_any_request_gets_an_answer_in_our_words_and_never_a_5xx(
    daemon: LocalDaemon, method: str, path: str, query: str, body: bytes
) -> None:
    if not daemon.fleet.is_registered("r0"):
        daemon.add(1, 2)
        status = await exchange(
            daemon, _request("POST", "/v1/replicas", '{"replica":"r0","run":"policy","variant":"bf16"}')
        )
        assert status.startswith(b"HTTP/1.1 200")
    reply = await exchange(daemon, _request(method, f"{path}?{query}" if query else path, body))
    head, _, content = reply.partition(b"\r\n\r\n")
    status_code = int(head.split()[1])
    assert status_code < 500, (head, content)
    if status_code >= 400 and b"application/json" in head and method != "HEAD":
        refusal = json.loads(content)
        assert refusal["error"]
        assert refusal["message"]
    assert not (daemon.store.path.parent / "etc").exists()


@given(
    junk=st.binary(max_size=200), name=st.sampled_from([b"Host", b"Content-Length", b"Transfer-Encoding", b"Accept"])
)
@FUZZED
async def test_any_bytes_at_all_cost_the_daemon_nothing(daemon: LocalDaemon, junk: bytes, name: bytes) -> None:
    headers = b"Connection: close\r\n" + name + b": " + junk
    replies = [
        await exchange(daemon, b"GET /v1/status HTTP/1.1\r\n" + headers + b"\r\n\r\n"),
        await exchange(daemon, b"GET /" + junk + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
        await exchange(daemon, junk, hang_up=True),
    ]
    for reply in replies:
        assert not reply or reply.split()[1] < b"500", reply
    assert (await exchange(daemon, _request("GET", "/v1/status"))).startswith(b"HTTP/1.1 200")


def _request(method: str, target: str, body: bytes | str = b"") -> bytes:
    content = body.encode() if isinstance(body, str) else body
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.mark.parametrize("path", ["/v1/runs/..%2f..%2f..%2fsecret/latest", "/v1/objects/..%2f..%2f..%2fsecret"])
async def test_no_path_reaches_a_file_outside_the_store(daemon: LocalDaemon, path: str) -> None:
    (daemon.store.path.parent / "secret").write_text("hunter2")
    assert b"hunter2" not in await exchange(daemon, _request("GET", path))
