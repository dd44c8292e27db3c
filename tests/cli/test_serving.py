"""The whole command line against `deltad serve` in a process of its own, with checkpoints as trainers write them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.models import BROKEN, bits, nudged, write
from tests.cli.terminal import Deltad, Ended, end, start

FIRST = bits()
SECOND = nudged(FIRST, "model.layer.weight", 50)

_RUN = '[[run]]\nid = "policy"\n'


@contextmanager
def serving(home: Path, name: str, sections: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """`deltad serve`, once it has told its service manager that it is ready."""
    home.mkdir(exist_ok=True)
    config = home / f"{name}.toml"
    config.write_text(f'[daemon]\nname = "{name}"\nstore = "{name}-store"\nsocket = "{name}.sock"\n{sections}')
    notify = home / f"{name}.notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, (home / f"{name}.log").open("wb") as log:
        manager.bind(str(notify))
        environment = {**os.environ, "NOTIFY_SOCKET": str(notify), "OMP_NUM_THREADS": "1"}
        process = start("serve", "--config", config, env=environment, stdout=log, stderr=log)
        try:
            manager.settimeout(60)
            assert b"READY=1" in manager.recv(1024)
            yield process
        finally:
            process.terminate()
            process.wait()
            notify.unlink()


class Host:
    """A host with a running daemon on it, and the command line there."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes], command: Deltad, *, name: str = "a") -> None:
        self.home = home
        self.process = process
        self.offline = command
        self._socket = home / f"{name}.sock"

    def deltad(self, *arguments: object) -> Ended:
        return self.offline(*arguments, "--socket", self._socket)

    def versions(self) -> list[str]:
        """Newest first."""
        return [info["version"] for info in self.deltad("log", "--json").reply["versions"]]


@pytest.fixture
def host(tmp_path: Path, deltad: Deltad) -> Iterator[Host]:
    home = tmp_path / "host"
    with serving(home, "a", _RUN) as process:
        yield Host(home, process, deltad)


def test_the_log_says_where_the_daemon_listens_and_which_secret_is_weak(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    relay = '[relay]\nlisten = "127.0.0.1:0"\ntoken_file = "token"\n[metrics]\nlisten = "[::1]:0"\n'
    with serving(tmp_path, "a", relay):
        pass
    said = {line["event"]: line for line in map(json.loads, (tmp_path / "a.log").read_text().splitlines())}
    assert "can be guessed" in said["config_warning"]["warning"]
    ready = said["daemon_ready"]
    assert ready["socket"] == str(tmp_path / "a.sock")
    for face, host in (("relay", "127.0.0.1"), ("metrics", "[::1]")):
        assert re.fullmatch(rf"{re.escape(host)}:[1-9]\d*", ready[face])


def test_a_version_is_published_listed_taken_apart_verified_and_exported(host: Host, tmp_path: Path) -> None:
    first, second = write(tmp_path / "step_1", FIRST), write(tmp_path / "step_2", SECOND)
    assert "anchor (first version)" in host.deltad("publish", first).out
    reply = host.deltad("publish", second, "--identity", "warm", "--json").reply
    published = reply["version"]
    assert (published["version"], published["kind"], published["changed"]) == ("v000002", "delta", 50)
    assert host.deltad("publish", second, "--json").reply["already"] is True

    expected = host.offline("diff", first, second, "--json").reply
    assert expected["root"] == published["root"]
    assert expected["chunks"] == published["chunks"]
    assert abs(expected["delta_bytes"] - published["delta_bytes"]) < 64

    lines = host.deltad("log").out.splitlines()
    rows = [at for at, line in enumerate(lines) if line[0] in "*●"]
    assert [lines[at].split()[1] for at in rows] == ["v000002", "v000001"]
    assert "identity warm" in " ".join(lines[rows[0] : rows[1]])
    assert "delta on v000001" in host.deltad("inspect", "latest").out
    assert "v000002 (latest)" in host.deltad("status").out

    assert host.deltad("verify", "policy/v000002").code == 0
    assert host.deltad("export", "policy/v000002", tmp_path / "out").code == 0
    assert "is policy/v000002" in host.deltad("verify", tmp_path / "out").out
    host.deltad("verify", tmp_path / "out", "--version", "policy/v000001").assert_refused(
        65, "of policy/v000001", "wrong in model.layer.weight\n"
    )
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    host.deltad("export", "policy/v000001", tmp_path / "out").assert_refused(64, f"{tmp_path}/out", "absent or empty")
    file = tmp_path / "out" / "tokenizer.json"
    host.deltad("export", "policy/v000001", file).assert_refused(64, f"{file}", "absent or empty, found a file")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line_and_loses_nothing(kind: str, host: Host, tmp_path: Path) -> None:
    assert host.deltad("publish", write(tmp_path / "step_1", FIRST)).code == 0
    make, words = BROKEN[kind]
    made = make(tmp_path / "step_2")
    directory = made if made.is_dir() else made.parent
    host.deltad("publish", directory).assert_refused(65, str(directory), *words)
    assert host.versions() == ["v000001"]
    assert host.deltad("publish", write(tmp_path / "step_3", SECOND)).code == 0
    assert host.versions() == ["v000003", "v000001"]
    assert host.deltad("verify", "latest").code == 0


def test_a_checkpoint_of_another_model_is_65_and_a_missing_one_is_66(host: Host, tmp_path: Path) -> None:
    assert host.deltad("publish", write(tmp_path / "step_1", FIRST)).code == 0
    other = {f"other.{name}": value for name, value in FIRST.items()}
    directory = write(tmp_path / "step_2", other)
    host.deltad("publish", directory).assert_refused(65, str(directory), "the model of policy/v000001", "another one")
    host.deltad("publish", tmp_path / "step_9").assert_refused(66, f"{tmp_path}/step_9", "nothing of that name")
    assert host.versions() == ["v000001"]


def test_other_bytes_under_a_published_number_are_65_unless_a_new_epoch_is_opened(host: Host, tmp_path: Path) -> None:
    for number, weights in enumerate((FIRST, SECOND, FIRST), start=1):
        assert host.deltad("publish", write(tmp_path / f"step_{number}", weights)).code == 0
    other = write(tmp_path / "resumed" / "step_2", nudged(FIRST, "model.norm.weight", 3))
    host.deltad("publish", other).assert_refused(65, str(other), "as published for policy/v000002", "--new-epoch")
    assert host.deltad("publish", other, "--new-epoch").code == 0
    assert "nothing changed, no epoch was opened" in host.deltad("publish", other, "--new-epoch").out
    assert host.versions() == ["v000002@e2", "v000003", "v000002", "v000001"]
    assert "epoch 2 opens here, from v000003" in host.deltad("log").out


def test_a_run_that_nobody_declared_is_66(host: Host, tmp_path: Path) -> None:
    directory = write(tmp_path / "step_1", FIRST)
    host.deltad("publish", directory, "--run", "other").assert_refused(66, "run other")


def secret(file: Path, token: str) -> Path:
    file.write_text(token)
    file.chmod(0o600)
    return file


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_wrong_token_is_77_and_status_says_so_until_the_file_is_put_right(tmp_path: Path, deltad: Deltad) -> None:
    address = f"127.0.0.1:{free_port()}"
    secret(tmp_path / "a.token", "the-right-one")
    token = secret(tmp_path / "b.token", "a-wrong-one")
    relay = f'[relay]\nlisten = "{address}"\ntoken_file = "a.token"\n{_RUN}'
    upstream = f'[[upstream]]\nurl = "http://{address}"\ntoken_file = "b.token"\nruns = ["policy"]\n'
    with serving(tmp_path, "a", relay) as above, serving(tmp_path, "b", upstream) as below:
        a = Host(tmp_path, above, deltad)
        b = Host(tmp_path, below, deltad, name="b")
        assert a.deltad("publish", write(tmp_path / "step_1", FIRST)).code == 0

        b.deltad("pull", "--run", "policy").assert_refused(77, address)
        b.deltad("pull").assert_refused(77, address, "token")
        assert b.deltad("pull", "--run", "policy", "--json").refusal["error"] == "Denied"
        text = b.deltad("status").out
        assert "down" in next(line for line in text.splitlines() if line.startswith(f"  http://{address}"))
        assert "compare the token files of both daemons" in text
        assert "ready    no: " in text
        assert "a-wrong-one" not in text

        secret(token, "the-right-one")
        assert b.deltad("pull", "--run", "policy", "--wait", "30s").code == 0
        assert b.versions() == ["v000001"]
        assert b.deltad("verify", "latest").code == 0
        assert b.deltad("publish", tmp_path / "step_1").code == 64

        above.kill()
        above.wait()
        b.deltad("pull", "--wait", "1s").assert_refused(69, address)
        assert b.versions() == ["v000001"]


def test_a_second_daemon_on_the_same_store_is_75_and_names_the_first(host: Host) -> None:
    config = host.home / "b.toml"
    config.write_text('[daemon]\nname = "b"\nstore = "a-store"\nsocket = "b.sock"\n')
    refused = end("serve", "--config", config)
    refused.assert_refused(75, f"{host.home}/a-store", f"process {host.process.pid}")


def test_a_socket_where_another_daemon_listens_is_78(host: Host) -> None:
    config = host.home / "b.toml"
    config.write_text('[daemon]\nname = "b"\nstore = "other-store"\nsocket = "a.sock"\n')
    end("serve", "--config", config).assert_refused(78, f"{host.home}/a.sock", "another process that listens")
    assert host.deltad("status").code == 0
    assert not (host.home / "other-store").exists()


def test_an_address_that_is_taken_is_78_and_leaves_no_store_behind(tmp_path: Path) -> None:
    secret(tmp_path / "token", "0123456789abcdef")
    config = tmp_path / "a.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        relay = f'[relay]\nlisten = "{address}"\ntoken_file = "token"\n'
        config.write_text(f'[daemon]\nname = "a"\nstore = "store"\nsocket = "a.sock"\n{relay}')
        refused = end("serve", "--config", config)
    refused.assert_refused(78, f"[relay] listen = '{address}'", "Address already in use", "`ss -ltnp` names")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "token"]


def test_a_store_of_another_format_is_65_and_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "FORMAT").write_text("deltad store 9\n")
    config = tmp_path / "a.toml"
    config.write_text('[daemon]\nname = "a"\nstore = "store"\nsocket = "a.sock"\n')
    end("serve", "--config", config).assert_refused(65, f"{tmp_path}/store/FORMAT", "another version of deltad")
    assert (tmp_path / "store" / "FORMAT").read_text() == "deltad store 9\n"


def test_a_daemon_drains_on_a_signal_and_exits_with_0(tmp_path: Path, deltad: Deltad) -> None:
    with serving(tmp_path, "a") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    deltad("status", "--socket", tmp_path / "a.sock").assert_refused(69, "is `deltad serve` running?")
