"""The client alone: what it raises, what it believes, and that it is light and safe to share.

What it says to a daemon, route by route, is in tests/local/test_server.py.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad import errors
from deltad.client import Client
from deltad.client.client import rebuild_error
from deltad.client.messages import ErrorReply, PublishRequest
from deltad.errors import (
    CheckpointChangedError,
    DeltadError,
    IntegrityError,
    LimitError,
    NotFoundError,
    PeerError,
    StoreFullError,
    UnavailableError,
)
from deltad.limits import Limits
from tests.kit.operations import RUN, LocalDaemon, serve_locally


def every_error() -> list[type[DeltadError]]:
    """Those of the tree that travel; what another module keeps for itself does not."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DeltadError)]


@contextmanager
def answering(path: Path, reply: bytes) -> Iterator[None]:
    """A program that is no daemon: answers every connection on a socket with the same bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def http(body: bytes, *, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


@pytest.mark.parametrize("kind", every_error())
async def test_every_error_arrives_as_what_it_was(daemon: LocalDaemon, kind: type[DeltadError]) -> None:
    sent = kind("/checkpoints/step_1", expected="this", found="that", hint="do so")
    daemon.operations.refusal = sent
    with pytest.raises(DeltadError) as caught:
        await daemon.ask(daemon.client.publish, RUN, PublishRequest("/checkpoints/step_1"))
    got = caught.value
    assert type(got) is kind
    assert str(got) == "/checkpoints/step_1: expected this, found that; do so"
    assert (got.kind, got.retryable, got.exit_code) == (sent.kind, sent.retryable, sent.exit_code)


def test_an_error_of_a_newer_daemon_keeps_its_words_exit_code_and_whether_to_try_again() -> None:
    error = rebuild_error(ErrorReply("Quota", "run policy: over its quota", retryable=True, exit_code=75))
    assert type(error) is DeltadError
    assert (str(error), error.retryable, error.exit_code) == ("run policy: over its quota", True, 75)
    assert (DeltadError("x").retryable, DeltadError("x").exit_code) == (False, 1)
    assert isinstance(rebuild_error(ErrorReply("StoreFull", "disk full")), StoreFullError)
    assert isinstance(rebuild_error(ErrorReply("CheckpointChanged", "moved")), CheckpointChangedError)


@pytest.mark.parametrize("left", ["nothing", "a dead socket", "a file"])
def test_where_nobody_listens_the_socket_is_named_and_the_next_step_too(tmp_path: Path, left: str) -> None:
    path = tmp_path / "deltad.sock"
    if left == "a dead socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(path))
    elif left == "a file":
        path.write_text("")
    with pytest.raises(UnavailableError, match="is `deltad serve` running") as caught:
        Client(path).status()
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 69


def test_a_path_too_long_for_a_socket_is_unavailable_too(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="too long"):
        Client(tmp_path / ("x" * 120)).status()


def test_a_daemon_that_does_not_answer_in_time_is_unavailable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hung:
        hung.bind(str(tmp_path / "hung.sock"))
        hung.listen()
        with pytest.raises(UnavailableError, match=r"an answer within 0\.05 s"):
            Client(tmp_path / "hung.sock", timeout=0.05).status()


async def test_one_client_outlives_its_daemon(tmp_path: Path) -> None:
    async with serve_locally(tmp_path) as daemon:
        client = daemon.client
        before = await daemon.ask(client.status)
    with pytest.raises(UnavailableError):
        await asyncio.to_thread(client.status)
    async with serve_locally(tmp_path) as daemon:
        assert await daemon.ask(client.status) == before


async def test_threads_may_share_a_client(daemon: LocalDaemon) -> None:
    objects = [bytes([place]) * 300_000 for place in range(16)]
    digests = [daemon.store.put(data) for data in objects]
    with ThreadPoolExecutor(8) as threads:
        loop = asyncio.get_running_loop()
        got = await asyncio.gather(*(loop.run_in_executor(threads, daemon.client.object, d) for d in digests * 4))
    assert got == objects * 4


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", UnavailableError),
        (b"HTTP/1.1 200 OK\r\nContent-Le", PeerError),
        (http(b'{"daemon":', length=100), UnavailableError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", PeerError),
        (http(b"hello"), PeerError),
        (http(b"{}"), PeerError),
        (http(b'{"daemon": "\xff"}'), PeerError),
        (http(b'{"x":' + b"[" * 100_000), PeerError),
        (http(b"", status="204 No Content"), PeerError),
        (http(b"", status="302 Found"), PeerError),
        (http(b"<h1>nginx</h1>", status="502 Bad Gateway"), PeerError),
        (http(b'{"error": 1}', status="404 Not Found"), PeerError),
        (http(b"", length=1 << 40), LimitError),
        (http(b"{}", status="404 Not Found", length=-1), PeerError),
    ],
)
def test_what_is_no_reply_of_a_daemon_is_an_error_that_names_the_socket(
    tmp_path: Path, reply: bytes, error: type[DeltadError]
) -> None:
    path = tmp_path / "deltad.sock"
    with answering(path, reply), pytest.raises(error) as caught:
        Client(path, timeout=30.0).status()
    assert str(path) in str(caught.value)


def test_an_object_with_other_bytes_than_its_name_is_never_handed_out(tmp_path: Path) -> None:
    with answering(tmp_path / "s", http(b"other bytes")), pytest.raises(IntegrityError, match="SHA-256"):
        Client(tmp_path / "s").object("0" * 64)


def test_a_reply_above_its_limit_or_without_a_length_is_refused_unread(tmp_path: Path) -> None:
    client = Client(tmp_path / "s", limits=Limits(record_bytes=1000))
    with answering(tmp_path / "s", http(b"x" * 1001)), pytest.raises(LimitError, match="at most 1000 bytes"):
        client.record_bytes(RUN, "v1")
    (tmp_path / "s").unlink()
    with (
        answering(tmp_path / "s", b"HTTP/1.1 200 OK\r\n\r\nshort"),
        pytest.raises(PeerError, match="without its length"),
    ):
        client.record_bytes(RUN, "v1")
    (tmp_path / "s").unlink()
    with answering(tmp_path / "s", http(b"short", length=6)), pytest.raises(UnavailableError, match="cut"):
        client.record_bytes(RUN, "v1")


@given(reply=st.one_of(st.binary(max_size=200), st.binary(max_size=50).map(http)))
def test_any_bytes_at_all_are_one_of_our_errors(tmp_path_factory: pytest.TempPathFactory, reply: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "s"
    with answering(path, reply), pytest.raises(DeltadError):
        Client(path, timeout=30.0).status()


async def test_a_name_that_is_no_name_is_refused_by_the_daemon_and_reaches_no_other_route(daemon: LocalDaemon) -> None:
    for run in ("../v1/status", "a/b", "a?b=c", "a#b", "a\r\nX: y", "ü", ""):
        with pytest.raises(DeltadError) as caught:
            await daemon.ask(daemon.client.versions, run)
        assert caught.value.kind in ("Usage", "NotFound")


async def test_not_found_is_told_apart_from_unavailable(daemon: LocalDaemon) -> None:
    with pytest.raises(NotFoundError):
        await daemon.ask(daemon.client.versions, "other")


def test_importing_the_client_loads_no_framework_and_no_server() -> None:
    code = (
        "import sys, deltad.client; heavy = {'aiohttp', 'torch', 'numba', 'numpy', 'zstandard', 'uvloop', 'asyncio', "
        "'structlog', 'prometheus_client', 'rich', 'click'}; print(*sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
