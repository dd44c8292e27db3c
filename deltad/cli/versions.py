"""`deltad log`, and how one version is described in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import Daemon, Whole, daemon_options, json_option, the_run
from deltad.cli.output import show, show_json
from deltad.figures import count, percent, percent_of, size, stages, when
from deltad.ops.blocks import Cell, Facts, Table, Tone, columns
from deltad.types import RunId, Version, parse_run, parse_version

if TYPE_CHECKING:
    from deltad.client.messages import VersionInfo


@click.command(short_help="List the versions of a run, newest first.")
@click.argument("run", metavar="[RUN]", type=parse_run, required=False)
@click.option("-n", "--limit", type=Whole(min=1), metavar="N", help="Show the newest N only.")
@daemon_options
@json_option
def log(daemon: Daemon, run: RunId | None, limit: int | None, as_json: bool) -> None:
    """List the versions of RUN, newest first.

    For each: when it was published, its kind, the share of elements that changed, its bytes and their
    share of the full weights, how it is coded, and who published it; where it was published here, why it is
    coded so; and where it was reached over versions in between, from which one. Where a new epoch opens, the
    version it forks from is named, and how many versions that leaves behind.

    \b
    Examples:
      deltad log
      deltad log policy -n 20 --json
    """
    from deltad.client.messages import VersionsReply

    client = daemon.client()
    run = the_run(client, run)
    versions = client.versions(run)
    newest_first = tuple(reversed(versions))[:limit]
    if as_json:
        show_json(VersionsReply(newest_first))
    else:
        show([log_table(run, newest_first, forks(versions))])


def log_table(run: str, newest_first: Sequence[VersionInfo], forked: dict[str, str]) -> Table:
    """The log as a table; `forked` has a note for each version that opens an epoch."""
    rows: list[tuple[Cell | str, ...]] = []
    for info in newest_first:
        fork = forked.get(info.version, "")
        identity = f"identity {info.identity}" if info.identity else ""
        over = f"on {info.base}" if info.base not in ("", info.parent) else ""
        note = "; ".join(filter(None, (fork, over, info.reason, info.coder_reason, identity)))
        rows.append(
            (
                info.version,
                when(info.created),
                info.kind,
                percent(info.density),
                size(info.delta_bytes),
                percent_of(info.delta_bytes, info.full_bytes),
                info.coder or "–",
                info.source or "–",
                Cell(note, Tone.WARN if fork else Tone.DIM),
            )
        )
    heads = columns("version", "published", "kind", ">changed", ">bytes", ">of full", "coder", "source", "note")
    return Table(f"run {run}", heads, rows, empty="no versions yet")


def forks(ascending: Sequence[VersionInfo]) -> dict[str, str]:
    """For each version that opens an epoch after another: where it forks off, and what stays behind."""
    notes: dict[str, str] = {}
    before: list[Version] = []
    for info in ascending:
        version = parse_version(info.version)
        if before and version.epoch > before[-1].epoch:
            # The parent may be a version of another run, which none of these is after.
            parent = parse_version(info.parent) if info.parent and "/" not in info.parent else None
            left = sum(parent is None or old > parent for old in before if old.epoch == before[-1].epoch)
            notes[info.version] = f"epoch {version.epoch} opens here, from {info.parent or 'nothing'}" + (
                f", leaving {count(left, 'version')} behind" if left else ""
            )
        before.append(version)
    return notes


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
