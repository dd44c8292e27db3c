"""Versions, replicas and statuses as a daemon would describe them, for tests of what is shown."""

from __future__ import annotations

from typing import Any

import msgspec

from deltad.client.messages import (
    RegionReport,
    RegionView,
    ReplicaReport,
    ReplicaState,
    RunReport,
    Seconds,
    StatusView,
    UpstreamView,
    VersionInfo,
)

FULL_BYTES = 256 << 20


def version(name: str, **changes: Any) -> VersionInfo:
    """A delta of 1 MiB that changed 0.31 % of 1000 elements, but for the `changes`."""
    info = VersionInfo(
        run="policy",
        version=name,
        parent="",
        identity="",
        source="trainer-1",
        variant="bf16",
        kind="delta",
        reason="",
        root=(name.encode().hex() + "0" * 64)[:64],
        layout="ab" * 32,
        density=0.0031,
        elements=1000,
        changed=3,
        full_bytes=FULL_BYTES,
        delta_bytes=1 << 20,
        chunks=1,
        created=1_700_000_000.0,
        seconds=Seconds(settle=1.02, encode=2.31),
    )
    return msgspec.structs.replace(info, **changes)


def replica(name: str, state: ReplicaState, serves: VersionInfo | None, **changes: Any) -> ReplicaReport:
    """A replica that read the published root back from what it serves, but for the `changes`."""
    report = ReplicaReport(
        replica=name,
        run="policy",
        variant="bf16",
        state=state,
        version=serves.version if serves else "",
        root=serves.root if serves else "",
    )
    return msgspec.structs.replace(report, **changes)


def status(
    *versions: VersionInfo,
    regions: tuple[RegionView, ...] = (),
    upstreams: tuple[UpstreamView, ...] = (),
    **changes: Any,
) -> StatusView:
    """Daemon `border-a` with these versions of one run, and nothing else, but for the `changes`."""
    runs = {"policy": RunReport(latest=versions[-1].version if versions else "", versions=versions)}
    view = StatusView(
        daemon="border-a",
        boot="boot-1",
        version="0.1.0",
        backend="numpy",
        backend_reason="as configured",
        uptime=3725.0,
        ready=True,
        reasons=(),
        store="/var/lib/deltad",
        store_bytes=300 << 20,
        free_bytes=9 << 30,
        region=RegionReport("border-a", "boot-1", 1, runs),
        upstreams=upstreams,
        regions=regions,
    )
    return msgspec.structs.replace(view, **changes)


def region(daemon: str, *replicas: ReplicaReport, latest: str = "", age: float = 2.0, fresh: bool = True) -> RegionView:
    """Another daemon's region as it was last heard of."""
    runs = {"policy": RunReport(latest=latest, replicas=replicas)}
    return RegionView(RegionReport(daemon, "boot-9", 7, runs), age, fresh)
