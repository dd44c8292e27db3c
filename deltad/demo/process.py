"""Supervision of the demo's programs: start, watch, start again as systemd would, and leave nothing behind.

It may not know what the programs do. Its invariant: every program runs in a process group of its own that is
gone once `Supervisor.stop` has returned or the supervisor's process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from deltad.demo import tether
from deltad.errors import DeltadError

LINE_BYTES = 1 << 20


class ProgramEndedError(DeltadError):
    """A program that was to go on running has ended for good. `log` is where its last words are."""

    exit_code = 1

    def __init__(self, name: str, *, found: str, log: Path) -> None:
        self.log = log
        super().__init__(f"the program {name!r}", expected="to go on running", found=found, hint=f"see {log}")


@dataclass(frozen=True, slots=True)
class RestartRule:
    """When a program that ended is started again: always, but for a burst of failures and hopeless exits.

    More than `burst` ends within `window` seconds are a fault that starting again does not heal; nor is a
    configuration that cannot be used.
    """

    burst: int = 5
    window: float = 20.0
    hopeless: tuple[int, ...] = (64, 78)

    def again(self, ends: Sequence[float], code: int) -> bool:
        """`ends`: when the program ended so far on a monotonic clock, ascending, this end included."""
        if code in self.hopeless:
            return False
        return sum(1 for end in ends if end > ends[-1] - self.window) <= self.burst


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. Without a `restart` rule its end is final: an error, unless it `may_end` with code 0.

    Its output goes to `log`; `on_line` is given each line of standard output as well.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str]
    restart: RestartRule | None = None
    may_end: bool = False
    on_line: Callable[[bytes], None] | None = None


class Child:
    """One supervised program. `pid` is that of its newest process, `starts` how often it was started."""

    def __init__(
        self,
        program: Program,
        *,
        on_change: Callable[[Child], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.program = program
        self.pid = 0
        self.starts = 0
        self.last_code: int | None = None
        self._on_change = on_change
        self._clock = clock
        self._stopping = False
        self._group = 0

    async def run(self) -> None:
        """Run the program until it has ended for good. Raises ProgramEndedError where it should not have ended."""
        ends: list[float] = []
        while True:
            code = await self._run_once()
            if self._stopping:
                return
            ends.append(self._clock())
            if code == 0 and self.program.may_end:
                return
            if self.program.restart is None or not self.program.restart.again(ends, code):
                raise ProgramEndedError(self.program.name, found=describe_exit(code), log=self.program.log)

    async def _run_once(self) -> int:
        with self.program.log.open("ab", buffering=0) as log:
            return await self._run_with(log)

    async def _run_with(self, log: FileIO) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self.program.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if self.program.on_line else log,
            stderr=log,
            env=dict(self.program.environment),
            limit=LINE_BYTES,
            start_new_session=True,
        )
        self.pid = self._group = process.pid
        self.last_code = None
        self.starts += 1
        self._on_change(self)
        if self._stopping:
            self.signal(signal.SIGTERM)
        try:
            if process.stdout is not None and self.program.on_line is not None:
                while line := await process.stdout.readline():
                    log.write(line)
                    self.program.on_line(line)
            self.last_code = await process.wait()
        finally:
            # Whatever it started itself goes with it; after a cancel, so does it. From then on the group's
            # number may belong to somebody else.
            self.signal(signal.SIGKILL)
            self._group = 0
        self._on_change(self)
        return self.last_code

    @property
    def is_stopping(self) -> bool:
        """Its end is what was asked for."""
        return self._stopping

    def stopping(self) -> None:
        """From now on its end is what was asked for."""
        self._stopping = True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program's process group, if anything is left of it."""
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)


class Supervisor:
    """All programs of the demo. `start` returns at once; `failed` is done when one ended that should not have."""

    def __init__(self, *, on_change: Callable[[Child], None]) -> None:
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.children: dict[str, Child] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, program: Program) -> Child:
        """Start a program and keep watching it."""
        child = Child(program, on_change=self._on_change)
        task = asyncio.create_task(child.run(), name=program.name)
        task.add_done_callback(self._ended)
        self.children[program.name] = child
        self._tasks[program.name] = task
        return child

    async def wait(self, name: str) -> None:
        """Until the program has ended for good. Raises ProgramEndedError as `Child.run` does."""
        await asyncio.shield(self._tasks[name])

    async def stop(self, names: Sequence[str], *, patience: float = 10.0) -> None:
        """SIGTERM, and SIGKILL for what is left after `patience` seconds. Unknown names are passed over."""
        known = [name for name in names if name in self._tasks]
        for name in known:
            self.children[name].stopping()
            if not self._tasks[name].done():
                self.children[name].signal(signal.SIGTERM)
        tasks = [self._tasks[name] for name in known]
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
        for name in known:
            self.children[name].signal(signal.SIGKILL)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failed.done():
            self.failed.exception()  # it was for whoever waited for it; nobody does any more

    def kill(self) -> None:
        """SIGKILL to everything, now."""
        for child in self.children.values():
            child.stopping()
            child.signal(signal.SIGKILL)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)


def describe_exit(code: int) -> str:
    """An exit code in words; asyncio gives a signal as its negative number."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def tail(path: Path, *, lines: int = 15, size: int = 16384) -> str:
    """The last lines of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            text = file.read(size).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
