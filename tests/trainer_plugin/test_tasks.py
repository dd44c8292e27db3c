"""Prompts and rewards that a few lines can verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trainer_plugin.rl.arithmetic import Arithmetic
from trainer_plugin.rl.tasks import Task
from trainer_plugin.rl.tokens import Tokens


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    return tokenizer


@pytest.fixture(params=[Arithmetic, Tokens], ids=lambda kind: kind.name)
def task(request: pytest.FixtureRequest, tokenizer: Any) -> Task:
    return request.param(tokenizer, 1)


def test_prompts_follow_from_the_seed_and_the_step(task: Task, tokenizer: Any) -> None:
    again = type(task)(tokenizer, 1)
    other = type(task)(tokenizer, 2)
    assert task.prompts(3, 8) == again.prompts(3, 8)
    assert task.prompts(3, 8) != task.prompts(4, 8)
    assert task.prompts(3, 8) != other.prompts(3, 8)
    assert task.probe() == other.probe()


def test_no_step_trains_on_what_is_held_out(task: Task) -> None:
    held_out = {prompt.text for prompt in task.held_out(1000)}
    trained = {prompt.text for step in range(100) for prompt in task.prompts(step, 8)}
    assert len(held_out) >= 20
    assert not held_out & trained


def test_every_seed_is_evaluated_on_the_same_prompts(task: Task, tokenizer: Any) -> None:
    assert type(task)(tokenizer, 2).held_out(10) == task.held_out(10)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("2+3=5", 1.0),
        ("5", 1.0),
        ("The answer is 5.", 1.0),
        ("2+3=6", 0.0),
        ("five", 0.0),
        ("5 or 6", 0.0),
        ("55", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_of_an_answer_is_what_counts(tokenizer: Any, answer: str, reward: float) -> None:
    task = Arithmetic(tokenizer, 1)
    prompt = task.ask(2, 3)
    assert prompt.answer == "5"
    assert "What is 2+3?" in tokenizer.decode(list(prompt.token_ids))
    assert task.reward(prompt, tokenizer.encode(answer)) == reward


def test_the_share_of_target_tokens_is_the_reward(tokenizer: Any) -> None:
    task = Tokens(tokenizer, 1)
    (prompt,) = task.prompts(1, 1)
    target = [token for token in range(256) if task.reward(prompt, [token]) == 1.0]
    rest = [token for token in range(256) if token not in target]
    assert len(target) == 128
    assert task.reward(prompt, [*target[:3], *rest[:1]]) == 0.75
    assert task.reward(prompt, []) == 0.0
