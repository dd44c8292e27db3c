"""The demo, measured: does a policy learn through the whole path, and what does each version cost on the way?

A full run is 3 seeds of 30 steps on SmolLM2-135M-Instruct at a learning rate of 1e-5, ten times the demo's own,
over the demo's default link. A quick run is one seed of 6 steps on the tiny random model, which learns nothing
that is worth stating.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bench.harness import Measurement, Spec, median_of, skipped
from bench.intervals import t_interval, wilson_interval
from deltad.demo.options import DemoOptions
from deltad.demo.report import DemoReport, TrainerLine, parse_line
from deltad.demo.runner import run_demo

SEEDS = (0, 1, 2)
STEPS = 30
LEARNING_RATE = 1e-5
HELD_OUT = 100

PATHS = ("deltad", "trainer_plugin", "rollout_plugin", "bench/demo.py", "bench/intervals.py")

SPECS = (
    Spec(name="runs whose every version matched", unit="share", direction="max", must=1.0),
    Spec(name="versions that crossed", unit="", direction="max"),
    Spec(name="rollouts from the remote replica", unit="", direction="max"),
    Spec(name="bytes pulled per delta, of full", unit="%", direction="min"),
    Spec(name="weights changed per delta", unit="%", direction="min"),
    Spec(name="pause of generation", unit="ms", direction="min"),
    Spec(name="end to end, written to verified", unit="s", direction="min"),
    Spec(name="log-prob gap, replica to trainer", unit="nat", direction="min"),
    Spec(name="held-out reward before", unit="", direction="max"),
    Spec(name="held-out reward after", unit="", direction="max"),
    Spec(name="held-out reward gained", unit="", direction="max"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of the demo left: its report and the trainer's evaluations by `before` and `after`."""

    report: DemoReport
    evaluations: dict[str, TrainerLine]


def measure(quick: bool) -> Iterator[Measurement]:
    """Run the demo once per seed, then one measurement for each row. Raises RuntimeError if a run failed."""
    if quick:
        outcomes = [_run(DemoOptions(quick=True))]
    else:
        options = (
            DemoOptions(steps=STEPS, learning_rate=LEARNING_RATE, seed=seed, evaluate=HELD_OUT) for seed in SEEDS
        )
        outcomes = [_run(one) for one in options]
    yield from _costs(outcomes)
    if quick:
        reason = "a tiny random model in a few steps learns nothing worth stating; the full run trains a real one"
        yield from (skipped(f"held-out reward {what}", reason) for what in ("before", "after", "gained"))
    else:
        yield from _rewards(outcomes)


def _run(options: DemoOptions) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="deltad-bench-") as directory:
        report, events = Path(directory, "report.json"), Path(directory, "events.jsonl")
        code = run_demo(replace(options, report=report, events=events))
        if not report.exists():
            raise RuntimeError(f"the demo with seed {options.seed} ended with exit code {code} and left no report")
        lines = [line for text in events.read_bytes().splitlines() if (line := parse_line(text)) is not None]
        evaluations = {line.when: line for line in lines if line.event == "evaluation"}
        return Outcome(msgspec.json.decode(report.read_bytes(), type=DemoReport), evaluations)


def _costs(outcomes: Sequence[Outcome]) -> Iterator[Measurement]:
    versions = [version for outcome in outcomes for version in outcome.report.versions]
    # The first version crosses whole; what a step costs is told by the others.
    deltas = [version for outcome in outcomes for version in outcome.report.versions[1:]]
    model = f"{outcomes[0].report.model}, {len(outcomes)} runs"
    runs = [float(outcome.report.all_match) for outcome in outcomes]
    yield Measurement(name=SPECS[0].name, value=statistics.fmean(runs), runs=len(runs), note=model)
    yield Measurement(name=SPECS[1].name, value=float(len(versions)), runs=len(runs))
    rollouts = sum(outcome.report.rollouts_from_remote for outcome in outcomes)
    yield Measurement(name=SPECS[2].name, value=float(rollouts), runs=len(runs))
    yield median_of(SPECS[3].name, [version.percent_of_full for version in deltas], note="all that region 2 pulled")
    yield median_of(SPECS[4].name, [100 * version.density for version in deltas])
    yield median_of(SPECS[5].name, [1000 * version.seconds.pause for version in deltas])
    yield median_of(SPECS[6].name, [version.seconds.end_to_end for version in deltas])
    gaps = [version.logprob_gap for version in versions if version.logprob_gap is not None]
    yield median_of(SPECS[7].name, gaps, note="largest over the tokens of a fixed prompt, per version")


def _rewards(outcomes: Sequence[Outcome]) -> Iterator[Measurement]:
    """The base policy is one and the same in all runs; what differs by seed is the training, so that the
    intervals of what came after it are Student's over the seeds, and few seeds give wide ones."""
    before = [_reward(outcome, "before") for outcome in outcomes]
    after = [_reward(outcome, "after") for outcome in outcomes]
    gained = [late - early for early, late in zip(before, after, strict=True)]
    prompts = outcomes[0].evaluations["before"].prompts
    yield Measurement(
        name="held-out reward before",
        value=statistics.fmean(before),
        spread=wilson_interval(round(before[0] * prompts), prompts),
        runs=len(before),
        note=f"95 % Wilson interval over {prompts} held-out prompts, greedy; the same policy and prompts in all runs",
    )
    over_seeds = f"95 % t interval over {len(after)} seeds; {STEPS} steps at a learning rate of {LEARNING_RATE:g}"
    for name, values in (("held-out reward after", after), ("held-out reward gained", gained)):
        yield Measurement(
            name=name, value=statistics.fmean(values), spread=t_interval(values), runs=len(values), note=over_seeds
        )


def _reward(outcome: Outcome, when: str) -> float:
    found = outcome.evaluations[when].reward_mean
    if found is None:
        raise RuntimeError(f"the held-out reward {when} training is no number")
    return found
