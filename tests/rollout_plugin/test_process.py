"""`python -m rollout_plugin` as an operator runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deltad.errors import NotFoundError
from tests.rollout_plugin.region import Region
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


def test_an_address_in_use_ends_it_with_78(region: Region) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            command(region, "--listen", address), stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert done.returncode == 78
    assert f"--listen {address}" in json.loads(done.stderr.splitlines()[-1])["error"]


@pytest.mark.parametrize("wrong", [("--listen", "somewhere"), ("--run", "No Run"), ("--name", "../r1")])
def test_a_malformed_option_ends_it_with_2_and_one_line(region: Region, wrong: tuple[str, str]) -> None:
    done = subprocess.run(command(region, *wrong), stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "expected" in done.stderr.splitlines()[-1]
