"""Feeding a run from a watched directory. A lost event only delays; a bad checkpoint only costs itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from deltad.config import WatchConfig
from deltad.daemon.node import Node
from deltad.errors import DeltadError, StoreError, UnavailableError
from deltad.watch.watcher import Candidate, DirectoryWatcher

log = structlog.get_logger()

FIRST_RETRY = 1.0
LAST_RETRY = 30.0


async def watch(node: Node, config: WatchConfig) -> None:
    """Publish every settled checkpoint of one watched directory, in order, for as long as it is awaited."""
    latest = node.versions_of(config.run).records.latest()
    after = None if latest is None else latest.version.number

    def refuse(directory: Path, error: DeltadError) -> None:
        node.metrics.checkpoint_refused(config.run, error)
        log.warning("checkpoint_refused", run=config.run, directory=str(directory), error=str(error))

    watcher = DirectoryWatcher(
        config.directory,
        config.pattern,
        quiet=config.quiet,
        rescan=config.rescan,
        after=after,
        on_refused=refuse,
        limits=node.limits,
    )
    async for candidate in watcher:
        await _publish(node, config, candidate)


async def _publish(node: Node, config: WatchConfig, candidate: Candidate) -> None:
    part = f"watch {config.run}"
    delay = FIRST_RETRY
    while True:
        try:
            await node.publish_checkpoint(
                config.run,
                candidate.directory,
                _number(node, config, candidate),
                new_epoch=config.on_conflict == "new_epoch",
                if_changed=candidate.counted,
                settle=candidate.settle,
            )
            node.unwell.pop(part, None)
            return
        except DeltadError as error:
            node.metrics.checkpoint_refused(config.run, error)
            log.warning("checkpoint_refused", run=config.run, number=candidate.number, error=str(error))
            if not isinstance(error, (StoreError, UnavailableError)):
                # Only another checkpoint can help; the watcher brings that one when it comes.
                node.unwell.pop(part, None)
                return
            node.unwell[part] = str(error)
        await asyncio.sleep(delay)
        delay = min(2 * delay, LAST_RETRY)


def _number(node: Node, config: WatchConfig, candidate: Candidate) -> int:
    """The trainer's number or, where it has none, the next one, whoever published last."""
    latest = node.versions_of(config.run).records.latest()
    if not candidate.counted or latest is None:
        return candidate.number
    return max(candidate.number, latest.version.number + 1)
