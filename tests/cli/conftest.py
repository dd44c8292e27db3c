"""What all tests of the command line use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cli.host import Host, serving
from tests.cli.terminal import Deltad, deltad
from tests.kit.versions import Lineage

__all__ = ["deltad"]


@pytest.fixture
async def host(tmp_path: Path, deltad: Deltad) -> AsyncIterator[Host]:
    async with serving(tmp_path, deltad) as host:
        yield host


@pytest.fixture
def lineage(host: Host) -> Lineage:
    """Three versions of one run that the daemon holds: an anchor and two deltas."""
    lineage = Lineage(density=0.3)
    for _ in range(3):
        lineage.publish()
    host.hold(lineage)
    return lineage
