"""`deltad pin` and `deltad unpin`: keep a version whatever the retention says, or leave it to it again."""

from __future__ import annotations

import click

from deltad.cli.connect import Daemon, VersionName, daemon_options, json_option, parse_version_name
from deltad.cli.lineage import pinned_by
from deltad.cli.output import show, show_json
from deltad.ops.blocks import Line

_VERSION = click.argument("version", metavar="VERSION", type=parse_version_name)


@click.command(short_help="Keep a version whatever the retention says.")
@_VERSION
@click.option("--reason", default="", metavar="TEXT", help="Why; told by `log` and `gc`.")
@daemon_options
@json_option
def pin(daemon: Daemon, version: VersionName, reason: str, as_json: bool) -> None:
    """Keep VERSION, and all that leads to it, whatever the retention of its run says.

    The daemon notes who asked, when and why. A pinned version may be pinned again: the same reason changes nothing,
    another one replaces it.

    \b
    Examples:
      deltad pin policy/v000012 --reason "the one in the paper"
      deltad pin latest
    """
    client = daemon.client()
    info = version.find(client)
    reply = client.pin(info.run, info.version, reason)
    if as_json:
        show_json(reply)
        return
    assert reply.pin is not None, "the daemon has pinned it"
    said = "is pinned" if reply.changed else "was pinned before; nothing changed"
    show([Line(f"{info.run}/{reply.version} {said}, by {pinned_by(reply.pin)}")])


@click.command(short_help="Leave a version to the retention again.")
@_VERSION
@daemon_options
@json_option
def unpin(daemon: Daemon, version: VersionName, as_json: bool) -> None:
    """Leave VERSION to the retention of its run again. One that is not pinned stays as it is.

    \b
    Example:
      deltad unpin policy/v000012
    """
    client = daemon.client()
    info = version.find(client)
    reply = client.unpin(info.run, info.version)
    if as_json:
        show_json(reply)
        return
    said = "is not pinned any more" if reply.changed else "was not pinned; nothing changed"
    show([Line(f"{info.run}/{reply.version} {said}")])
