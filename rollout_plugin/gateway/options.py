"""The gateway's command line as a frozen type."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deltad.errors import UsageError
from deltad.types import RunId, Variant, parse_run, parse_variant
from rollout_plugin.gateway.admission import Pace
from rollout_plugin.options import Door, add_door, parse_door


@dataclass(frozen=True, slots=True)
class Options:
    """What `python -m rollout_plugin.gateway` was asked to do. Port 0 lets the system choose one."""

    door: Door
    run: RunId
    variant: Variant
    host: str
    port: int
    ready_file: Path | None
    tokenizer: Path | None
    key_file: Path | None
    most_running: int
    most_waiting: int
    max_staleness: int | None
    pace: Pace | None
    patience: float
    drain: float
    chat_tokens: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UsageError.exit_code, f"{self.prog}: error: {message}\n")


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line. Exits with 64 and one line on standard error for anything malformed."""
    parser = _Parser(
        prog="python -m rollout_plugin.gateway",
        description="The front door of a run's replicas, here and in regions below: OpenAI's completions and chat "
        "completions, with the weight version behind every token. Logs JSON lines to standard error.",
    )
    add = parser.add_argument
    add_door(parser)
    add("--run", required=True, help="run id, which is the name of the model")
    add("--variant", default="bf16", help="variant that the replicas serve (default: bf16)")
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where the API is served")
    add("--ready-file", type=Path, help="receives the URL once a replica serves")
    add("--tokenizer", type=Path, metavar="DIR", help="tokenizer to use (default: the one that came with the weights)")
    add("--key-file", type=Path, help="file of API keys, one a line; without it no key is asked for")
    add("--most-running", type=int, default=256, metavar="N", help="requests that run at once (default: 256)")
    add("--most-held", type=int, default=4096, metavar="N", help="requests that may be held back (default: 4096)")
    add(
        "--max-staleness",
        type=int,
        metavar="N",
        help="versions that a replica may be behind the newest and still answer",
    )
    add(
        "--rollouts-per-version",
        type=int,
        metavar="N",
        help="prompts that train one version: with --max-staleness, requests are held back before they run so far "
        "ahead of the trainer that their answers would be staler than that when they are trained on",
    )
    add(
        "--patience",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to wait for a turn, or for a replica that takes over",
    )
    add("--drain", type=float, default=30.0, metavar="S", help="seconds that SIGTERM lets running requests go on")
    add("--chat-tokens", type=int, default=256, metavar="N", help="length of a chat's answer where it does not say")
    given = parser.parse_args(arguments)
    host, colon, port = given.listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        parser.error(f"--listen {given.listen!r}: expected HOST:PORT")
    for name, least in (
        ("most_running", 1),
        ("most_held", 1),
        ("chat_tokens", 1),
        ("max_staleness", 0),
        ("rollouts_per_version", 1),
        ("patience", 0),
        ("drain", 0),
    ):
        value = getattr(given, name)
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')}: expected at least {least}, found {value}")
    if given.rollouts_per_version is not None and given.max_staleness is None:
        parser.error("--rollouts-per-version: expected --max-staleness beside it")
    pace = Pace(given.rollouts_per_version, given.max_staleness) if given.rollouts_per_version is not None else None
    try:
        return Options(
            door=parse_door(parser, given),
            run=parse_run(given.run),
            variant=parse_variant(given.variant),
            host=host.strip("[]"),
            port=int(port),
            ready_file=given.ready_file,
            tokenizer=given.tokenizer,
            key_file=given.key_file,
            most_running=given.most_running,
            most_waiting=given.most_held,
            max_staleness=given.max_staleness,
            pace=pace,
            patience=given.patience,
            drain=given.drain,
            chat_tokens=given.chat_tokens,
        )
    except UsageError as error:
        parser.error(str(error))
