"""What a task is: prompts, and a reward that a few lines of code can verify. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, and what the reward needs to know of it."""

    text: str
    token_ids: tuple[int, ...]
    answer: str = ""


class Task(Protocol):
    """Prompts and rewards; all of it follows from the seed that the task was made with."""

    name: str

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """The training prompts of a step, none of them held out."""

    def held_out(self, count: int) -> list[Prompt]:
        """At most `count` prompts that no step trains on; the same ones every time."""

    def probe(self) -> tuple[int, ...]:
        """A fixed prompt with an answer, whose per-token log-probs are compared between machines."""

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        """From 0 to 1."""
