"""What the daemon is doing while a command waits for it: one line on the standard error of a terminal.

Shows nothing off a terminal and leaves nothing behind. That it cannot ask is no failure of the command.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deltad.cli.connect import Daemon
from deltad.errors import DeltadError
from deltad.figures import clean
from deltad.types import RunId

if TYPE_CHECKING:
    from rich.status import Status

_ASK_AGAIN = 0.5


@contextmanager
def activity(daemon: Daemon, run: RunId, doing: str) -> Iterator[None]:
    """Show `doing`, and what the daemon says it does for `run`, until the block ends."""
    with step(doing) as status:
        if status is None:
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(target=_follow, args=(daemon, run, doing, status, over), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join(timeout=2 * _ASK_AGAIN)


@contextmanager
def step(doing: str) -> Iterator[Status | None]:
    """Show `doing` until the block ends; None off a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status(Text(clean(doing))) as status:
        yield status


def _follow(daemon: Daemon, run: RunId, doing: str, status: Status, over: threading.Event) -> None:
    from rich.text import Text

    while not over.wait(_ASK_AGAIN):
        try:
            report = daemon.client().status().region.runs.get(run)
        except DeltadError:
            continue
        if report is not None and report.activity:
            status.update(Text(clean(f"{doing}: {report.activity}")))
