"""The group of differences on bit patterns: exhaustive where the width allows it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltad.delta.backend import UNSIGNED
from deltad.delta.difference import adjusted, compose, difference, from_codes, inverse, join, to_codes
from deltad.types import DTYPES, DType


def lanes(dtype: DType) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(UNSIGNED[dtype.lane_bytes], st.integers(1, 40))


@pytest.mark.parametrize("name", ["BF16", "F16", "U16"])
def test_every_old_pattern_is_carried_to_every_new_pattern_of_a_spread(name: str) -> None:
    dtype = DTYPES[name]
    old = np.arange(2**16, dtype=np.uint16)
    for new_pattern in (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x3F80, 0xBF7F):
        new = np.full_like(old, new_pattern)
        carried = compose(old, difference(old, new, dtype), dtype)
        assert np.array_equal(carried, new)


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.lane_bytes == 1], ids=lambda d: d.name)
def test_all_pairs_of_one_byte_patterns_round_trip(dtype: DType) -> None:
    old, new = (grid.reshape(-1).astype(np.uint8) for grid in np.meshgrid(np.arange(256), np.arange(256)))
    changed = difference(old, new, dtype)
    assert np.array_equal(compose(old, changed, dtype), new)
    assert np.array_equal(changed == 0, old == new)
    assert np.array_equal(compose(new, inverse(changed, dtype), dtype), old)


def test_neighbouring_floats_are_one_apart_across_zero_and_across_exponents() -> None:
    bf16 = DTYPES["BF16"]
    pairs = [(0x3F80, 0x3F81), (0x3FFF, 0x4000), (0x0000, 0x0001), (0x8000, 0xFFFF & 0x8001)]
    steps = [int(difference(np.array([a], np.uint16), np.array([b], np.uint16), bf16)[0]) for a, b in pairs]
    assert steps[:3] == [1, 1, 1]
    assert steps[3] == 2**16 - 1


@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_differences_compose(data: st.DataObject, name: str) -> None:
    dtype = DTYPES[name]
    a = data.draw(lanes(dtype))
    b, c = (data.draw(hnp.arrays(a.dtype, a.shape)) for _ in range(2))
    first, second = difference(a, b, dtype), difference(b, c, dtype)
    assert np.array_equal(compose(a, join(first, second, dtype), dtype), c)


@pytest.mark.parametrize("name", ["BF16", "F16", "I16", "U16"])
@pytest.mark.parametrize("sign", [0x0000, 0x8000])
def test_every_difference_of_two_byte_lanes_has_a_code_of_its_own_whatever_the_sign(name: str, sign: int) -> None:
    dtype = DTYPES[name]
    every = np.arange(1, 2**16, dtype=np.uint16)
    old = np.full_like(every, 0x3F80 | sign)
    codes = to_codes(adjusted(every, old, dtype), dtype)
    assert np.array_equal(np.sort(codes), np.arange(2**16 - 1))
    assert np.array_equal(adjusted(from_codes(codes, dtype), old, dtype), every)


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.lane_bytes == 1], ids=lambda d: d.name)
def test_all_differences_of_one_byte_lanes_have_codes_of_their_own_beside_any_old_lane(dtype: DType) -> None:
    old, every = (grid.reshape(-1).astype(np.uint8) for grid in np.meshgrid(np.arange(256), np.arange(1, 256)))
    codes = to_codes(adjusted(every, old, dtype), dtype)
    assert np.array_equal(adjusted(from_codes(codes, dtype), old, dtype), every)
    assert codes.max() == 254


def test_a_step_away_from_zero_is_code_one_for_either_sign() -> None:
    bf16 = DTYPES["BF16"]
    old, new = np.array([0x3F80, 0xBF80], np.uint16), np.array([0x3F81, 0xBF81], np.uint16)
    assert to_codes(adjusted(difference(old, new, bf16), old, bf16), bf16).tolist() == [1, 1]
