"""`deltad export`: a version as a checkpoint directory that any loader of such directories reads."""

from __future__ import annotations

import os
from pathlib import Path

import click

from deltad.cli.connect import Daemon, VersionName, daemon_options, json_option, parse_version_name, version_id
from deltad.cli.output import show, show_json
from deltad.cli.progress import activity
from deltad.ops.blocks import Facts, Line


@click.command(short_help="Write a version as a loadable checkpoint.")
@click.argument("version", metavar="VERSION", type=parse_version_name)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@daemon_options
@json_option
def export(daemon: Daemon, version: VersionName, directory: Path, as_json: bool) -> None:
    """Write VERSION into DIR as a loadable Hugging Face checkpoint, with its config and tokenizer.

    The daemon writes the files and checks their root on the way. VERSION is RUN/v000012, v000012,
    v000012@e2, 12 or latest; without @e2, the newest epoch that has the number is meant.

    \b
    Examples:
      deltad export policy/v000012 /tmp/policy-12
      deltad export latest /tmp/newest
    """
    from deltad.client.messages import ExportRequest

    client = daemon.client()
    wanted = version_id(version.find(client))
    # The daemon does not share our working directory.
    request = ExportRequest(version=str(wanted.version), directory=os.path.abspath(directory))
    with activity(daemon, wanted.run, f"exporting {wanted}"):
        reply = client.export(wanted.run, request)
    if as_json:
        show_json(reply)
    else:
        show([Line(f"{wanted} is in {reply.directory}"), Facts("", [("root", reply.root)])])
