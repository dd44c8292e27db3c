"""FP8 e4m3: every bfloat16 and every border of float32 against an oracle, torch, and the compiled twin."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.quant import fast, fp8
from deltad.delta.quant.element import E4M3
from tests.delta.test_quant.conftest import EVERY_BF16, around, nearest, numbers, patterns

ONE = patterns(1.0)[0]
SCALES = patterns([2.0**-126, 1e-30, 0.001, 1 / 448, 0.0123, 0.7, 1.0, 1.5, 3.0, 1e10, np.finfo(np.float32).max / 448])
NUMBERS = np.unique(np.abs(E4M3.values()[: E4M3.top + 1]))
BORDERS = around(np.concatenate([NUMBERS, (NUMBERS[1:] + NUMBERS[:-1]) / 2, [464, 480, 2.0**-126, 2.0**-149]]))


def by_torch(lanes: np.ndarray, scale: np.uint32) -> np.ndarray:
    """The contract of `quantise` in torch: one multiplication by 1 / scale, a clamp, torch's own cast."""
    values = torch.from_numpy(numbers(lanes).copy()) * (1 / torch.tensor(float(scale.view(np.float32))))
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes).numpy()


def test_the_values_are_those_of_torch() -> None:
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3.values(), table, equal_nan=True)
    assert np.array_equal(np.signbit(E4M3.values()[:128]), np.zeros(128, bool))
    assert E4M3.values()[E4M3.top] == 448
    assert E4M3.values()[1] == 2.0**-9


@pytest.mark.parametrize("lanes", [EVERY_BF16, BORDERS], ids=["every bfloat16", "borders of float32"])
def test_every_number_is_cast_to_the_nearest_code_and_ties_to_even(quant: Any, lanes: np.ndarray) -> None:
    assert np.array_equal(quant.e4m3_from_float(lanes), nearest(numbers(lanes), E4M3))


@pytest.mark.parametrize("lanes", [EVERY_BF16, BORDERS], ids=["every bfloat16", "borders of float32"])
def test_torch_casts_every_number_in_range_the_same_way(lanes: np.ndarray) -> None:
    inside = lanes[np.abs(numbers(lanes)) <= 464]
    cast = torch.from_numpy(numbers(inside).copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(fp8.e4m3_from_float(inside), cast)


def test_every_code_comes_back_from_its_value(quant: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    back = quant.e4m3_from_float(quant.f32_from_e4m3(codes))
    assert np.array_equal(back, np.where(codes == 0xFF, 0x7F, codes)), "all but the sign of a NaN"


def test_what_is_beyond_the_top_saturates_and_only_nan_becomes_nan(quant: Any) -> None:
    lanes = patterns([448.0, 464.0, 465.0, 1e30, np.inf, -465.0, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40])
    expected = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x00, 0x80, 0x00, 0x80]
    assert quant.e4m3_from_float(lanes).tolist() == expected
    signalling = np.array([0x7F800001, 0xFF800001, 0xFFC00000, 0x7FFFFFFF], np.uint32)
    assert quant.e4m3_from_float(signalling).tolist() == [0x7F] * 4
    assert quant.quantise(signalling, ONE).tolist() == [0x7F] * 4


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("lanes", [EVERY_BF16, BORDERS], ids=["every bfloat16", "borders of float32"])
def test_every_number_is_scaled_by_one_rounded_product(quant: Any, lanes: np.ndarray, scale: np.uint32) -> None:
    # float64 holds the product of two float32 exactly, so this rounds it once, by another route.
    reciprocal = np.float32(1 / scale.view(np.float32).astype(np.float64))
    with np.errstate(all="ignore"):
        products = (numbers(lanes).astype(np.float64) * np.float64(reciprocal)).astype(np.float32)
    codes = quant.quantise(lanes, scale)
    assert np.array_equal(codes, nearest(products, E4M3))
    assert np.array_equal(codes, by_torch(lanes, scale))


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_a_code_is_a_fixed_point_of_its_scale(quant: Any, scale: np.uint32) -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), 0xFF)
    assert np.array_equal(quant.quantise(quant.dequantise(codes, scale), scale), codes)


def test_a_scale_is_the_largest_magnitude_over_448_rounded_once() -> None:
    amax = np.concatenate([patterns([2.0**-117, 1.0, 448.0, 3.14159, np.finfo(np.float32).max]), BORDERS[:200]])
    amax = amax[(amax & 0x7FFFFFFF) >= patterns(448 * 2.0**-126)[0]] & np.uint32(0x7FFFFFFF)
    for pattern, scale in zip(amax, fp8.scales_for(amax), strict=True):
        exact = Fraction(float(pattern.view(np.float32))) / 448
        found = scale.view(np.float32)
        error = abs(Fraction(float(found)) - exact)
        for neighbour in (np.nextafter(found, np.float32(0)), np.nextafter(found, np.float32(np.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)


def test_nothing_gives_scale_one_and_next_to_nothing_the_smallest_scale(quant: Any) -> None:
    for zeros in (patterns([0.0, -0.0]), patterns([-0.0, np.nan, np.inf]), np.zeros(0, np.uint32)):
        assert quant.quantise_tensor(zeros)[1] == ONE
    codes, scale = quant.quantise_tensor(patterns([2.0**-149, -(2.0**-130), -0.0]))
    assert scale.view(np.float32) == 2.0**-126
    assert numbers(quant.dequantise(codes, scale)).tolist() == [0.0, -(2.0**-130), 0.0]


def test_quantising_again_changes_neither_scale_nor_code() -> None:
    every_mantissa = np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)
    scales = fp8.scales_for(every_mantissa)
    top = (np.float32(448) * scales.view(np.float32)).view(np.uint32)
    assert np.array_equal(fp8.scales_for(top), scales)
    lanes = patterns(np.random.default_rng(3).standard_normal((300, 200)))
    codes, block_scales = fp8.quantise_blocks(lanes)
    again, scales_again = fp8.quantise_blocks(fp8.dequantise_blocks(codes, block_scales))
    assert np.array_equal(again, codes)
    assert np.array_equal(scales_again, block_scales)


def test_the_largest_number_always_takes_the_largest_code() -> None:
    every_mantissa = np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)
    factors = fp8.reciprocals(fp8.scales_for(every_mantissa))
    products = (every_mantissa.view(np.float32) * factors).view(np.uint32)
    assert set(fp8.e4m3_from_float(products).tolist()) == {E4M3.top}


def test_a_nan_or_an_infinity_leaves_the_others_as_they_were(quant: Any) -> None:
    lanes = patterns(np.random.default_rng(1).standard_normal(500))
    codes, scale = quant.quantise_tensor(lanes)
    lanes[7], lanes[300], lanes[301] = patterns([np.nan, np.inf, -np.inf])
    broken, same_scale = quant.quantise_tensor(lanes)
    assert same_scale == scale
    assert broken[[7, 300, 301]].tolist() == [0x7F, 0x7E, 0xFE]
    others = np.delete(np.arange(500), [7, 300, 301])
    assert np.array_equal(broken[others], codes[others])


def test_windows_of_a_tensor_give_the_bytes_of_the_whole(quant: Any) -> None:
    lanes = patterns(np.random.default_rng(2).standard_normal(300_001))
    codes, scale = quant.quantise_tensor(lanes)
    windows = [lanes[at : at + 77_777] for at in range(0, lanes.size, 77_777)]
    assert fp8.scales_for(np.asarray(max(map(quant.largest, windows)))) == scale
    assert np.array_equal(np.concatenate([quant.quantise(window, scale) for window in windows]), codes)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (130, 257), (3, 400), (0, 5), (5, 0)])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
def test_each_block_is_quantised_as_a_tensor_of_its_own(quant: Any, shape: tuple[int, int], dtype: type) -> None:
    lanes = patterns(np.random.default_rng(4).standard_normal(shape)).reshape(shape)
    lanes = lanes if dtype is np.uint32 else (lanes >> np.uint32(16)).astype(np.uint16)
    codes, scales = quant.quantise_blocks(lanes)
    assert codes.shape == shape
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for row, column in np.ndindex(scales.shape):
        part = np.s_[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
        block, scale = fp8.quantise_tensor(lanes[part])
        assert scales[row, column] == scale
        assert np.array_equal(codes[part], block)
        assert np.array_equal(quant.dequantise_blocks(codes, scales)[part], fp8.dequantise(block, scale))


def test_stripes_of_a_matrix_and_its_padding_give_the_bytes_of_the_whole(quant: Any) -> None:
    lanes = patterns(np.random.default_rng(5).standard_normal((300, 200))).reshape(300, 200)
    codes, scales = quant.quantise_blocks(lanes)
    stripes = [quant.quantise_blocks(lanes[at : at + 128]) for at in (0, 128, 256)]
    assert np.array_equal(np.concatenate([stripe for stripe, _ in stripes]), codes)
    assert np.array_equal(np.concatenate([scale for _, scale in stripes]), scales)
    padded, same = quant.quantise_blocks(np.pad(lanes, ((0, 84), (0, 56))))
    assert np.array_equal(same, scales)
    assert np.array_equal(padded[:300, :200], codes)
    columns = quant.quantise_blocks(np.asfortranarray(lanes))
    assert np.array_equal(columns[0], codes), "lanes need not be contiguous"


def test_torch_quantises_blocks_to_the_same_bytes() -> None:
    lanes = (patterns(np.random.default_rng(6).standard_normal((256, 384))) >> 16).astype(np.uint16).reshape(256, 384)
    lanes[5, 5], lanes[200, 300], lanes[128:, :128] = 0x7FC0, 0xFF80, 0x8000
    weight = torch.from_numpy(numbers(lanes).copy())
    grid = weight.view(2, 128, 3, 128)
    amax = torch.where(grid.isfinite(), grid.abs(), 0).amax(dim=(1, 3), keepdim=True)
    scale = torch.where(amax == 0, 1, (amax / 448).clamp(min=2.0**-126))
    scaled = grid * (1 / scale)
    codes = torch.where(scaled.isnan(), 0x7F, scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    ours, scales = fp8.quantise_blocks(lanes)
    assert np.array_equal(scales.view(np.float32), scale.view(2, 3).numpy())
    assert np.array_equal(ours, codes.view(256, 384).numpy())


@given(st.binary(min_size=8, max_size=1200), st.sampled_from([np.uint16, np.uint32]))
def test_both_implementations_agree_on_any_bits(data: bytes, dtype: type) -> None:
    lanes = np.frombuffer(data[: len(data) // 8 * 8], dtype)
    codes, scale = fp8.quantise_tensor(lanes)
    fast_codes, fast_scale = fast.quantise_tensor(lanes)
    assert fast_scale == scale
    assert np.array_equal(fast_codes, codes)
    blocks, scales = fp8.quantise_blocks(lanes.reshape(2, -1))
    fast_blocks, fast_scales = fast.quantise_blocks(lanes.reshape(2, -1))
    assert np.array_equal(fast_blocks, blocks)
    assert np.array_equal(fast_scales, scales)


def test_a_nan_comes_out_as_one_pattern(quant: Any) -> None:
    lanes = quant.dequantise(np.array([0x7F, 0xFF, 0x38], np.uint8), ONE)
    assert lanes.tolist() == [0x7FC00000, 0x7FC00000, ONE]
    broken = quant.dequantise(np.array([0x38], np.uint8), np.uint32(0xFFC00001))
    assert broken.tolist() == [0x7FC00000]


def test_a_callers_mistake_is_named(quant: Any) -> None:
    with pytest.raises(ValueError, match="uint32"):
        quant.quantise_tensor(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="uint32"):
        quant.largest(np.zeros(3, np.int64))
    for scale in patterns([0.0, -1.0, 2.0**-127, 2.0**127, np.inf, np.nan]):
        with pytest.raises(ValueError, match="scales"):
            quant.quantise(np.zeros(3, np.uint32), scale)
    with pytest.raises(ValueError, match="uint32 pattern"):
        quant.quantise(np.zeros(3, np.uint32), np.float32(1))
    with pytest.raises(ValueError, match="matrix"):
        quant.quantise_blocks(np.zeros(3, np.uint32))
    with pytest.raises(ValueError, match="shape"):
        quant.dequantise_blocks(np.zeros((3, 3), np.uint8), np.zeros((2, 1), np.uint32))
    with pytest.raises(ValueError, match="uint8"):
        quant.dequantise(np.zeros(3, np.int8), ONE)


@pytest.mark.skipif(os.environ.get("DELTAD_TEST_FULL") != "1", reason="takes minutes: run `make test-full`")
@pytest.mark.timeout(1800)
def test_torch_casts_every_float32_the_same_way() -> None:
    step = 1 << 24
    for start in range(0, 1 << 32, step):
        lanes = np.arange(start, start + step, dtype=np.uint64).astype(np.uint32)
        assert np.array_equal(fast.e4m3_from_float(lanes), by_torch(lanes, ONE)), hex(start)
