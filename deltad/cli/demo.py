"""`deltad demo`: the whole path on one machine."""

from __future__ import annotations

from pathlib import Path

import click

from deltad.cli.connect import Whole, json_option
from deltad.demo.options import DemoOptions

_PATH = click.Path(path_type=Path)
_DEFAULT = DemoOptions()


@click.command(short_help="Run the whole path on this machine.")
@click.option(
    "--steps",
    type=Whole(min=1),
    default=_DEFAULT.steps,
    show_default=True,
    metavar="N",
    help="Optimiser steps; each makes a version.",
)
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="AdamW's learning rate.  [default: 1e-6]",
)
@click.option("--quick", is_flag=True, help="A tiny random model: under a minute on two cores.")
@click.option(
    "--report",
    type=_PATH,
    default=_DEFAULT.report,
    show_default=True,
    metavar="PATH",
    help="Where the report is written.",
)
@click.option(
    "--keep",
    type=_PATH,
    metavar="DIR",
    help="Keep all files in DIR, which must be absent or empty.",
)
@click.option(
    "--rtt",
    type=click.FloatRange(min=0),
    default=_DEFAULT.rtt_ms,
    show_default=True,
    metavar="MS",
    help="The link's round trip in milliseconds.",
)
@click.option(
    "--mbit",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULT.mbit,
    show_default=True,
    metavar="R",
    help="The link's rate in Mbit/s, each way.",
)
@click.option("--seed", type=Whole(min=0), default=_DEFAULT.seed, metavar="N", help="Of prompts and sampling.")
@json_option
def demo(
    *,
    steps: int,
    lr: float | None,
    quick: bool,
    report: Path,
    keep: Path | None,
    rtt: float,
    mbit: float,
    seed: int,
    as_json: bool,
) -> int:
    """Run real reinforcement learning through two daemons and a slow link on this machine.

    A trainer writes checkpoints, daemon A publishes them, daemon B pulls them over the link, and a
    replica swaps them into its live weights; the next step's rollouts are sampled from that replica.
    Ends with a table and a report, and with 0 only if every version that was served is bit for bit the
    one that was published.

    \b
    Examples:
      deltad demo
      deltad demo --quick --steps 3 --report /tmp/report.json
    """
    from deltad.demo.runner import run_demo

    return run_demo(
        DemoOptions(
            steps=steps,
            learning_rate=lr,
            quick=quick,
            report=report,
            keep=keep,
            rtt_ms=rtt,
            mbit=mbit,
            seed=seed,
            as_json=as_json,
        )
    )
