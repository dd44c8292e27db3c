"""A replica's endpoint over real TCP: what it answers, while versions come and go, and to nonsense."""

from __future__ import annotations

import http.client
import io
import json
import threading
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deltad.client.messages import NextReply
from deltad.errors import ConfigError
from rollout_plugin.engines import Listener, Sample, Sampling
from rollout_plugin.log import Log
from rollout_plugin.server import Endpoint
from rollout_plugin.serving import Serving
from tests.rollout_plugin.conftest import Running, StartReplica
from tests.rollout_plugin.region import Region
from tests.rollout_plugin.test_replica import log_of

PROMPT = [72, 101, 108, 108, 111]


def ask(url: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        connection.request(method, path, data)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def generate(replica: Running, **fields: object) -> tuple[int, Any]:
    return ask(replica.url, "POST", "/v1/generate", {"prompt_ids": PROMPT, "max_new_tokens": 4, **fields})


@pytest.fixture
def replica(region: Region, start_replica: StartReplica) -> Running:
    """A replica that serves version 0, verified."""
    replica = start_replica()
    region.await_verified(region.history[0])
    return replica


def test_samples_name_the_version_of_every_token(replica: Running) -> None:
    status, reply = generate(replica, n=3, seed=2)
    assert status == 200
    assert reply["versions"] == ["v000000"]
    assert reply["replica"] == "r1"
    assert len(reply["samples"]) == 3
    for sample in reply["samples"]:
        assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["versions"])
        assert set(sample["versions"]) == {"v000000"}


def test_logprobs_name_their_version(replica: Running) -> None:
    status, reply = ask(replica.url, "POST", "/v1/logprobs", {"token_ids": PROMPT})
    assert status == 200
    assert (reply["version"], len(reply["logprobs"])) == ("v000000", len(PROMPT) - 1)
    assert reply["logprobs"] == list(replica.engine.logprobs(PROMPT).logprobs)


def test_the_version_route_says_what_is_served(replica: Running) -> None:
    assert ask(replica.url, "GET", "/v1/version") == (
        200,
        {
            "replica": "r1",
            "run": "policy",
            "variant": "bf16",
            "version": "v000000",
            "verified": True,
            "coming": "",
        },
    )


@pytest.mark.parametrize(("method", "path", "code"), [("GET", "/", 404), ("GET", "/v1/generate", 405)])
def test_a_route_that_is_not_there_is_answered_with_those_that_are(
    replica: Running, method: str, path: str, code: int
) -> None:
    status, reply = ask(replica.url, method, path)
    assert (status, reply["error"]) == (code, "NotFound")
    assert f"{method} {path}: " in reply["message"]
    for route in ("POST /v1/generate", "POST /v1/logprobs", "GET /v1/version", "GET /healthz"):
        assert route in reply["message"]


def test_a_replica_says_that_it_lives_before_it_serves() -> None:
    endpoint = Endpoint(
        Serving(), replica="r2", run="policy", variant="bf16", host="127.0.0.1", port=0, log=Log(io.StringIO())
    )
    url = endpoint.start()
    try:
        with urllib.request.urlopen(f"{url}/healthz") as reply:
            assert (reply.status, reply.read()) == (200, b"alive\n")
        assert ask(url, "GET", "/v1/version")[0] >= 400
    finally:
        endpoint.stop()


def test_an_answer_in_flight_across_a_commit_completes_and_shows_both_versions(
    region: Region, replica: Running
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, replica, max_new_tokens=490)
        while not running.done():
            region.await_verified(region.publish_changed(seed=len(region.history)))
        status, reply = running.result()
    assert status == 200
    (sample,) = reply["samples"]
    assert len(set(sample["versions"])) > 1
    assert sample["versions"] == sorted(sample["versions"])
    assert reply["versions"] == sorted(set(sample["versions"]))


def test_a_request_for_a_newer_version_waits_for_it(region: Region, replica: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, replica, min_version="v000001", wait=60)
        region.await_verified(region.publish_changed())
        status, reply = running.result()
    assert status == 200
    assert reply["versions"] == ["v000001"]


def test_a_request_that_has_waited_long_enough_is_told_to_try_again_and_what_is_coming(
    region: Region, replica: Running
) -> None:
    status, reply = generate(replica, min_version="v000001")
    assert status == 409
    assert (reply["retryable"], reply["version"], reply["coming"]) == (True, "v000000", "")

    staging, go_on = threading.Event(), threading.Event()
    region.offers = lambda reply: reply and NextReply(reply.target, reload=True)

    def hold() -> None:
        staging.set()
        go_on.wait(60)

    region.before_export = hold
    after = region.publish_changed()
    assert staging.wait(60)
    status, reply = generate(replica, min_version="v000001")
    assert (status, reply["retryable"], reply["coming"]) == (409, True, "v000001")
    assert "v000001 is coming" in reply["message"]
    go_on.set()
    region.await_verified(after)


def test_before_the_first_version_is_verified_nothing_is_served(region: Region, start_replica: StartReplica) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        asked.set()
        go_on.wait(60)

    region.before_export = hold
    replica = start_replica()
    assert asked.wait(60)
    for method, path, body in (
        ("GET", "/v1/version", None),
        ("POST", "/v1/generate", {"prompt_ids": PROMPT}),
        ("POST", "/v1/logprobs", {"token_ids": PROMPT}),
    ):
        status, reply = ask(replica.url, method, path, body)
        assert (status, reply["retryable"]) == (503, True)
    go_on.set()
    region.await_verified(region.history[0])
    assert ask(replica.url, "GET", "/v1/version")[0] == 200


def test_a_fenced_replica_answers_503_and_lists_the_answers_that_wrong_weights_gave(
    region: Region, replica: Running
) -> None:
    """P30: a version is served from the commit on, and turns out wrong when it is read back."""
    engine = replica.engine
    before = region.history[0]
    weights = before.weights.copy()
    weights.arrays[0][0] ^= 1
    given: list[str] = []

    def answer_before_reading_back() -> None:
        # The read-back asks this first: an answer is given between the commit and the read-back.
        if engine.version.number == 1 and not given:
            engine.live.whole(1)[7] ^= 1
            given.append(generate(replica)[1]["id"])

    engine.live.check_live = answer_before_reading_back  # type: ignore[method-assign]
    go_on = threading.Event()
    region.before_export = lambda: go_on.wait(60) and None
    good = generate(replica)[1]["id"]
    after = region.publish(before.layout, weights, before.files)
    region.await_replica(lambda r: "served weights of v000001" in r.error)

    for method, path, body in (
        ("GET", "/v1/version", None),
        ("POST", "/v1/generate", {"prompt_ids": PROMPT}),
        ("POST", "/v1/logprobs", {"token_ids": PROMPT}),
    ):
        status, reply = ask(replica.url, method, path, body)
        assert (status, reply["retryable"]) == (503, True)
        assert "fenced: served weights of v000001" in reply["message"]
    (line,) = log_of(replica, "fenced")
    assert line["suspect_answers"] == given
    assert good not in given
    go_on.set()
    region.await_verified(after)
    assert generate(replica)[0] == 200


@pytest.mark.parametrize("heals", [False, True])
def test_an_answer_whose_last_step_ends_just_before_the_fence_is_listed_or_withheld(
    replica: Running, heals: bool
) -> None:
    """P30: the list of suspects is closed with the fence, so what comes after it may not go out."""
    engine, serving = replica.engine, replica.serving
    whole = engine.generate

    def fenced_after_the_last_step(
        prompt: Sequence[int], sampling: Sampling, listener: Listener | None = None
    ) -> list[Sample]:
        samples = whole(prompt, sampling)
        assert serving.fence("a test") == ()
        if heals:
            serving.verified(engine)
        return samples

    engine.generate = fenced_after_the_last_step  # type: ignore[method-assign, assignment]
    serving.doubt(engine.version)
    status, reply = generate(replica)
    assert (status, reply["retryable"]) == (503, True)
    engine.generate = whole  # type: ignore[method-assign]
    serving.verified(engine)
    assert generate(replica)[0] == 200


def test_a_fence_ends_an_answer_in_flight(replica: Running) -> None:
    engine = replica.engine
    with ThreadPoolExecutor(1) as pool:
        with engine.pause():
            running = pool.submit(generate, replica, max_new_tokens=490)
            engine.fence("a test")
        status, reply = running.result()
    assert (status, reply["retryable"]) == (503, True)
    engine.unfence()


MALFORMED: list[tuple[str, object]] = [
    ("/v1/generate", b""),
    ("/v1/generate", b"{"),
    ("/v1/generate", b"[]"),
    ("/v1/generate", b"\xff\xfe"),
    ("/v1/generate", b"[" * 100_000),
    ("/v1/generate", {}),
    ("/v1/generate", {"prompt_ids": []}),
    ("/v1/generate", {"prompt_ids": [1.5]}),
    ("/v1/generate", {"prompt_ids": [10**30]}),
    ("/v1/generate", {"prompt_ids": [257]}),
    ("/v1/generate", {"prompt_ids": PROMPT, "n": 0}),
    ("/v1/generate", {"prompt_ids": PROMPT, "n": 257}),
    ("/v1/generate", {"prompt_ids": PROMPT, "n": 2**62, "max_new_tokens": 2**62}),
    ("/v1/generate", {"prompt_ids": PROMPT, "max_new_tokens": 1000}),
    ("/v1/generate", {"prompt_ids": PROMPT, "temperature": -1}),
    ("/v1/generate", {"prompt_ids": PROMPT, "temperature": 1e300}),
    ("/v1/generate", {"prompt_ids": PROMPT, "min_version": "newest"}),
    ("/v1/generate", {"prompt_ids": PROMPT, "sampling": "hot"}),
    ("/v1/logprobs", {"token_ids": [1]}),
    ("/v1/logprobs", {"token_ids": [1] * 600}),
    ("/v1/generate", b" " * (2 << 20)),
    ("/v1/%2e%2e/etc/passwd", {}),
    ("/v1/version", {}),
]


def test_no_request_however_malformed_gives_a_5xx(replica: Running) -> None:
    for path, body in MALFORMED:
        status, reply = ask(replica.url, "POST", path, body)
        assert 400 <= status < 500, (path, body)
        assert reply["message"]
        assert reply["retryable"] is False
    assert generate(replica)[0] == 200


def test_weights_that_diverged_are_said_and_not_sampled(replica: Running) -> None:
    engine = replica.engine
    with engine.pause():
        engine.model.model.norm.weight.fill_(float("nan"))
    for path, body in (("/v1/generate", {"prompt_ids": PROMPT}), ("/v1/logprobs", {"token_ids": PROMPT})):
        status, reply = ask(replica.url, "POST", path, body)
        assert status == 503
        assert "policy v000000: expected log-probs, found NaN" in reply["message"]


def test_a_bug_in_the_engine_is_a_500_with_a_traceback_in_the_log(replica: Running) -> None:
    replica.engine.model = None
    status, reply = generate(replica)
    assert (status, reply["retryable"]) == (500, False)
    assert "TypeError" in str(log_of(replica, "request_failed")[0]["error"])


def test_seeds_of_any_size_work(replica: Running) -> None:
    for seed in (-1, 0, 2**63 - 1, 2**64 - 1):
        assert generate(replica, seed=seed)[0] == 200


def test_an_address_in_use_is_said_at_once(replica: Running) -> None:
    port = int(replica.url.rpartition(":")[2])
    second = Endpoint(
        Serving(), replica="r2", run="policy", variant="bf16", host="127.0.0.1", port=port, log=Log(io.StringIO())
    )
    with pytest.raises(ConfigError, match=f"--listen 127.0.0.1:{port}"):
        second.start()
    second.stop()
