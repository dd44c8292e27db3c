"""The replica's command line as a frozen type. Imports no torch, so `--help` is quick."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deltad.errors import UsageError
from deltad.types import RunId, Variant, parse_daemon_name, parse_run, parse_variant

if TYPE_CHECKING:
    from deltad.client import Client

ENGINES = ("transformers", "vllm")
CACHES = ("new-requests-only", "keep", "reset")
"""What becomes of vLLM's cached keys and values at a commit; see `rollout_plugin.engines.vllm.engine.CachePolicy`."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `python -m rollout_plugin` was asked to do. Port 0 lets the system choose one."""

    door: Door
    run: RunId
    variant: Variant
    name: str
    host: str
    port: int
    ready_file: Path | None
    engine: str = "transformers"
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    cache: str = CACHES[0]


@dataclass(frozen=True, slots=True)
class Door:
    """Where the daemon is: its Unix socket, or its `[local]` over TLS with a token and the authority to trust."""

    socket: Path | None = None
    url: str = ""
    token_file: Path | None = None
    ca: Path | None = None

    def client(self) -> Client:
        """Nothing is sent yet. Raises ConfigError for files that cannot be used."""
        from deltad.client import Client
        from deltad.config import TlsFiles, TokenFile

        if self.socket is not None:
            return Client(self.socket)
        token = None if self.token_file is None else TokenFile(self.token_file).read
        return Client(self.url, token=token, tls=TlsFiles(ca=self.ca).client())


def add_door(parser: argparse.ArgumentParser) -> None:
    """The options that say where the daemon is."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, help="Unix socket of the daemon on this host")
    where.add_argument(
        "--daemon", default="", metavar="URL", help="the daemon's [local], https://HOST:PORT, from another container"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="with --daemon: the token that is shown there")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="with --daemon: the authority that certified it")


def parse_door(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Door:
    """Exits with the parser's error for what is malformed."""
    if given.daemon and not given.daemon.startswith("https://"):
        parser.error(f"--daemon {given.daemon[:200]!r}: expected https://HOST:PORT")
    if given.socket is not None and (given.token_file or given.ca):
        parser.error("--token-file and --ca: expected --daemon beside them")
    return Door(given.socket, given.daemon, given.token_file, given.ca)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UsageError.exit_code, f"{self.prog}: error: {message}\n")


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line. Exits with 64 and one line on standard error for anything malformed."""
    parser = _Parser(
        prog="python -m rollout_plugin",
        description="Serve a run's policy over HTTP, always at the newest version that the daemon offers: weights "
        "are patched in place, read back and verified while generation goes on. Logs JSON lines to standard error.",
    )
    add = parser.add_argument
    add_door(parser)
    add("--run", required=True, help="run id")
    add("--variant", default="bf16", help="variant to serve (default: bf16)")
    add("--name", required=True, help="name of this replica, unique at its daemon: a second living one is refused")
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where /v1/generate is served")
    add("--ready-file", type=Path, help="receives the URL once the first version is verified")
    add("--engine", choices=ENGINES, default=ENGINES[0], help="what generates (default: transformers)")
    add("--engine-args", default="{}", metavar="JSON", help="arguments of vLLM's EngineArgs, by name")
    add("--cache", choices=CACHES, default=CACHES[0], help="what becomes of vLLM's cached keys and values at a commit")
    given = parser.parse_args(arguments)
    try:
        engine_arguments = json.loads(given.engine_args)
    except ValueError:
        engine_arguments = None
    if not isinstance(engine_arguments, dict):
        parser.error(f"--engine-args {given.engine_args[:200]!r}: expected an object in JSON")
    if engine_arguments and given.engine != "vllm":
        parser.error("--engine-args: expected --engine vllm beside it")
    host, colon, port = given.listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        parser.error(f"--listen {given.listen!r}: expected HOST:PORT")
    try:
        return Options(
            door=parse_door(parser, given),
            run=parse_run(given.run),
            variant=parse_variant(given.variant),
            name=parse_daemon_name(given.name),
            host=host.strip("[]"),
            port=int(port),
            ready_file=given.ready_file,
            engine=given.engine,
            engine_arguments=engine_arguments,
            cache=given.cache,
        )
    except UsageError as error:
        parser.error(str(error))
