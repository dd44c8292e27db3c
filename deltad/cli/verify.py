"""`deltad verify`: is this version, or this checkpoint, what was published? Compared root by root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import (
    Daemon,
    VersionName,
    daemon_options,
    json_option,
    parse_version_name,
    path_or_version,
    publish_as_option,
    the_run,
    version_id,
)
from deltad.cli.output import show, show_json
from deltad.cli.progress import activity, step
from deltad.errors import IntegrityError, NotFoundError
from deltad.figures import count
from deltad.ops.blocks import Facts, Line
from deltad.types import VersionId

if TYPE_CHECKING:
    from deltad.client.client import Client
    from deltad.client.messages import VerifyReply
    from deltad.delta.digest import U64
    from deltad.delta.layout import Layout

_NAMED = 10


@click.command(short_help="Prove that a version or checkpoint has its root.")
@click.argument("what", metavar="VERSION|DIR")
@click.option("--version", "against", type=parse_version_name, metavar="VERSION", help="What DIR must be.")
@publish_as_option
@daemon_options
@json_option
def verify(daemon: Daemon, what: str, against: VersionName | None, publish_as: str, as_json: bool) -> None:
    """Prove that VERSION, or the checkpoint in DIR, has the published root.

    VERSION (RUN/v000012, v000012, v000012@e2, 12 or latest; without @e2, the newest epoch that has the
    number): the daemon rebuilds all weights from its store and compares; what it finds damaged is set aside and
    healed where that is possible, as `deltad status` tells. DIR: the root of the checkpoint is
    computed here, offline. It is compared with --version where that is given, else, where --socket, --config
    or DELTAD_SOCKET points at a daemon, with all it has published. Exits with 65 and names the tensors that
    differ.

    \b
    Examples:
      deltad verify policy/v000012
      deltad verify /tmp/policy-12 --version policy/v000012
      deltad verify checkpoints/step_000120
    """
    target = path_or_version(what)
    if isinstance(target, VersionName):
        _verify_version(daemon, target, as_json)
    else:
        _verify_directory(daemon, target, against, publish_as, as_json)


def _verify_version(daemon: Daemon, name: VersionName, as_json: bool) -> None:
    client = daemon.client()
    wanted = version_id(name.find(client))
    with activity(daemon, wanted.run, f"rebuilding {wanted}"):
        reply = client.verify(wanted.run, wanted.version)
    _conclude(str(wanted), f"{wanted}, rebuilt from the store", reply, as_json)


def _verify_directory(
    daemon: Daemon, directory: Path, against: VersionName | None, publish_as: str, as_json: bool
) -> None:
    from deltad.client.messages import VerifyReply

    with step(f"reading {directory}"):
        found = sum_checkpoint(directory, publish_as)
    if against is None and not daemon.named:
        if as_json:
            show_json({"directory": str(directory), "root": found.root.hex(), "tensors": len(found.layout.tensors)})
        else:
            facts = [("root", found.root.hex()), ("tensors", f"{len(found.layout.tensors):,}")]
            show([Line(f"{directory}, compared with nothing"), Facts("", facts)])
        return
    client = daemon.client()
    wanted = _published_with(client, found.root.hex()) if against is None else version_id(against.find(client))
    published = published_weights(client, wanted, found.root)
    reply = VerifyReply(
        version=str(wanted.version),
        root=published.root.hex(),
        found=found.root.hex(),
        match=published.root == found.root,
        tensors=len(published.layout.tensors),
        wrong_tensors=tuple(differing(published, found)),
    )
    _conclude(str(wanted), str(directory), reply, as_json)


@dataclass(frozen=True, slots=True)
class Summed:
    """All weights of something, by their element sums (shape [tensors, 2])."""

    layout: Layout
    sums: U64
    root: bytes


def sum_checkpoint(directory: Path, publish_as: str) -> Summed:
    """The sums of a checkpoint directory. Raises CheckpointError and its kin."""
    from deltad.checkpoint.directory import open_checkpoint
    from deltad.delta.backend import choose
    from deltad.delta.codec import sum_weights
    from deltad.delta.digest import root_of
    from deltad.delta.threads import default_threads

    with open_checkpoint(directory, publish_as=publish_as) as checkpoint:
        sums = sum_weights(checkpoint.layout, checkpoint, choose(), threads=default_threads())
        checkpoint.check_unchanged()
        return Summed(checkpoint.layout, sums, root_of(checkpoint.layout, sums))


def published_weights(client: Client, version: VersionId, root: bytes) -> Summed:
    """The sums of a version, in the variant that has `root` or else its first one, as its manifest has them.

    Raises NotFoundError, IntegrityError or FormatError.
    """
    from deltad.delta.layout import decode_layout
    from deltad.delta.manifest import decode_manifest
    from deltad.delta.record import decode_record
    from deltad.types import Digest

    record = decode_record(client.record_bytes(version.run, version.version))
    variant = next((variant for variant in record.variants if variant.root == root), record.variants[0])
    layout = decode_layout(client.object(Digest(variant.layout)))
    derived = client.derived_edges(version.run, version.version)
    named = [edge.manifest.hex() for edge in variant.edges]
    for digest in (*named, *(edge.manifest for edge in derived if edge.variant == variant.name)):
        # Every edge that leads here has the same sums, but a daemon need not hold all of them.
        try:
            manifest = decode_manifest(client.object(digest))
        except NotFoundError:
            continue
        return Summed(layout, manifest.tensor_sums(layout), variant.root)
    raise NotFoundError(f"{version}", expected="a manifest of one of its edges", found="none held by this daemon")


def differing(published: Summed, found: Summed) -> list[str]:
    """What is wrong in `found`, one text a tensor: absent, of another dtype or shape, unknown, or other bits."""
    wrong = []
    for name in sorted(published.layout.index.keys() | found.layout.index.keys()):
        i, j = published.layout.index.get(name), found.layout.index.get(name)
        if j is None:
            wrong.append(f"{name} (missing)")
        elif i is None:
            wrong.append(f"{name} (not of this version)")
        elif published.layout.tensors[i] != found.layout.tensors[j]:
            old, new = published.layout.tensors[i], found.layout.tensors[j]
            wrong.append(f"{name} ({new.dtype} {list(new.shape)}, not {old.dtype} {list(old.shape)})")
        elif (published.sums[i] != found.sums[j]).any():
            wrong.append(name)
    return wrong


def _published_with(client: Client, root: str) -> VersionId:
    """The newest version with this root, of any run that the daemon holds. Raises IntegrityError if there is none."""
    runs = sorted(client.status().region.runs) or [the_run(client, None)]
    searched = 0
    for run in runs:
        versions = client.versions(run)
        searched += len(versions)
        for info in reversed(versions):
            if info.root == root:
                return version_id(info)
    raise IntegrityError(
        f"run {runs[0]}" if len(runs) == 1 else f"runs {', '.join(runs)}",
        expected=f"a version with root {root}",
        found=f"none among {count(searched, 'version')}",
        hint="name one with --version to see which tensors differ",
    )


def _conclude(name: str, what: str, reply: VerifyReply, as_json: bool) -> None:
    if as_json:
        show_json(reply)
    if not reply.match:
        raise IntegrityError(
            what,
            expected=f"root {reply.root} of {name}",
            found=f"{reply.found}, wrong in {_named(reply.wrong_tensors)}",
        )
    if not as_json:
        facts = [("root", reply.root), ("tensors", f"{reply.tensors:,}, all as published")]
        show([Line(what if what.startswith(name) else f"{what} is {name}"), Facts("", facts)])


def _named(tensors: Sequence[str]) -> str:
    if not tensors:
        return "no tensor that can be named"
    more = len(tensors) - _NAMED
    return ", ".join(tensors[:_NAMED]) + (f" and {more} more" if more > 0 else "")
