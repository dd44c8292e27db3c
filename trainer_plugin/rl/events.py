"""What the trainer says while it runs: one JSON object per line on standard output.

Every line has `event` (the tag below) and `time` (Unix seconds, for people). A reader that does not
know a tag or a field skips it; fields are only ever added. Versions are text (`v000003`), digests hex,
durations seconds. This module imports nothing but msgspec.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", kw_only=True):
    """Base of all lines. `time` is the wall clock when the line was written."""

    time: float = 0.0


class Started(Event, frozen=True, tag="started"):
    """Once, first. `parameters` counts elements, a tied head once; `dtype` is that of the checkpoints."""

    model: str
    parameters: int
    dtype: str
    task: str
    steps: int
    samples: int
    prompts_per_step: int
    learning_rate: float
    seed: int


class StepStarted(Event, frozen=True, tag="step_started"):
    """Step 1..N begins: its rollouts are to be sampled from `version` on the remote replica."""

    step: int
    version: str


class Rollouts(Event, frozen=True, tag="rollouts"):
    """The samples of a step came in. `total` counts all samples that the remote replica has sent so far.

    `versions` names every version that sampled at least one token. `reward_mean` belongs to them.
    """

    step: int
    versions: tuple[str, ...]
    samples: int
    tokens: int
    total: int
    reward_mean: float
    reward_std: float
    seconds: float


class Trained(Event, frozen=True, tag="trained"):
    """One optimiser step is done.

    `zero_advantage` tells that every group had equal rewards: the loss has no gradient, and the next
    delta is small or empty. `clipped` is the share of sequences whose ratio was clipped.
    """

    step: int
    loss: float
    grad_norm: float
    zero_advantage: bool
    ratio_mean: float
    clipped: float
    seconds: float


class CheckpointWritten(Event, frozen=True, tag="checkpoint_written"):
    """A checkpoint directory is complete. `number` 0 is the base policy. `bytes` counts all its files.

    `seconds` is how long writing took; `time` is the start of the version's `end_to_end`.
    """

    number: int
    version: str
    path: str
    bytes: int
    seconds: float


class VersionVerified(Event, frozen=True, tag="version_verified"):
    """The remote replica serves the version, and read all of it back.

    `end_to_end` counts from the end of writing the checkpoint. `root_served` is what the replica read
    back. `logprob_gap` is the largest absolute difference between the replica's per-token log-probs of
    the probe prompt and the trainer's own bf16 policy of this version; `logprob_shift` is the largest
    absolute difference between the replica's and its own at the first version (0 for the first).
    """

    number: int
    version: str
    replica: str
    root_served: str
    end_to_end: float
    logprob_gap: float
    logprob_shift: float


class Evaluation(Event, frozen=True, tag="evaluation"):
    """Held-out reward of a version, greedy, sampled from the remote replica. `when`: `before` or `after`."""

    when: str
    version: str
    prompts: int
    reward_mean: float


class Waiting(Event, frozen=True, tag="waiting"):
    """Something is waited for: a `daemon` or `replica` that refuses, or a `version` that is not verified yet."""

    what: str
    attempt: int
    error: str


class Finished(Event, frozen=True, tag="finished"):
    """Once, last, before exit 0. `rollouts_from_remote` counts samples, evaluation not included."""

    steps: int
    versions: int
    rollouts_from_remote: int
    rollouts_from_local: int
    seconds: float


class Failed(Event, frozen=True, tag="failed"):
    """Once, last, before an exit code other than 0. `kind` is that of the error tree."""

    kind: str
    error: str


Line = (
    Started
    | StepStarted
    | Rollouts
    | Trained
    | CheckpointWritten
    | VersionVerified
    | Evaluation
    | Waiting
    | Finished
    | Failed
)
