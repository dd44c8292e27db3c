"""GRPO: what is learned from a group, and what is not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_plugin.rl.grpo import Answer, Group, Learner, advantages
from trainer_plugin.rl.model import prepare_tiny

PROMPT = (72, 101, 108, 108, 111)


def bits(learner: Learner) -> dict[str, bytes]:
    return {
        name: parameter.view(torch.uint16).numpy().tobytes() for name, parameter in learner.policy.named_parameters()
    }


def answer(learner: Learner, tokens: tuple[int, ...], reward: float, *, off: float = 0.0) -> Answer:
    """An answer sampled by the policy itself, or by one whose log-probs are `off` lower."""
    scores = learner.logprobs([*PROMPT, *tokens])[len(PROMPT) - 1 :]
    return Answer(tokens, tuple(score - off for score in scores), reward)


def likelihood(learner: Learner, tokens: tuple[int, ...]) -> float:
    return sum(learner.logprobs([*PROMPT, *tokens])[len(PROMPT) - 1 :])


def test_advantages_are_centred_and_scaled() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]


@given(st.lists(st.floats(0, 1, width=16), min_size=1, max_size=16))
def test_advantages_sum_to_zero_and_rank_like_the_rewards(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert math.isclose(sum(found), 0.0, abs_tol=1e-6)
    if min(rewards) == max(rewards):
        assert not any(found)
    else:
        assert np.argmax(found) == np.argmax(rewards)
        assert math.isclose(float(np.std(found)), 1.0, rel_tol=1e-6)


def test_equal_rewards_leave_every_bit_of_the_weights_as_it_was(tiny: Path) -> None:
    learner = Learner(tiny, learning_rate=1.0)
    before = bits(learner)
    outcome = learner.step([Group(PROMPT, tuple(answer(learner, (i, i + 1), 1.0) for i in range(4)))])
    assert outcome.zero_advantage
    assert outcome.grad_norm == 0.0
    assert bits(learner) == before


def test_a_step_makes_the_better_answer_likelier_and_the_worse_one_less_so(tiny: Path) -> None:
    learner = Learner(tiny, learning_rate=1e-3)
    good, bad = (10, 20, 30), (40, 50)
    before = likelihood(learner, good), likelihood(learner, bad)
    outcome = learner.step([Group(PROMPT, (answer(learner, good, 1.0), answer(learner, bad, 0.0)))])
    assert not outcome.zero_advantage
    assert outcome.grad_norm > 0
    assert outcome.ratio_mean == pytest.approx(1.0, abs=0.05)
    assert likelihood(learner, good) > before[0]
    assert likelihood(learner, bad) < before[1]


def test_answers_of_different_lengths_score_as_they_do_alone(tiny: Path) -> None:
    learner = Learner(tiny, learning_rate=1e-3)
    answers = tuple(answer(learner, tokens, 0.0) for tokens in ((1,), (2, 3, 4, 5), (6, 7)))
    together = learner.ratios(Group(PROMPT, answers)).tolist()
    alone = [learner.ratios(Group(PROMPT, (each,))).item() for each in answers]
    assert together == pytest.approx(alone, abs=1e-4)


def test_a_ratio_outside_the_clip_teaches_nothing_more(tiny: Path) -> None:
    """Answers that are already much likelier than when they were sampled, and good: the surrogate is flat."""
    learner = Learner(tiny, learning_rate=1e-3)
    before = bits(learner)
    good, bad = answer(learner, (10, 20), 1.0, off=1.0), answer(learner, (30, 40), 0.0, off=-1.0)
    outcome = learner.step([Group(PROMPT, (good, bad))])
    assert outcome.clipped == 1.0
    assert outcome.grad_norm == 0.0
    assert bits(learner) == before


def test_the_published_policy_is_the_masters_rounded_to_bf16(tiny: Path) -> None:
    learner = Learner(tiny, learning_rate=1e-3)
    learner.step([Group(PROMPT, (answer(learner, (1, 2), 1.0), answer(learner, (3, 4), 0.0)))])
    for policy, master in zip(learner.policy.parameters(), learner.masters, strict=True):
        assert torch.equal(policy, master.to(torch.bfloat16))
        assert not torch.equal(policy.float(), master)


def test_steps_smaller_than_a_bf16_rounding_add_up_in_the_masters(tiny: Path) -> None:
    learner = Learner(tiny, learning_rate=1e-6)
    start = bits(learner)
    changed = []
    for _ in range(8):
        learner.step([Group(PROMPT, (answer(learner, (1, 2), 1.0), answer(learner, (3, 4), 0.0)))])
        changed.append(count_changed(start, bits(learner)))
    assert 0 < changed[0] < 0.1 * learner.parameters
    assert changed[7] > 2 * changed[0]


def count_changed(before: dict[str, bytes], after: dict[str, bytes]) -> int:
    return sum(
        int(np.count_nonzero(np.frombuffer(old, np.uint16) != np.frombuffer(after[name], np.uint16)))
        for name, old in before.items()
    )


def test_equal_runs_give_equal_bits(tiny: Path) -> None:
    found = []
    for _ in range(2):
        learner = Learner(tiny, learning_rate=1e-3)
        for step in range(3):
            group = Group(PROMPT, (answer(learner, (step, 2), 1.0), answer(learner, (3, step), 0.0)))
            learner.step([group])
        found.append(bits(learner))
    assert found[0] == found[1]


def test_the_gradient_of_the_next_step_is_taken_at_the_weights_that_were_published(tiny: Path) -> None:
    learner = Learner(tiny, learning_rate=0.05)
    learner.step([Group(PROMPT, (answer(learner, (1, 2), 1.0), answer(learner, (3, 4), 0.0)))])
    assert likelihood(learner, (1, 2)) != pytest.approx(likelihood(Learner(tiny, learning_rate=0.05), (1, 2)), abs=0.5)
    ratios = learner.ratios(Group(PROMPT, (answer(learner, (1, 2), 0.0), answer(learner, (7, 8, 9), 0.0))))
    assert ratios.tolist() == pytest.approx([1.0, 1.0], abs=0.05)


def test_a_learner_and_the_files_that_it_started_from_do_not_touch_each_other(tmp_path: Path) -> None:
    directory = prepare_tiny(tmp_path / "tiny", seed=1)
    path = directory / "model.safetensors"
    learner = Learner(directory, learning_rate=0.1)
    before, weights = path.read_bytes(), bits(learner)
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\x55" * 4096)
    assert bits(learner) == weights
    path.write_bytes(before)
    learner.step([Group(PROMPT, (answer(learner, (1, 2), 1.0), answer(learner, (3, 4), 0.0)))])
    assert path.read_bytes() == before
