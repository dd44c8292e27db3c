"""What a daemon does again and again beside its work: gauges, exports, mirrors, collections, derived edges.

All methods belong to the event loop's thread. Owns the invariant that no version's way waits for any of it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING

import structlog

from deltad.daemon.deriving import LOOK_SECONDS
from deltad.errors import DeltadError
from deltad.ops.overview import mismatched
from deltad.types import RunId

if TYPE_CHECKING:
    from deltad.daemon.node import Node

log = structlog.get_logger()

MIRROR_REST_SECONDS = 300.0
"""How long a mirror that could not advance is left alone."""


class Chores:
    """The chores of one daemon."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._told: set[RunId] = set()
        """The runs that metrics are shown of."""
        self._mirror_rests: dict[RunId, float] = {}

    async def do(self) -> None:
        """Refresh gauges, drop exports that nobody needs, let mirrors catch up."""
        node, now = self._node, time.monotonic()
        if node.store_size.is_due(now):
            await asyncio.to_thread(node.store_size.measure)
        node.metrics.store(used=node.store_size.bytes, free=node.store.free_bytes())
        for upstream in node.upstreams():
            node.metrics.upstream(upstream.url, up=upstream.up)
        node.fleet.forget_silent(now)
        for run, standing in node.standings().items():
            view = node.fleet.view(run, standing.versions, now, target=standing.target)
            node.metrics.fleet(run, [r.state for region in view.regions for r in region.report.runs[run].replicas])
            node.metrics.target(run, held=view.target is not None, verified=view.verified)
            node.metrics.standing(run, view.regions, mismatched=mismatched(run, view.regions, standing.versions))
            self._told.add(run)
        for run in self._told - {*node.runs()}:
            self._told.discard(run)
            node.metrics.forget(run)
        for export in await asyncio.to_thread(lambda: list(node.store.exports().iterdir())):
            if not node.fleet.is_registered(export.name):
                await asyncio.to_thread(shutil.rmtree, export, ignore_errors=True)
        for run in node.runs():
            await self._advance_mirror(run, now)
        self.renew_leases(now)
        if problem := await node.keeper.collect_when_due(now):
            node.unwell["garbage"] = problem
        else:
            node.unwell.pop("garbage", None)
        self.forget_gone()

    async def derive(self) -> None:
        """Make and drop edges in the background, for as long as the daemon runs."""
        while True:
            await self.derive_now()
            await asyncio.sleep(LOOK_SECONDS)

    async def derive_now(self) -> None:
        """Make and drop the edges of all runs that the policy decides on; none while a checkpoint is published."""
        node = self._node
        for run in node.runs():
            if not node.activities:
                now, versions = time.monotonic(), node.versions_of(run)
                await node.deriving.look(versions, node.fleet.view(run, versions.all(), now), now)

    def forget_gone(self) -> None:
        """Forget what was known of versions that are not held any more."""
        for versions in self._node.known():
            if versions.forget_gone():
                self._node.store_size.went()

    def renew_leases(self, now: float) -> None:
        """Keep what replicas serve and regions below have."""
        node = self._node
        node.keeper.renew_leases(node.fleet.view(run, node.versions_of(run).all(), now) for run in node.runs())

    async def _advance_mirror(self, run: RunId, now: float) -> None:
        node, part = self._node, f"mirror {run}"
        if now < self._mirror_rests.get(run, 0.0):
            return
        try:
            await node.versions_of(run).advance_mirror()
            node.unwell.pop(part, None)
        except DeltadError as error:
            # The path of versions does not need it; it is tried again when something may have changed.
            if node.unwell.get(part) != str(error):
                log.warning("mirror_not_advanced", run=run, error=str(error))
            node.unwell[part] = str(error)
            self._mirror_rests[run] = now + MIRROR_REST_SECONDS
