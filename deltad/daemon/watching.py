"""Feeding a run from a watched directory. A lost event only delays; a bad checkpoint only costs itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from deltad.config import WatchConfig
from deltad.daemon.node import Node
from deltad.errors import BaseMissingError, DeltadError, StoreError, UnavailableError
from deltad.types import Version
from deltad.watch.watcher import Candidate, DirectoryWatcher

log = structlog.get_logger()

FIRST_RETRY = 1.0
LAST_RETRY = 30.0
_MOST_EARLY = 1000


async def watch(node: Node, config: WatchConfig) -> None:
    """Publish every settled checkpoint of one watched directory, in order, for as long as it is awaited."""

    def newest() -> int | None:
        version = _newest(node, config)
        return None if version is None else version.number

    def refuse(directory: Path, error: DeltadError) -> None:
        _refuse(node, config, error, directory=str(directory))

    def be_there(there: bool) -> None:
        node.remarks.is_there(config.run, config.directory, there)
        write, event = (log.info, "directory_appeared") if there else (log.warning, "directory_missing")
        write(event, run=config.run, directory=str(config.directory))

    watcher = DirectoryWatcher(
        config.directory,
        config.pattern,
        quiet=config.quiet,
        rescan=config.rescan,
        newest=newest,
        on_refused=refuse,
        on_there=be_there,
        limits=node.limits,
    )
    early = _Early(node, config)
    waiting = asyncio.create_task(early.run())
    try:
        async for candidate in watcher:
            await early.publish(candidate)
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A candidate whose base was missing when `tried_at` was the newest version."""

    candidate: Candidate
    tried_at: Version | None
    why: BaseMissingError


class _Early:
    """Publishes candidates one at a time, and those whose base is not there yet once it is, whoever brings it."""

    def __init__(self, node: Node, config: WatchConfig) -> None:
        self._node, self._config = node, config
        self._turn = asyncio.Lock()
        self._waiting: dict[Path, _Waiting] = {}

    async def publish(self, candidate: Candidate) -> None:
        async with self._turn:
            self._waiting.pop(candidate.directory, None)  # it was written again since
            newest = _newest(self._node, self._config)
            try:
                await _publish(self._node, self._config, candidate)
            except BaseMissingError as error:
                self._waiting[candidate.directory] = _Waiting(candidate, newest, error)
                while len(self._waiting) > _MOST_EARLY:
                    del self._waiting[self._in_order()[0].candidate.directory]
                first = self._in_order()[0]
                self._node.remarks.waits(self._config.run, first.why, newest)
                log.info("checkpoint_waits", run=self._config.run, number=candidate.number, error=str(error))

    async def run(self) -> None:
        """Try again whenever there is another newest version."""
        while True:
            if await self._node.announcements.wait_until(self._is_due, self._config.rescan) is None:
                continue
            for waiting in self._in_order():
                if self._waiting.get(waiting.candidate.directory) is waiting:
                    await self.publish(waiting.candidate)

    def _is_due(self) -> bool | None:
        newest = _newest(self._node, self._config)
        return any(newest != waiting.tried_at for waiting in self._waiting.values()) or None

    def _in_order(self) -> list[_Waiting]:
        return sorted(self._waiting.values(), key=lambda waiting: waiting.candidate.number)


async def _publish(node: Node, config: WatchConfig, candidate: Candidate) -> None:
    """Raises BaseMissingError; whatever else is wrong with the candidate is told, and it is passed over."""
    part = f"watch {config.run}"
    delay = FIRST_RETRY
    while True:
        try:
            await node.publish_checkpoint(
                config.run,
                candidate.directory,
                _number(node, config, candidate),
                epoch=node.fences[config.run].epoch,
                epoch_on_conflict=config.on_conflict == "new_epoch",
                if_changed=candidate.counted,
                settle=candidate.settle,
            )
            node.unwell.pop(part, None)
            return
        except BaseMissingError:
            node.unwell.pop(part, None)
            raise
        except DeltadError as error:
            if not isinstance(error, (StoreError, UnavailableError)):
                _refuse(node, config, error, number=candidate.number)
                # Only another checkpoint can help; the watcher brings that one when it comes.
                node.unwell.pop(part, None)
                return
            node.metrics.checkpoint_refused(config.run, error)
            log.warning("checkpoint_refused", run=config.run, number=candidate.number, error=str(error))
            node.unwell[part] = str(error)
        await asyncio.sleep(delay)
        delay = min(2 * delay, LAST_RETRY)


def _number(node: Node, config: WatchConfig, candidate: Candidate) -> int:
    """The trainer's number or, where it has none, the next one, whoever published last."""
    newest = _newest(node, config)
    if not candidate.counted or newest is None:
        return candidate.number
    return max(candidate.number, newest.number + 1)


def _newest(node: Node, config: WatchConfig) -> Version | None:
    latest = node.versions_of(config.run).records.latest()
    return None if latest is None else latest.version


def _refuse(node: Node, config: WatchConfig, error: DeltadError, **which: object) -> None:
    """A checkpoint is not published: counted, logged, and told in the status. The daemon stays ready."""
    node.metrics.checkpoint_refused(config.run, error)
    node.remarks.refused(config.run, error, _newest(node, config))
    log.warning("checkpoint_refused", run=config.run, error=str(error), **which)
