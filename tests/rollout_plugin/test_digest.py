"""Torch's element sums are those of the format, for any dtype, length and alignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.digest import BLOCK_BYTES, sum_bytes, tensor_seed
from rollout_plugin.apply import digest
from rollout_plugin.apply.digest import sum_tensor
from rollout_plugin.apply.live import DTYPE_NAMES

SEED = tensor_seed("model.embed_tokens.weight")


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@given(st.integers(0, 3 * BLOCK_BYTES), st.integers(0, 9), st.integers(0, 2**64 - 1))
def test_any_bytes_at_any_offset_have_the_sum_of_the_reference(count: int, lead: int, seed: int) -> None:
    data = random_bytes(lead + count, seed % 1000)
    found = sum_tensor(torch.from_numpy(data)[lead:], seed)
    assert found.dtype == np.uint64
    assert np.array_equal(found, sum_bytes(data[lead:], 0, seed))


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_is_summed_by_its_bits(dtype: torch.dtype) -> None:
    data = random_bytes(24_000)
    data[:8000] = 0xFF  # NaN payloads of every float, and the largest of the others
    tensor = torch.from_numpy(data.copy()).view(dtype).reshape(50, -1)
    assert np.array_equal(sum_tensor(tensor, SEED), sum_bytes(data, 0, SEED))


def test_a_tensor_is_summed_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_WINDOW_BLOCKS", 2)
    data = random_bytes(5 * BLOCK_BYTES + 6)
    assert np.array_equal(sum_tensor(torch.from_numpy(data.copy()).view(torch.int16), SEED), sum_bytes(data, 0, SEED))


def test_a_scalar_and_an_empty_tensor_have_sums_too() -> None:
    assert np.array_equal(sum_tensor(torch.zeros(0, 7), SEED), np.zeros(2, np.uint64))
    scalar = torch.tensor(1.5)
    assert np.array_equal(sum_tensor(scalar, SEED), sum_bytes(scalar.numpy().reshape(1).view(np.uint8), 0, SEED))


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        sum_tensor(torch.zeros(4, 4).T, SEED)
