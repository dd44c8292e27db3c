"""A disk that is full, for real: a small file system under the store of a running daemon."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.limits import DEFAULT_LIMITS
from tests.daemon.test_two_daemons import WAIT, Regions

RESERVE = DEFAULT_LIMITS.disk_reserve_bytes
ROOM = 2 * RESERVE


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    regions = Regions(tmp_path)
    store = regions.a.home / "store"
    store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={RESERVE + ROOM}", "tmpfs", str(store)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted, which takes root: {mounted.stderr.strip()}")
    try:
        yield regions
    finally:
        for daemon in (regions.a, regions.b):
            if daemon.process is not None:
                daemon.process.kill()
                daemon.process.wait()
        subprocess.run(["umount", str(store)], check=True)


def test_a_full_disk_delays_a_version_and_loses_none(regions: Regions) -> None:
    regions.a.start()
    regions.step(0)
    regions.arrived(regions.a, 0)
    ballast = regions.a.home / "store" / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, ROOM)

    regions.step(1)
    reason = unwell(regions, "watch r")
    assert f"reserve of {RESERVE}" in reason
    assert "free some space" in reason
    assert [info.version for info in regions.a.client.versions("r")] == ["v000000"]
    regions.b.start()
    regions.arrived(regions.b, 0)

    ballast.unlink()
    assert regions.arrived(regions.a, 1).parent == "v000000"
    regions.arrived(regions.b, 1)
    for daemon in (regions.a, regions.b):
        regions.check_export(daemon, 1)
    regions.step(2)
    regions.arrived(regions.a, 2)
    assert regions.a.client.status().ready


def unwell(regions: Regions, part: str) -> str:
    """Why a part of daemon A is unwell, once it is. A status can only be asked for again and again."""
    deadline = time.monotonic() + WAIT
    while True:
        for reason in regions.a.client.status().reasons:
            if reason.startswith(part):
                return reason
        assert time.monotonic() < deadline, regions.a.log
        time.sleep(0.05)
