"""The bench of the version graph measures what it says, on a small scale."""

from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
import pytest

from bench import graph, harness, lag
from bench.pairs import SIMULATED
from bench.simulated import walk
from deltad.delta.backend import choose

TINY = 256


def test_simulated_steps_change_one_percent_each_and_other_weights_than_before() -> None:
    run = next(run for run in SIMULATED if run.density == 0.01)
    states = list(walk(run, 10, part=TINY))
    shares = [np.count_nonzero(one != other) / one.size for one, other in pairwise(states)]
    assert all(0.007 < share < 0.014 for share in shares)
    assert 3 * shares[0] < np.count_nonzero(states[0] != states[-1]) / states[0].size < sum(shares)


def test_a_laggard_gets_its_bits_by_what_the_policy_folded() -> None:
    rows = harness.judge(lag.SPECS, lag.measure(choose(), part=TINY))
    values = {row.name: row.value for row in rows}
    edges, ladder = values["100 behind, edges"], values["100 behind, edges, by the ladder alone"]
    assert edges == 1
    assert ladder is not None
    assert 1 < ladder <= 12
    assert 0 < (values["100 behind, bytes / 100 single deltas"] or 0) < 1


@pytest.mark.skipif(os.environ.get("DELTAD_TEST_FULL") != "1", reason="takes most of a minute: run `make test-full`")
def test_a_quick_run_measures_every_row() -> None:
    rows = harness.judge(graph.SPECS, graph.measure(quick=True))
    assert all(row.value is not None for row in rows)
