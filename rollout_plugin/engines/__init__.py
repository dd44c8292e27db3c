"""The port between a replica and an inference engine; one module per engine beside it.

Imports no engine and no torch. Owns the rule that every engine keeps: no decoding step runs while
weights are written, and every token knows the version whose weights gave its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltad.delta.backend import Lanes
from deltad.delta.codec import Weights
from deltad.delta.layout import Layout
from deltad.types import Version


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. Equal requests to equal weights give equal samples."""

    n: int = 1
    max_new_tokens: int = 16
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. All three have one entry per token; `ended` tells that it came to its end by itself.

    `logprobs` are natural logarithms of the policy's own probabilities (temperature 1), `versions` the
    version whose weights gave them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of a given sequence: entry i belongs to token i + 1, given all before it."""

    logprobs: tuple[float, ...]
    version: Version


class LiveTensors(Weights, Protocol):
    """An engine's live weights as the tensors of a layout, in place."""

    layout: Layout

    def whole(self, tensor: int) -> Lanes:
        """All lanes of a tensor in canonical order: writing them changes what is served."""

    def check_live(self) -> None:
        """Raises ReplicaError if what is seen here is no longer what is served."""


class Engine(Protocol):
    """An engine with weights in it. Requests come from any thread, `pause` and `fence` from one."""

    version: Version
    """Written within `pause` alone."""

    @property
    def live(self) -> LiveTensors: ...

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Sample]:
        """Sample `n` answers. Raises UsageError for a request that can never work, UnavailableError once fenced."""

    def logprobs(self, token_ids: Sequence[int]) -> Scored:
        """Score a sequence of at least two tokens. Raises like `generate`."""

    def pause(self) -> AbstractContextManager[None]:
        """Wait for the running step, and hold the next ones until the end; requests keep their caches."""

    def fence(self, reason: str) -> None:
        """Refuse all steps, running requests included, until `unfence`. May be called within `pause`."""

    def unfence(self) -> None:
        """Serve again."""


class Loader(Protocol):
    """Makes an engine from a checkpoint directory that holds exactly `layout` in `version`.

    The engine must not alias the directory's files. Raises ReplicaError where layout and model do not
    cover each other.
    """

    def __call__(self, directory: Path, layout: Layout, version: Version) -> Engine: ...
