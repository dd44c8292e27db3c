"""A deployment for tests: real loads over a bucket in memory, and a daemon whose deeds are scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from deltad.client.messages import ReplicaReport, ReplicaState
from deltad.errors import CheckpointError, DeltadError
from deltad.hotload.ledger import Load
from deltad.hotload.loading import HotLoads
from deltad.limits import DEFAULT_LIMITS
from deltad.store.announce import Announcements
from deltad.store.bucket.obstore import ObstoreBucket
from deltad.store.disk import DISK
from deltad.types import RunId
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.disk_deltas import INDEX, tensor_bytes, write_delta
from tests.kit.weights import ArrayWeights

ROOT = "a" * 64


def report(replica: str, state: ReplicaState, version: str = "", *, root: str = ROOT, error: str = "") -> ReplicaReport:
    return ReplicaReport(replica, "r", "bf16", state, version=version, root=root, error=error)


class Daemon:
    """Implements `Deeds`: versions are counted, and replicas say what a test has them say."""

    def __init__(self) -> None:
        self.announcements = Announcements()
        self.limits = DEFAULT_LIMITS
        self.published: list[tuple[str, str, str]] = []
        """(identity, base version, cache policy), in order."""
        self.led: list[str] = []
        self.reports: dict[str, ReplicaReport] = {}
        self.refusal: DeltadError | None = None
        self.held: DeltadError | None = None
        self.may_publish = asyncio.Event()
        self.may_publish.set()

    async def publish(self, directory: Path, identity: str, base: str, cache: str) -> str:
        await self.may_publish.wait()
        if self.refusal is not None:
            raise self.refusal
        assert (directory / INDEX).exists() or (directory / "model.safetensors").exists()
        self.published.append((identity, base, cache))
        return f"v{len(self.published):06d}"

    async def lead(self, version: str, by: str, cache: str = "") -> None:
        self.led.append(version)

    def check_free(self) -> None:
        if self.held is not None:
            raise self.held

    def version_of(self, identity: str) -> str:
        return next((f"v{i:06d}" for i, published in enumerate(self.published, 1) if published[0] == identity), "")

    def identity_of(self, version: str) -> str:
        number = int(version[1:] or 0)
        return self.published[number - 1][0] if 0 < number <= len(self.published) else ""

    def replicas(self) -> Sequence[tuple[str, ReplicaReport]]:
        return [("region-1", report) for report in self.reports.values()]

    def free_bytes(self) -> int:
        return 1 << 30

    def say(self, replica: str, state: ReplicaState, version: str = "", *, root: str = ROOT, error: str = "") -> None:
        self.reports[replica] = report(replica, state, version, root=root, error=error)
        self.announcements.announce()


class Site:
    """A deployment `d` of run `r`."""

    def __init__(self, home: Path, *, timeout: float = 30.0) -> None:
        self.home = home
        self.daemon = Daemon()
        self.bucket = ObstoreBucket("memory:///")
        self.timeout = timeout
        self.states = [ArrayWeights.bell(MODEL)]
        (home / "scratch").mkdir(exist_ok=True)
        self.loads = self.open()
        self.work = asyncio.create_task(self.loads.work())

    def open(self) -> HotLoads:
        return HotLoads(
            "d",
            RunId("r"),
            self.bucket,
            self.daemon,
            ledger=self.home / "ledger.json",
            scratch=self.home / "scratch",
            files=DISK,
            timeout=self.timeout,
        )

    async def restart(self) -> None:
        """As after a kill: what is in memory is gone."""
        await self.stop()
        self.loads = self.open()
        self.work = asyncio.create_task(self.loads.work())

    async def stop(self) -> None:
        self.work.cancel()
        await asyncio.wait([self.work])

    async def upload(self, identity: str, base: str = "") -> None:
        """A full snapshot or, with `base`, a delta on that identity."""
        directory = self.home / f"upload-{identity}"
        if base:
            self.states.append(self.states[-1].changed(0.02, seed=len(self.states)))
            old, new = map(tensor_bytes, self.states[-2:])
            write_delta(directory, old, new, version=identity, base_version=base)
        else:
            write_checkpoint(directory, self.states[-1], shard_bytes=3000)
        for path in sorted(directory.iterdir(), key=lambda path: path.name == INDEX):
            await self.bucket.put(f"{identity}/{path.name}", path.read_bytes())

    async def ended(self, load: Load) -> Load:
        def end() -> Load | None:
            found = self.loads.ledger.find(load.id)
            return found if found is not None and found.state.is_end else None

        found = await self.daemon.announcements.wait_until(end, 30.0)
        assert found is not None
        return found

    async def until_published(self, count: int) -> None:
        """Until the fleet was led somewhere for the `count`th time."""
        deadline = time.monotonic() + 30.0
        while len(self.daemon.led) < count:
            assert time.monotonic() < deadline, self.loads.ledger
            await asyncio.sleep(0.01)


BROKEN = CheckpointError("step_1", expected="weights", found="others")
