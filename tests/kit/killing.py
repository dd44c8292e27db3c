"""Dying at a chosen moment: a forked child runs a deed and kills itself at its N-th file operation."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

OPERATIONS = frozenset(
    {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.utime", "shutil.rmtree"}
)
"""Audit events that stand for an operation on the file system. `os.replace` reports as `os.rename`."""


def dies_at(operation: int, deed: Callable[[], object]) -> bool:
    """Run `deed` in a fork that is SIGKILLed just before its `operation`-th file operation, from 1.

    False if the deed ended before that. An error in the deed fails the test that asked.
    """
    child = os.fork()
    if child == 0:
        _run(operation, deed)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the deed itself failed"
    return False


def _run(operation: int, deed: Callable[[], object]) -> None:
    seen = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in OPERATIONS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.addaudithook(hook)
        deed()
        status = 0
    finally:
        os._exit(status)
