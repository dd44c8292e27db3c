"""The watcher: awaits file-system events and the clock, looks, and yields what is settled.

A thin shell: it decides nothing about checkpoints. Events only make it look sooner; the look that comes
every `rescan` seconds is the truth, since network file systems give no events and queues overflow. The
watched directory may be missing at first, go away and come back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import watchfiles

from deltad.checkpoint.directory import check_complete
from deltad.checkpoint.files import Fingerprint
from deltad.errors import CheckpointChangedError, CheckpointError, DeltadError, FormatError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.watch.pattern import Pattern, parse_pattern
from deltad.watch.settle import Settling, Sighting
from deltad.watch.survey import survey

log = structlog.get_logger()

_GATHER_MS = 200  # how long a burst of events is gathered before it makes one look
_STEP_MS = 50


@dataclass(frozen=True, slots=True)
class Candidate:
    """A settled checkpoint.

    `found` is when its present state was first seen, on the watcher's clock, and `settle` how many seconds
    after that it was handed out. `counted`: the number was counted by the watcher, from the newest that is
    published; the directory has none of its own.
    """

    number: int
    directory: Path
    found: float
    settle: float
    fingerprint: Fingerprint
    counted: bool = False


class DirectoryWatcher:
    """Iterate it with `async for` to get each settled checkpoint once, in ascending order of number.

    A directory that is written again after its number was handed out is handed out again in its new state.
    `pattern` is as in `deltad.watch.pattern`; `quiet` and `rescan` are seconds; `newest` tells the number of the
    run's newest version, and is asked again and again, since others may publish too. `on_refused` is told of
    each checkpoint that stands still and cannot be published, once for each state of it, and of a watched
    directory that cannot be read. `on_there` is told when the watched directory is found missing (False), and
    when it has appeared after that (True).

    Raises UsageError for a pattern that is none.
    """

    def __init__(
        self,
        directory: Path,
        pattern: str,
        *,
        quiet: float,
        rescan: float,
        newest: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[Path, DeltadError], None] | None = None,
        on_there: Callable[[bool], None] = lambda there: None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._directory = directory
        self._pattern: Pattern = parse_pattern(pattern)
        self._rescan = rescan
        self._clock = clock
        self._newest = newest
        self._on_refused = on_refused or _log_refusal
        self._on_there = on_there
        self._limits = limits
        self._settling = Settling(quiet=quiet, recheck=rescan, newest=newest(), numbered=self._pattern.numbered)
        self._was_there = False
        self._is_missing = False
        self._trouble = ""

    async def __aiter__(self) -> AsyncIterator[Candidate]:
        events = _Events(self._directory)
        try:
            while True:
                events.clear()  # before the look: what happens during it makes another one
                await events.follow()
                await self._look()
                if (candidate := self._next_candidate()) is not None:
                    yield candidate
                    continue
                await events.wait(min(self._rescan, self._settling.due() - self._clock()))
        finally:
            await events.stop()

    async def _look(self) -> None:
        try:
            sightings = await asyncio.to_thread(survey, self._directory, self._pattern, limits=self._limits)
        except (CheckpointError, FormatError) as error:
            # What was seen before still stands; a file system may fail for a while.
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._on_refused(self._directory, error)
            return
        self._trouble = ""
        if (sightings is None) != self._is_missing:
            self._is_missing = sightings is None
            self._on_there(not self._is_missing)
        if sightings is None and not self._was_there:
            return
        self._was_there = True
        for sighting in self._settling.look(sightings or (), self._clock()):
            reason = await asyncio.to_thread(self._check, sighting)
            self._settling.judge(sighting, reason, self._clock())
        while (refused := self._settling.next_refused(self._clock())) is not None:
            self._on_refused(self._directory / refused[0], refused[1])

    def _check(self, sighting: Sighting) -> DeltadError | None:
        """Why the checkpoint is not complete in the state that was sighted; None if it is."""
        try:
            state = check_complete(self._directory / sighting.path, limits=self._limits)
        except (CheckpointError, FormatError) as error:
            return error
        if state != sighting.fingerprint:
            return CheckpointChangedError(sighting.path, found=sighting.fingerprint.difference(state))
        return None

    def _next_candidate(self) -> Candidate | None:
        now = self._clock()
        self._settling.newest = self._newest()
        settled = self._settling.next_settled(now)
        if settled is None:
            return None
        directory = self._directory / settled.path
        return Candidate(
            settled.number, directory, settled.found, now - settled.found, settled.fingerprint, settled.counted
        )


class _Events:
    """File-system events below a directory, where there are any, as one wake-up."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wake = asyncio.Event()
        self._followed: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None

    def clear(self) -> None:
        self._wake.clear()

    async def follow(self) -> None:
        """Listen to the directory that has the name now; it may be another one than before, or none."""
        try:
            status = await asyncio.to_thread(os.stat, self._directory)
            there = (status.st_dev, status.st_ino)
        except OSError:
            there = None
        if there != self._followed:
            await self.stop()
            self._followed = there
            if there is not None:
                self._task = asyncio.create_task(self._listen())

    async def wait(self, timeout: float) -> None:
        """Until something happened, or `timeout` seconds, which may be over already."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _listen(self) -> None:
        try:
            async for changes in watchfiles.awatch(
                self._directory, watch_filter=None, debounce=_GATHER_MS, step=_STEP_MS, ignore_permission_denied=True
            ):
                if any(path == str(self._directory) for _, path in changes):
                    # It was removed, and the next one of its name may get the same inode.
                    self._followed = None
                self._wake.set()
        except* (OSError, RuntimeError):
            pass  # no events: the limit of watches is reached, or the directory is gone again; looks go on


def _log_refusal(directory: Path, error: DeltadError) -> None:
    log.warning("checkpoint_not_publishable", directory=str(directory), reason=str(error))
