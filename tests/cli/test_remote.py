"""Commands reach a daemon on another host over TLS, with a token that says what they may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.client.messages import PublishRequest
from tests.cli.conftest import Deltad
from tests.kit.authority import Authority
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights


class Host:
    """A daemon with a `[local]`, a token of each kind, and the authority that certified it."""

    def __init__(self, home: Path) -> None:
        self.authority = Authority(home / "authority")
        issued = self.authority.issue("trainer-1")
        port = free_port()
        self.url = f"https://127.0.0.1:{port}"
        self.tokens = {}
        sections = f'[local]\nlisten = "127.0.0.1:{port}"\ncertificate = "{issued.certificate}"\nkey = "{issued.key}"\n'
        for scope in ("read", "administer"):
            token = self.tokens[scope] = home / f"{scope}.token"
            token.touch(0o600)
            token.write_text(f"{scope}-0123456789abcdef")
            sections += f'[[token]]\nfile = "{token}"\nname = "{scope}"\nscope = "{scope}"\n'
        self.daemon = Daemon(home / "d", "trainer-1", f'{sections}[[run]]\nid = "policy"\n')

    def options(self, scope: str) -> tuple[object, ...]:
        return "--daemon", self.url, "--token-file", self.tokens[scope], "--ca", self.authority.certificate


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    host.daemon.start()
    weights = ArrayWeights.random(MODEL)
    host.daemon.client.publish("policy", PublishRequest(str(write_checkpoint(tmp_path / "step_1", weights))))
    yield host
    host.daemon.stop()


def test_a_command_does_over_tls_what_its_token_allows_and_nothing_else(host: Host, deltad: Deltad) -> None:
    admin = host.options("administer")
    assert "policy" in deltad("status", *admin).out
    assert "v000001" in deltad("log", *admin).out
    deltad("gc", "--dry-run", *host.options("read")).assert_refused(77, "an identity that may do this")


def test_the_environment_may_say_where_the_daemon_is(
    host: Host, deltad: Deltad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAD_DAEMON", host.url)
    monkeypatch.setenv("DELTAD_TOKEN_FILE", str(host.tokens["administer"]))
    monkeypatch.setenv("DELTAD_CA", str(host.authority.certificate))
    assert "trainer-1" in deltad("status").out


def test_what_cannot_be_is_said_before_anything_is_sent(host: Host, deltad: Deltad, tmp_path: Path) -> None:
    deltad("status", "--daemon", "http://127.0.0.1:1").assert_refused(64, "https://HOST:PORT")
    deltad("status", "--token-file", host.tokens["read"]).assert_refused(64, "--daemon beside them")
    deltad("status", "--daemon", host.url, "--socket", "s").assert_refused(64, "one of --daemon, --socket and --config")
    deltad("status", "--daemon", host.url, "--token-file", tmp_path / "none").assert_refused(78, "token file")
    other = Authority(tmp_path / "other").certificate
    ended = deltad("status", "--daemon", host.url, "--token-file", host.tokens["administer"], "--ca", other)
    ended.assert_refused(69, host.url)
    assert "0123456789abcdef" not in ended.err
