"""Which daemon, run and version a command means.

The options that all commands share, and the only place where a client is opened. The daemon is found
by `--daemon` or `--socket`, else by `--config`, else by DELTAD_DAEMON or DELTAD_SOCKET, else at the default path.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltad.errors import DeltadError, NotFoundError, UsageError
from deltad.types import RunId, Version, VersionId, parse_run, parse_version

if TYPE_CHECKING:
    from deltad.client.client import Client
    from deltad.client.messages import VersionInfo

DEFAULT_SOCKET = Path("/run/deltad/deltad.sock")

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|h)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Remote:
    """A daemon's `[local]` over TLS, and what is shown and trusted there."""

    url: str
    token_file: Path | None = None
    ca: Path | None = None

    def client(self) -> Client:
        """Nothing is sent yet. Raises ConfigError for files that cannot be used."""
        from deltad.client.client import Client
        from deltad.config import TlsFiles, TokenFile

        token = None if self.token_file is None else TokenFile(self.token_file).read
        if token is not None:
            token()  # what is wrong with the file is said before anything is sent
        return Client(self.url, token=token, tls=TlsFiles(ca=self.ca).client())


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon by its socket, or over TLS. `named` tells that the caller pointed at it, not that a default did."""

    at: Path | Remote
    named: bool

    def client(self) -> Client:
        """A client of it. Nothing is sent yet."""
        from deltad.client.client import Client

        return Client(self.at) if isinstance(self.at, Path) else self.at.client()


def find_daemon(
    socket: Path | None, config: Path | None, url: str = "", token_file: Path | None = None, ca: Path | None = None
) -> Daemon:
    """The daemon that the options mean. Raises UsageError, and ConfigError if the configuration cannot be used."""
    if sum((socket is not None, config is not None, bool(url))) > 1:
        raise UsageError("which daemon", expected="one of --daemon, --socket and --config", found="several")
    if not url and (token_file is not None or ca is not None):
        raise UsageError("--token-file and --ca", expected="--daemon beside them", found="none")
    if url:
        return Daemon(_remote(url, token_file, ca), named=True)
    if socket is not None:
        return Daemon(socket, named=True)
    if config is not None:
        from deltad.config import load_config

        return Daemon(load_config(config).daemon.socket, named=True)
    if url := os.environ.get("DELTAD_DAEMON", ""):
        files = (Path(named) if (named := os.environ.get(name, "")) else None for name in _FILES)
        return Daemon(_remote(url, *files), named=True)
    named = os.environ.get("DELTAD_SOCKET", "")
    return Daemon(Path(named or DEFAULT_SOCKET), named=bool(named))


_FILES = ("DELTAD_TOKEN_FILE", "DELTAD_CA")


def _remote(url: str, token_file: Path | None, ca: Path | None) -> Remote:
    if not url.startswith("https://"):
        raise UsageError(f"--daemon {url[:200]}", expected="https://HOST:PORT, a daemon's [local]")
    return Remote(url, token_file, ca)


def daemon_options(command: Command) -> Command:
    """Adds `--daemon`, `--socket` and `--config`; the command takes a `daemon`."""

    @click.option("--daemon", "url", default="", metavar="URL", help="The daemon's [local] on another host, https://….")
    @click.option("--token-file", type=_PATH, metavar="FILE", help="With --daemon: the token that is shown there.")
    @click.option("--ca", type=_PATH, metavar="FILE", help="With --daemon: the authority that certified it.")
    @click.option("--socket", type=_PATH, metavar="PATH", help="The daemon's Unix socket.")
    @click.option("--config", type=_PATH, metavar="FILE", help="Find the daemon by its configuration.")
    @functools.wraps(command)
    def wrapped(
        *, url: str, token_file: Path | None, ca: Path | None, socket: Path | None, config: Path | None, **rest: Any
    ) -> Any:
        return command(daemon=find_daemon(socket, config, url, token_file, ca), **rest)

    return wrapped


def json_option(command: Command) -> Command:
    """Adds `--json`; the command takes `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON; errors too.")(command)


def help_if_alone(context: click.Context) -> int | None:
    """For a group that was called without a command: its help on standard error, and the exit code of misuse."""
    if context.invoked_subcommand is not None:
        return None
    click.echo(context.get_help(), err=True)
    return UsageError.exit_code


def run_option(command: Command) -> Command:
    """Adds `--run`; the command takes `run`."""
    return click.option("--run", type=parse_run, metavar="RUN", help="The run; needed where the daemon has several.")(
        command
    )


def publish_as_option(command: Command) -> Command:
    """Adds `--publish-as`; the command takes `publish_as`."""
    return click.option(
        "--publish-as",
        type=click.Choice(["source", "bf16"]),
        default="source",
        show_default=True,
        help="Read the checkpoint as a watch with this `publish_as` would.",
    )(command)


class Whole(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


def parse_wait(text: str) -> float:
    """Seconds from `500ms`, `60s`, `5m`, `1h` or a bare number of seconds. Raises UsageError."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise UsageError(f"duration {text[:80]!r}", expected="a form like 500ms, 60s, 5m or 1h")
    return float(match[1]) * _SECONDS[match[2] or "s"]


_PATH = click.Path(path_type=Path)


def the_run(client: Client, run: RunId | None) -> RunId:
    """The run that was named, or the daemon's only one.

    Raises NotFoundError or UsageError; where an upstream keeps its runs from the daemon, what is in the way.
    """
    if run is not None:
        return run

    from deltad.client.client import rebuild_error
    from deltad.client.messages import ErrorReply

    view = client.status()
    runs = sorted(view.region.runs)
    if not runs:
        for upstream in view.upstreams:
            if upstream.error:
                raise rebuild_error(ErrorReply(upstream.error_kind, f"{upstream.url}: {upstream.error}"))
        raise NotFoundError(f"daemon {view.daemon}", expected="a run", found="none yet")
    if len(runs) > 1:
        raise UsageError(
            f"daemon {view.daemon}", expected="one run", found=", ".join(runs), hint="say which one you mean"
        )
    return parse_run(runs[0])


@dataclass(frozen=True, slots=True)
class VersionName:
    """A version as it was typed: `RUN/v000012`, `v000012@e2`, `12`, `RUN/latest` or `latest`.

    Without an epoch, the newest one that has the number is meant.
    """

    run: RunId | None
    version: Version | None
    """None for `latest`."""
    epoch_named: bool = True

    def find(self, client: Client) -> VersionInfo:
        """The version as the daemon holds it. Raises NotFoundError or UsageError."""
        run = the_run(client, self.run)
        if self.version is not None and self.epoch_named:
            return client.version(run, self.version)
        versions = client.versions(run)
        if self.version is not None:
            number = self.version.number
            same = [info for info in versions if parse_version(info.version).number == number]
            return same[-1] if same else client.version(run, self.version)
        if not versions:
            raise NotFoundError(f"run {run}", expected="a version", found="none yet")
        return versions[-1]


def parse_version_name(text: str) -> VersionName:
    """Raises UsageError."""
    run, slash, version = text.rpartition("/")
    number = None if version == "latest" else parse_version(version)
    return VersionName(parse_run(run) if slash else None, number, epoch_named="@" in version)


def path_or_version(text: str) -> Path | VersionName:
    """What is on disk is a path; what is not must be a version's name. Raises NotFoundError."""
    path = Path(text)
    if path.exists():
        return path
    try:
        return parse_version_name(text)
    except DeltadError:
        raise NotFoundError(
            text, expected="a file, a directory or a version such as policy/v000012", found="none of them"
        ) from None


def existing(path: Path) -> Path:
    """The path, if there is something. Raises NotFoundError."""
    if not path.exists():
        raise NotFoundError(f"{path}", expected="a file or directory", found="nothing of that name")
    return path


def version_id(info: VersionInfo) -> VersionId:
    """The parsed name of a version that a daemon told about. Raises UsageError."""
    return VersionId(parse_run(info.run), parse_version(info.version))
