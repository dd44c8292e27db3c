"""The gateway over real TCP, before replicas that swap, die, break off and stall by a script."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deltad.client.messages import ReplicaState
from rollout_plugin.gateway.admission import Pace
from rollout_plugin.gateway.text import Words, load_words
from rollout_plugin.messages import Refusal
from tests.rollout_plugin.gateway.stubs import Stage, StubReplica, events, staged

PROMPT = [10, 11, 12]


def call(stage: Stage, path: str, body: object = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection(stage.url.removeprefix("http://"), timeout=60)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body) if body is not None else None
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        raw = response.read()
        got = dict(response.getheaders())
        if response.getheader("Content-Type", "").startswith("text/event-stream"):
            return response.status, events(raw), got
        if response.getheader("Content-Type", "").startswith("application/json"):
            return response.status, json.loads(raw), got
        return response.status, raw, got
    finally:
        connection.close()


def complete(stage: Stage, **fields: object) -> tuple[int, Any, dict[str, str]]:
    return call(stage, "/v1/completions", {"model": "policy", "prompt": PROMPT, "max_tokens": 6, **fields})


def swaps_at(number: int, version: str = "v000002") -> Any:
    def at_token(stub: StubReplica, token: int) -> None:
        if token == number and stub.version < version:
            stub.version = version

    return at_token


def once(number: int, what: str) -> Any:
    """Cut, or broken off, before that token, the first time."""
    done: list[int] = []

    def at_token(stub: StubReplica, token: int) -> str:
        if token == number and not done:
            done.append(token)
            return what
        return ""

    return at_token


def test_a_whole_answer_names_the_version_of_every_token_in_its_body_and_its_headers() -> None:
    with staged(StubReplica("r1", at_token=swaps_at(4))) as stage:
        status, reply, headers = complete(stage, logprobs=1)
    assert status == 200
    (choice,) = reply["choices"]
    assert choice["token_ids"] == [3, 4, 5, 6, 7, 8]
    assert choice["weight_versions"] == [
        {"version": "v000001", "start": 0, "end": 4},
        {"version": "v000002", "start": 4, "end": 6},
    ]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 6
    assert choice["finish_reason"] == "length"
    assert reply["weight_version"] == {"began": "v000001", "ended": "v000002"}
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert (headers["Deltad-Version-Began"], headers["Deltad-Version-Ended"]) == ("v000001", "v000002")
    assert headers["Deltad-Replica"] == "d/r1"


def test_a_streamed_answer_shows_a_swap_as_it_happens() -> None:
    with staged(StubReplica("r1", at_token=swaps_at(4))) as stage:
        status, said, headers = complete(stage, stream=True, stream_options={"include_usage": True})
    assert (status, headers["Deltad-Version-Began"], said[-1]) == (200, "v000001", None)
    *chunks, last = said[:-1]
    tokens = [(token, c["choices"][0]["weight_version"]) for c in chunks for token in c["choices"][0]["token_ids"]]
    assert tokens == [(3 + at, "v000001" if at < 4 else "v000002") for at in range(6)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(chunks[-1]["choices"][0]["weight_versions"]) == 2
    assert last["weight_version"] == {"began": "v000001", "ended": "v000002"}
    assert last["usage"]["completion_tokens"] == 6


def test_several_prompts_and_samples_are_choices_in_order() -> None:
    with staged(StubReplica("r1")) as stage:
        status, reply, _ = complete(stage, prompt=[[1], [1, 2]], n=2, max_tokens=2)
    assert status == 200
    assert [(c["index"], c["token_ids"]) for c in reply["choices"]] == [
        (0, [1, 2]),
        (1, [1, 2]),
        (2, [2, 3]),
        (3, [2, 3]),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_aborts_at_a_swap_is_partial_and_can_be_resumed_by_its_tokens(stream: bool) -> None:
    with staged(StubReplica("r1", at_token=swaps_at(4))) as stage:
        status, reply, _ = complete(stage, weight_version={"on_swap": "abort"}, stream=stream)
        assert status == 200
        if stream:
            choice = reply[-3]["choices"][0]
            tokens = [t for chunk in reply[:-2] for t in chunk["choices"][0]["token_ids"]]
        else:
            (choice,) = reply["choices"]
            tokens = choice["token_ids"]
        assert (tokens, choice["finish_reason"]) == ([3, 4, 5, 6], "abort")
        assert choice["weight_versions"] == [{"version": "v000001", "start": 0, "end": 4}]
        _, rest, _ = complete(stage, prompt=[*PROMPT, *tokens], max_tokens=2)
        assert rest["choices"][0]["token_ids"] == [7, 8]
        assert metric(stage, "deltad_gateway_aborted_answers_total") == 1


def test_an_answer_that_resumes_reads_its_tokens_anew_with_the_new_weights() -> None:
    stub = StubReplica("r1", at_token=swaps_at(4))
    with staged(stub) as stage:
        status, reply, _ = complete(stage, weight_version={"on_swap": "resume"}, n=2)
    assert status == 200
    for choice in reply["choices"]:
        assert choice["token_ids"] == [3, 4, 5, 6, 7, 8]
    swapped = [asked for asked in stub.asked if len(asked.prompt_ids) == 7]
    assert swapped
    assert {asked.min_version for asked in swapped} == {"v000002"}
    assert {asked.max_new_tokens for asked in swapped} == {2}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_replica_is_cut_goes_on_at_another_one_without_a_gap_or_a_token_twice(stream: bool) -> None:
    stubs = [StubReplica(name, at_token=once(3, "cut")) for name in ("r1", "r2", "r3")]
    with staged(*stubs) as stage:
        status, reply, _ = complete(stage, stream=stream, max_tokens=8)
    assert status == 200
    choices = [c for chunk in reply[:-1] for c in chunk["choices"]] if stream else reply["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == list(range(3, 11))
    assert choices[-1]["finish_reason"] == "length"


def test_an_answer_whose_replica_falls_silent_goes_on_at_another_one() -> None:
    stalls = asyncio.Event()
    stalled: list[str] = []

    async def stall(stub: StubReplica) -> None:
        stalled.append(stub.name)
        await stalls.wait()

    def at_token(stub: StubReplica, token: int) -> Any:
        return stall(stub) if token == 3 and not stalled else ""

    with staged(*(StubReplica(name, at_token=at_token) for name in ("r1", "r2")), silence=0.3) as stage:
        status, reply, headers = complete(stage)
    assert (status, reply["choices"][0]["token_ids"]) == (200, [3, 4, 5, 6, 7, 8])
    assert headers["Deltad-Replica"] != f"d/{stalled[0]}"


def test_samples_of_one_prompt_survive_the_death_of_their_replica_each_for_itself() -> None:
    stubs = [StubReplica(name, at_token=once(3, "cut")) for name in ("r1", "r2", "r3", "r4", "r5")]
    with staged(*stubs) as stage:
        status, reply, _ = complete(stage, n=4)
    assert status == 200
    assert [choice["token_ids"] for choice in reply["choices"]] == [[3, 4, 5, 6, 7, 8]] * 4


def test_an_answer_that_broke_off_is_begun_anew_where_nothing_was_given_away() -> None:
    """What a fenced replica gave may be wrong: none of it may be in the answer."""
    stub = StubReplica("r1", at_token=once(3, "fence"))
    with staged(stub) as stage:
        status, reply, _ = complete(stage)
    assert (status, reply["choices"][0]["token_ids"]) == (200, [3, 4, 5, 6, 7, 8])
    assert [asked.prompt_ids for asked in stub.asked] == [PROMPT, PROMPT]


def test_a_streamed_answer_that_broke_off_ends_with_an_error_and_without_the_mark_of_its_end() -> None:
    go_on = threading.Event()

    async def break_off() -> str:
        await asyncio.to_thread(go_on.wait, 60)
        return "fence"

    with staged(StubReplica("r1", at_token=lambda stub, token: break_off() if token == 3 else "")) as stage:
        connection = http.client.HTTPConnection(stage.url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 6, "stream": True}))
        response = connection.getresponse()
        first = response.read1(1 << 16)
        go_on.set()
        said = events(first + response.read())
        connection.close()
    assert response.status == 200
    assert None not in said
    assert [token for chunk in said[:-1] for token in chunk["choices"][0]["token_ids"]] == [3, 4, 5]
    assert said[-1]["error"]["retryable"] is True
    assert "fenced" in said[-1]["error"]["message"]


def test_a_replica_that_refuses_is_passed_over() -> None:
    refusal = Refusal("Unavailable", "replica: fenced: a test", True)
    stubs = [StubReplica(name, refuses=refusal) for name in ("r1", "r2")]
    with staged(*stubs, StubReplica("r3")) as stage:
        for at in range(8):
            assert complete(stage, prompt=[at])[0] == 200


def test_a_version_that_is_not_served_is_a_retryable_409_that_names_the_one_that_is_coming() -> None:
    with staged(StubReplica("r1", staleness=1)) as stage:
        stage.latest = "v000002"
        stage.settled(lambda: str(stage.fleet and stage.fleet.roster.latest) == "v000002")
        for asked in ({"min": "v000002"}, {"exact": "v000002"}, {"max_staleness": 0}):
            status, reply, headers = complete(stage, weight_version=asked)
            assert (status, reply["error"]["retryable"], reply["error"]["coming"]) == (409, True, "v000002")
            assert "v000002 is coming" in reply["error"]["message"]
            assert headers["Retry-After"]
        status, reply, _ = complete(stage, weight_version={"exact": "v000000"})
        assert (status, reply["error"]["retryable"]) == (409, False)
        assert complete(stage, weight_version={"max_staleness": 1})[0] == 200


def test_a_request_that_asked_to_wait_is_answered_when_its_version_is_verified() -> None:
    stub = StubReplica("r1")
    with staged(stub) as stage, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, stage, weight_version={"min": "v000002", "wait": 60})
        stage.settled(lambda: metric(stage, "deltad_gateway_held_requests") == 1)
        assert stub.asked == []
        stub.version = stage.latest = "v000002"
        status, reply, _ = waiting.result()
    assert (status, reply["weight_version"]["began"]) == (200, "v000002")


def test_a_request_for_an_exact_version_never_holds_a_token_of_another() -> None:
    with staged(StubReplica("r1", at_token=swaps_at(2))) as stage:
        status, reply, _ = complete(stage, weight_version={"exact": "v000001"})
    assert status == 200
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert reply["choices"][0]["weight_versions"] == [{"version": "v000001", "start": 0, "end": 2}]


def test_the_bound_on_staleness_holds_requests_back_until_a_replica_has_caught_up() -> None:
    stub = StubReplica("r1", staleness=3)
    with staged(stub, most_stale=2) as stage, ThreadPoolExecutor(1) as pool:
        assert complete(stage)[0] == 409
        waiting = pool.submit(complete, stage, weight_version={"wait": 60})
        stage.settled(lambda: metric(stage, "deltad_gateway_held_requests") == 1)
        stub.staleness = 2
        assert waiting.result()[0] == 200


def test_rollouts_that_would_run_too_far_ahead_of_the_trainer_are_held_until_its_next_version() -> None:
    stub = StubReplica("r1")
    with staged(stub, pace=Pace(batch=2, bound=0)) as stage, ThreadPoolExecutor(1) as pool:
        assert [complete(stage)[0] for _ in range(2)] == [200, 200]
        waiting = pool.submit(complete, stage)
        stage.settled(lambda: metric(stage, "deltad_gateway_held_requests") == 1)
        assert len(stub.asked) == 2
        stage.latest, stage.sequence, stub.version = "v000002", 2, "v000002"
        assert waiting.result()[0] == 200


def test_requests_beyond_what_may_run_take_turns_and_beyond_what_may_wait_are_told_to_come_again() -> None:
    go_on = threading.Event()

    async def hold(stub: StubReplica, token: int) -> None:
        await asyncio.to_thread(go_on.wait, 60)

    def at_token(stub: StubReplica, token: int) -> Any:
        return hold(stub, token)

    stub = StubReplica("r1", at_token=at_token)
    with staged(stub, most_running=1, most_waiting=2) as stage, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(complete, stage) for _ in range(3)]
        stage.settled(lambda: metric(stage, "deltad_gateway_held_requests") == 2)
        status, reply, headers = complete(stage)
        assert (status, reply["error"]["retryable"], headers["Retry-After"]) == (429, True, "1")
        assert len(stub.asked) == 1
        go_on.set()
        assert [request.result()[0] for request in running] == [200] * 3


def test_a_client_that_goes_away_gives_its_turn_back_and_ends_the_sampling() -> None:
    go_on = threading.Event()

    def at_token(stub: StubReplica, token: int) -> Any:
        return asyncio.to_thread(go_on.wait, 60) if token == 1 else ""

    stub = StubReplica("r1", at_token=at_token)
    with staged(stub, most_running=1) as stage:
        connection = http.client.HTTPConnection(stage.url.removeprefix("http://"), timeout=60)
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert connection.getresponse().read1(10)
        connection.close()
        stage.settled(lambda: metric(stage, "deltad_gateway_running_requests") == 0)
        go_on.set()
        assert complete(stage)[0] == 200
        stage.settled(lambda: stub.left_early == 1)


def test_a_drained_gateway_lets_what_runs_come_to_its_end_and_takes_nothing_new() -> None:
    go_on = threading.Event()
    stub = StubReplica("r1", at_token=lambda stub, token: asyncio.to_thread(go_on.wait, 60))
    with staged(stub) as stage, ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, stage)
        stage.settled(lambda: bool(stub.asked))
        assert stage.gateway is not None
        assert stage.loop is not None
        drained = asyncio.run_coroutine_threadsafe(stage.gateway.drain(60), stage.loop)
        stage.settled(lambda: call(stage, "/readyz")[0] == 503)
        status, reply, _ = complete(stage)
        assert (status, "draining" in reply["error"]["message"]) == (503, True)
        assert not drained.done()
        go_on.set()
        assert drained.result(60) is True
        assert running.result()[0] == 200


def test_without_a_replica_there_is_a_retryable_503_and_no_readiness() -> None:
    with staged() as stage:
        status, reply, _ = complete(stage)
        assert (status, reply["error"]["retryable"]) == (503, True)
        assert call(stage, "/readyz")[0] == 503
        assert call(stage, "/healthz")[0] == 200


def test_a_replica_whose_state_is_not_known_gets_nothing() -> None:
    stubs = StubReplica("r1", state=ReplicaState.UNKNOWN), StubReplica("r2")
    with staged(*stubs) as stage:
        for at in range(8):
            assert complete(stage, prompt=[at])[0] == 200
    assert stubs[0].asked == []


def test_models_and_replicas_are_shown_with_their_versions() -> None:
    with staged(StubReplica("r1")) as stage:
        status, models, _ = call(stage, "/v1/models")
        assert (status, models["data"][0]["id"], models["data"][0]["weight_versions"]) == (200, "policy", ["v000001"])
        assert call(stage, "/v1/models/policy")[1] == models["data"][0]
        assert call(stage, "/v1/models/other")[0] == 404
        (shown,) = call(stage, "/v1/replicas")[1]["replicas"]
        assert (shown["name"], shown["version"], shown["verified"]) == ("d/r1", "v000001", True)


def test_with_keys_no_route_but_health_and_metrics_answers_without_one() -> None:
    with staged(StubReplica("r1"), keys=("open-sesame",)) as stage:
        for path in ("/v1/models", "/v1/models/policy", "/v1/replicas", "/v1/nonsense"):
            status, reply, _ = call(stage, path)
            assert (status, reply["error"]["type"]) == (401, "authentication_error"), path
            assert call(stage, path, Authorization="Bearer open-sesam")[0] == 401
        assert complete(stage)[0] == 401
        assert call(stage, "/v1/models", Authorization="Bearer open-sesame")[0] == 200
        assert [call(stage, path)[0] for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3


MALFORMED: list[tuple[str, object]] = [
    ("/v1/completions", b""),
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b"\xff\xfe"),
    ("/v1/completions", b"[" * 100_000),
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [1.5]}),
    ("/v1/completions", {"prompt": [[1], "a"]}),
    ("/v1/completions", {"prompt": "a text"}),
    ("/v1/completions", {"prompt": PROMPT, "model": "another"}),
    ("/v1/completions", {"prompt": PROMPT, "n": 0}),
    ("/v1/completions", {"prompt": PROMPT, "n": 10**9}),
    ("/v1/completions", {"prompt": [[1]] * 200}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}),
    ("/v1/completions", {"prompt": PROMPT, "top_p": 0.5}),
    ("/v1/completions", {"prompt": PROMPT, "top_k": 5}),
    ("/v1/completions", {"prompt": PROMPT, "echo": True}),
    ("/v1/completions", {"prompt": PROMPT, "logprobs": 5}),
    ("/v1/completions", {"prompt": PROMPT, "stop": ["x"] * 17}),
    ("/v1/completions", {"prompt": PROMPT, "no_such_field": 1}),
    ("/v1/completions", {"prompt": PROMPT, "weight_version": {"min": "newest"}}),
    ("/v1/completions", {"prompt": PROMPT, "weight_version": {"min": "v1", "exact": "v1"}}),
    ("/v1/completions", {"prompt": PROMPT, "weight_version": {"max_staleness": -1}}),
    ("/v1/completions", {"prompt": PROMPT, "weight_version": {"wait": 1e9}}),
    ("/v1/completions", {"prompt": PROMPT, "weight_version": {"on_swap": "panic"}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/chat/completions", {"messages": "hi"}),
    ("/v1/completions", b" " * (9 << 20)),
    ("/v1/%2e%2e/etc/passwd", {}),
    ("/v1/models", {}),
]


def test_no_request_however_malformed_gives_a_5xx_or_reaches_a_replica() -> None:
    stub = StubReplica("r1")
    with staged(stub) as stage:
        for path, body in MALFORMED:
            status, reply, _ = call(stage, path, body)
            assert 400 <= status < 500, (path, body)
            assert reply["error"]["message"]
            assert reply["error"]["retryable"] is False
        assert stub.asked == []
        assert complete(stage)[0] == 200
        assert stage.log.getvalue() == ""


@pytest.fixture
def words(tiny: Path) -> Words:
    """The tiny model's tokenizer, which maps bytes to themselves in an order of its own."""
    return load_words(dict, tiny)


def test_text_goes_in_and_comes_out_and_ends_before_a_stop_text(words: Words) -> None:
    stub = StubReplica("r1")
    with staged(stub, words=lambda: words) as stage:
        status, reply, _ = complete(stage, prompt="hello", max_tokens=3)
        assert status == 200
        assert stub.asked[-1].prompt_ids == words.encode("hello")
        assert reply["choices"][0]["text"] == "".join(words.token(t) for t in reply["choices"][0]["token_ids"])
        status, whole, _ = complete(stage, prompt="hello", max_tokens=60)
        stop = whole["choices"][0]["text"][10:12]
        status, cut, _ = complete(stage, prompt="hello", max_tokens=60, stop=stop)
        (choice,) = cut["choices"]
        assert choice["text"] == whole["choices"][0]["text"].split(stop)[0]
        assert choice["finish_reason"] == "stop"
        assert len(choice["token_ids"]) < 60
        assert choice["weight_versions"][-1]["end"] == len(choice["token_ids"])
        status, said, _ = complete(stage, prompt="hello", max_tokens=60, stop=stop, stream=True)
        assert "".join(c["choices"][0]["text"] for c in said[:-2]) == choice["text"]


def metric(stage: Stage, name: str) -> float:
    """The sum of a metric's series, as a scrape sees them."""
    lines = call(stage, "/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
