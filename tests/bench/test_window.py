"""The bench of a window counts what a region pulls, and a newcomer takes an anchor and a skip delta."""

from __future__ import annotations

import numpy as np
import pytest

from bench.chain import replayed
from bench.pairs import PAIRS, Extent, States
from bench.window import leading_share, pass_through

TENSORS = (Extent("a.weight", (128, 64)), Extent("b.weight", (96, 64)))
LANES = sum(extent.lanes for extent in TENSORS)


def pair() -> States:
    old = np.random.default_rng(1).integers(0, 1 << 16, LANES).astype(np.uint16)
    new = old.copy()
    new[::97] += np.uint16(1)
    return States(PAIRS[0], TENSORS, old, new)


def test_a_replayed_step_changes_as_many_weights_by_as_much_at_other_places() -> None:
    first, second, third = replayed(pair(), 2)
    for before, after in ((first, second), (second, third)):
        changed = after[before != after] - before[before != after]
        assert np.array_equal(changed, np.ones(-(-LANES // 97), np.uint16))
    assert not np.array_equal(np.flatnonzero(first != second), np.flatnonzero(second != third))


def test_a_newcomer_takes_an_anchor_and_a_skip_delta_whatever_was_published() -> None:
    window = pass_through(TENSORS, replayed(pair(), 12))
    assert [hop.edge.kind for hop in window.way.hops] == ["anchor", "skip-delta"]
    assert len(window.infos) == 13
    assert window.full == 2 * LANES
    assert window.way_bytes < window.anchor + window.skip_bytes + 1
    assert 0 < window.skip_bytes < window.deltas


def test_the_schedule_of_the_leading_system_sends_two_of_fifty_whole() -> None:
    assert leading_share(50) == pytest.approx(2 + 48 * 0.0198)
