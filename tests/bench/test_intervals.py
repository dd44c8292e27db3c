"""The intervals agree with published values and behave at their edges."""

from __future__ import annotations

import pytest

from bench.intervals import t_interval, wilson_interval


def test_the_t_interval_of_three_values_is_the_textbooks() -> None:
    low, high = t_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


def test_equal_values_leave_no_width() -> None:
    assert t_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_wilsons_interval_agrees_with_published_values() -> None:
    # Newcombe (1998), table I: 81 of 263, and 15 of 148.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)


def test_wilsons_interval_stays_within_zero_and_one() -> None:
    assert wilson_interval(0, 20)[0] == 0.0
    assert wilson_interval(20, 20)[1] == pytest.approx(1.0)


@pytest.mark.parametrize(("right", "of"), [(0, 0), (3, 2), (-1, 5)])
def test_what_is_no_share_is_refused(right: int, of: int) -> None:
    with pytest.raises(ValueError, match="share"):
        wilson_interval(right, of)


def test_one_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 values"):
        t_interval([1.0])
