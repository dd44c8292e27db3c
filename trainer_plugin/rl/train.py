"""The loop: write a checkpoint, see it verified far away, sample from it there, learn, and again.

It talks to the daemon beside it, to find out what the remote replica serves, and to that replica, for
rollouts; it never samples by itself. It neither knows how versions travel nor waits for anything but
the version that it wrote last.
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from deltad.client import Client
from deltad.client.messages import PROVEN, FleetView, ReplicaReport
from deltad.errors import DeltadError, StoreError, UnavailableError, UsageError
from deltad.types import Version, parse_version
from trainer_plugin.rl import events
from trainer_plugin.rl.options import Options
from trainer_plugin.rl.rollouts import RemoteReplica, insist
from trainer_plugin.rl.tasks import Prompt, Task

_POLL_SECONDS = 20.0
_FEWEST_SECONDS = 0.5
"""A poll that the daemon answers sooner, because it is stopping, is not repeated before."""


class Speaker:
    """Writes events as lines to a stream and, if there is one, to the progress file."""

    def __init__(self, stream: TextIO, progress_file: Path | None) -> None:
        self._stream = stream
        self._file = progress_file

    def say(self, event: events.Event) -> None:
        """One line, with the time of now unless the event has its own."""
        stamped = event if event.time else msgspec.structs.replace(event, time=time.time())
        line = msgspec.json.encode(stamped).decode()
        print(line, file=self._stream, flush=True)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(line + "\n")


class Trainer:
    """One training run. `run` returns after the last version was verified and says everything on the way."""

    def __init__(self, options: Options, speaker: Speaker) -> None:
        from transformers import AutoTokenizer

        from trainer_plugin.rl.grpo import Learner

        self._options = options
        self._say = speaker.say
        self._tokenizer: Any = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        self._learner = Learner(options.model, learning_rate=options.learning_rate)
        self._task = _task(options, self._tokenizer)
        self._client = Client(options.socket)
        self._replica = RemoteReplica(
            options.rollouts,
            patience=options.patience,
            on_retry=lambda attempt, error: self._waiting("replica", attempt, error),
        )
        self._probe_at_first: tuple[float, ...] | None = None
        self._sampled = 0

    def run(self) -> None:
        """Raises UnavailableError once the patience is over."""
        options = self._options
        begun = time.monotonic()
        self._say(
            events.Started(
                model=options.model.name,
                parameters=self._learner.parameters,
                dtype="bf16",
                task=self._task.name,
                steps=options.steps,
                samples=options.samples,
                prompts_per_step=options.prompts_per_step,
                learning_rate=options.learning_rate,
                seed=options.seed,
            )
        )
        version = self._publish(0)
        self._evaluate("before", version)
        for step in range(1, options.steps + 1):
            self._say(events.StepStarted(step=step, version=version))
            self._learn(step, version)
            version = self._publish(step)
        self._evaluate("after", version)
        self._say(
            events.Finished(
                steps=options.steps,
                versions=options.steps + 1,
                rollouts_from_remote=self._sampled,
                rollouts_from_local=0,
                seconds=time.monotonic() - begun,
            )
        )

    def _learn(self, step: int, version: str) -> None:
        from trainer_plugin.rl.grpo import Answer, Group

        begun = time.monotonic()
        prompts = self._task.prompts(step, self._options.prompts_per_step)
        generated = [
            self._replica.generate(
                prompt.token_ids,
                n=self._options.samples,
                max_new_tokens=self._options.max_new_tokens,
                temperature=self._options.temperature,
                seed=_seed(self._options.seed, step, i),
                min_version=version,
            )
            for i, prompt in enumerate(prompts)
        ]
        groups = [
            Group(
                prompt.token_ids,
                tuple(
                    Answer(sample.token_ids, sample.logprobs, self._task.reward(prompt, sample.token_ids))
                    for sample in reply.samples
                ),
            )
            for prompt, reply in zip(prompts, generated, strict=True)
        ]
        answers = [answer for group in groups for answer in group.answers]
        rewards = [answer.reward for answer in answers]
        mean = sum(rewards) / len(rewards)
        self._sampled += len(answers)
        self._say(
            events.Rollouts(
                step=step,
                versions=_ascending(v for reply in generated for v in reply.versions),
                samples=len(answers),
                tokens=sum(len(answer.token_ids) for answer in answers),
                total=self._sampled,
                reward_mean=mean,
                reward_std=(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
                seconds=time.monotonic() - begun,
            )
        )
        begun = time.monotonic()
        outcome = self._learner.step(groups)
        self._say(
            events.Trained(
                step=step,
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                zero_advantage=outcome.zero_advantage,
                ratio_mean=outcome.ratio_mean,
                clipped=outcome.clipped,
                seconds=time.monotonic() - begun,
            )
        )

    def _publish(self, number: int) -> str:
        """Write the policy, wait until a remote replica serves it, and compare the two. Returns the version."""
        version, written = str(Version(1, number)), self._write(number)
        report = self._verified(version)
        end_to_end = time.monotonic() - written
        probe = self._task.probe()
        remote = self._replica.logprobs(probe, min_version=version).logprobs
        first = self._probe_at_first = self._probe_at_first or remote
        self._say(
            events.VersionVerified(
                number=number,
                version=version,
                replica=report.replica,
                root_served=report.root,
                end_to_end=end_to_end,
                logprob_gap=_largest_gap(remote, self._learner.logprobs(probe)),
                logprob_shift=_largest_gap(remote, first),
            )
        )
        return version

    def _write(self, number: int) -> float:
        """Save as trainers do, file by file into the final directory. Returns when it ended, on the monotonic clock."""
        begun = time.monotonic()
        directory = self._options.checkpoints / f"step_{number:06d}"
        self._learner.policy.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)
        ended = time.monotonic()
        self._say(
            events.CheckpointWritten(
                number=number,
                version=str(Version(1, number)),
                path=str(directory),
                bytes=sum(path.stat().st_size for path in directory.iterdir()),
                seconds=ended - begun,
            )
        )
        for old in range(number - self._options.keep + 1):
            shutil.rmtree(self._options.checkpoints / f"step_{old:06d}", ignore_errors=True)
        return ended

    def _verified(self, version: str) -> ReplicaReport:
        """The replica that serves `version` or newer, as soon as the daemon here knows of one."""
        until = time.monotonic() + self._options.patience

        def ask() -> ReplicaReport:
            for attempt in itertools.count(1):
                asked = time.monotonic()
                wait = min(max(until - asked, 0.0), _POLL_SECONDS)
                view = self._client.fleet(self._options.run, version=version, verified=1, wait=wait)
                for report in _reports(view):
                    if proves(report, version):
                        return report
                missing = UnavailableError(version, expected="verified on a replica", found=_describe(view))
                if time.monotonic() >= until:
                    missing.retryable = False
                    raise missing
                self._waiting("version", attempt, missing)
                time.sleep(max(0.0, asked + _FEWEST_SECONDS - time.monotonic()))
            raise AssertionError("counting does not end")

        return insist(ask, self._options.patience, lambda attempt, error: self._waiting("daemon", attempt, error))

    def _evaluate(self, when: str, version: str) -> None:
        prompts = self._task.held_out(self._options.evaluate)
        if not prompts:
            return
        rewards = [self._greedy_reward(prompt, version) for prompt in prompts]
        mean = sum(rewards) / len(rewards)
        self._say(events.Evaluation(when=when, version=version, prompts=len(prompts), reward_mean=mean))

    def _greedy_reward(self, prompt: Prompt, version: str) -> float:
        reply = self._replica.generate(
            prompt.token_ids,
            n=1,
            max_new_tokens=self._options.max_new_tokens,
            temperature=0.0,
            seed=0,
            min_version=version,
        )
        return self._task.reward(prompt, reply.samples[0].token_ids)

    def _waiting(self, what: str, attempt: int, error: DeltadError) -> None:
        self._say(events.Waiting(what=what, attempt=attempt, error=str(error)))


def proves(report: ReplicaReport, version: str) -> bool:
    """Whether a replica's report says that it serves `version` or newer, and has read all of it back."""
    return report.state in PROVEN and bool(report.root) and parse_version(report.version) >= parse_version(version)


def _reports(view: FleetView) -> Iterator[ReplicaReport]:
    for region in view.regions:
        for run in region.report.runs.values():
            yield from run.replicas


def _describe(view: FleetView) -> str:
    said = [f"{r.replica}: {r.state} {r.version} {r.error}".strip() for r in _reports(view)]
    said += [
        f"the fleet of {region.report.daemon} is held at {run.target.version} by {run.target.by}"
        for region in view.regions
        for run in region.report.runs.values()
        if run.target
    ]
    return "; ".join(said) or "no replica that is known here"


def _largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference; NaN if any of them is."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)


def _seed(seed: int, step: int, group: int) -> int:
    """One seed for each group of the run."""
    return random.Random(f"{seed} {step} {group}").getrandbits(31)  # noqa: S311


def _ascending(versions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(versions), key=parse_version))


def _task(options: Options, tokenizer: Any) -> Task:
    if options.task == "tokens":
        from trainer_plugin.rl.tokens import Tokens

        return Tokens(tokenizer, options.seed)
    from trainer_plugin.rl.arithmetic import Arithmetic

    return Arithmetic(tokenizer, options.seed)


def train(options: Options, stream: TextIO) -> int:
    """Run to the end. The exit code: 0, or that of the error, which is also the last line."""
    speaker = Speaker(stream, options.progress_file)
    try:
        if options.checkpoints.exists() and any(options.checkpoints.glob("step_*")):
            raise UsageError(
                f"directory {options.checkpoints}",
                expected="no checkpoints",
                found="those of another training run",
                hint="name another directory",
            )
        Trainer(options, speaker).run()
    except DeltadError as error:
        speaker.say(events.Failed(kind=error.kind, error=str(error)))
        return error.exit_code
    except OSError as error:
        speaker.say(events.Failed(kind="Store", error=str(error)))
        return StoreError.exit_code
    return 0
