"""`deltad publish` and `deltad pull`: bring a version into the daemon, by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from deltad.cli.connect import (
    Daemon,
    VersionName,
    Whole,
    daemon_options,
    json_option,
    parse_version_name,
    parse_wait,
    run_option,
    the_run,
)
from deltad.cli.output import show, show_json
from deltad.cli.progress import activity
from deltad.cli.versions import version_facts
from deltad.errors import DeltadError, UnavailableError, UsageError
from deltad.figures import duration
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.ops.blocks import Line
from deltad.types import RunId

if TYPE_CHECKING:
    from deltad.client.client import Client
    from deltad.client.messages import RunVersion, VersionInfo


@click.command(short_help="Publish a checkpoint directory.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@run_option
@click.option("--number", type=Whole(min=0), help="The version's number; else the directory's name has it.")
@click.option("--new-epoch", is_flag=True, help="Open a new epoch: from here on older writers are refused.")
@click.option(
    "--resume-from",
    type=parse_version_name,
    metavar="VERSION",
    help="Open a new epoch whose first version is made from this one.",
)
@click.option(
    "--fork-from",
    type=parse_version_name,
    metavar="RUN/VERSION",
    help="Begin a run with a version that is made from another run's.",
)
@click.option(
    "--epoch", type=Whole(min=1), metavar="N", help="The epoch that you write in: be refused once there is a newer one."
)
@click.option("--identity", default="", metavar="TEXT", help="Your own name for this version.")
@daemon_options
@json_option
def publish(
    *,
    daemon: Daemon,
    directory: Path,
    run: RunId | None,
    number: int | None,
    new_epoch: bool,
    resume_from: VersionName | None,
    fork_from: VersionName | None,
    epoch: int | None,
    identity: str,
    as_json: bool,
) -> None:
    """Publish the complete checkpoint in DIR as the next version of a run.

    Returns when the version is durable. The same bytes under the same number again are no error and
    change nothing; other bytes are refused, unless --new-epoch opens a new epoch. With --new-epoch only the
    newest version itself changes nothing; all else opens one.

    A trainer that goes on from an earlier version says so with --resume-from: the delta is then taken from that
    version, and the versions that came after it stay in the epoch before. A run that goes on from another run's
    version says so with --fork-from: its first version is a delta too, and whoever holds the other run pulls no more
    than that. The same resume or fork again is no error and changes nothing.

    \b
    Examples:
      deltad publish checkpoints/step_000120
      deltad publish out/actor --run policy --number 120 --identity after-warmup
      deltad publish checkpoints/step_000101 --run policy --resume-from v000100
      deltad publish out/step_000000 --run policy-math --fork-from policy/v000100
    """
    from deltad.client.messages import PublishRequest

    # The daemon does not share our working directory.
    client = daemon.client()
    run = the_run(client, run)
    request = PublishRequest(
        os.path.abspath(directory),
        number,
        identity,
        new_epoch,
        resume_from=_resumed(client, run, resume_from),
        fork_from=None if fork_from is None else _forked(client, fork_from),
        epoch=epoch or 0,
    )
    with activity(daemon, run, f"publishing {directory}"):
        reply = client.publish(run, request)
    if as_json:
        show_json(reply)
        return
    name = f"{reply.version.run}/{reply.version.version}"
    same = "was published before with the same bytes; nothing changed" + (", no epoch was opened" if new_epoch else "")
    said = same if reply.already else "is published"
    show([Line(f"{name} {said}"), version_facts(reply.version)])


def _resumed(client: Client, run: RunId, name: VersionName | None) -> str:
    if name is None:
        return ""
    if name.run not in (None, run):
        raise UsageError(
            f"--resume-from {name.run}/{name.version}",
            expected=f"a version of run {run}",
            found=f"one of run {name.run}",
            hint="a run that begins with another run's version is published with --fork-from",
        )
    return replace(name, run=run).find(client).version


def _forked(client: Client, name: VersionName) -> RunVersion:
    from deltad.client.messages import RunVersion

    if name.run is None:
        raise UsageError("--fork-from", expected="a version with its run, such as policy/v000100", found="no run")
    return RunVersion(name.run, name.find(client).version)


@click.command(short_help="Pull from the upstreams now.")
@run_option
@click.option(
    "--wait", type=parse_wait, default="60s", show_default=True, metavar="TIME", help="How long to wait for it."
)
@daemon_options
@json_option
def pull(daemon: Daemon, run: RunId | None, wait: float, as_json: bool) -> None:
    """Pull what the upstreams have now, instead of at the daemon's own next turn.

    Returns when all that they have is durable here, and exits with 69 if that takes longer than --wait.

    \b
    Example:
      deltad pull --run policy --wait 5m
    """
    from deltad.client.messages import LatestReply

    client = daemon.client()
    run = the_run(client, run)
    with activity(daemon, run, f"pulling {run}"):
        info = pull_all(client, run, wait)
    if as_json:
        show_json(LatestReply(info))
    else:
        show([Line(f"{info.run}/{info.version} is durable here"), version_facts(info)])


def pull_all(
    client: Client, run: RunId, wait: float, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = monotonic
) -> VersionInfo:
    """Ask again while the daemon uses up all the time that one request may take.

    Raises UnavailableError once `wait` seconds are over, or if the upstreams have no version at all.
    """
    ends = clock() + wait
    while True:
        asked = clock()
        share = min(ends - asked, limits.long_poll_seconds)
        try:
            info = client.pull(run, max(share, 0.0))
        except DeltadError as error:
            # An upstream that was away for the whole of one piece may be back in the next.
            if not error.retryable or clock() - asked < share or clock() >= ends:
                raise
            continue
        if clock() - asked < share or clock() >= ends:
            break
    if info is None or (wait and clock() >= ends):
        raise UnavailableError(
            f"run {run}",
            expected=f"all that its upstreams have, within {duration(wait)}",
            found="no version yet" if info is None else f"{info.version} so far",
            hint="`deltad status` says what they do or wait for",
        )
    return info
