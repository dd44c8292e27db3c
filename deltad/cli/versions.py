"""`deltad log`, and how one version is described in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deltad.cli.connect import Daemon, Whole, daemon_options, json_option, the_run
from deltad.cli.output import show_json, show_lines, shows_boxes, terminal_width
from deltad.figures import count, percent, percent_of, size, stages, when
from deltad.ops.blocks import Cell, Facts
from deltad.types import RunId, parse_run

if TYPE_CHECKING:
    from deltad.client.messages import VersionInfo


@click.command(short_help="Draw the versions of a run, newest first.")
@click.argument("run", metavar="[RUN]", type=parse_run, required=False)
@click.option("-n", "--limit", type=Whole(min=1), metavar="N", help="Show the newest N only.")
@daemon_options
@json_option
def log(daemon: Daemon, run: RunId | None, limit: int | None, as_json: bool) -> None:
    """Draw the lineage of RUN, newest version first: lines part where an epoch or a fork leaves another behind.

    For each version: its kind, the share of elements that changed, its bytes and their share of the full weights,
    and when it was published; below that, whether it is the latest or a target and who holds fleets there, where
    it comes from if not from the one before, who pinned it, how it is coded and why, and who published it. At the
    end, who moved the target lately, when and why.

    \b
    Examples:
      deltad log
      deltad log policy -n 20 --json
    """
    from deltad.cli.lineage import ASCII, BOXES, log_lines

    client = daemon.client()
    run = the_run(client, run)
    versions, targets = client.versions(run), client.targets(run)
    if as_json:
        show_json({"versions": versions[::-1][:limit], "targets": targets})
        return
    strokes = BOXES if shows_boxes() else ASCII
    show_lines(log_lines(run, versions, targets, limit=limit, strokes=strokes, width=terminal_width()))


def version_facts(info: VersionInfo) -> Facts:
    """One version in words."""
    base = info.base or info.parent
    how = f"{info.kind} on {base}" if info.kind != "anchor" and base else info.kind
    rows: list[tuple[str, Cell | str]] = [
        ("kind", f"{how} ({info.reason})" if info.reason else how),
        ("changed", f"{info.changed:,} of {count(info.elements, 'element')}, {percent(info.density)}"),
        (
            "bytes",
            f"{size(info.delta_bytes)} in {count(info.chunks, 'chunk')}, "
            f"{percent_of(info.delta_bytes, info.full_bytes)} of the full {size(info.full_bytes)}",
        ),
        ("root", info.root),
    ]
    if info.coder:
        rows.append(("coder", f"{info.coder} ({info.coder_reason})" if info.coder_reason else info.coder))
    if info.pulled_bytes:
        rows.append(("pulled", size(info.pulled_bytes)))
    if info.identity:
        rows.append(("identity", info.identity))
    rows += [("variant", info.variant), ("source", info.source or "–"), ("published", when(info.created))]
    took = stages(info.seconds)
    return Facts("", [*rows, ("took", took)] if took else rows)
