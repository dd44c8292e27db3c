"""`deltad status`: one look at a daemon, or a look that stays."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import Daemon, daemon_options, json_option, parse_wait
from deltad.cli.output import draw, show, show_json
from deltad.errors import DeltadError, UsageError
from deltad.figures import when
from deltad.ops.blocks import Block, Cell, Line, Tone

if TYPE_CHECKING:
    from deltad.client.client import Client
    from deltad.client.messages import StatusView


_LEAST_SECONDS = 0.1


def _parse_every(text: str) -> float:
    """As `parse_wait`, but never so short that the looking itself is a load. Raises UsageError."""
    seconds = parse_wait(text)
    if seconds < _LEAST_SECONDS:
        raise UsageError(f"--every {text[:80]}", expected="at least 100ms")
    return seconds


@click.command(short_help="Show the daemon, regions, replicas and upstreams.")
@click.option("--watch", is_flag=True, help="Stay: redraw on a terminal, print every change elsewhere.")
@click.option(
    "--every",
    type=_parse_every,
    default="1s",
    show_default=True,
    metavar="TIME",
    help="With --watch: how often, at least each 100ms.",
)
@daemon_options
@json_option
def status(daemon: Daemon, watch: bool, every: float, as_json: bool) -> None:
    """Show the daemon, its versions, all regions and replicas, and its upstreams.

    A replica's `root` says whether the weights that it serves, read back and hashed, are the published
    ones; `behind` is its staleness in versions. An upstream that waits says why.

    \b
    Examples:
      deltad status
      deltad status --watch
      deltad status --json | jq .region
    """
    client = daemon.client()
    if watch:
        _watch(client, every, as_json)
    elif as_json:
        show_json(client.status())
    else:
        show(_blocks(client.status()))


def _watch(client: Client, every: float, as_json: bool) -> None:
    looks = _looks(client, every)
    if sys.stdout.isatty() and not as_json:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
            for look in looks:
                live.update(draw(_blocks(look)), refresh=True)
        return
    for look in _changes(looks):
        if as_json:
            show_json(_reply(look), compact=True)
        else:
            show([Line(when(time.time())), *_blocks(look)])
            click.echo()


def _looks(client: Client, every: float) -> Iterator[StatusView | DeltadError]:
    """One view after another. A daemon that stops answering is a view too; one that never did is an error."""
    yield client.status()
    while True:
        time.sleep(every)
        try:
            yield client.status()
        except DeltadError as error:
            if not error.retryable:
                raise
            yield error


def _changes(looks: Iterator[StatusView | DeltadError]) -> Iterator[StatusView | DeltadError]:
    from deltad.ops.overview import without_clocks

    before: object = None
    for look in looks:
        now = str(look) if isinstance(look, DeltadError) else without_clocks(look)
        if now != before:
            before = now
            yield look


def _blocks(look: StatusView | DeltadError) -> list[Block]:
    from deltad.ops.overview import status_blocks

    return [Line(Cell(str(look), Tone.BAD))] if isinstance(look, DeltadError) else status_blocks(look)


def _reply(look: StatusView | DeltadError) -> object:
    from deltad.client.messages import ErrorReply

    if isinstance(look, DeltadError):
        return ErrorReply(look.kind, str(look), look.retryable, look.exit_code)
    return look
