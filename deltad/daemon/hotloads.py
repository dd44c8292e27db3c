"""Hot loads as a daemon does them: a snapshot becomes a version of a run, and the run's fleets are led to it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltad.client.messages import Act, Cache, ReplicaReport, Target, TargetRequest
from deltad.config import HotLoadConfig
from deltad.daemon.origin import PublishOptions
from deltad.errors import PreconditionError
from deltad.hotload.coreweave import CoreWeave
from deltad.hotload.fireworks import Fireworks
from deltad.hotload.loading import HotLoads
from deltad.hotload.requests import Deployments, Route
from deltad.types import RunId, parse_version

if TYPE_CHECKING:
    from deltad.daemon.node import Node

WHY = "hot load"
"""Why a fleet is held that a load holds: whoever holds it for another reason is not overruled."""
_TRAILING_NUMBER = re.compile(r"([0-9]{1,15})\Z")


class NodeDeeds:
    """Implements `deltad.hotload.loading.Deeds` for one run."""

    def __init__(self, node: Node, run: RunId) -> None:
        self._node, self._run = node, run
        self.announcements = node.announcements
        self.limits = node.limits

    async def publish(self, directory: Path, identity: str, base: str, cache: Cache) -> str:
        latest = self._node.latest(self._run)
        match = _TRAILING_NUMBER.search(identity)
        number = max(int(match[1]) if match else 0, latest.number + 1 if latest else 0)
        how: PublishOptions = {"identity": identity, "cache": cache}
        if base:
            how["delta_base"] = parse_version(base)
        reply = await self._node.publish_checkpoint(self._run, directory, number, **how)
        return reply.version.version

    async def lead(self, version: str, by: str, cache: Cache = "") -> None:
        self._node.versions_of(self._run).set_cache(parse_version(version), cache)
        target = self._target()
        if target is not None and target.version == version:
            return
        self.check_free()
        latest = self._node.latest(self._run)
        if latest is None or str(latest) != version:
            await self._node.move_target(self._run, TargetRequest(Act.HOLD, version=version, why=WHY), by)
        elif target is not None:
            await self._node.move_target(self._run, TargetRequest(Act.RELEASE, why=WHY), by)

    def check_free(self) -> None:
        target = self._target()
        if target is not None and target.why != WHY:
            raise PreconditionError(
                f"the fleet of run {self._run}",
                expected="one that follows what is loaded",
                found=f"it held at {target.version} by {target.by or 'somebody'} ({target.why})",
                hint="`deltad release` lets it follow",
            )

    def version_of(self, identity: str) -> str:
        records = self._node.versions_of(self._run).records.records()
        return next((str(record.version) for record in reversed(records) if record.identity == identity), "")

    def identity_of(self, version: str) -> str:
        records = self._node.versions_of(self._run).records.records()
        return next((record.identity for record in records if str(record.version) == version), "")

    def replicas(self) -> Sequence[tuple[str, ReplicaReport]]:
        versions = self._node.versions_of(self._run).all()
        view = self._node.fleet.view(self._run, versions, time.monotonic())
        return [
            (region.report.daemon, replica)
            for region in view.regions
            if (report := region.report.runs.get(self._run)) is not None
            for replica in report.replicas
        ]

    def free_bytes(self) -> int:
        return self._node.store.free_bytes() - self._node.limits.disk_reserve_bytes

    def _target(self) -> Target | None:
        return self._node.targets(self._run).target


def make_hot_loads(node: Node) -> list[HotLoads]:
    """One for each `[[hot_load]]`. Raises MissingPackageError, ConfigError; IntegrityError for a damaged ledger."""
    return [_make(node, config) for config in node.config.hot_loads]


def routes(hot_loads: Sequence[HotLoads]) -> list[Route]:
    """What clients of the public APIs ask for."""
    if not hot_loads:
        return []
    deployments = Deployments(hot_loads)
    return [*CoreWeave(deployments).routes(), *Fireworks(deployments).routes()]


def _make(node: Node, config: HotLoadConfig) -> HotLoads:
    from deltad.store.bucket.obstore import ObstoreBucket

    settings = config.credentials_file.read if config.credentials_file else dict
    records = node.versions_of(config.run).records
    return HotLoads(
        config.deployment,
        config.run,
        ObstoreBucket(config.url, settings),
        NodeDeeds(node, config.run),
        ledger=records.directory / f"hot-loads-{config.deployment}.json",
        scratch=node.store.scratch,
        files=node.store.files,
        timeout=config.timeout,
        account=config.account,
    )
