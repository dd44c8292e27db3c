"""Real daemons in processes of their own, started, killed and asked as an operator would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deltad.client import Client

TOKEN = "a-token-that-only-the-tests-know"


def free_port() -> int:
    """A TCP port that nobody listens on now, below those that outgoing connections are given.

    Test runs side by side choose from different ones; the seven ports behind it are theirs alone, too.
    """
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
    for port in range(15_000 + os.getpid() % 30 * 64 + mine * 8, 20_000, 64):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


class Daemon:
    """One daemon with its own directory. `sections` is what its configuration says beyond [daemon].

    `within` is put before its command, such as `ip netns exec NAME`.
    """

    def __init__(self, home: Path, name: str, sections: str = "", *, within: Sequence[str] = ()) -> None:
        self.within = within
        self.home = home
        self.name = name
        home.mkdir(parents=True, exist_ok=True)
        self.token = home / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)
        self.config = home / "deltad.toml"
        self.config.write_text(f'[daemon]\nname = "{name}"\nstore = "store"\nsocket = "deltad.sock"\n{sections}')
        self.client = Client(home / "deltad.sock", timeout=30.0)
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        """What is set beyond the test's own environment."""

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def command(self, *words: str) -> list[str]:
        """A command of deltad, run by the interpreter of the test."""
        return [*self.within, sys.executable, "-m", "deltad", *words]

    def start(self, *, wait: bool = True) -> Daemon:
        """Start it, and return once it has told its service manager that it is ready.

        With `wait` false at once: whoever wants to know is `listening`.
        """
        if wait:
            with self.listening() as manager:
                self._start()
                assert b"READY=1" in manager.recv(1024)
        else:
            self._start()
        return self

    @contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """What its service manager hears, in the place of which this is."""
        notify = self.home / "notify"
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(notify))
            manager.settimeout(60)
            yield manager

    def _start(self) -> None:
        notify = {"NOTIFY_SOCKET": str(self.home / "notify"), "OMP_NUM_THREADS": "1"}
        with (self.home / "log").open("ab") as log:
            command = self.command("serve", "--config", str(self.config))
            environment = {**os.environ, **notify, **self.environment}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)
