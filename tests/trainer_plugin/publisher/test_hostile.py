"""Whatever is sent to the routes of a publisher: an error in words, no version, and the next step works."""

from __future__ import annotations

import http.client
import itertools
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.client.handover import BLOCK, CHUNK, HEAD, TAIL, HandedOver, HandOver, JoinRequest
from deltad.delta.backend import choose
from deltad.delta.frame import Rect
from deltad.delta.shards import ArraySource, ShardEncoder
from tests.kit.daemons import Daemon
from tests.kit.weights import ArrayWeights
from tests.trainer_plugin.publisher.conftest import LAYOUT, RUN, Ranks


def send(daemon: Daemon, route: str, body: bytes) -> tuple[int, str]:
    """One request as a stranger would write it; the status and what was said."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(str(daemon.home / "deltad.sock"))
        raw.sendall(
            f"POST /v1/runs/{RUN}/{route} HTTP/1.1\r\nHost: deltad\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        reply = http.client.HTTPResponse(raw)
        reply.begin()
        return reply.status, reply.read().decode()


def block(kind: int, data: bytes) -> bytes:
    return BLOCK.pack(kind, len(data)) + data


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


HEADS = packed(HandOver("s", 0, 1))
END = block(TAIL, packed(HandedOver(b"", b"", 0, ())))


STEPS = itertools.count(2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    daemon = Daemon(tmp_path_factory.mktemp("daemon"), "trainer-host", f'[[run]]\nid = "{RUN}"\n').start()
    made = Ranks(daemon, 1)
    made.publish(0, ArrayWeights.bell(LAYOUT))
    yield made
    daemon.stop()


def beyond() -> bytes:
    """A chunk for a tensor that the only rank does hold, but at a place that it does not."""
    wide = LAYOUT.tensors[0]
    encoder = ShardEncoder(
        LAYOUT, [Rect(0, (0, 0), wide.shape)], [ArraySource(ArrayWeights.bell(LAYOUT).arrays[0])], choose()
    )
    return next(iter(encoder.chunks())).data


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "cut off"),
        (block(CHUNK, b"x"), 400, "its head as the first block"),
        (block(HEAD, b"\xc1"), 400, "a HandOver in MessagePack"),
        (block(HEAD, packed(HandOver("s", 0, -1))), 400, "number"),
        (block(HEAD, packed(HandOver("s", 7, 1))) + END, 409, "a rank that has joined"),
        (block(HEAD, packed(HandOver("nobody", 0, 1))) + END, 409, "join again"),
        (block(HEAD, HEADS) + BLOCK.pack(CHUNK, 1 << 31), 413, "at most"),
        (block(HEAD, HEADS) + block(CHUNK, b"no frame"), 422, "frame"),
        (block(HEAD, HEADS) + block(CHUNK, b""), 400, "chunks and then its end"),
        (block(HEAD, HEADS) + block(9, b""), 400, "a block of kind 9"),
        (block(HEAD, HEADS) + block(CHUNK, beyond())[:-5], 400, "cut off 5 bytes short"),
        (block(HEAD, HEADS) + block(TAIL, b"\x00"), 400, "a HandedOver in MessagePack"),
        (block(HEAD, HEADS) + END, 400, "16 bytes for each of its"),
    ],
)
def test_a_step_that_is_none_is_refused_in_words_and_the_next_is_published(
    ranks: Ranks, body: bytes, status: int, said: str
) -> None:
    before = len(ranks.daemon.client.versions(RUN))
    found, text = send(ranks.daemon, "steps", body)
    assert (found, said in text) == (status, True), text
    number = next(STEPS)
    outcome = ranks.publish(number, ArrayWeights.bell(LAYOUT).changed(0.1, seed=number))[0]
    assert outcome.version is not None, outcome.reason
    assert len(ranks.daemon.client.versions(RUN)) == before + 1


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=60)), max_size=4).map(
            lambda blocks: block(HEAD, HEADS) + b"".join(block(*each) for each in blocks)
        ),
    ),
    st.sampled_from(["steps", "ranks"]),
)
def test_no_bytes_are_answered_with_a_fault_of_the_daemons(ranks: Ranks, body: bytes, route: str) -> None:
    status, text = send(ranks.daemon, route, body)
    assert 400 <= status < 500, text


def test_a_share_that_reaches_beyond_the_ranks_own_shards_is_refused(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 2)
    ranks.publish(0, ArrayWeights.bell(LAYOUT))
    head = packed(HandOver("s", 1, 1, None))
    status, text = send(daemon, "steps", block(HEAD, head) + block(CHUNK, beyond()))
    assert (status, "changes of the shards that it hands over" in text) == (400, True), text


def test_a_world_without_end_is_refused(daemon: Daemon) -> None:
    status, text = send(daemon, "ranks", packed(JoinRequest("s", 0, 1 << 40, ())))
    assert (status, "ranks" in text) == (413, True), text
