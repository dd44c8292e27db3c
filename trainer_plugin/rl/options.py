"""The trainer's command line as a frozen type. Imports no torch, so `--help` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltad.types import RunId, parse_run


@dataclass(frozen=True, slots=True)
class Options:
    """What `python -m trainer_plugin.rl` was asked to do."""

    model: Path
    checkpoints: Path
    steps: int
    learning_rate: float
    seed: int
    socket: Path
    run: RunId
    rollouts: str
    samples: int
    prompts_per_step: int
    max_new_tokens: int
    temperature: float
    task: str
    evaluate: int
    keep: int
    patience: float
    progress_file: Path | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line. Exits with 2 and one line on standard error for anything malformed."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_plugin.rl",
        description="Train a policy with GRPO. Every step writes a checkpoint that a daemon publishes, and every "
        "rollout is sampled from the replica that serves it. Prints one JSON object per event on standard output.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face checkpoint to start from")
    add("--checkpoints", type=Path, required=True, help="directory that receives step_000000, step_000001, …")
    add("--steps", type=int, default=6, help="optimiser steps; versions are one more, the base policy being the first")
    add("--lr", type=float, default=1e-6, dest="learning_rate", help="AdamW learning rate (default: 1e-6)")
    add("--seed", type=int, default=0, help="prompts, sampling and order (default: 0)")
    add("--socket", type=Path, required=True, help="Unix socket of the daemon beside this trainer")
    add("--run", type=_run, required=True, help="run id")
    add("--rollouts", required=True, metavar="URL", help="http://HOST:PORT of the remote replica")
    add("--samples", type=int, default=8, help="samples per prompt, one group (default: 8)")
    add("--prompts-per-step", type=int, default=1, help="groups per step (default: 1)")
    add("--max-new-tokens", type=int, default=16, help="longest answer in tokens (default: 16)")
    add("--temperature", type=float, default=1.0, help="sampling temperature of rollouts (default: 1)")
    add("--task", choices=("arithmetic", "tokens"), default="arithmetic", help="the verifiable reward")
    add("--evaluate", type=int, default=0, metavar="N", help="held-out prompts, before and after (default: none)")
    add("--keep", type=int, default=2, help="checkpoints left on disk; older ones are removed (default: 2)")
    add("--patience", type=float, default=300.0, help="seconds to retry a daemon or replica that does not answer")
    add("--progress-file", type=Path, help="also append every line to this file")
    return Options(**vars(parser.parse_args(arguments)))


def _run(text: str) -> RunId:
    try:
        return parse_run(text)
    except Exception as error:
        raise argparse.ArgumentTypeError(str(error)) from None
