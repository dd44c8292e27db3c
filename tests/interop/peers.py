"""Others' clients, run by the Python of their own environment (`make venv-peers`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"

needs_peers = pytest.mark.skipif(
    not PYTHON.exists(), reason="others' clients are not installed: `make venv-peers`, which needs Python 3.12"
)


def run_peer(*words: str | Path, env: Mapping[str, str] | None = None, stdin: str = "", timeout: float = 120.0) -> str:
    """What a command of that environment prints; `words` follow `python`. Fails the test with what it said."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(env or {})
    done = subprocess.run(
        [PYTHON, *words], input=stdin, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
