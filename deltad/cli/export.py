"""`deltad export`: a version as a checkpoint directory that any loader of such directories reads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from deltad.cli.connect import Daemon, VersionName, daemon_options, json_option, parse_version_name, version_id
from deltad.cli.output import show, show_json
from deltad.cli.progress import activity
from deltad.ops.blocks import Facts, Line


@click.command(short_help="Write a version as a loadable checkpoint.")
@click.argument("version", metavar="VERSION", type=parse_version_name)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["checkpoint", "disk-delta"]),
    default="checkpoint",
    help="What to write: all of it, or what changed, as slime, miles and cwtrain lay it out.",
)
@click.option("--base", type=parse_version_name, help="disk-delta: the version it applies to, else the one before.")
@click.option(
    "--encoding", type=click.Choice(["xor", "overwrite"]), default="xor", help="disk-delta: how bytes are told."
)
@click.option(
    "--checksum",
    type=click.Choice(["adler32", "xxh3-128", "blake3"]),
    default="adler32",
    help="disk-delta: of each tensor's new bytes.",
)
@daemon_options
@json_option
def export(  # noqa: PLR0917
    daemon: Daemon,
    version: VersionName,
    directory: Path,
    layout: str,
    base: VersionName | None,
    encoding: str,
    checksum: str,
    as_json: bool,
) -> None:
    """Write VERSION into DIR as a loadable Hugging Face checkpoint, with its config and tokenizer.

    With `--layout disk-delta` what is written is the difference from the version before, or from the one that `--base`
    names, in the layout that slime, miles and cwtrain read.

    The daemon writes the files and checks their root on the way. VERSION is RUN/v000012, v000012,
    v000012@e2, 12 or latest; without @e2, the newest epoch that has the number is meant.

    \b
    Examples:
      deltad export policy/v000012 /tmp/policy-12
      deltad export latest /tmp/newest
      deltad export latest /tmp/weight_v000013 --layout disk-delta --checksum xxh3-128
    """
    from deltad.client.messages import DiskDeltaRequest, ExportRequest

    client = daemon.client()
    wanted = version_id(version.find(client))
    # The daemon does not share our working directory.
    how = None
    if layout == "disk-delta":
        since = (
            str(version_id(replace(base, run=base.run or wanted.run).find(client)).version) if base is not None else ""
        )
        how = DiskDeltaRequest(base=since, encoding=encoding, checksum=checksum)
    request = ExportRequest(version=str(wanted.version), directory=os.path.abspath(directory), disk_delta=how)
    with activity(daemon, wanted.run, f"exporting {wanted}"):
        reply = client.export(wanted.run, request)
    if as_json:
        show_json(reply)
    else:
        show([Line(f"{wanted} is in {reply.directory}"), Facts("", [("root", reply.root)])])
