"""The group of differences on bit patterns: exhaustive where the width allows it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltad.delta.backend import Changes
from deltad.delta.backend.numpy import UNSIGNED, NumpyBackend, compose, difference, inverse
from deltad.types import DTYPES, Difference, DType

BACKEND = NumpyBackend()


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
    joined = first ^ second if dtype.difference is Difference.XOR else first + second
    assert np.array_equal(compose(a, joined, dtype), c)


@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_streams_decode_to_the_changes_that_were_encoded(data: st.DataObject, name: str) -> None:
    dtype = DTYPES[name]
    old = data.draw(lanes(dtype))
    new = data.draw(hnp.arrays(old.dtype, old.shape))
    changes = BACKEND.scan(old, new, dtype)
    streams = tuple(BACKEND.encode(changes, dtype))
    decoded = BACKEND.decode(streams, changes.positions.size, old.size, dtype)
    target = old.copy()
    before, after = BACKEND.apply(target, decoded, dtype)
    assert np.array_equal(target, new)
    assert np.array_equal(before, old[changes.positions])
    assert np.array_equal(after, new[changes.positions])


@given(st.lists(st.integers(0, 5000), unique=True, max_size=50).map(sorted))
def test_gaps_of_any_length_survive(positions: list[int]) -> None:
    dtype = DTYPES["BF16"]
    changes = Changes(np.array(positions, np.int64), np.ones(len(positions), np.uint16))
    decoded = BACKEND.decode(tuple(BACKEND.encode(changes, dtype)), len(positions), 5001, dtype)
    assert decoded.positions.tolist() == positions
