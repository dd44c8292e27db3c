"""vLLM itself as a replica's engine, in its own environment: each version bit for bit what a fresh start gives.

`make venv-vllm` makes the environment. Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltad.client.messages import ReplicaState
from tests.rollout_plugin import vllm_models
from tests.rollout_plugin.region import Held, write_export
from tests.rollout_plugin.test_rollback import Keeping
from tests.rollout_plugin.test_server import ask

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PROMPT = [72, 101, 108, 108, 111]
FULL = pytest.mark.skipif("DELTAD_TEST_FULL" not in os.environ, reason="takes minutes: run by `make test-full`")

QUIET = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_CACHE_DIR": str(PYTHON.parents[1] / "numba"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM has no environment here: `make venv-vllm` makes it"),
    pytest.mark.timeout(600),
]


class Host:
    """The process that has vLLM; its methods are those of `tests.rollout_plugin.vllm_host.Host`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, do: str, **asked: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process with vLLM in it ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]


@contextmanager
def hosting(folder: Path, **environment: str) -> Iterator[Host]:
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "tests.rollout_plugin.vllm_host", folder / "maps"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                **QUIET,
                **environment,
            },
        )
        try:
            yield Host(process)
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with hosting(tmp_path_factory.mktemp("vllm")) as host:
        yield host


@contextmanager
def serving(
    host: Host, home: Path, model: Callable[[Path], Path], *, cache: str = "new-requests-only", **arguments: object
) -> Iterator[tuple[Keeping, str]]:
    """A region with a replica that vLLM serves; version 0 is verified."""
    region = Keeping(home / "region")
    region.start()
    try:
        region.publish_checkpoint(model(home / "model"))
        url = host("start", socket=str(region.socket), arguments=arguments, cache=cache)
        try:
            region.await_verified(region.history[0])
            yield region, url
        finally:
            host("stop")
    finally:
        region.kill()
        region.store.close()


def assert_as_fresh(host: Host, held: Held, directory: Path) -> None:
    """What is served is, bit for bit, what an engine has that is started from the version's export."""
    write_export(held, directory)
    served, fresh = host("served", prompt=PROMPT), host("fresh", directory=str(directory), prompt=PROMPT)
    assert served["root"] == held.info.root
    assert served == fresh


MODELS = [
    vllm_models.qwen3,
    vllm_models.llama_fp16,
    vllm_models.qwen3_moe,
    pytest.param(vllm_models.llama_fp32, marks=FULL),
]


@pytest.mark.parametrize("model", MODELS)
def test_after_commits_and_a_roll_back_of_five_all_is_as_in_a_fresh_engine(
    host: Host, tmp_path: Path, model: Callable[[Path], Path]
) -> None:
    with serving(host, tmp_path, model) as (region, _):
        for seed in range(6):
            region.await_verified(region.publish_changed(0.03, seed=seed))
        assert_as_fresh(host, region.history[-1], tmp_path / "forward")
        assert len(region.exports) == 1, "every version after the first came as a delta"
        region.lead_to(region.history[1])
        region.await_verified(region.history[1])
        assert_as_fresh(host, region.history[1], tmp_path / "back")
        assert len(region.exports) == 1, "going back loads nothing whole"


def test_a_delta_by_context_is_read_beside_the_engines_own_tensors(host: Host, tmp_path: Path) -> None:
    with serving(host, tmp_path, vllm_models.qwen3_moe) as (region, _):
        region.mode = "dense"
        region.publish_changed(0.03, seed=1)
        region.await_verified(region.publish_changed(0.03, seed=2))
        assert len(region.exports) == 1


@pytest.mark.parametrize("cache", ["new-requests-only", "keep", "reset"])
def test_requests_in_flight_outlive_commits_and_all_come_to_their_end(host: Host, tmp_path: Path, cache: str) -> None:
    with serving(host, tmp_path, vllm_models.qwen3, cache=cache) as (region, url), ThreadPoolExecutor(4) as pool:
        # The one token that ends an answer is made unlikely by asking for many answers.
        asked = {"prompt_ids": PROMPT, "n": 2, "max_new_tokens": 400}
        running = [pool.submit(ask, url, "POST", "/v1/generate", {**asked, "seed": seed}) for seed in range(4)]
        seed = 0
        while not all(each.done() for each in running):
            seed += 1
            region.await_verified(region.publish_changed(0.001, seed=seed))
        samples = []
        for each in running:
            status, reply = each.result()
            assert status == 200, reply
            samples += reply["samples"]
        for sample in samples:
            assert sample["ended"] or len(sample["token_ids"]) == 400
            assert sample["versions"] == sorted(sample["versions"])
            assert len(sample["logprobs"]) == len(sample["token_ids"])
        assert any(len(set(sample["versions"])) > 1 for sample in samples), "a commit fell into an answer"


@pytest.mark.parametrize("cache", ["new-requests-only", "reset"])
def test_a_new_request_reads_no_keys_and_values_of_the_version_before(host: Host, tmp_path: Path, cache: str) -> None:
    """A prompt long enough for whole blocks in the prefix cache: after a commit it is answered as if it were new."""
    prompt = [20 + i % 300 for i in range(300)]
    with serving(host, tmp_path, vllm_models.qwen3, cache=cache) as (region, _):
        host("served", prompt=prompt)
        held = region.publish_changed(0.5)
        region.await_verified(held)
        write_export(held, tmp_path / "export")
        fresh = host("fresh", directory=str(tmp_path / "export"), prompt=prompt)
        assert host("served", prompt=prompt) == fresh


def test_what_is_served_wrong_is_noticed_by_the_read_back_and_healed_by_a_whole_copy(
    host: Host, tmp_path: Path
) -> None:
    """P30, through the permuted experts of a CPU: the copy lands where the engine has them."""
    with serving(host, tmp_path, vllm_models.qwen3_moe) as (region, _):
        host("damage")
        held = region.publish_changed(0.03)
        states: set[ReplicaState] = set()
        region.await_replica(lambda r: states.add(r.state) or r.error != "" or r.version == held.info.version)
        region.await_verified(held)
        assert len(region.exports) == 2
        assert_as_fresh(host, held, tmp_path / "healed")


def test_weights_that_vllm_packs_away_are_refused_with_the_reason(host: Host, tmp_path: Path) -> None:
    """float32 is packed by oneDNN on every CPU, and an edit of the parameter would silently do nothing."""
    words = host("packed", directory=str(vllm_models.llama_fp32(tmp_path / "model")))
    assert words.startswith("Replica: ")
    assert "one that vLLM packed for oneDNN or AMX" in words
    assert "load_format='deltad'" in words


@FULL
@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        (vllm_models.deepseek_v3, "model.layers.1.mlp.gate.e_score_correction_bias"),
        (vllm_models.hybrid, "model.layers.0.linear_attn.A_log"),
    ],
)
def test_a_tensor_that_vllm_keeps_in_another_precision_than_was_published_is_refused_by_name(
    host: Host, tmp_path: Path, model: Callable[[Path], Path], tensor: str
) -> None:
    region = Keeping(tmp_path / "region")
    region.start()
    try:
        region.publish_checkpoint(model(tmp_path / "model"))
        host("start", socket=str(region.socket), arguments={}, cache="keep")
        try:
            fenced = region.await_replica(lambda replica: replica.state is ReplicaState.FENCED)
            assert f"tensor '{tensor}': expected BF16" in fenced.error
        finally:
            host("stop")
    finally:
        region.kill()
        region.store.close()


def test_two_ranks_serve_one_version_bit_for_bit(tmp_path: Path) -> None:
    with (
        hosting(tmp_path, VLLM_CPU_OMP_THREADS_BIND="0|1") as host,
        serving(host, tmp_path, vllm_models.qwen3, tensor_parallel_size=2) as (region, url),
    ):
        with ThreadPoolExecutor(1) as pool:
            asked = {"prompt_ids": PROMPT, "max_new_tokens": 300}
            running = pool.submit(ask, url, "POST", "/v1/generate", asked)
            for seed in range(4):
                region.await_verified(region.publish_changed(0.03, seed=seed))
            assert running.result()[0] == 200
        region.mode = "dense"
        region.await_verified(region.publish_changed(0.03, seed=9))
        region.lead_to(region.history[1])
        region.await_verified(region.history[1])
        write_export(region.history[1], tmp_path / "export")
        served = host("served", prompt=PROMPT)
        assert served["root"] == region.history[1].info.root
        assert len(served["checksums"]) == 2
        assert served == host("fresh", directory=str(tmp_path / "export"), prompt=PROMPT)


def test_a_replica_of_vllm_is_started_by_the_command_line(tmp_path: Path) -> None:
    region = Keeping(tmp_path / "region")
    region.start()
    try:
        region.publish_checkpoint(vllm_models.qwen3(tmp_path / "model"))
        command = [PYTHON, "-m", "rollout_plugin", "--socket", region.socket, "--run", "policy", "--name", "r1"]
        command += ["--engine", "vllm", "--engine-args", '{"enforce_eager": true, "max_model_len": 512}']
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT), **QUIET}
            )
        try:
            region.await_verified(region.history[0])
            region.await_verified(region.publish_changed(0.03))
            assert len(region.exports) == 1
        finally:
            process.terminate()
            assert process.wait(60) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        region.kill()
        region.store.close()
