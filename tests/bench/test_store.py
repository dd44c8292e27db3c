"""The store's bench: what it measures is what it says, on runs small enough for every test run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import long_run
from bench.harness import ROOT, judge
from bench.long_run import RUN
from bench.store import SPECS, measure
from deltad.store.store import Store
from tests.kit.whole import whole_versions


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a few versions of a few tensors."""
    home = tmp_path_factory.mktemp("long")
    long_run.fill(home / "store", 12, 3)
    return home


def test_a_long_run_is_whole_though_nothing_was_encoded(home: Path) -> None:
    store = Store.open(home / "store", limits=long_run.LIMITS)
    assert len(whole_versions(store, RUN)) == 12
    store.close()


@pytest.mark.parametrize("what", ["open", "collect", "read"])
def test_what_is_done_in_a_process_of_its_own_is_told_in_seconds_and_bytes(home: Path, what: str) -> None:
    command = [sys.executable, "-m", "bench.long_run", what, str(home)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] > 0
    assert found["above"] >= 0


@pytest.mark.skipif(os.environ.get("DELTAD_TEST_FULL") != "1", reason="takes a minute: run `make test-full`")
def test_a_quick_run_measures_or_skips_every_row() -> None:
    rows = judge(SPECS, measure(quick=True))
    assert all(row.value is not None or row.skipped for row in rows)
