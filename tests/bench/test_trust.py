"""The bench of trust measures every row, or says why not."""

from __future__ import annotations

import os

import pytest

from bench.harness import judge
from bench.trust import SPECS, measure


@pytest.mark.skipif(os.environ.get("DELTAD_TEST_FULL") != "1", reason="takes a minute: run `make test-full`")
def test_a_quick_run_measures_every_row() -> None:
    rows = judge(SPECS, measure(quick=True))
    assert all(row.value is not None for row in rows)
