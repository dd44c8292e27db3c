"""Dying in a chosen system call: `strace` kills a forked child when it enters its N-th call of a kind.

The child inherits all that this process has imported and compiled, makes its deed ready, and waits: what is
counted begins where it goes on. Calls are counted thread by thread, as strace does.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CALLS = (
    "openat",
    "write",
    "pwrite64",
    "fallocate",
    "ftruncate",
    "fsync",
    "fdatasync",
    "msync",
    "mkdir",
    "mkdirat",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "unlink",
    "unlinkat",
    "rmdir",
    "ioctl",
    "utimensat",
)
"""What changes a file system, or is part of changing it. Another machine may have other ones."""

Deed = Callable[[], object]
_LINE = re.compile(r"^(\d+) +(\w+)\(")
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, -1
_FAILED = 7


def calls_of(ready: Callable[[], Deed], trace: Path) -> dict[str, int]:
    """How often a deed enters each kind of call in the thread that does so most often. It must succeed."""
    names = ",".join(f"?{name}" for name in CALLS)
    status = _traced(ready, "-e", f"trace={names}", "-o", str(trace))
    assert os.WIFEXITED(status), "the deed was killed, and nobody had asked for that"
    counts = Counter(match.groups() for line in trace.read_text().splitlines() if (match := _LINE.match(line)))
    found: dict[str, int] = {}
    for (_, name), count in counts.items():
        found[name] = max(count, found.get(name, 0))
    return found


def killed_in(ready: Callable[[], Deed], call: str, number: int) -> bool:
    """Kill a deed when it enters its `number`-th `call`, from 1. False if it ended before that."""
    inject = f"inject={call}:signal=KILL:when={number}"
    status = _traced(ready, "-e", f"trace={call}", "-e", inject, "-o", os.devnull)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    return False


def _traced(ready: Callable[[], Deed], *options: str) -> int:
    """Run a deed in a fork under strace; how it ended, as `waitpid` says. An error in the deed fails the test."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed; with it, this kills in the midst of real system calls")
    is_ready, told_ready = os.pipe()
    go, told_go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told_go)
        _be_the_child(ready, told_ready, go)
    os.close(told_ready)
    os.close(go)
    try:
        assert os.read(is_ready, 1), "the deed could not be made ready"
        with _attached(child, *options):
            os.write(told_go, b"!")
            _, status = os.waitpid(child, 0)
    finally:
        os.close(is_ready)
        os.close(told_go)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the deed itself failed"
    return status


@contextmanager
def _attached(child: int, *options: str) -> Iterator[None]:
    command = ["strace", "-f", *options, "-p", str(child)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        line = strace.stderr.readline()
        if "attached" not in line:
            pytest.skip(f"strace may not attach to a process here: {line.strip()}")
        yield
        strace.stderr.read()


def _be_the_child(ready: Callable[[], Deed], told_ready: int, go: int) -> None:
    status = _FAILED
    try:
        # Where only ancestors may trace, strace, which is a sibling, has to be allowed to.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
        deed = ready()
        os.write(told_ready, b"!")
        if os.read(go, 1):
            deed()
            status = 0
    finally:
        os._exit(status)
