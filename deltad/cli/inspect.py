"""`deltad inspect`: what a file, a checkpoint or a version is made of."""

from __future__ import annotations

from pathlib import Path

import click

from deltad.cli.connect import (
    Daemon,
    VersionName,
    daemon_options,
    json_option,
    path_or_version,
    publish_as_option,
    version_id,
)
from deltad.cli.output import show, show_json


@click.command(short_help="Show what a file, checkpoint or version is made of.")
@click.argument("what", metavar="FILE|VERSION")
@click.option("--all", "everything", is_flag=True, help="List all tensors and chunks.")
@publish_as_option
@daemon_options
@json_option
def inspect(daemon: Daemon, what: str, everything: bool, publish_as: str, as_json: bool) -> None:
    """Show what FILE or VERSION is made of.

    FILE may be a safetensors file, a checkpoint directory, or an object of a daemon's store (a version
    record, manifest, page, layout or chunk), told by its content. VERSION (RUN/v000012, v000012, v000012@e2, 12
    or latest; without @e2, the newest epoch that has the number) is asked of the daemon: its record,
    variants, edges, manifests, pages and chunks. What is damaged is refused and said to be.

    The digest of a layout covers the files that travel with the weights, so a checkpoint's directory and
    one of its safetensors files have layouts of their own.

    \b
    Examples:
      deltad inspect model-00001-of-00002.safetensors
      deltad inspect checkpoints/step_000120 --all
      deltad inspect policy/v000012 --json
    """
    target = path_or_version(what)
    if isinstance(target, VersionName):
        from deltad.cli.edges import read_version, version_blocks, version_json

        client = daemon.client()
        version = read_version(client, version_id(target.find(client)))
        if as_json:
            show_json(version_json(version))
        else:
            show(version_blocks(version, everything))
    elif target.is_dir() or target.suffix == ".safetensors":
        from deltad.cli.layouts import layout_blocks, layout_json, read_layout

        layout = read_layout(target, publish_as)
        if as_json:
            show_json({"path": str(target), **layout_json(layout)})
        else:
            show(layout_blocks(str(target), layout, everything))
    else:
        _inspect_object(target, everything, as_json)


def _inspect_object(path: Path, everything: bool, as_json: bool) -> None:
    from deltad.cli.anatomy import object_blocks
    from deltad.cli.objects import builtins, read_object

    found = read_object(path)
    if as_json:
        show_json(
            {
                "path": str(path),
                "kind": found.kind,
                "digest": found.digest.hex(),
                "size": found.size,
                "fields": builtins(found.value),
            }
        )
    else:
        show(object_blocks(path, found, everything))
