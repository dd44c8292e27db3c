"""What `deltad demo` was asked to do, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo's options. Relative paths are relative to the current directory.

    `steps`: optimiser steps; versions are one more, the base policy being the first.
    `learning_rate`: AdamW's; None takes 1e-6.
    `quick`: a tiny random model in place of SmolLM2-135M-Instruct.
    `report`: where the JSON report is written.
    `keep`: a directory for everything that the demo writes; None takes a temporary one, removed at the end.
    `rtt_ms`, `mbit`: the link between the regions: round trip in ms, 10^6 bit/s for each direction.
    `seed`: of prompts, sampling and, with `quick`, the weights.
    `as_json`: print the report in place of the table; progress goes to standard error.
    `evaluate`: held-out prompts whose reward the trainer measures before and after; 0 measures none.
    `events`: a file that receives the trainer's event lines too; they are in its log in any case.
    """

    steps: int = 6
    learning_rate: float | None = None
    quick: bool = False
    report: Path = Path("demo-report.json")
    keep: Path | None = None
    rtt_ms: float = 80.0
    mbit: float = 50.0
    seed: int = 0
    as_json: bool = False
    evaluate: int = 0
    events: Path | None = None
