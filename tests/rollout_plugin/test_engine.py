"""The embedded engine: samples that can be repeated, log-probs that agree, pauses that lose nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deltad.checkpoint import open_checkpoint
from deltad.delta.codec import sum_weights
from deltad.delta.digest import root_of
from deltad.delta.layout import Layout
from deltad.errors import ReplicaError, UnavailableError, UsageError
from deltad.types import Version
from rollout_plugin.engines import Sampling
from rollout_plugin.engines.gate import Gate
from rollout_plugin.engines.transformers import TransformersEngine, load
from trainer_plugin.rl.model import prepare_tiny

PROMPT = [72, 101, 108, 108, 111]
V0 = Version(1, 0)


def layout_of(directory: Path) -> Layout:
    with open_checkpoint(directory) as checkpoint:
        return checkpoint.layout


@pytest.fixture
def engine(tiny: Path) -> TransformersEngine:
    return load(tiny, layout_of(tiny), V0)


def root(engine: TransformersEngine) -> bytes:
    return root_of(engine.live.layout, sum_weights(engine.live.layout, engine.live))


def test_equal_seeds_give_equal_samples_and_others_do_not(engine: TransformersEngine) -> None:
    one = engine.generate(PROMPT, Sampling(n=4, max_new_tokens=12, seed=3))
    assert engine.generate(PROMPT, Sampling(n=4, max_new_tokens=12, seed=3)) == one
    assert engine.generate(PROMPT, Sampling(n=4, max_new_tokens=12, seed=4)) != one
    assert len({sample.token_ids for sample in one}) == 4


def test_a_sample_has_a_logprob_and_a_version_for_each_token(engine: TransformersEngine) -> None:
    for sample in engine.generate(PROMPT, Sampling(n=2, max_new_tokens=9, seed=1)):
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions)
        assert set(sample.versions) == {V0}
        assert sample.ended or len(sample.token_ids) == 9


def test_logprobs_of_sampled_tokens_are_those_of_scoring_them(engine: TransformersEngine) -> None:
    (sample,) = engine.generate(PROMPT, Sampling(max_new_tokens=12, temperature=0.7, seed=5))
    scored = engine.logprobs([*PROMPT, *sample.token_ids])
    assert scored.version == V0
    assert len(scored.logprobs) == len(PROMPT) + len(sample.token_ids) - 1
    # bf16: a cache of another shape rounds differently.
    assert sample.logprobs == pytest.approx(scored.logprobs[len(PROMPT) - 1 :], abs=0.05)


def test_temperature_0_is_greedy(engine: TransformersEngine) -> None:
    one, two = engine.generate(PROMPT, Sampling(n=2, max_new_tokens=5, temperature=0, seed=1))
    assert one == two
    with torch.inference_mode():
        logits = engine.model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    assert one.token_ids[0] == int(logits.argmax())


def test_an_answer_ends_with_its_end_token(tiny: Path) -> None:
    engine = load(tiny, layout_of(tiny), V0)
    end = engine.model.generation_config.eos_token_id
    with torch.no_grad():
        # An end token that every hidden state likes: the final norm's gain is 1, so this is a large logit.
        hidden = engine.model.model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0, -1]
        engine.model.lm_head.weight[end] = hidden
    (sample,) = engine.generate(PROMPT, Sampling(max_new_tokens=50, temperature=0))
    assert sample.ended
    assert sample.token_ids == (end,)


def test_the_engine_does_not_change_when_the_export_is_overwritten(tmp_path: Path) -> None:
    directory = prepare_tiny(tmp_path / "model", seed=1)
    engine = load(directory, layout_of(directory), V0)
    before = root(engine)
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\x55" * 4096)
    assert root(engine) == before


def test_the_export_does_not_change_when_the_engine_is_patched(tmp_path: Path) -> None:
    directory = prepare_tiny(tmp_path / "model", seed=1)
    path = directory / "model.safetensors"
    before = path.read_bytes()
    engine = load(directory, layout_of(directory), V0)
    for i in range(len(engine.live.layout.tensors)):
        engine.live.whole(i)[:] = 0
    assert path.read_bytes() == before


def test_ties_survive_the_move_out_of_the_file(engine: TransformersEngine) -> None:
    assert engine.model.lm_head.weight.data_ptr() == engine.model.model.embed_tokens.weight.data_ptr()


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplicaError, match="expected one that transformers loads"):
        load(tmp_path, Layout(1, ()), V0)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], Sampling()),
        ([-1], Sampling()),
        ([257], Sampling()),
        (PROMPT, Sampling(n=0)),
        (PROMPT, Sampling(max_new_tokens=0)),
        (PROMPT, Sampling(max_new_tokens=508)),
        (PROMPT, Sampling(temperature=-1.0)),
        (PROMPT, Sampling(temperature=1e-9)),
        (PROMPT, Sampling(temperature=float("nan"))),
    ],
)
def test_a_request_that_cannot_work_is_refused(
    engine: TransformersEngine, prompt: list[int], sampling: Sampling
) -> None:
    with pytest.raises(UsageError):
        engine.generate(prompt, sampling)


def test_scoring_needs_two_tokens(engine: TransformersEngine) -> None:
    with pytest.raises(UsageError, match="token ids"):
        engine.logprobs([1])


def test_a_request_in_flight_goes_on_after_a_swap_and_says_which_version_gave_each_token(
    engine: TransformersEngine,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, PROMPT, Sampling(n=2, max_new_tokens=400, seed=1))
        while not running.done():
            with engine.pause():
                engine.version = Version(1, engine.version.number + 1)
        one, two = running.result()
    assert list(one.versions) == sorted(one.versions)
    assert len(set(one.versions)) > 1
    shared = min(len(one.versions), len(two.versions))
    assert one.versions[:shared] == two.versions[:shared]


def test_a_fence_ends_what_is_in_flight_and_lifting_it_lets_new_requests_pass(engine: TransformersEngine) -> None:
    with ThreadPoolExecutor(1) as pool:
        with engine.pause():
            running = pool.submit(engine.generate, PROMPT, Sampling(max_new_tokens=400))
            engine.fence("weights are a mix")
        with pytest.raises(UnavailableError, match="fenced: weights are a mix"):
            running.result()
    with pytest.raises(UnavailableError, match="weights are a mix"):
        engine.logprobs(PROMPT)
    engine.unfence()
    assert engine.logprobs(PROMPT).version == V0


def test_the_gate_is_held_only_once_the_running_step_has_ended_and_then_keeps_all_others_out() -> None:
    gate = Gate()
    order: list[str] = []
    inside, finish, release = threading.Event(), threading.Event(), threading.Event()

    def running() -> None:
        with gate.step():
            inside.set()
            finish.wait(30)
            order.append("the running step ends")

    def holder() -> None:
        with gate.hold():
            order.append("held")
            release.wait(30)
            order.append("released")

    def late() -> None:
        with gate.step():
            order.append("the next step")

    threads = [threading.Thread(target=running)]
    threads[0].start()
    assert inside.wait(30)
    for target in (holder, late):
        threads.append(threading.Thread(target=target))
        threads[-1].start()
        # Were the gate open, the thread would pass within this time; it is closed, so the time makes no difference.
        threads[-1].join(0.1)
    finish.set()
    threads[0].join()
    threads[2].join(0.1)
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["the running step ends", "held", "released", "the next step"]


class Swapping:
    """A listener at whose third token the weights are about to be swapped, the caches as `cache` says."""

    gone = False

    def __init__(self, engine: TransformersEngine, cache: str) -> None:
        self._engine, self._cache = engine, cache
        self._tokens = 0
        self.thread = threading.Thread(target=self._swap)

    def took(self, row: int, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        self._tokens += 1
        if self._tokens == 3:
            self.thread.start()

    def _swap(self) -> None:
        with self._engine.pause(), torch.no_grad():
            for parameter in self._engine.model.parameters():
                parameter.mul_(1.3)
            self._engine.flip(Version(1, 1), self._cache)


@pytest.mark.parametrize(("cache", "anew"), [("reset", True), ("keep", False), ("", False)])
def test_after_a_commit_that_resets_caches_no_token_is_sampled_over_older_keys(
    engine: TransformersEngine, cache: str, anew: bool
) -> None:
    swapping = Swapping(engine, cache)
    (sample,) = engine.generate(PROMPT, Sampling(max_new_tokens=150, temperature=0, seed=5), swapping)
    swapping.thread.join()
    first = sample.versions.index(Version(1, 1))
    assert first >= 3
    # All of the sequence, read by the new weights alone.
    scored = engine.logprobs([*PROMPT, *sample.token_ids]).logprobs[len(PROMPT) - 1 :]
    after = [abs(one - other) for one, other in zip(sample.logprobs[first:], scored[first:], strict=True)]
    assert (max(after) < 0.1) is anew, after
