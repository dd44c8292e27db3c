"""Importing deltad inside a trainer or an inference engine brings nothing heavy with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_daemon_without_buckets_needs_no_library_for_them_and_one_with_them_says_what_to_install(
    tmp_path: Path,
) -> None:
    config = tmp_path / "deltad.toml"
    config.write_text('[daemon]\nname = "a"\nstore = "s"\nsocket = "x"\n[[bucket]]\nurl = "file:///b"\npull = ["*"]\n')
    without = "import sys; sys.modules['obstore'] = None; import deltad.daemon.serve, deltad.relay.bucket_client; "
    serve = f"sys.argv = ['deltad', 'serve', '--config', {str(config)!r}]; from deltad.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", without], check=True)
    run = subprocess.run([sys.executable, "-c", without + serve], capture_output=True, text=True, check=False)
    assert run.returncode == 69
    assert "expected the package obstore, found none; run `pip install 'deltad[s3]'`" in run.stderr
