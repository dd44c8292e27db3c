"""`deltad hold`, `deltad release` and `deltad rollback`: which version the fleets of a run should serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import (
    Command,
    Daemon,
    VersionName,
    daemon_options,
    json_option,
    parse_version_name,
    the_run,
)
from deltad.cli.output import show, show_json
from deltad.ops.blocks import Cell, Line, Tone
from deltad.types import RunId, parse_daemon_name, parse_run, parse_version

if TYPE_CHECKING:
    from deltad.client.messages import Act, TargetReply


@dataclass(frozen=True, slots=True)
class RunAt:
    """`RUN`, `RUN@N`, `@N` or `RUN/v000012`: a run, if it was named, and a version of it, if one was."""

    run: RunId | None
    version: VersionName | None


def parse_run_at(text: str) -> RunAt:
    """Raises UsageError."""
    if "/" in text:
        version = parse_version_name(text)
        return RunAt(version.run, version)
    name, at, number = text.partition("@")
    run = parse_run(name) if name or not at else None
    if not at:
        return RunAt(run, None)
    parsed = None if number == "latest" else parse_version(number)
    return RunAt(run, VersionName(run, parsed, epoch_named="@" in number))


def _options(command: Command) -> Command:
    for option in (
        json_option,
        daemon_options,
        click.option("--reason", default="", metavar="TEXT", help="Why; told by `status` and `log`."),
        click.option(
            "--fleet",
            type=parse_daemon_name,
            metavar="DAEMON",
            help="The fleet of this daemon alone; else all, or below another daemon its own.",
        ),
    ):
        command = option(command)
    return command


@click.command(short_help="Hold the fleets at a version, whatever is published.")
@click.argument("at", metavar="[RUN[@N]]", type=parse_run_at, required=False)
@_options
def hold(daemon: Daemon, at: RunAt | None, fleet: str | None, reason: str, as_json: bool) -> None:
    """Hold the fleets of RUN at version N, or without N where they are: at the version that they are held at
    already, or the newest. Publishing goes on, and nothing that is published moves them until `deltad release`.

    Said where the run is published, it is about all fleets, or the one that --fleet names, and reaches every
    daemon that pulls the run. Said at any other daemon, it is about that daemon's own fleet. The last to speak wins.

    \b
    Examples:
      deltad hold policy
      deltad hold policy@12 --fleet region-2 --reason "evaluating"
    """
    from deltad.client.messages import Act

    _move(daemon, at, Act.HOLD, fleet=fleet, reason=reason, as_json=as_json)


@click.command(short_help="Let the fleets follow the newest version again.")
@click.argument("run", metavar="[RUN]", type=parse_run, required=False)
@_options
def release(daemon: Daemon, run: RunId | None, fleet: str | None, reason: str, as_json: bool) -> None:
    """Let the fleets of RUN follow its newest version again: all, or the one that --fleet names.

    At a daemon that pulls the run, this withdraws what was said there; what was said where the run is published
    is released there.

    \b
    Example:
      deltad release policy --reason "the reward is back"
    """
    from deltad.client.messages import Act

    _move(daemon, RunAt(run, None), Act.RELEASE, fleet=fleet, reason=reason, as_json=as_json)


@click.command(short_help="Bring the fleets back to an older version, and hold them there.")
@click.argument("at", metavar="[RUN[@N]]", type=parse_run_at, required=False)
@_options
def rollback(daemon: Daemon, at: RunAt | None, fleet: str | None, reason: str, as_json: bool) -> None:
    """Bring the fleets of RUN back to version N, which must be older than what they should serve now, and hold
    them there; without N, to the one that the newest version was made from. Saying it twice goes back once.

    As `deltad hold`, but for the check of the direction.

    \b
    Examples:
      deltad rollback policy --reason "reward fell"
      deltad rollback policy@12
    """
    from deltad.client.messages import Act

    _move(daemon, at, Act.ROLLBACK, fleet=fleet, reason=reason, as_json=as_json)


def _move(daemon: Daemon, at: RunAt | None, act: Act, *, fleet: str | None, reason: str, as_json: bool) -> None:
    from deltad.client.messages import TargetRequest

    client = daemon.client()
    run = the_run(client, at.run if at else None)
    version = ""
    if at is not None and at.version is not None:
        version = VersionName(run, at.version.version, at.version.epoch_named).find(client).version
    reply = client.move_target(run, TargetRequest(act, version, fleet or "", reason))
    if as_json:
        show_json(reply)
    else:
        show([Line(cell) for cell in _words(reply, act, fleet)])


def _words(reply: TargetReply, act: Act, fleet: str | None) -> list[Cell]:
    from deltad.client.messages import Act
    from deltad.ops.overview import follows_words, held_words, whose_fleet

    unchanged = "" if reply.changed else "; nothing changed"
    if reply.target is None:
        whose = f"the fleet of {fleet} " if fleet else ""
        said = [Cell(f"run {reply.run}: {whose}{follows_words(reply.latest)}{unchanged}")]
    else:
        held = f"{whose_fleet(reply.target)} {held_words(reply.target, reply.latest)}"
        if act is Act.RELEASE:
            held += f"; that was said at {reply.target.daemon}, and is released there"
        said = [Cell(f"run {reply.run}: {held}{unchanged}", Tone.WARN)]
    if not reply.heard:
        said.append(
            Cell(f"no daemon named {fleet} has been heard of here; one of that name will obey once it asks", Tone.WARN)
        )
    return said
