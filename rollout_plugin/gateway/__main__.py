"""`python -m rollout_plugin.gateway`: one run's front door as a process, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiohttp import web

from deltad.client import Client
from deltad.delta.layout import decode_layout
from deltad.errors import ConfigError, DeltadError, UsageError
from deltad.types import parse_digest
from rollout_plugin.gateway.admission import Admission
from rollout_plugin.gateway.fleet import Fleet
from rollout_plugin.gateway.metrics import GatewayMetrics
from rollout_plugin.gateway.options import Options, parse_options
from rollout_plugin.gateway.server import Gateway, Settings
from rollout_plugin.gateway.text import load_words
from rollout_plugin.gateway.turns import Turns
from rollout_plugin.gateway.upstream import Replicas
from rollout_plugin.log import Log

LOOK_SECONDS = 0.25
"""Between two looks at the fleet: how much later a version may be seen here than it is verified."""

_SILENCE = 300.0

_SWITCH_SECONDS = 0.0005
"""How long a thread that looks at the fleet may keep streams waiting for the interpreter; Python's own 5 ms show."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; a second one ends the process where it stands."""
    options = parse_options(arguments)
    log = Log(sys.stderr, gateway=options.run)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with contextlib.suppress(ImportError):
            import uvloop

            uvloop.install()
        return asyncio.run(_serve(options, log))
    except DeltadError as error:
        log.write("failed", kind=error.kind, error=str(error))
        return error.exit_code


async def _serve(options: Options, log: Log) -> int:
    keys = _keys(options.key_file)
    client = options.door.client()
    metrics = GatewayMetrics.create()
    fleet = Fleet(
        functools.partial(client.fleet, options.run),
        variant=options.variant,
        every=LOOK_SECONDS,
        told=lambda trouble: log.write("daemon", trouble=trouble),
    )
    admission = Admission(most_running=options.most_running, most_waiting=options.most_waiting, pace=options.pace)
    turns = Turns(admission, lambda: fleet.roster.sequence)
    replicas = Replicas(connections=options.most_running * 2, silence=_SILENCE)
    settings = Settings(options.run, options.patience, options.max_staleness, options.chat_tokens, keys)
    words = functools.partial(load_words, functools.partial(_files, client, options), options.tokenizer)
    gateway = Gateway(settings, fleet=fleet, replicas=replicas, turns=turns, metrics=metrics, words=words, log=log)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    runner = web.AppRunner(gateway.app(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    following = asyncio.create_task(fleet.follow())
    granting = asyncio.create_task(_grant(fleet, turns))
    try:
        try:
            await web.TCPSite(runner, options.host, options.port).start()
        except OSError as error:
            where = f"--listen {options.host}:{options.port}"
            raise ConfigError(where, found=error.strerror or str(error)) from None
        host, port = options.host, runner.addresses[0][1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        gc.collect()
        gc.freeze()  # what is here now stays: no collection has to look at it while tokens wait
        log.write("listening", url=url)
        if options.ready_file is not None:
            await _tell_ready(fleet, stop, options.ready_file, url)
        await stop.wait()
        log.write("draining", requests=admission.running)
        if not await gateway.drain(options.drain):
            log.write("broken_off", requests=admission.running)
    finally:
        following.cancel()
        granting.cancel()
        await runner.cleanup()
        await replicas.close()
    log.write("stopped")
    return 0


async def _grant(fleet: Fleet, turns: Turns) -> None:
    """Each new version may be a turn for somebody."""
    while True:
        await fleet.changed(3600.0)
        turns.grant()


async def _tell_ready(fleet: Fleet, stop: asyncio.Event, file: Path, url: str) -> None:
    while not fleet.roster.members and not stop.is_set():
        await fleet.changed(0.5)
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(url + "\n")
    temporary.replace(file)


def _keys(file: Path | None) -> tuple[str, ...]:
    """The keys of a file, one a line. Raises ConfigError."""
    if file is None:
        return ()
    try:
        keys = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {file}", expected="a file of keys", found=str(error)) from None
    if not keys:
        raise ConfigError(f"--key-file {file}", expected="at least one key", found="none")
    return keys


def _files(client: Client, options: Options) -> Mapping[str, bytes]:
    """The non-weight files of the newest version. Raises UsageError where there is none yet."""
    newest = client.latest(options.run)
    if newest is None:
        raise UsageError(f"run {options.run}", expected="a version", found="none yet")
    layout = decode_layout(client.object(parse_digest(newest.layout)))
    return {file.name: client.object(file.digest.hex()) for file in layout.files}


if __name__ == "__main__":
    sys.exit(main())
