"""Answers that stream from a replica's endpoint, over real TCP, while versions come and go."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.rollout_plugin.conftest import Running, StartReplica
from tests.rollout_plugin.region import Region
from tests.rollout_plugin.test_replica import log_of
from tests.rollout_plugin.test_server import PROMPT, generate


@pytest.fixture
def replica(region: Region, start_replica: StartReplica) -> Running:
    """A replica that serves version 0, verified."""
    replica = start_replica()
    region.await_verified(region.history[0])
    return replica


@contextmanager
def streamed(replica: Running, **fields: object) -> Iterator[Iterator[Any]]:
    """The lines of a streamed answer as they come."""
    connection = http.client.HTTPConnection(replica.url.removeprefix("http://"), timeout=60)
    body = {"prompt_ids": PROMPT, "max_new_tokens": 8, "stream": True, **fields}
    try:
        connection.request("POST", "/v1/generate", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield (json.loads(line) for line in response)
    finally:
        connection.close()


def test_a_streamed_answer_is_the_one_that_comes_in_one_piece(replica: Running) -> None:
    whole = generate(replica, n=2, seed=5, max_new_tokens=8)[1]
    with streamed(replica, n=2, seed=5) as lines:
        first, *middle, last = lines
    assert first["replica"] == "r1"
    assert last["ended"] == [sample["ended"] for sample in whole["samples"]]
    for at, sample in enumerate(whole["samples"]):
        mine = [line for line in middle if line.get("sample", 0) == at]
        assert [token for line in mine for token in line["token_ids"]] == sample["token_ids"]
        assert [number for line in mine for number in line["logprobs"]] == sample["logprobs"]
        assert [line["version"] for line in mine for _ in line["token_ids"]] == sample["versions"]


def test_the_first_tokens_of_a_streamed_answer_come_before_it_is_at_its_end(replica: Running) -> None:
    engine = replica.engine
    with streamed(replica, max_new_tokens=400) as lines:
        assert next(lines)["id"]
        assert next(lines)["token_ids"]
        with engine.pause():  # so it cannot have come to its end
            pass
        assert "ended" in list(lines)[-1]


def test_a_version_that_comes_in_the_midst_of_a_streamed_answer_is_seen_in_its_lines(
    region: Region, replica: Running
) -> None:
    with streamed(replica, max_new_tokens=490) as lines:
        next(lines)
        region.publish_changed()
        versions = [line["version"] for line in lines if line.get("version")]
    assert versions == sorted(versions)
    assert versions[0] == "v000000"


def test_what_is_refused_before_the_first_token_is_a_refusal_and_no_stream(replica: Running) -> None:
    for fields, expected in (
        ({"prompt_ids": []}, 400),
        ({"max_new_tokens": 1000}, 400),
        ({"min_version": "v000009"}, 409),
        ({"n": 300}, 413),
    ):
        status, reply = generate(replica, stream=True, **fields)
        assert (status, bool(reply["message"])) == (expected, True), fields


def test_a_fence_ends_a_streamed_answer_with_an_error_line(replica: Running) -> None:
    engine = replica.engine
    with streamed(replica, max_new_tokens=490) as lines:
        next(lines)
        engine.fence("a test")
        last = list(lines)[-1]
    assert last["error"]["retryable"] is True
    assert "a test" in last["error"]["message"]
    engine.unfence()


def test_a_streamed_answer_by_a_version_that_turns_out_wrong_is_listed_though_it_never_ended(
    region: Region, replica: Running
) -> None:
    """P30: what has left before the version was verified must be named when it fails."""
    engine, serving = replica.engine, replica.serving
    serving.doubt(engine.version)
    with streamed(replica, max_new_tokens=490) as lines:
        answer = next(lines)["id"]
        assert next(lines)["token_ids"]
        suspects = serving.fence("a test")
        engine.fence("a test")
        assert "error" in list(lines)[-1]
    assert suspects == (answer,)
    assert log_of(replica, "request_failed") == []


def test_an_engine_stops_when_the_reader_of_a_stream_goes_away(replica: Running) -> None:
    engine = replica.engine
    asked = threading.Event()
    whole, drawn = engine.generate, []

    def watched(*arguments: Any) -> Any:
        drawn.extend(whole(*arguments))
        asked.set()
        return drawn

    engine.generate = watched  # type: ignore[method-assign]
    with engine.pause(), streamed_later(replica) as connection:
        connection.close()
    assert asked.wait(60)
    assert len(drawn[0].token_ids) < 490


@contextmanager
def streamed_later(replica: Running) -> Iterator[http.client.HTTPConnection]:
    """A connection on which a long answer was asked for, and no byte of it came yet."""
    connection = http.client.HTTPConnection(replica.url.removeprefix("http://"), timeout=60)
    connection.request(
        "POST", "/v1/generate", json.dumps({"prompt_ids": PROMPT, "max_new_tokens": 490, "stream": True})
    )
    yield connection
