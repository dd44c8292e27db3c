"""What is collected for somebody else has no secret in it, wherever one was planted."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deltad.delta.keys import SigningKey
from deltad.ops.support import without_secrets
from tests.kit.daemons import TOKEN, Daemon, free_port

KEY = SigningKey.from_seed(bytes(range(32)))
ACCESS = "planted/access+key=0123456789"


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    port = free_port()
    sections = (
        f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n[metrics]\nlisten = "127.0.0.1:{port + 1}"\n'
        f'[signing]\nkey_file = "key"\n[[run]]\nid = "{TOKEN[:20]}"\n[[bucket]]\nurl = "file://{tmp_path}/bucket"\n'
        'publish = ["*"]\ncredentials_file = "credentials"\n'
    )
    daemon = Daemon(tmp_path / "a", "a", sections)
    for name, content in (("key", KEY.pem()), ("credentials", f"AWS_SECRET_ACCESS_KEY={ACCESS}\n".encode())):
        (daemon.home / name).write_bytes(content)
        (daemon.home / name).chmod(0o600)
    return daemon


def collect(daemon: Daemon, *more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, bytes]]:
    output = daemon.home / "bundle.tar.gz"
    command = daemon.command("support-bundle", "--config", str(daemon.config), "--output", str(output), *more)
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert output.stat().st_mode & 0o777 == 0o600
    with tarfile.open(output) as archive:
        return ended, {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]


def test_of_a_running_daemon_all_is_there_and_no_secret(daemon: Daemon) -> None:
    pem = [line for line in KEY.pem().decode().splitlines() if "PRIVATE" not in line]
    planted = [TOKEN, base64.b64encode(TOKEN.encode()).decode().rstrip("="), TOKEN.encode().hex(), ACCESS, *pem]
    log = daemon.home / "planted.log"
    log.write_text("\n".join(["before", *planted, "Authorization: Bearer unknown-to-anybody-here", "after"]))
    daemon.start()
    try:
        ended, parts = collect(daemon, "--log", str(log), "--json")
    finally:
        daemon.stop()
    told = json.loads(ended.stdout)
    wanted = {"status.json", "doctor.json", "config.toml", "host.txt", "metrics.txt", "log.txt", "missing.txt"}
    assert wanted <= set(told["parts"])
    assert {f"deltad-support/{name}" for name in told["parts"]} == set(parts)
    whole = b"\n".join(parts.values())
    for secret in [*planted, "unknown-to-anybody-here"]:
        assert secret.encode() not in whole
    assert parts["deltad-support/log.txt"].startswith(b"before\n[removed]\n")
    assert parts["deltad-support/log.txt"].endswith(b"after")
    assert b'token_file = "' in parts["deltad-support/config.toml"], "where secrets lie is told"
    assert json.loads(parts["deltad-support/status.json"])["daemon"] == "a"
    assert b"deltad_ready 1.0" in parts["deltad-support/metrics.txt"]


def test_of_a_daemon_that_does_not_run_what_there_is_is_collected_and_the_rest_named(daemon: Daemon) -> None:
    ended, parts = collect(daemon)
    assert "status.json" in parts["deltad-support/missing.txt"].decode()
    assert "deltad-support/config.toml" in parts
    assert "without secrets" in ended.stdout
    again = subprocess.run(
        daemon.command(
            "support-bundle", "--config", str(daemon.config), "--output", str(daemon.home / "bundle.tar.gz")
        ),
        check=False,
        capture_output=True,
        text=True,
    )
    assert (again.returncode, "expected a new file" in again.stderr) == (74, True)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (b"Authorization: Bearer abc.def", b"Authorization: [removed] abc.def"),
        (b'{"token": "abcdefgh"}', b'{"token": "[removed]"}'),
        (b"https://user:hunter22@host/", b"https://user:[removed]@host/"),
        (
            b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n.",
            b"-----BEGIN PRIVATE KEY-----[removed]\n.",
        ),
        (b"token_file = 5; tokens: 12 of 30", b"token_file = 5; tokens: 12 of 30"),
    ],
)
def test_what_looks_like_a_secret_goes_and_other_words_stay(said: bytes, left: bytes) -> None:
    found = without_secrets(said, [])
    if said.startswith(b"Authorization"):
        assert b"abc.def" not in found
    else:
        assert found == left


def test_no_color_means_no_colours() -> None:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    ended = subprocess.run(
        [sys.executable, "-m", "deltad", "config", "keys"], check=True, capture_output=True, env=environment
    )
    assert b"\x1b[" not in ended.stdout
