"""`deltad diff`: what publishing one checkpoint after another would send. Offline; stores nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import existing, json_option, publish_as_option
from deltad.cli.output import show, show_json
from deltad.cli.progress import step
from deltad.figures import count, percent, percent_of, size
from deltad.ops.blocks import Block, Cell, Facts, Line, Table, columns

if TYPE_CHECKING:
    from deltad.cli.comparison import Comparison

_SHOWN = 20


@click.command(short_help="Say what changed between two checkpoints, in bytes.")
@click.argument("old", metavar="OLD", type=click.Path(path_type=Path))
@click.argument("new", metavar="NEW", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="List all tensors, the unchanged ones too.")
@click.option(
    "--coder",
    type=click.Choice(["auto", "blind", "fast", "mid", "dense"]),
    default="auto",
    show_default=True,
    help="Code the delta as a [[run]] with this `coder` would; `auto`, before any region has told its rate.",
)
@publish_as_option
@json_option
def diff(*, old: Path, new: Path, everything: bool, coder: str, publish_as: str, as_json: bool) -> None:
    """Compare two checkpoint directories: what changed, and how many bytes the change costs.

    Runs the encoder itself over both and counts what it gives, so the bytes are those that a publish
    would send, but for a few that depend on the names of run and version. What a publish would refuse, such
    as another model, is refused here too. Needs no daemon and writes nothing. The most changed tensors
    come first.

    \b
    Examples:
      deltad diff checkpoints/step_000119 checkpoints/step_000120
      deltad diff old new --all --json
      deltad diff old new --coder blind
    """
    from deltad.cli.comparison import compare

    with step(f"comparing {old} and {new}"):
        reply = compare(existing(old), existing(new), publish_as, coder)
    if as_json:
        show_json(reply)
    else:
        show(_blocks(reply, everything))


def _blocks(reply: Comparison, everything: bool) -> list[Block]:
    listed = reply.tensors if everything else tuple(t for t in reply.tensors if t.changed)[:_SHOWN]
    rows: list[tuple[Cell | str, ...]] = [
        (t.name, t.dtype, "×".join(map(str, t.shape)) or "scalar", f"{t.changed:,}", percent(t.density)) for t in listed
    ]
    unchanged = sum(not t.changed for t in reply.tensors)
    kind = f"{reply.kind}: {reply.reason}, so all weights are sent" if reply.reason else reply.kind
    total = Facts(
        "",
        [
            ("kind", kind),
            ("changed", f"{reply.changed:,} of {count(reply.elements, 'element')}, {percent(reply.density)}"),
            ("unchanged", f"{unchanged:,} of {count(len(reply.tensors), 'tensor')}"),
            (
                "bytes",
                f"{size(reply.delta_bytes)} in {count(reply.chunks, 'chunk')}, manifest and record, "
                f"{percent_of(reply.delta_bytes, reply.full_bytes)} of the full {size(reply.full_bytes)}",
            ),
            ("coder", reply.coder),
            ("root", reply.root),
        ],
    )
    table = Table("", columns("tensor", "dtype", "shape", ">changed", ">density"), rows, empty="no tensor changed")
    more = len(reply.tensors) - unchanged - len(rows)
    hidden = [Line(f"{count(more, 'more changed tensor')}; --all lists every tensor")] if more > 0 else []
    return [table, *hidden, total]
