"""One local API for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.operations import LocalDaemon, serve_locally


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[LocalDaemon]:
    async with serve_locally(tmp_path) as daemon:
        yield daemon
