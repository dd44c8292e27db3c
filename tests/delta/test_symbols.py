"""Numbers as symbols and bits: one spelling each, every other spelling refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import UNSIGNED
from deltad.delta.symbols import (
    GAPS,
    Scheme,
    decode_gaps,
    decode_values,
    encode_gaps,
    encode_values,
    from_symbols,
    to_symbols,
    value_scheme,
)
from deltad.errors import FormatError
from deltad.types import DTYPES, DType

SCHEMES = sorted(
    {GAPS, *(value_scheme(dtype) for dtype in DTYPES.values())}, key=lambda scheme: (scheme.top, scheme.low)
)
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def numbers(scheme: Scheme) -> st.SearchStrategy[list[int]]:
    sizes = st.integers(0, scheme.top.bit_length()).map(lambda bits: min(scheme.top, 1 << bits))
    return st.lists(sizes.flatmap(lambda top: st.integers(0, top)), max_size=40)


@each_scheme
def test_every_symbol_of_a_number_fits_a_byte(scheme: Scheme) -> None:
    largest = np.array([scheme.top], np.uint64)
    symbols, bits = to_symbols(largest, scheme)
    assert len(symbols) == 1
    assert np.array_equal(from_symbols(symbols, bits, scheme), largest)


@given(st.data())
def test_any_numbers_come_back_and_their_symbols_ascend_with_them(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from(SCHEMES))
    drawn = np.array(data.draw(numbers(scheme)), np.uint64)
    symbols, bits = to_symbols(drawn, scheme)
    assert len(symbols) == drawn.size
    assert len(bits) % 4 == 0
    assert np.array_equal(from_symbols(symbols, bits, scheme), drawn)
    ordered = np.frombuffer(
        to_symbols(np.sort(drawn >> np.uint64(scheme.low) << np.uint64(scheme.low)), scheme)[0], np.uint8
    )
    assert (np.diff(ordered.astype(int)) >= 0).all()


@given(st.data())
def test_another_spelling_is_refused_or_means_other_numbers(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from(SCHEMES))
    drawn = np.array(data.draw(numbers(scheme)), np.uint64)
    symbols, bits = to_symbols(drawn, scheme)
    other = bytes(data.draw(st.lists(st.integers(0, 255), max_size=len(symbols) + 1))) or symbols
    rest = data.draw(st.one_of(st.just(bits), st.binary(max_size=len(bits) + 5)))
    try:
        found = from_symbols(other, rest, scheme)
    except FormatError:
        return
    assert int(found.max(initial=0)) <= scheme.top
    assert to_symbols(found, scheme) == (other, rest)


@pytest.mark.parametrize("bits", [b"", bytes(8), b"\x01\x00\x00\x80", bytes(3)])
def test_bits_that_are_not_used_up_or_not_padded_with_zeros_are_refused(bits: bytes) -> None:
    symbols, right = to_symbols(np.array([100], np.uint64), GAPS)
    assert len(right) == 4
    with pytest.raises(FormatError, match="bits"):
        from_symbols(symbols, bits, GAPS)


@given(st.lists(st.integers(0, 2**26), unique=True, max_size=50).map(sorted))
def test_ranks_come_back(ranks: list[int]) -> None:
    assert decode_gaps(*encode_gaps(np.array(ranks, np.int64))).tolist() == ranks


def test_a_gap_as_long_as_the_largest_frame_comes_back() -> None:
    ranks = np.array([0, 2**30 - 1], np.int64)
    assert decode_gaps(*encode_gaps(ranks)).tolist() == ranks.tolist()


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.lane_bytes <= 2], ids=lambda d: d.name)
@pytest.mark.parametrize("tiny", [0, 5])
def test_every_value_of_narrow_lanes_comes_back_with_and_without_pair_codes(dtype: DType, tiny: int) -> None:
    every = np.arange((1 << 8 * dtype.lane_bytes) - 1).astype(UNSIGNED[dtype.lane_bytes])
    codes = np.concatenate([np.full(tiny * every.size, 2, every.dtype), every])
    pairs, symbols, bits = encode_values(codes, dtype)
    assert bool(pairs) == bool(tiny)
    assert np.array_equal(decode_values(pairs, symbols, bits, codes.size, dtype), codes)


@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_any_values_come_back(data: st.DataObject, name: str) -> None:
    dtype = DTYPES[name]
    codes = st.one_of(st.integers(0, 3), st.integers(0, (1 << 8 * dtype.lane_bytes) - 2))
    drawn = np.array(data.draw(st.lists(codes, max_size=40)), UNSIGNED[dtype.lane_bytes])
    pairs, symbols, bits = encode_values(drawn, dtype)
    assert bool(pairs) == (drawn.size > 0 and 4 * int((drawn >= 3).sum()) <= drawn.size)
    assert np.array_equal(decode_values(pairs, symbols, bits, drawn.size, dtype), drawn)


def test_values_that_are_too_few_too_many_too_large_or_padded_otherwise_are_refused() -> None:
    dtype = DTYPES["BF16"]
    pairs, symbols, bits = encode_values(np.array([0, 1, 2, 0, 1, 9], np.uint16), dtype)
    for count in (2, 5, 9):
        with pytest.raises(FormatError):
            decode_values(pairs, symbols, bits, count, dtype)
    with pytest.raises(FormatError, match="exceptions"):
        decode_values(pairs, symbols + b"\0", bits, 6, dtype)
    with pytest.raises(FormatError, match="zeros behind"):
        decode_values(pairs[:1] + bytes([pairs[1] | 0x40]), symbols, bits, 6, dtype)
    top = value_scheme(dtype).top
    for number, pair in ((top, b"\x03"), (top - 2, b"\x03")):
        with pytest.raises(FormatError):
            decode_values(pair, *to_symbols(np.array([number], np.uint64), value_scheme(dtype)), 1, dtype)
    last = to_symbols(np.array([top - 3], np.uint64), value_scheme(dtype))
    assert decode_values(b"\x03", *last, 1, dtype).tolist() == [top]
