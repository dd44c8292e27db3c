"""A task that even a random model can learn: prefer some tokens over others.

The reward is the share of sampled tokens that belong to a target set, half of the byte tokens. Groups of
samples differ in it from the first step on, so that small models have a gradient at once.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import Any

from trainer_plugin.rl.tasks import Prompt

_TOKENS = 256
_LENGTH = 12


class Tokens:
    """Implements `trainer_plugin.rl.tasks.Task`."""

    name = "tokens"

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._target = frozenset(random.Random(f"target {seed}").sample(range(_TOKENS), _TOKENS // 2))  # noqa: S311

    def prompts(self, step: int, count: int) -> list[Prompt]:
        return self._draw(f"{self._seed} {step}", count)

    def held_out(self, count: int) -> list[Prompt]:
        return self._draw("held out", count)

    def probe(self) -> tuple[int, ...]:
        return self._prompt("the quick brown fox jumps over the lazy dog").token_ids

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        return sum(token in self._target for token in token_ids) / max(len(token_ids), 1)

    def _draw(self, name: str, count: int) -> list[Prompt]:
        rng = random.Random(name)  # noqa: S311
        return [self._prompt("".join(rng.choices(string.ascii_lowercase, k=_LENGTH))) for _ in range(count)]

    def _prompt(self, text: str) -> Prompt:
        return Prompt(text, tuple(self._tokenizer.encode(text, add_special_tokens=False)))
