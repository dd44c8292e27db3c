"""What others' formats take, and the bound: agreed with cases that can be told by hand."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from bench import rivals
from bench.pairs import PAIRS, Bits, Extent, States


def states(old: Bits, new: Bits) -> States:
    middle = old.size // 2
    return States(PAIRS[0], (Extent("a", (middle,)), Extent("b", (old.size - middle,))), old, new)


@pytest.fixture
def pair() -> tuple[Bits, Bits]:
    """20,000 weights of which 200 differ by one unit, all in the second half."""
    rng = np.random.default_rng(1)
    old = rng.integers(0x3C00, 0x3E00, 20_000).astype(np.uint16)
    new = old.copy()
    new[rng.choice(np.arange(10_000, 20_000), 200, replace=False)] += 1
    return old, new


def test_the_dense_xor_is_one_zstd_frame_per_chunk(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    assert rivals.dense_xor(old, new) == len(zstandard.ZstdCompressor(level=1).compress((old ^ new).tobytes()))


def test_a_tensor_without_changes_costs_the_others_nothing(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    half = (old[10_000:] ^ new[10_000:]).tobytes()
    assert rivals.tensor_xor(states(old, new)) == len(zstandard.ZstdCompressor(level=1).compress(half))
    assert 200 < rivals.sparse_int32(states(old, new)) < 200 * 6
    assert rivals.sparse_int32(states(old, old)) == rivals.tensor_xor(states(old, old)) == 0


def test_the_bound_of_equal_states_is_nothing() -> None:
    old = np.arange(1000, dtype=np.uint16)
    assert rivals.bound(old, old) == 0


def test_the_bound_is_the_entropy_of_mask_and_difference() -> None:
    # One exponent; half of all weights change, by +1 or -1 with equal shares: one bit a weight, one a change.
    old = np.full(1024, 0x3F90, np.uint16)
    new = old.copy()
    new[:256] += 1
    new[256:512] -= 1
    assert rivals.bound(old, new) == pytest.approx((1024 + 512) / 8)


def test_the_bound_knows_the_exponent() -> None:
    # All of one exponent change and none of the other, all alike: there is nothing to tell.
    old = np.repeat(np.array([0x3F90, 0x4110], np.uint16), 500)
    new = old + np.where(old == 0x3F90, np.uint16(1), np.uint16(0))
    assert rivals.bound(old, new) == pytest.approx(0)


def test_the_adjusted_difference_counts_units_away_from_zero() -> None:
    old = np.array([0x3F80, 0xBF80, 0x3F80, 0xBF80, 0x0000], np.uint16)
    new = np.array([0x3F81, 0xBF81, 0x3F7F, 0xBF7F, 0x8000], np.uint16)
    assert rivals.adjusted(old, new).tolist() == [1, 1, -1, -1, -1]


def test_the_adjusted_difference_tells_all_patterns_apart() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for old in (0x0000, 0x8000, 0x3F80, 0xBF80, 0x7FC0, 0xFFFF):
        found = rivals.adjusted(np.full(every.shape, old, np.uint16), every)
        assert np.unique(found).size == every.size
        assert found[old] == 0
