from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.site import Site
from trainer_plugin.rl.model import prepare_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model."""
    return prepare_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=7)


@pytest.fixture
def site(tmp_path: Path, tiny: Path) -> Iterator[Site]:
    site = Site(tmp_path, tiny)
    yield site
    site.stop()
