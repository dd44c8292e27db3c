"""The planner: any sample gives a table that decodes, the same one wherever the frame is cut into segments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import Mode
from deltad.delta.classes import Histogram, exponents_of, plan, run_stride, sample
from deltad.delta.coding import MANTISSA_BITS, Coder, Coding, check_coding, exponents
from deltad.types import DTYPES

CONTEXT_MODES: tuple[Mode, ...] = ("fast", "mid", "dense")
BF16 = DTYPES["BF16"]


@given(st.data(), st.sampled_from(sorted(MANTISSA_BITS)), st.sampled_from(CONTEXT_MODES))
def test_any_sample_of_any_frame_gives_a_table_that_keeps_the_rules(data: st.DataObject, name: str, mode: Mode) -> None:
    dtype = DTYPES[name]
    size = exponents(dtype)
    lanes, changed = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for exponent in data.draw(st.lists(st.integers(0, size - 1), max_size=90)):
        count = data.draw(st.integers(0, 1 << data.draw(st.integers(0, 18))))
        lanes[exponent] += count
        changed[exponent] += data.draw(st.integers(0, count))
    total = int(lanes.sum()) * data.draw(st.integers(1, 64))
    table = plan(Histogram(lanes, changed), min(total, 1 << 30), mode)
    check_coding(Coding(Coder.CONTEXT, 10, 5, table.small, table.starts, table.marked), dtype)


def bell(count: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_lanes_that_change_nearly_always_get_a_class_of_their_own_that_codes_the_others() -> None:
    old = bell(1 << 18)
    low = exponents_of(old, BF16) < 117
    chance = np.random.default_rng(1).random(old.size)
    new = old + (np.where(low, chance < 0.95, chance < 0.005)).astype(np.uint16)
    table = plan(sample([old], [new], BF16), old.size, "dense")
    (border,) = [i for i, start in enumerate(table.starts) if start == 117]
    assert border <= table.small
    assert table.marked == (1 << table.small) - 1


def test_what_costs_nothing_to_know_gets_one_class() -> None:
    old = bell(1 << 18)
    new = old + (np.random.default_rng(1).random(old.size) < 0.01).astype(np.uint16)
    for mode in CONTEXT_MODES:
        assert plan(sample([old], [new], BF16), old.size, mode).starts == (0,)


def test_the_denser_a_mode_the_more_lanes_may_be_small() -> None:
    old = bell(1 << 20)
    chance = np.random.default_rng(1).random(old.size) * 2.0 ** (exponents_of(old, BF16).astype(float) - 112)
    new = old + (chance < 0.5).astype(np.uint16)
    histogram = sample([old], [new], BF16)
    tables = [plan(histogram, old.size, mode) for mode in CONTEXT_MODES]
    assert len(tables[0].starts) < len(tables[1].starts) <= len(tables[2].starts)
    assert tables[0].small < tables[2].small


@pytest.mark.parametrize("lanes", [1, 1023, 1025, 300_000, 600_001])
def test_a_sample_takes_whole_runs_of_the_frame_however_it_is_cut(lanes: int) -> None:
    old, new = bell(lanes), bell(lanes, 2)
    taken = np.flatnonzero(np.arange(lanes) // 1024 % run_stride(lanes) == 0)
    cuts = sorted({0, lanes // 3, lanes // 3 + 1, lanes // 2, lanes - 1, lanes})
    for borders in ([0, lanes], cuts):
        segments = [slice(a, b) for a, b in pairwise(borders)]
        found = sample([old[cut] for cut in segments], [new[cut] for cut in segments], BF16)
        exponent = exponents_of(old[taken], BF16)
        assert np.array_equal(found.lanes, np.bincount(exponent, minlength=256))
        assert np.array_equal(found.changed, np.bincount(exponent[old[taken] != new[taken]], minlength=256))


def test_a_frame_in_which_no_sampled_lane_changed_gets_one_class() -> None:
    old = bell(1000)
    table = plan(sample([old], [old], BF16), old.size, "dense")
    assert (table.small, table.starts, table.marked) == (0, (0,), 0)


def test_tables_are_the_ones_that_they_were() -> None:
    """Integer arithmetic and exactly rounded roots: a machine that finds others would make other bytes."""
    exponent = np.arange(256)
    lanes = np.where((exponent > 90) & (exponent < 126), 200_000 >> np.abs(exponent - 118) // 2, 0)
    changed = lanes * np.minimum(97, 1 << np.clip(121 - exponent, 0, 7)) // 100
    tables = [plan(Histogram(lanes, changed), 1 << 24, mode) for mode in CONTEXT_MODES]
    fast = (0, 95, 97, 98, 99, 100, 101, 102, 103, 104, 112, 115, 117)
    mid = (0, 100, 103, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 118)
    dense = (0, 102, 105, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119)
    assert [table.starts for table in tables] == [fast, mid, dense]
    assert [table.small for table in tables] == [9, 12, 12]
