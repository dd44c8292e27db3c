"""`deltad serve`: run the daemon."""

from __future__ import annotations

from pathlib import Path

import click

from deltad.cli.connect import json_option


@click.command(short_help="Run the daemon.")
@click.option(
    "--config", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The daemon's configuration."
)
@json_option
def serve(config: Path, as_json: bool) -> int:
    """Run the daemon until SIGTERM, which drains it; a second one hurries.

    \b
    Example:
      deltad serve --config /etc/deltad/deltad.toml
    """
    # The configuration is judged before anything of the daemon is even imported.
    from deltad.config import load_config

    loaded = load_config(config)
    from deltad.daemon.serve import serve as run_daemon

    return run_daemon(loaded)
