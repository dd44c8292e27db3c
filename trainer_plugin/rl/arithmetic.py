"""Sums of two small numbers, asked through the chat template, with one worked example before the question.

The reward is 1 if the last number of the answer is the sum, else 0. A quarter of all pairs is held out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from trainer_plugin.rl.tasks import Prompt

_LARGEST = 20
_HELD_OUT = 100
_EXAMPLE = (12, 7)
_NUMBER = re.compile(r"[0-9]+", re.ASCII)


class Arithmetic:
    """Implements `trainer_plugin.rl.tasks.Task` with a tokenizer of transformers."""

    name = "arithmetic"

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        pairs = [(a, b) for a in range(1, _LARGEST + 1) for b in range(1, _LARGEST + 1) if (a, b) != _EXAMPLE]
        random.Random("held out").shuffle(pairs)  # noqa: S311 (the split is the same for every seed)
        self._held_out = pairs[:_HELD_OUT]
        self._training = pairs[_HELD_OUT:]

    def prompts(self, step: int, count: int) -> list[Prompt]:
        rng = random.Random(f"{self._seed} {step}")  # noqa: S311
        return [self.ask(*rng.choice(self._training)) for _ in range(count)]

    def held_out(self, count: int) -> list[Prompt]:
        return [self.ask(a, b) for a, b in self._held_out[:count]]

    def probe(self) -> tuple[int, ...]:
        answer = self._tokenizer.encode("2+3=5", add_special_tokens=False)
        return self.ask(2, 3).token_ids + tuple(answer)

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        numbers = _NUMBER.findall(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return float(bool(numbers) and numbers[-1] == prompt.answer)

    def ask(self, a: int, b: int) -> Prompt:
        """The prompt for a + b."""
        x, y = _EXAMPLE
        question = f"What is {a}+{b}?"
        messages = [
            {"role": "user", "content": f"What is {x}+{y}?"},
            {"role": "assistant", "content": f"{x}+{y}={x + y}"},
            {"role": "user", "content": question},
        ]
        encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return Prompt(question, tuple(encoded["input_ids"]), str(a + b))
