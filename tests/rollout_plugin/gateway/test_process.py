"""The gateway as an operator runs it, before real replicas that follow a real run, driven by OpenAI's own client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.rollout_plugin.conftest import StartReplica
from tests.rollout_plugin.region import RUN, Region

SWAPS = 50


@contextmanager
def gateway(region: Region, home: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A gateway's URL and process."""
    ready = home / "gateway-url"
    with (home / "gateway-log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rollout_plugin.gateway", "--socket", str(region.socket), "--run", RUN),
                *("--ready-file", str(ready), *more),
            ],
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            wait = threading.Event()
            for _ in range(6000):
                if ready.exists() or process.poll() is not None:
                    break
                wait.wait(0.01)
            yield ready.read_text().strip(), process
        finally:
            process.kill()
            process.wait()


def speaking(url: str, key: str = "none") -> openai.OpenAI:
    """OpenAI's own client, which asks once."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_over_fifty_swaps_under_load_no_request_is_lost_and_no_token_given_twice(
    region: Region, start_replica: StartReplica, tmp_path: Path
) -> None:
    for name in ("r1", "r2"):
        start_replica(name)
    region.await_verified(region.history[0])
    over = threading.Event()
    with gateway(region, tmp_path) as (url, process), speaking(url) as client, ThreadPoolExecutor(4) as pool:

        def ask(seed: int) -> list[tuple[list[int], list[str]]]:
            answers = []
            while not over.is_set() or not answers:
                stream = client.completions.create(
                    model=RUN, prompt=[72, 101, 108], max_tokens=24, seed=seed, stream=True, logprobs=1
                )
                tokens: list[int] = []
                versions: list[str] = []
                for chunk in stream:
                    for choice in chunk.choices:
                        extra = choice.model_extra or {}
                        tokens += extra["token_ids"]
                        versions += [extra["weight_version"]] * len(extra["token_ids"])
                answers.append((tokens, versions))
            return answers

        asked = [pool.submit(ask, seed) for seed in range(4)]
        for at in range(SWAPS):
            region.await_verified(region.publish_changed(seed=at))
        over.set()
        answers = [answer for request in asked for answer in request.result()]
        assert len(answers) > SWAPS / 4
        for tokens, versions in answers:
            assert len(tokens) == 24 or tokens[-1] == 256
            assert versions == sorted(versions)
        assert len({version for _, versions in answers for version in versions}) > SWAPS / 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    lines = [json.loads(line) for line in (tmp_path / "gateway-log").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["listening", "draining", "stopped"]


def test_a_client_chats_by_text_and_learns_which_version_answered(
    region: Region, start_replica: StartReplica, tmp_path: Path
) -> None:
    start_replica()
    region.await_verified(region.history[0])
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    with (
        gateway(region, tmp_path, "--key-file", str(keys)) as (url, _),
        speaking(url, "open-sesame") as client,
        speaking(url, "guess") as stranger,
    ):
        assert [model.id for model in client.models.list()] == [RUN]
        answer = client.completions.create(model=RUN, prompt="hello", max_tokens=5, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        assert (answer.model_extra or {})["weight_version"] == {"began": "v000000", "ended": "v000000"}
        with pytest.raises(openai.ConflictError, match="v000009 or newer"):
            client.completions.create(model=RUN, prompt="hello", extra_body={"weight_version": {"min": "v9"}})
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.completions.create(model=RUN, prompt="hello", top_p=0.5)
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_what_cannot_be_bound_or_read_is_said_before_anything_is_served(region: Region, tmp_path: Path) -> None:
    for more, code, said in (
        (("--key-file", str(tmp_path / "none")), 78, "--key-file"),
        (("--listen", "256.0.0.1:80"), 78, "--listen 256.0.0.1:80"),
        (("--listen", "80"), 64, "expected HOST:PORT"),
        (("--rollouts-per-version", "4"), 64, "expected --max-staleness beside it"),
    ):
        command = [sys.executable, "-m", "rollout_plugin.gateway", "--socket", str(region.socket), "--run", RUN, *more]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, said in ended.stderr) == (code, True), ended.stderr
