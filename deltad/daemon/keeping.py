"""Keeping the store small: who needs which version now, and letting the others go.

Leases are renewed from what the fleet says of itself, so a replica or a region that falls silent loses its own
by itself. A collection blocks, and runs in a worker thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import structlog

from deltad.client.messages import CollectReply, Explanation, FleetView
from deltad.config import Config
from deltad.errors import DeltadError, NotFoundError
from deltad.store.garbage import Collected, Explained, collect
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import RunId, parse_version

log = structlog.get_logger()

SHOWN_OBJECTS = 10_000
"""How many objects that stay, and that go, are told of one by one."""

COLLECT_SECONDS = 300.0
"""How often a daemon collects by itself."""


class Keeper:
    """All runs of one store. Methods belong to the event loop's thread."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._collecting = asyncio.Lock()
        self._due = 0.0

    def retentions(self) -> dict[RunId, Retention]:
        """What the configuration says; a bound of 0 is none."""
        return {
            run.id: Retention(run.keep_versions or None, run.keep_for or None, run.keep_bytes or None)
            for run in self._config.runs
        }

    def renew_leases(self, views: Iterable[FleetView]) -> None:
        """Lease to every replica what it serves, and to every region what it holds."""
        for view in views:
            run = RunId(view.run)
            for region in view.regions:
                if not region.fresh:
                    continue
                report = region.report.runs[view.run]
                if region.report.daemon != self._config.daemon.name:
                    self._lease(run, f"region {region.report.daemon}", report.latest)
                for replica in report.replicas:
                    self._lease(run, f"replica {replica.replica} of {region.report.daemon}", replica.version)

    def _lease(self, run: RunId, holder: str, version: str) -> None:
        if version:
            # What is not held here any more cannot be kept: its reader will be given the newest whole.
            with suppress(NotFoundError):
                self._store.run(run).lease(f"{holder} ({run})", parse_version(version))

    async def collect(self, *, dry_run: bool = False) -> Collected:
        """Collect now. Raises what `deltad.store.garbage.collect` raises."""
        async with self._collecting:
            return await asyncio.to_thread(collect, self._store, self.retentions(), dry_run=dry_run)

    async def collect_when_due(self, now: float) -> str:
        """Collect if the last time is long ago; what went wrong, in words, or nothing."""
        if now < self._due:
            return ""
        self._due = now + COLLECT_SECONDS
        try:
            await self.collect()
        except DeltadError as error:
            log.warning("not_collected", error=str(error))
            return str(error)
        return ""


def collect_reply(collected: Collected) -> CollectReply:
    """What a collection did, or would do, in words."""
    dropped = [found for found in collected.objects if not found.kept]
    kept = [found for found in collected.objects if found.kept]
    shown = (*dropped[:SHOWN_OBJECTS], *kept[:SHOWN_OBJECTS])
    return CollectReply(
        versions=tuple(map(_explanation, collected.versions)),
        objects=tuple(map(_explanation, shown)),
        kept_objects=len(kept),
        dropped_objects=len(dropped),
        dropped_bytes=collected.freed_bytes,
    )


def _explanation(found: Explained) -> Explanation:
    return Explanation(found.thing, found.bytes, found.kept, found.why)
