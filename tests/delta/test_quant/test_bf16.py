"""The cast to bfloat16: nearest, ties to even, for every pattern; checked against numbers, not against bits."""

import numpy as np
import pytest
import torch

from deltad.delta.quant import bf16_from_f32, f32_from_bf16, fast

SPREAD = np.array([0x0000, 0x0001, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xBEEF, 0xFFFE, 0xFFFF], np.uint32)
"""Low halves on both sides of each border that rounding has."""

EVERY_TOP = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | SPREAD).ravel()
"""Every sign, exponent and kept mantissa, denormals, infinities and NaNs among them."""

EVERY_LOW = np.concatenate(
    [
        np.uint32(top) << np.uint32(16) | np.arange(1 << 16, dtype=np.uint32)
        for top in (0x0000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0xFF80, 0x8000, 0xC2FF)
    ]
)


def is_nan(lanes: np.ndarray) -> np.ndarray:
    return (lanes & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)


def nearest(lanes: np.ndarray) -> np.ndarray:
    """The oracle: look each magnitude up among all finite bfloat16 values, as float64, and take the nearer."""
    finite = (np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    values = np.append(finite, 2.0**128)  # where the next value would be, infinity begins by rounding
    magnitude = np.minimum((lanes & np.uint32(0x7FFFFFFF)).view(np.float32).astype(np.float64), 2.0**128)
    above = np.searchsorted(values, magnitude)
    below = np.maximum(above - (values[above] != magnitude), 0)
    up, down = values[above] - magnitude, magnitude - values[below]
    even = np.where(above % 2 == 0, above, below)
    pattern = np.where(up < down, above, np.where(down < up, below, even))
    return pattern.astype(np.uint16) | (lanes >> np.uint32(16) & np.uint32(0x8000)).astype(np.uint16)


@pytest.mark.parametrize("lanes", [EVERY_TOP, EVERY_LOW], ids=["every top half", "every low half"])
def test_every_number_is_rounded_to_the_nearest_and_ties_to_even(lanes: np.ndarray) -> None:
    numbers = lanes[~is_nan(lanes)]
    assert np.array_equal(bf16_from_f32(numbers), nearest(numbers))


@pytest.mark.parametrize("lanes", [EVERY_TOP, EVERY_LOW], ids=["every top half", "every low half"])
def test_torch_rounds_every_number_the_same_way(lanes: np.ndarray) -> None:
    numbers = lanes[~is_nan(lanes)]
    by_torch = torch.from_numpy(numbers.view(np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(bf16_from_f32(numbers), by_torch)


def test_a_nan_stays_a_nan_with_its_sign_and_the_top_of_its_payload() -> None:
    nans = np.concatenate([lanes[is_nan(lanes)] for lanes in (EVERY_TOP, EVERY_LOW)])
    cast = bf16_from_f32(nans)
    assert np.all((cast & 0x7FFF) > 0x7F80), "none became an infinity or a number"
    assert np.array_equal(cast >> 15, (nans >> 31).astype(np.uint16))
    assert np.array_equal(cast & 0x3F, (nans >> 16 & 0x3F).astype(np.uint16))
    assert np.all(cast & 0x40), "all are quiet"


def test_what_is_a_bfloat16_already_is_kept_bit_for_bit() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    quiet = every | np.where(is_nan(every.astype(np.uint32) << 16), np.uint16(0x40), np.uint16(0))
    assert np.array_equal(bf16_from_f32(every.astype(np.uint32) << np.uint32(16)), quiet)


def test_a_window_gives_the_same_bits_as_the_whole() -> None:
    whole = bf16_from_f32(EVERY_TOP)
    parts = [bf16_from_f32(EVERY_TOP[at : at + 77_777]) for at in range(0, EVERY_TOP.size, 77_777)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert bf16_from_f32(EVERY_TOP[:0]).size == 0


def test_lanes_of_another_width_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="uint32"):
        bf16_from_f32(np.zeros(3, np.uint16))


@pytest.mark.parametrize("lanes", [EVERY_TOP, EVERY_LOW], ids=["every top half", "every low half"])
def test_the_compiled_cast_gives_the_same_bits(lanes: np.ndarray) -> None:
    assert np.array_equal(fast.bf16_from_f32(lanes), bf16_from_f32(lanes))


def test_widening_keeps_the_number() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = f32_from_bf16(every).view(np.float32)
    by_torch = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(wide.view(np.uint32), by_torch.view(np.uint32))
    with pytest.raises(ValueError, match="uint16"):
        f32_from_bf16(np.zeros(3, np.uint32))


def test_the_compiled_cast_refuses_lanes_of_another_width_too() -> None:
    with pytest.raises(ValueError, match="uint32"):
        fast.bf16_from_f32(np.zeros(3, np.uint16))
