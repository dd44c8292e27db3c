"""The port between a replica and an inference engine; one module per engine beside it.

Imports no engine and no torch. Owns the rule that every engine keeps: no decoding step runs while
weights are written, and every token knows the version whose weights gave its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltad.delta.backend import Backend, Lanes
from deltad.delta.codec import Patch, Weights
from deltad.delta.digest import U64
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


class Listener(Protocol):
    """Hears the tokens of a request as they are drawn, and says when nobody wants the rest."""

    def took(self, sample: int, token_ids: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        """One or more tokens of an answer, all by the weights of `version`. From any thread; may not block or raise."""

    @property
    def gone(self) -> bool:
        """True ends the request after the step that runs; what was drawn until then is its answer."""


class Checkpoint(Protocol):
    """A whole version on disk. `tensors` gives each that holds weights: its place in the layout, and all its lanes."""

    @property
    def directory(self) -> Path: ...

    def tensors(self) -> Iterator[tuple[int, Lanes]]: ...


class Writes(Protocol):
    """What some deltas change, beside the live weights and laid out as the engine has its tensors.

    Both methods return what all writes that are in force now add to the element sums, shape [tensors, 2]. After an
    error in `write` a part of its step may be in force; `undo` takes that back too, and after an error of its own it
    may be called again.
    """

    def write(self, step: int) -> U64:
        """Write one delta into the live weights. Within `Engine.pause` alone; deltas follow in order."""

    def undo(self) -> U64:
        """Take back all that was written, newest first. Within the same pause."""


class LiveTensors(Weights, Protocol):
    """An engine's live weights as the tensors of a layout, in place.

    Any call may fail, as the engine may: with an error of `deltad.errors` or any other.
    """

    @property
    def layout(self) -> Layout: ...

    def check_live(self) -> None:
        """Raises ReplicaError if what is seen here is no longer what is served."""

    def sums(self, backend: Backend) -> U64:
        """Element sums of everything that is served, each copy of it, read back. Shape [tensors, 2].

        Raises IntegrityError where copies of a tensor differ.
        """

    def stage(self, steps: Sequence[Sequence[Patch]], backend: Backend) -> Writes:
        """Lay out what these deltas do, in order, for the engine's own tensors. Writes no live byte."""

    def copy_from(self, checkpoint: Checkpoint) -> None:
        """Write a whole version over the live weights. Cannot be undone. Within `Engine.pause` alone."""


class Engine(Protocol):
    """An engine with weights in it. Requests come from any thread, `pause` and `fence` from one."""

    @property
    def version(self) -> Version:
        """The version whose weights the next step reads."""

    @property
    def live(self) -> LiveTensors: ...

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener | None = None) -> list[Sample]:
        """Sample `n` answers. Raises UsageError for a request that can never work, UnavailableError once fenced."""

    def logprobs(self, token_ids: Sequence[int]) -> Scored:
        """Score a sequence of at least two tokens. Raises like `generate`."""

    def pause(self) -> AbstractContextManager[None]:
        """Wait for the running step, and hold the next ones until the end; requests keep their caches."""

    def flip(self, version: Version, cache: str = "") -> None:
        """All tokens from here on are this version's; caches of older ones go as `cache` says, or the engine's policy.

        Within `pause` alone. An engine that could not do it raises, and its version is the one before.
        """

    def fence(self, reason: str) -> None:
        """Refuse all steps, running requests included, until `unfence`. May be called within `pause`."""

    def unfence(self) -> None:
        """Serve again."""

    def close(self) -> None:
        """End what the engine started: processes and threads. It is fenced, and nothing is asked of it any more."""


class Loader(Protocol):
    """Makes an engine from a checkpoint directory that holds exactly `layout` in `version`.

    The engine must not alias the directory's files. Raises ReplicaError where layout and model do not
    cover each other.
    """

    def __call__(self, directory: Path, layout: Layout, version: Version) -> Engine: ...
