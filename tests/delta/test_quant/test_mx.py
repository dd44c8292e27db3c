"""MXFP8 and MXFP4: the scale rule in exact arithmetic, every bfloat16, the borders, and the compiled twin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.quant import fast, mx
from deltad.delta.quant.element import E2M1, E4M3, Element
from tests.delta.test_quant.conftest import EVERY_BF16, around, nearest, numbers, patterns

FORMATS = {"mxfp8": E4M3, "mxfp4": E2M1}


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def quantised(quant: Any, kind: str, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes one a byte, and scales."""
    codes, scales = getattr(quant, f"quantise_{kind}")(lanes)
    return (unpacked(codes) if kind == "mxfp4" else codes), scales


def unpacked(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def by_the_book(block: np.ndarray, element: Element) -> tuple[np.ndarray, int]:
    """OCP MX §6.3 for one block of float32 numbers, in exact arithmetic."""
    if not np.all(np.isfinite(block)):
        return np.full(32, element.nan or 0, np.uint8), 255
    amax = float(np.abs(block).max())
    floor_of_log2 = math.frexp(amax)[1] - 1 if amax else -1000
    shared = max(floor_of_log2 - element.top_exponent, -127)
    return nearest(np.ldexp(block.astype(np.float64), -shared), element), shared + 127


def blocks_around_the_borders(element: Element) -> np.ndarray:
    """Blocks whose largest magnitude is 1.5 · 2^e, with all borders of the elements at that scale below it."""
    values = element.values()[: element.top + 1].astype(np.float64)
    borders = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    borders = borders[borders <= 1.5 * 2.0**element.top_exponent]
    rows = []
    for exponent in (-126, -119, -60, 0, 60, 127):
        lanes = around(np.ldexp(borders, exponent - element.top_exponent).astype(np.float32))
        lanes = np.concatenate([lanes, np.zeros(-lanes.size % 31, np.uint32)]).reshape(-1, 31)
        top = np.full((lanes.shape[0], 1), patterns(1.75 * 2.0**exponent)[0])
        rows.append(np.concatenate([lanes, top], axis=1))
    return np.concatenate(rows)


def mixed_blocks() -> np.ndarray:
    """Every bfloat16 exactly once, in blocks that mix all exponents, and again in blocks of one exponent."""
    shuffled = np.random.default_rng(7).permutation(EVERY_BF16).reshape(-1, 32)
    return np.concatenate([shuffled, EVERY_BF16.reshape(-1, 32)])


def test_blocks_follow_the_specification_to_the_letter(quant: Any, kind: str) -> None:
    element = FORMATS[kind]
    for lanes in (mixed_blocks(), blocks_around_the_borders(element)):
        codes, scales = quantised(quant, kind, lanes)
        for block, block_codes, scale in zip(numbers(lanes), codes, scales[:, 0], strict=True):
            expected, expected_scale = by_the_book(block, element)
            assert scale == expected_scale
            assert np.array_equal(block_codes, expected)


def test_every_bfloat16_as_the_largest_of_its_block(quant: Any, kind: str) -> None:
    element = FORMATS[kind]
    lanes = np.zeros((1 << 16, 32), np.uint16)
    lanes[:, 9] = EVERY_BF16
    codes, scales = quantised(quant, kind, lanes)
    finite = np.isfinite(numbers(EVERY_BF16))
    exponent = np.frexp(np.abs(numbers(EVERY_BF16)[finite]))[1] - 1
    exponent[numbers(EVERY_BF16)[finite] == 0] = -200
    shared = np.maximum(exponent - element.top_exponent, -127)
    assert np.array_equal(scales[finite, 0], shared + 127)
    assert np.array_equal(codes[finite, 9], nearest(np.ldexp(numbers(EVERY_BF16)[finite], -shared), element))
    assert np.all(scales[~finite, 0] == 255)
    assert np.all(codes[~finite] == (element.nan or 0))


def test_what_is_above_the_top_value_of_its_binade_is_clamped(quant: Any) -> None:
    lanes = np.zeros((1, 32), np.uint32)
    lanes[0, :4] = patterns([511.9, -450.0, 448.0, -0.0])
    codes, scales = quant.quantise_mxfp8(lanes)
    assert (codes[0, :5].tolist(), scales.tolist()) == ([0x7E, 0xFE, 0x7E, 0x80, 0], [[127]])
    lanes[0, :4] = patterns([7.9, -6.1, 5.0, -0.0])
    codes, scales = quant.quantise_mxfp4(lanes)
    assert (codes[0, :3].tolist(), scales.tolist()) == ([0x7 | 0xF << 4, 0x6 | 0x8 << 4, 0], [[127]])


def test_a_block_of_zeros_keeps_their_signs_under_the_smallest_scale(quant: Any, kind: str) -> None:
    codes, scales = quantised(quant, kind, patterns([0.0, -0.0] * 16))
    assert scales.tolist() == [0]
    assert codes.tolist() == [0, FORMATS[kind].sign] * 16


def test_one_nan_or_infinity_makes_its_block_nan_and_no_other(quant: Any, kind: str) -> None:
    whole = patterns(np.random.default_rng(8).standard_normal(96)).reshape(3, 32)
    codes, scales = quantised(quant, kind, whole)
    for bad in (0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001):
        lanes = whole.copy()
        lanes[1, 31] = bad
        broken, broken_scales = quantised(quant, kind, lanes)
        assert broken_scales[1] == 255
        assert np.array_equal(broken[[0, 2]], codes[[0, 2]])
        assert np.array_equal(broken_scales[[0, 2]], scales[[0, 2]])
        values = getattr(quant, f"dequantise_{kind}")(*getattr(quant, f"quantise_{kind}")(lanes))
        assert np.all(values[1] == 0x7FC00000)
        assert np.all(np.isfinite(numbers(values[[0, 2]])))


def test_every_code_under_every_scale_has_its_exact_value(quant: Any, kind: str) -> None:
    element = FORMATS[kind]
    count = 2 * element.sign
    codes = np.tile(np.arange(count, dtype=np.uint8), (256, 32 // min(count, 32)))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], codes.shape[1] // 32, axis=1)
    stored = codes[:, 0::2] | codes[:, 1::2] << 4 if kind == "mxfp4" else codes
    lanes = getattr(quant, f"dequantise_{kind}")(stored, scales)
    with np.errstate(over="ignore"):
        powers = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)[:, None]
        exact = element.values()[codes].astype(np.float64) * powers
        expected = exact.astype(np.float32)
    assert np.array_equal(numbers(lanes), expected, equal_nan=True)
    assert np.array_equal(np.signbit(numbers(lanes)), np.signbit(expected) & ~np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.array_equal(expected[finite].astype(np.float64), exact[finite])


def test_quantising_again_changes_nothing(quant: Any, kind: str) -> None:
    lanes = patterns(np.random.default_rng(9).standard_normal(64 * 200) * 1e-3).reshape(200, 64)
    once = getattr(quant, f"quantise_{kind}")(lanes)
    again = getattr(quant, f"quantise_{kind}")(getattr(quant, f"dequantise_{kind}")(*once))
    assert np.array_equal(again[0], once[0])
    assert np.array_equal(again[1], once[1])


@pytest.mark.parametrize("shape", [(32,), (5, 96), (2, 3, 64), (0, 32), (3, 0)])
def test_any_shape_of_whole_blocks_and_any_window_of_them(quant: Any, kind: str, shape: tuple[int, ...]) -> None:
    lanes = patterns(np.random.default_rng(10).standard_normal(shape)).reshape(shape)
    codes, scales = getattr(quant, f"quantise_{kind}")(lanes)
    width = shape[-1] // (2 if kind == "mxfp4" else 1)
    assert codes.shape == (*shape[:-1], width)
    assert scales.shape == (*shape[:-1], shape[-1] // 32)
    assert getattr(quant, f"dequantise_{kind}")(codes, scales).shape == shape
    flat_codes, flat_scales = codes.reshape(-1), scales.reshape(-1)
    for at in range(0, lanes.size, 32):
        window_codes, window_scales = getattr(quant, f"quantise_{kind}")(lanes.reshape(-1)[at : at + 32])
        bytes_each = window_codes.size
        assert np.array_equal(window_codes, flat_codes[at // 32 * bytes_each :][:bytes_each])
        assert np.array_equal(window_scales, flat_scales[at // 32 :][:1])
    strided = getattr(quant, f"quantise_{kind}")(np.asfortranarray(lanes))
    assert np.array_equal(strided[0], codes)


def test_torch_quantises_to_the_same_bytes() -> None:
    for lanes in (
        mixed_blocks().astype(np.uint32) << 16,
        blocks_around_the_borders(E4M3),
        blocks_around_the_borders(E2M1),
    ):
        wide = torch.from_numpy(lanes.view(np.int32).copy())
        exponent = (wide & 0x7FFFFFFF).amax(dim=1, keepdim=True) >> 23
        broken = exponent == 255
        for kind, element in FORMATS.items():
            scale = torch.where(broken, 255, (exponent - element.top_exponent).clamp(min=0))
            factor = ((254 - scale.clamp(max=252)) << 23).view(torch.float32)
            scaled = wide.view(torch.float32) * factor
            if kind == "mxfp8":
                codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
                codes = torch.where(broken, 0x7F, codes)
            else:
                size = scaled.abs()
                steps = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5]
                codes = sum(step.to(torch.uint8) for step in steps) | torch.signbit(scaled).to(torch.uint8) << 3
                codes = torch.where(broken, 0, codes)
            ours, scales = quantised(fast, kind, lanes)
            assert np.array_equal(scales, scale.to(torch.uint8).numpy())
            assert np.array_equal(ours, codes.numpy())


@given(st.binary(min_size=256, max_size=2048), st.sampled_from([np.uint16, np.uint32]))
def test_both_implementations_agree_on_any_bits(data: bytes, dtype: type) -> None:
    lanes = np.frombuffer(data[: len(data) // 128 * 128], dtype)
    for kind in FORMATS:
        codes, scales = getattr(mx, f"quantise_{kind}")(lanes)
        fast_codes, fast_scales = getattr(fast, f"quantise_{kind}")(lanes)
        assert np.array_equal(fast_codes, codes)
        assert np.array_equal(fast_scales, scales)
        assert np.array_equal(
            getattr(fast, f"dequantise_{kind}")(codes, scales), getattr(mx, f"dequantise_{kind}")(codes, scales)
        )


def test_a_callers_mistake_is_named(quant: Any, kind: str) -> None:
    quantise, dequantise = getattr(quant, f"quantise_{kind}"), getattr(quant, f"dequantise_{kind}")
    with pytest.raises(ValueError, match="whole blocks"):
        quantise(np.zeros((32, 33), np.uint32))
    with pytest.raises(ValueError, match="whole blocks"):
        quantise(np.uint32(1).reshape(()))
    with pytest.raises(ValueError, match="uint32"):
        quantise(np.zeros(32, np.float32))
    with pytest.raises(ValueError, match="a scale for each"):
        dequantise(np.zeros(32, np.uint8), np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        dequantise(np.zeros(32, np.int8), np.zeros(1, np.uint8))
