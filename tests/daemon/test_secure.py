"""Real daemons that speak TLS to each other and to a rank, as SECURITY.md says; and no secret gets out."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import deltad
from deltad.client import Client
from deltad.client.messages import PublishRequest, RegisterRequest
from deltad.config import TlsFiles
from deltad.errors import DeltadError, DeniedError
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

SECURITY = (Path(deltad.__file__).parent / "docs" / "SECURITY.md").read_text(encoding="utf-8")
WAIT = 60.0


class Site:
    """A trainer's daemon and a region's, and the authority that certified both, made by the documented commands."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (commands,) = re.findall(r"```sh\n(.*?)```", SECURITY, re.DOTALL)
        made = subprocess.run(["bash", "-euc", commands], cwd=home, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        self.secret = "planted-" + secrets.token_hex(16)
        self.token_file = home / "rank.token"
        self.write_token(self.secret)
        # TLS, loopback, and free ports beside each other.
        self.relay, self.local, self.metrics = free_port(), free_port() + 1, free_port() + 2
        self.a = Daemon(
            home / "a",
            "trainer-1",
            f"""
[relay]
listen = "127.0.0.1:{self.relay}"
certificate = "{home}/trainer-1.pem"
key = "{home}/trainer-1.key"
client_ca = "{home}/authority.pem"
[local]
listen = "127.0.0.1:{self.local}"
certificate = "{home}/trainer-1.pem"
key = "{home}/trainer-1.key"
[metrics]
listen = "127.0.0.1:{self.metrics}"
[[peer]]
name = "rollout-1"
runs = ["policy"]
[[token]]
file = "{self.token_file}"
runs = ["policy"]
name = "rank"
[[run]]
id = "policy"
[[run]]
id = "secret"
""",
        )
        self.b = Daemon(
            home / "b",
            "rollout-1",
            f"""
[[upstream]]
url = "https://127.0.0.1:{self.relay}"
name = "trainer-1"
ca = "{home}/authority.pem"
certificate = "{home}/rollout-1.pem"
key = "{home}/rollout-1.key"
""",
        )

    def write_token(self, token: str) -> None:
        self.token_file.touch(0o600)
        self.token_file.write_text(token)

    def rank(self, token: Callable[[], str]) -> Client:
        """A rank on another host: it reaches the trainer's daemon over TLS alone."""
        tls = TlsFiles(ca=self.home / "authority.pem").client()
        tls.check_hostname = False  # the certificate is for a name, and there is no name for loopback here
        return Client(f"https://127.0.0.1:{self.local}", token=token, tls=tls)

    def hang_up(self) -> None:
        """SIGHUP; returns once the daemon has said what became of it."""
        before = self.a.log.count("config_reloaded") + self.a.log.count("config_not_reloaded")
        assert self.a.process is not None
        self.a.process.send_signal(signal.SIGHUP)
        while self.a.log.count("config_reloaded") + self.a.log.count("config_not_reloaded") == before:
            assert self.a.process.poll() is None, self.a.log

    def metric(self, line: str) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics") as reply:
            return line in reply.read().decode()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for daemon in (site.a, site.b):
        if daemon.process is not None:
            daemon.stop()


def test_certificates_tokens_and_reloads_let_in_those_who_may_and_no_secret_gets_out(site: Site) -> None:
    checkpoint = write_checkpoint(site.home / "step_1", ArrayWeights.random(MODEL))
    site.a.start()
    for run in ("policy", "secret"):
        site.a.client.publish(run, PublishRequest(str(checkpoint)))
    site.b.start()
    assert site.b.client.latest("policy", wait=WAIT) is not None, site.b.log
    assert not [run for run in site.b.client.status().region.runs if run == "secret"], "its certificate is not for it"

    errors: list[str] = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(DeltadError) as caught:
            call()
        assert isinstance(caught.value, DeniedError), caught.value
        errors.append(str(caught.value))

    rank = site.rank(lambda: site.secret)
    assert [info.version for info in rank.versions("policy")] == ["v000001"]
    rank.register_replica(RegisterRequest("r0", "policy", "bf16"))
    assert rank.next("r0").target == "v000001"
    refused(lambda: rank.versions("secret"))
    refused(rank.status)
    refused(lambda: rank.publish("policy", PublishRequest(str(checkpoint))))
    refused(lambda: site.rank(lambda: "another").versions("policy"))

    # Another token, and no right to it any more for the old one, without a restart.
    fresh = "planted-" + secrets.token_hex(16)
    site.write_token(fresh)
    refused(lambda: rank.versions("policy"))
    assert site.rank(lambda: fresh).versions("policy")
    config = site.a.config.read_text()
    site.a.config.write_text(config.replace('name = "rank"', 'name = "rank"\nscope = ["read", "publish"]'))
    site.hang_up()
    again = site.rank(lambda: fresh).publish("policy", PublishRequest(str(checkpoint)))
    assert again.already
    assert site.metric('deltad_config_reloads_total{outcome="taken_up"} 1.0')

    # A file that cannot be used changes nothing and is told of (P37).
    site.a.config.write_text(config + "[[token]]\n")
    site.hang_up()
    assert site.rank(lambda: fresh).publish("policy", PublishRequest(str(checkpoint))).already
    assert "token[1].file: expected a value, found no such key" in site.a.log
    assert site.metric('deltad_config_reloads_total{outcome="refused"} 1.0')

    # A peer that is not named any more is a stranger.
    site.a.config.write_text(config.replace('name = "rollout-1"', 'name = "rollout-2"'))
    site.hang_up()
    with pytest.raises(DeniedError, match="HTTP 401"):
        site.b.client.pull("policy", wait=5.0)

    for daemon in (site.a, site.b):
        assert daemon.process is not None
        process = Path("/proc") / str(daemon.process.pid)
        found = [daemon.log.encode(), (process / "cmdline").read_bytes(), (process / "environ").read_bytes()]
        found += [text.encode() for text in errors]
        found.append(repr(daemon.client.status()).encode())
        shown = subprocess.run(
            [*daemon.command("config", "show"), str(daemon.config)], capture_output=True, check=False
        )
        found += [shown.stdout, shown.stderr]
        for path in daemon.home.rglob("*"):
            if path.is_file() and path != daemon.token:
                found.append(path.read_bytes())
        if daemon is site.a:
            for page in ("metrics", "status.json", ""):
                with urllib.request.urlopen(f"http://127.0.0.1:{site.metrics}/{page}") as reply:
                    found.append(reply.read())
        keys = [line for name in ("trainer-1", "rollout-1") for line in _lines(site.home / f"{name}.key")]
        for secret in (site.secret.encode(), fresh.encode(), *keys):
            assert not [text for text in found if secret in text]


def _lines(key: Path) -> list[bytes]:
    """The lines of a private key that say something."""
    return [line for line in key.read_bytes().splitlines() if not line.startswith(b"-")]
