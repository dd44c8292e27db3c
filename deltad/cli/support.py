"""`deltad support-bundle`: one file for somebody else to look at, without secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import click

from deltad.cli.connect import json_option
from deltad.cli.output import show, show_json
from deltad.errors import DeltadError, StoreError
from deltad.figures import count, size
from deltad.ops.blocks import Facts, Line

if TYPE_CHECKING:
    from deltad.config import Config

_JOURNAL_LINES = "--lines=5000"
_SECONDS = 10.0
_MOST_BYTES = 16 << 20


@click.command(name="support-bundle", short_help="Collect what somebody else needs to help, without secrets.")
@click.option(
    "--config", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The daemon's configuration."
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where; must not exist."
)
@click.option("--unit", default="deltad", show_default=True, help="The systemd unit whose journal is taken along.")
@click.option("--log", type=click.Path(path_type=Path), metavar="FILE", help="A log file to take along.")
@json_option
def support_bundle(config: Path, output: Path | None, unit: str, log: Path | None, as_json: bool) -> None:
    """Collect status, findings of the doctor, metrics, configuration, versions and the journal in one file.

    Every secret that FILE names is taken out of all of it, as is whatever looks like a token or a private key. Names
    of hosts, runs and directories stay in: look at it before you give it away. The daemon may be running or not.

    \b
    Example:
      sudo deltad support-bundle --config /etc/deltad/deltad.toml --output deltad-support.tar.gz
    """
    from deltad.config import load_config
    from deltad.ops.support import bundle, secrets_of

    loaded = load_config(config)
    now = time.time()
    output = output or Path(f"deltad-support-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}.tar.gz")
    parts: dict[str, bytes] = {}
    missing: dict[str, str] = {}
    for name, collect in _collectors(loaded, unit, log).items():
        try:
            parts[name] = collect()[-_MOST_BYTES:]
        except (DeltadError, OSError, ValueError, subprocess.SubprocessError) as error:
            missing[name] = str(error) or type(error).__name__
    parts["missing.txt"] = "".join(f"{name}: {why}\n" for name, why in missing.items()).encode()
    data = bundle(parts, secrets_of(loaded), now=now)
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as out:
            out.write(data)
    except OSError as error:
        raise StoreError(str(output), expected="a new file", found=error.strerror or str(error)) from None
    if as_json:
        show_json({"file": str(output), "bytes": len(data), "parts": sorted(parts), "missing": missing})
    else:
        rows = [(name, "taken along") for name in parts]
        rows += [(name, f"missing: {why}") for name, why in missing.items()]
        show([Facts("", rows), Line(f"{output}: {count(len(parts), 'part')}, {size(len(data))}, without secrets")])


def _collectors(config: Config, unit: str, log: Path | None) -> dict[str, Callable[[], bytes]]:
    """What makes each part. Any may fail."""
    from deltad.config import to_toml

    parts: dict[str, Callable[[], bytes]] = {
        "status.json": lambda: _status(config),
        "doctor.json": lambda: _doctor(config),
        "config.toml": lambda: to_toml(config).encode(),
        "host.txt": _host,
        "journal.txt": lambda: _command(
            "journalctl", "--no-pager", "--output=short-iso", _JOURNAL_LINES, "--unit", unit
        ),
        "unit.txt": lambda: _command("systemctl", "show", unit, "--no-pager"),
    }
    if config.metrics is not None:
        address = config.metrics.listen
        parts["metrics.txt"] = lambda: _page(f"http://{address}/metrics")
        parts["status-page.json"] = lambda: _page(f"http://{address}/status.json")
    if log is not None:
        parts["log.txt"] = log.read_bytes
    return parts


def _status(config: Config) -> bytes:
    import msgspec

    from deltad.client.client import Client

    return msgspec.json.encode(Client(config.daemon.socket, timeout=_SECONDS).status())


def _doctor(config: Config) -> bytes:
    import msgspec

    from deltad.ops.doctor import examine, gather

    return msgspec.json.encode(examine(config, gather(config)))


def _host() -> bytes:
    packages = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
    lines = [f"python {sys.version}", platform.platform(), f"processors {os.cpu_count()}", *packages]
    return "\n".join(lines).encode() + b"\n"


def _command(*words: str) -> bytes:
    ended = subprocess.run(words, check=True, capture_output=True, timeout=_SECONDS)
    return ended.stdout


def _page(url: str) -> bytes:
    # The address is that of the daemon itself.
    with urlopen(url, timeout=_SECONDS) as reply:  # noqa: S310
        return bytes(reply.read(_MOST_BYTES))
