"""`deltad doctor`: is this host fit for what its configuration asks of it, and if not, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import json_option
from deltad.cli.output import show, show_json
from deltad.figures import count
from deltad.ops.blocks import Cell, Facts, Line, Tone

if TYPE_CHECKING:
    from deltad.ops.doctor import Finding

FOUND_ERRORS = 1
"""Exit code where something is wrong that the daemon would not start with, or not be safe."""


@click.command(short_help="Say whether this host is fit for its configuration.")
@click.option(
    "--config", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The daemon's configuration."
)
@click.option("--all", "everything", is_flag=True, help="Tell of what is good, too.")
@json_option
def doctor(config: Path, everything: bool, as_json: bool) -> int:
    """Look at the disk, the store, permissions, limits, clock and network that FILE's daemon has or will have.

    The daemon may be running or not; nothing is changed. Each finding says what is there, what was expected,
    and what to do. Ask as the user that the daemon runs as.

    Exits with 0 where nothing is worse than a warning, with 1 where there is an error.

    \b
    Examples:
      deltad doctor --config /etc/deltad/deltad.toml
      sudo -u deltad deltad doctor --config /etc/deltad/deltad.toml --json
    """
    from deltad.config import load_config

    loaded = load_config(config)
    from deltad.ops.doctor import Level, examine, gather

    findings = examine(loaded, gather(loaded))
    counts = {level: sum(found.level is level for found in findings) for level in Level}
    if as_json:
        show_json({"config": str(loaded.path), "counts": counts, "findings": findings})
    else:
        shown = [found for found in findings if everything or found.level is not Level.OK]
        summary = ", ".join(
            (
                count(counts[Level.ERROR], "error"),
                count(counts[Level.WARNING], "warning"),
                count(counts[Level.NOTE], "note"),
                f"{counts[Level.OK]} good",
            )
        )
        show([*([Facts("", [_row(found) for found in shown])] if shown else []), Line(f"{loaded.path}: {summary}")])
    return FOUND_ERRORS if counts[Level.ERROR] else 0


def _row(found: Finding) -> tuple[str, Cell]:
    tones = {"ok": Tone.GOOD, "note": Tone.PLAIN, "warning": Tone.WARN, "error": Tone.BAD}
    return found.level, Cell(str(found), tones[found.level])
