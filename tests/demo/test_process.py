"""Supervision: what dies is started again, what must not die ends the demo, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deltad.demo import tether
from deltad.demo.process import Child, Program, ProgramEndedError, RestartRule, Supervisor, describe_exit, tail

SLEEPER = "import time; print('up', flush=True); time.sleep(1000)"


class Watch:
    """Every change that the supervisor tells about, and a way to wait for one."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int]] = []
        self._changed = asyncio.Event()

    def __call__(self, child: Child) -> None:
        if child.last_code is None:
            self.starts.append((child.program.name, child.pid))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 20)


@contextlib.asynccontextmanager
async def supervised() -> AsyncIterator[tuple[Supervisor, Watch]]:
    watch = Watch()
    supervisor = Supervisor(on_change=watch)
    try:
        yield supervisor, watch
    finally:
        await supervisor.stop(list(supervisor.children), patience=5)


def program(tmp_path: Path, code: str, **options: object) -> Program:
    return Program("child", (sys.executable, "-c", code), tmp_path / "child.log", os.environ, **options)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    return not is_gone(pid, patience=0)


def is_gone(pid: int, *, patience: float = 20) -> bool:
    """Whether a process has ended; one that was killed takes a moment, for which this waits."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], patience)[0])
    finally:
        os.close(handle)


async def test_a_child_that_is_killed_is_started_again_with_a_new_pid(tmp_path: Path) -> None:
    async with supervised() as (supervisor, watch):
        child = supervisor.start(program(tmp_path, SLEEPER, restart=RestartRule()))
        for life in (1, 2, 3):
            await watch.until(lambda life=life: child.starts == life)  # type: ignore[misc]
            assert is_alive(child.pid)
            os.kill(child.pid, signal.SIGKILL)
        await watch.until(lambda: child.starts == 4)
        assert len({pid for _, pid in watch.starts}) == 4
        assert not supervisor.failed.done()


async def test_a_child_that_dies_in_a_burst_is_given_up_with_its_exit_code_and_its_log_named(tmp_path: Path) -> None:
    async with supervised() as (supervisor, _):
        code = "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"
        child = supervisor.start(program(tmp_path, code, restart=RestartRule(burst=2, window=1000)))
        with pytest.raises(ProgramEndedError, match=r"'child'.*exit code 3.*child\.log") as caught:
            await supervisor.failed
        assert child.starts == 3
        assert tail(caught.value.log).splitlines() == ["out of luck"] * 3
        assert caught.value.exit_code == 1


async def test_a_configuration_error_is_not_tried_again(tmp_path: Path) -> None:
    async with supervised() as (supervisor, _):
        child = supervisor.start(program(tmp_path, "raise SystemExit(78)", restart=RestartRule()))
        with pytest.raises(ProgramEndedError, match="exit code 78"):
            await supervisor.failed
        assert child.starts == 1


@pytest.mark.parametrize(("code", "found"), [("pass", "exit code 0"), ("import os; os.abort()", "SIGABRT")])
async def test_the_end_of_a_child_that_must_go_on_is_a_failure_whatever_its_code(
    tmp_path: Path, code: str, found: str
) -> None:
    async with supervised() as (supervisor, _):
        supervisor.start(program(tmp_path, code))
        with pytest.raises(ProgramEndedError, match=found):
            await supervisor.wait("child")


async def test_a_child_that_may_end_ends_well_and_its_lines_are_handed_over_in_order(tmp_path: Path) -> None:
    lines: list[bytes] = []
    async with supervised() as (supervisor, _):
        code = "for i in range(1000): print(i)"
        supervisor.start(program(tmp_path, code, may_end=True, on_line=lines.append))
        await supervisor.wait("child")
        assert [int(line) for line in lines] == list(range(1000))
        assert not supervisor.failed.done()


async def test_a_child_that_may_end_fails_with_any_other_code_than_zero(tmp_path: Path) -> None:
    async with supervised() as (supervisor, _):
        supervisor.start(program(tmp_path, "raise SystemExit(2)", may_end=True))
        with pytest.raises(ProgramEndedError, match="exit code 2"):
            await supervisor.failed


async def test_stopping_asks_first_and_is_no_failure(tmp_path: Path) -> None:
    ready = asyncio.Event()
    lines: list[bytes] = []

    def take(line: bytes) -> None:
        lines.append(line)
        ready.set()

    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit(0)))\n"
        "print('up', flush=True); signal.pause()"
    )
    async with supervised() as (supervisor, _):
        supervisor.start(program(tmp_path, code, restart=RestartRule(), on_line=take))
        await ready.wait()
        await supervisor.stop(["child", "never started"])
        assert lines == [b"up\n", b"drained\n"]
        assert supervisor.children["child"].starts == 1
        assert not supervisor.failed.done()


async def test_stopping_kills_what_does_not_listen_and_what_it_started(tmp_path: Path) -> None:
    pids: list[int] = []
    ready = asyncio.Event()

    def take(line: bytes) -> None:
        pids.extend(map(int, line.split()))
        ready.set()

    code = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "below = subprocess.Popen(['sleep', '1000'])\n"
        "print(os.getpid(), below.pid, flush=True); signal.pause()"
    )
    async with supervised() as (supervisor, _):
        supervisor.start(program(tmp_path, code, on_line=take))
        await ready.wait()
        await supervisor.stop(["child"], patience=0.1)
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-S', {tether.__file__!r}, str(os.getpid()), 'cat'])\n"
        "print(child.pid, flush=True); signal.pause()"
    )
    # The child holds the other end of this pipe: that it is closed tells that the child is gone.
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdin=read, stdout=subprocess.PIPE) as parent:
        os.close(read)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
        parent.wait()
        with pytest.raises(BrokenPipeError):
            write_for_ever(write)
        os.close(write)


def write_for_ever(pipe: int) -> None:
    while True:
        os.write(pipe, b"x" * 65536)


def test_a_tethered_program_does_not_start_under_another_parent() -> None:
    ended = subprocess.run([sys.executable, "-I", "-S", tether.__file__, "1", "true"], check=False)
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("ends", "code", "again"),
    [
        ([0.0], 1, True),
        ([0, 1, 2], -9, True),
        ([0, 1, 2, 3], -9, False),
        ([0, 20, 40, 60], -9, True),
        ([0.0], 78, False),
    ],
)
def test_only_a_burst_or_a_hopeless_exit_is_not_started_again(ends: list[float], code: int, again: bool) -> None:
    assert RestartRule(burst=3, window=10).again(ends, code) is again


def test_exits_are_described_in_words() -> None:
    assert [describe_exit(code) for code in (0, 70, -9, -250)] == [
        "exit code 0",
        "exit code 70",
        "killed by SIGKILL",
        "killed by signal 250",
    ]


def test_the_tail_of_a_log_is_its_last_lines_whatever_they_hold(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"first\n" * 10_000 + b"\xff last\n")
    assert tail(log, lines=2) == "first\n\ufffd last"
