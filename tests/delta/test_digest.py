"""The element sum: linear over any partition, followed exactly by updates, fixed by the format."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.delta.backend.numpy import UNSIGNED
from deltad.delta.codec import sum_weights
from deltad.delta.digest import (
    BLOCK_BYTES,
    block_multipliers,
    cell_keys,
    pack_sums,
    root_of,
    sum_bytes,
    sum_changes,
    tensor_seed,
    unpack_sums,
)
from deltad.delta.layout import Layout, TensorSpec
from tests.kit.weights import ArrayWeights, layouts, weights

SEED = tensor_seed("model.layers.0.mlp.up_proj.weight")


def reference(data: bytes, seed: int) -> list[int]:
    """The formula in big integers, one cell at a time."""
    padded = data + bytes(-len(data) % 4)
    totals = [0, 0]
    for cell in range(len(padded) // 4):
        value = int.from_bytes(padded[4 * cell : 4 * cell + 4], "little")
        block, within = divmod(cell, 16384)
        multipliers = block_multipliers(seed, np.array([block], np.uint64))
        for lane in range(2):
            totals[lane] += value * int(cell_keys()[lane, within]) * int(multipliers[lane, 0])
    return [total % 2**64 for total in totals]


@given(st.binary(max_size=400))
def test_it_is_the_documented_formula(data: bytes) -> None:
    assert sum_bytes(np.frombuffer(data, np.uint8), 0, SEED).tolist() == reference(data, SEED)


def test_it_is_the_documented_formula_across_a_block_border() -> None:
    data = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES + 1000, dtype=np.uint8)
    assert sum_bytes(data, 0, SEED).tolist() == reference(data.tobytes(), SEED)


@settings(max_examples=40)
@given(st.integers(1, 3 * BLOCK_BYTES), st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6), st.integers(0, 9))
def test_any_partition_adds_up(size: int, cuts: list[int], seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    borders = sorted({0, size, *(cut % size for cut in cuts)})
    parts = [sum_bytes(data[a:b], a, SEED) for a, b in pairwise(borders)]
    assert np.array_equal(np.sum(parts, axis=0, dtype=np.uint64), sum_bytes(data, 0, SEED))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 40_000), st.integers(0, 2**32))
@settings(max_examples=60)
def test_following_changes_equals_summing_anew(width: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * width, dtype=np.uint8).view(UNSIGNED[width])
    new = old.copy()
    at = np.sort(rng.choice(count, max(1, count // 50), replace=False)).astype(np.int64)
    new[at] = rng.integers(0, 256, at.size * width, dtype=np.uint8).view(UNSIGNED[width])
    before = sum_bytes(old.view(np.uint8), 0, SEED)
    after = sum_bytes(new.view(np.uint8), 0, SEED)
    assert np.array_equal(before + sum_changes(at, old[at], new[at], SEED), after)


def test_a_flipped_bit_anywhere_changes_both_lanes() -> None:
    data = np.zeros(BLOCK_BYTES + 64, np.uint8)
    clean = sum_bytes(data, 0, SEED)
    for byte in (0, 1, 2, 3, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 63):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert (sum_bytes(data, 0, SEED) != clean).all()
            data[byte] ^= 1 << bit


def test_swapping_two_tensors_or_two_cells_is_seen() -> None:
    data = np.arange(16, dtype=np.uint8)
    swapped = np.concatenate([data[4:8], data[:4], data[8:]])
    assert not np.array_equal(sum_bytes(data, 0, SEED), sum_bytes(swapped, 0, SEED))
    assert not np.array_equal(sum_bytes(data, 0, SEED), sum_bytes(data, 0, tensor_seed("another")))


def test_the_keys_are_those_of_the_format() -> None:
    """Fixed figures: a change here would give every published version another root."""
    assert cell_keys()[:, :2].tolist() == KEYS
    layout = Layout(1, (TensorSpec("w", "BF16", (3,)),))
    sums = sum_weights(layout, ArrayWeights([np.array([1, 2, 3], np.uint16)]))
    assert root_of(layout, sums).hex() == ROOT


@given(st.data())
def test_sums_pack_and_unpack(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    sums = sum_weights(layout, data.draw(weights(layout)))
    assert np.array_equal(unpack_sums(pack_sums(sums), len(layout.tensors)), sums)


KEYS = [[563552229, 709084173], [1408911624, 4256372561]]
ROOT = "7f11bdb2061429aefcf1e5d59427ed95dc753e19fabc2156ca89bc48674f9800"
