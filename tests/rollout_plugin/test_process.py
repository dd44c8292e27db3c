"""`python -m rollout_plugin` as an operator runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltad.client.messages import ReplicaState
from deltad.errors import NotFoundError
from tests.rollout_plugin.conftest import StartReplica
from tests.rollout_plugin.region import QUIET_FOR, RUN, Region
from tests.rollout_plugin.test_server import PROMPT, ask


def command(region: Region, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "rollout_plugin", "--socket", str(region.socket)),
        *("--run", "policy", "--variant", "bf16", "--name", "r1", *more),
    ]


def test_it_serves_follows_a_restarted_daemon_and_takes_leave_on_sigterm(region: Region, tmp_path: Path) -> None:
    ready = tmp_path / "url"
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command(region, "--ready-file", str(ready)), stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            report = region.await_verified(region.history[0])
            assert ready.read_text().strip() == report.address
            status, reply = ask(report.address, "POST", "/v1/generate", {"prompt_ids": PROMPT})
            assert (status, reply["versions"]) == (200, ["v000000"])
            region.kill()
            region.start()
            region.await_verified(region.publish_changed())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    with pytest.raises(NotFoundError):
        region.client.next("r1")
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[0] == "listening"
    assert events[-1] == "stopped"


@pytest.mark.parametrize("package", ["torch", "transformers", "aiohttp"])
def test_a_missing_engine_is_one_line_with_the_command_that_brings_it(package: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from rollout_plugin.__main__ import main; sys.exit(main())"
    options = ["--socket", "/no.sock", "--run", "policy", "--name", "r1"]
    ended = subprocess.run([sys.executable, "-c", script, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 69
    (line,) = ended.stderr.splitlines()
    said = json.loads(line)
    assert (said["event"], said["kind"]) == ("failed", "MissingPackage")
    assert f"expected the Python package {package}" in said["error"]
    assert "`pip install 'deltad[transformers]'`" in said["error"]


@contextmanager
def replica_process(region: Region, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command(region, *more), stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_twin_waits_while_the_first_lives_and_takes_over_when_it_is_killed(region: Region, tmp_path: Path) -> None:
    with replica_process(region) as first:
        address = region.await_verified(region.history[0]).address
        twin = subprocess.Popen(
            command(region), stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            assert twin.stderr is not None
            refusal = next(line for line in twin.stderr if json.loads(line)["event"] == "retry")
            assert f"another one of that name, at {address}" in json.loads(refusal)["error"]
            assert region.await_replica(lambda r: True).address == address
            first.kill()
            first.wait()
            assert region.await_replica(lambda r: r.address != address and r.state == "verified").version == "v000000"
        finally:
            twin.kill()
            twin.communicate()


def test_a_ready_file_of_an_earlier_process_is_gone_until_this_one_serves(region: Region, tmp_path: Path) -> None:
    ready = tmp_path / "url"
    ready.write_text("http://127.0.0.1:1\n")
    stale: list[bool] = []
    region.before_export = lambda: stale.append(ready.exists())
    with replica_process(region, "--ready-file", str(ready)):
        report = region.await_verified(region.history[0])
        assert stale == [False]
        assert ready.read_text().strip() == report.address
        ready.unlink()
        region.await_verified(region.publish_changed())
        assert not ready.exists(), "it tells of the start alone"


def test_a_ready_file_that_cannot_be_removed_ends_it_with_78(region: Region, tmp_path: Path) -> None:
    done = subprocess.run(
        command(region, "--ready-file", str(tmp_path)), stderr=subprocess.PIPE, text=True, check=False, timeout=120
    )
    assert done.returncode == 78
    assert f"--ready-file {tmp_path}" in json.loads(done.stderr.splitlines()[-1])["error"]


def test_a_replica_that_hangs_stops_nobody_else_and_is_unknown_once_it_was_quiet(
    region: Region, start_replica: StartReplica
) -> None:
    """P34."""
    with replica_process(region) as process:
        start_replica("r2")
        region.await_verified(region.history[0], "r1")
        region.await_verified(region.history[0], "r2")
        process.send_signal(signal.SIGSTOP)
        for seed in range(3):
            region.await_verified(region.publish_changed(seed=seed), "r2")
        assert region.await_replica(lambda r: True, "r1").version == "v000000"

        region.ahead = 2 * QUIET_FOR
        region.await_replica(lambda r: r.state is ReplicaState.UNKNOWN, "r1")
        region.await_verified(region.publish_changed(seed=3), "r2")
        view = region.client.fleet(RUN, version=region.history[0].info.version)
        assert (view.replicas, view.verified) == (2, 1)

        process.send_signal(signal.SIGCONT)
        region.await_verified(region.history[-1], "r1")


def test_an_address_in_use_ends_it_with_78(region: Region) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            command(region, "--listen", address), stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert done.returncode == 78
    assert f"--listen {address}" in json.loads(done.stderr.splitlines()[-1])["error"]


@pytest.mark.parametrize("wrong", [("--listen", "somewhere"), ("--run", "No Run"), ("--name", "../r1")])
def test_a_malformed_option_ends_it_with_64_and_one_line(region: Region, wrong: tuple[str, str]) -> None:
    done = subprocess.run(command(region, *wrong), stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 64
    assert "expected" in done.stderr.splitlines()[-1]
