"""`deltad gc`: let go of what nobody needs, or be told in words what that would be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deltad.cli.connect import Daemon, daemon_options, json_option
from deltad.cli.output import show, show_json
from deltad.figures import count, size
from deltad.ops.blocks import Block, Cell, Line, Table, Tone, columns

if TYPE_CHECKING:
    from deltad.client.messages import CollectReply, Explanation


@click.command(short_help="Remove what nobody needs, or say what that is.")
@click.option("--dry-run", is_flag=True, help="Change nothing; say of everything whether it stays, and why.")
@click.option("--all", "everything", is_flag=True, help="Tell of objects that stay, too.")
@daemon_options
@json_option
def gc(daemon: Daemon, dry_run: bool, everything: bool, as_json: bool) -> None:
    """Remove the versions that the retention of their run does not keep, and what only they led to.

    The newest version, those that a fleet is held at or somebody pinned, and those that a replica, a region or
    work under way uses, stay, with all that leads to them from an anchor. The daemon does this by itself every
    few minutes.

    \b
    Examples:
      deltad gc --dry-run
      deltad gc --dry-run --all --json
    """
    reply = daemon.client().collect(dry_run=dry_run)
    if as_json:
        show_json(reply)
        return
    show([_summary(reply, dry_run), *_tables(reply, everything)])


def _summary(reply: CollectReply, dry_run: bool) -> Line:
    gone = sum(not found.kept for found in reply.versions)
    said = "would be removed" if dry_run else "removed"
    return Line(
        f"{count(gone, 'version')} and {count(reply.dropped_objects, 'object')} {said} "
        f"({size(reply.dropped_bytes)}, of which chunks give theirs back with their packs); "
        f"{count(len(reply.versions) - gone, 'version')} and {count(reply.kept_objects, 'object')} stay"
    )


def _tables(reply: CollectReply, everything: bool) -> list[Block]:
    objects = [found for found in reply.objects if everything or not found.kept]
    tables: list[Block] = [_table("versions", reply.versions)]
    if objects:
        tables.append(_table("objects", objects))
    return tables


def _table(title: str, found: list[Explanation] | tuple[Explanation, ...]) -> Table:
    rows = [
        (
            one.thing.removeprefix("object "),
            size(one.bytes),
            Cell("stays", Tone.GOOD) if one.kept else Cell("goes", Tone.WARN),
            one.why,
        )
        for one in found
    ]
    return Table(title, columns("name", ">size", "", "why"), rows)
