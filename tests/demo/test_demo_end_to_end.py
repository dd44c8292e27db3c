"""The demo as a user runs it: four programs, two regions, and the proof; and again with a daemon killed in mid-run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltad.demo.process import tail

LAST_LINES = 40
PATIENCE_SECONDS = 150


class Demo:
    """A running demo. Its output is read line by line, so that a test can wait for what it says."""

    def __init__(self, directory: Path, models: Path, *options: str) -> None:
        self.report_path = directory / "report.json"
        self._directory = directory
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deltad", "demo", "--report", str(self.report_path), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ, TMPDIR=str(directory), XDG_CACHE_HOME=str(models), PYTHONUNBUFFERED="1"),
        )

    def until(self, words: str) -> None:
        """Read on until a line holds these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if words in line:
                return
        pytest.fail(f"the demo ended without saying {words!r}:\n" + self.last_words())

    def last_words(self) -> str:
        """The last lines of the demo and of every program's log, as far as they are left."""
        logs = sorted(self._directory.glob("deltad-demo-*/logs/*.log"))
        return "\n".join(self.lines[-LAST_LINES:] + [f"== {log.name}\n{tail(log)}" for log in logs])

    def state(self) -> dict[str, Any]:
        (path,) = self._directory.glob("deltad-demo-*/demo-state.json")
        state: dict[str, Any] = json.loads(path.read_bytes())
        return state

    def pid(self, program: str) -> int:
        pid: int = self.state()["processes"][program]["pid"]
        return pid

    def finish(self) -> int:
        """Read to the end; the exit code."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait()

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.report_path.read_bytes())
        return report


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model is made once for all demos of this module."""
    return tmp_path_factory.mktemp("models")


@contextlib.contextmanager
def running(directory: Path, models: Path, *options: str) -> Iterator[Demo]:
    demo = Demo(directory, models, *options)
    # One that hangs is stopped, and what its programs said last is shown, before the test itself times out.
    patience = threading.Timer(PATIENCE_SECONDS, lambda: print(demo.last_words()) or demo.process.terminate())
    patience.start()
    try:
        yield demo
    finally:
        patience.cancel()
        demo.process.terminate()
        demo.finish()
        assert demo.process.stdout is not None
        demo.process.stdout.close()


def assert_proven(demo: Demo, *, versions: int) -> None:
    code = demo.finish()
    said = demo.last_words()
    assert code == 0, said
    assert demo.lines[-1] == "all_match: true", said
    report = demo.report()
    assert report["all_match"] is True
    assert report["rollouts_from_remote"] > 0
    assert len(report["versions"]) >= versions
    for version in report["versions"]:
        assert version["match"] is True
        assert version["root_published"] == version["root_served"]
        assert len(version["root_served"]) == 64
        assert version["delta_bytes"] > 0
    roots = [version["root_served"] for version in report["versions"]]
    assert len(set(roots)) > 1, "training changed nothing"
    assert report["versions"][0]["density"] == 1.0
    assert all(version["delta_bytes"] < version["full_bytes"] for version in report["versions"][1:])


def is_gone(pid: int) -> bool:
    """Whether the process has ended, or does within a few seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 20)[0])
    finally:
        os.close(handle)


def test_every_version_that_a_remote_replica_serves_is_the_one_that_was_published(tmp_path: Path, models: Path) -> None:
    with running(tmp_path, models, "--quick") as demo:
        assert_proven(demo, versions=5)
        assert demo.lines[-2] == f"report: {demo.report_path}"
        assert list(tmp_path.iterdir()) == [demo.report_path], "a demo that went well leaves only its report"


@pytest.mark.parametrize("daemon", ["daemon-a", "daemon-b"])
def test_a_daemon_that_is_killed_in_mid_run_is_started_again_and_the_run_completes(
    tmp_path: Path, models: Path, daemon: str
) -> None:
    with running(tmp_path, models, "--quick") as demo:
        demo.until("v000002 verified")
        os.kill(demo.pid(daemon), signal.SIGKILL)
        demo.until(f"{daemon} ended: killed by SIGKILL")
        demo.until(f"{daemon} is started again")
        assert_proven(demo, versions=5)


def test_a_replica_that_dies_ends_the_demo_with_the_last_lines_of_its_log(tmp_path: Path, models: Path) -> None:
    with running(tmp_path, models, "--quick") as demo:
        demo.until("v000000 verified")
        os.kill(demo.pid("replica"), signal.SIGKILL)
        assert demo.finish() == 1
        said = "\n".join(demo.lines)
        assert "the program 'replica': expected to go on running, found killed by SIGKILL" in said
        assert not demo.report_path.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(
    tmp_path: Path, models: Path, number: signal.Signals, code: int
) -> None:
    with running(tmp_path, models, "--quick") as demo:
        demo.until("v000000 published")
        processes = demo.state()["processes"]
        assert len(processes) >= 6
        demo.process.send_signal(number)
        assert demo.finish() == code
        assert all(is_gone(process["pid"]) for process in processes.values())
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.environ.get("DELTAD_TEST_FULL") != "1", reason="takes minutes: run `make test-full`")
@pytest.mark.timeout(900)
def test_the_demo_proves_it_on_the_real_model_too(tmp_path: Path, models: Path) -> None:
    with running(tmp_path, models) as demo:
        assert_proven(demo, versions=5)
        assert demo.report()["parameters"] > 100_000_000
        assert demo.report()["rollouts_from_remote"] >= 5 * 8
