"""`deltad config check|show|keys`: what a configuration file means and may hold, without starting anything."""

from __future__ import annotations

from pathlib import Path

import click

from deltad.cli.connect import help_if_alone, json_option
from deltad.cli.output import show, show_json
from deltad.figures import count
from deltad.ops.blocks import Cell, Facts, Line, Table, Tone, columns

_FILE = click.argument("file", type=click.Path(path_type=Path))


@click.group(invoke_without_command=True, short_help="Check or show a configuration file; list its keys.")
@click.pass_context
def config(context: click.Context) -> int | None:
    """Check a configuration file, show it with all defaults filled in, or list what it may hold.

    \b
    Examples:
      deltad config check /etc/deltad/deltad.toml
      deltad config keys
    """
    return help_if_alone(context)


@config.command(short_help="Say whether a file can be used.")
@_FILE
@json_option
def check(file: Path, as_json: bool) -> None:
    """Say whether FILE can be used: keys, units, runs and token files. Binds and creates nothing.

    \b
    Example:
      deltad config check /etc/deltad/deltad.toml
    """
    from deltad.config import load_config, warnings

    loaded = load_config(file)
    doubts = warnings(loaded)
    if as_json:
        show_json({"file": str(loaded.path), "valid": True, "daemon": loaded.daemon.name, "warnings": doubts})
        return
    has = (
        count(len(loaded.runs), "run"),
        count(len(loaded.watches), "watched directory", "watched directories"),
        count(len(loaded.upstreams), "upstream"),
    )
    listens = [
        f"{name} on {part.listen}" for name, part in (("relay", loaded.relay), ("metrics", loaded.metrics)) if part
    ]
    show(
        [
            Line(f"{loaded.path} can be used"),
            *(Line(Cell(f"warning: {doubt}", Tone.WARN)) for doubt in doubts),
            Facts(
                "",
                [
                    ("daemon", loaded.daemon.name),
                    ("store", str(loaded.daemon.store)),
                    ("socket", str(loaded.daemon.socket)),
                    ("serves", ", ".join(listens) or "its own host only"),
                    ("has", ", ".join(has)),
                ],
            ),
        ]
    )


@config.command(name="show", short_help="Print a file with every default filled in.")
@_FILE
@json_option
def show_config(file: Path, as_json: bool) -> None:
    """Print FILE with every default filled in, as TOML that loads to the same configuration.

    Token files are named; tokens are never shown.

    \b
    Example:
      deltad config show /etc/deltad/deltad.toml
    """
    from deltad.config import dump, load_config, to_toml

    loaded = load_config(file)
    if as_json:
        show_json(dump(loaded))
    else:
        click.echo(to_toml(loaded), nl=False)


@config.command(name="keys", short_help="List every section and key that a file may have.")
@json_option
def list_keys(as_json: bool) -> None:
    """List every section and key that a configuration file may have, with defaults and meaning.

    `[daemon]` is all that a file needs; sections in double brackets may stand in it more than once.

    \b
    Example:
      deltad config keys
    """
    from deltad.config import UNITS, explain

    sections = explain()
    if as_json:
        show_json({"units": UNITS, "sections": sections})
        return
    tables = [
        Table(
            f"{section.name} {section.text.rstrip('.')}",
            columns("key", "default", "meaning"),
            [(key.name, "required" if key.required else key.default, key.text) for key in section.keys],
        )
        for section in sections
    ]
    show([*tables, Line(UNITS)])
