"""Importing deltad inside a trainer or an inference engine brings nothing heavy with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"aiohttp", "numba", "obstore", "torch", "transformers", "trainer_plugin", "rollout_plugin"}
PROBE = "import sys; before = set(sys.modules); import {module}; print(*sorted(set(sys.modules) - before), sep='\\n')"


def loaded_by(module: str) -> set[str]:
    probe = [sys.executable, "-I", "-c", PROBE.format(module=module)]
    return set(subprocess.run(probe, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    ("module", "too_heavy"),
    [
        ("deltad", HEAVY | {"numpy", "asyncio", "msgspec"}),
        ("deltad.delta.backend", HEAVY | {"asyncio"}),
        ("deltad.client", HEAVY | {"asyncio", "click", "rich", "structlog", "prometheus_client"}),
        ("deltad.demo.runner", HEAVY | {"rich"}),
    ],
)
def test_an_import_loads_nothing_heavy(module: str, too_heavy: set[str]) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not loaded & too_heavy
