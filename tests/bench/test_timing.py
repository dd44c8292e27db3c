"""Ratios are of rates, in the right direction, and of as many runs as were asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench.timing import RUNS, compare, halves, on_two_threads, rate_ratios, seconds


class Clock:
    """Time that passes only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, *takes: float) -> Callable[[], None]:
        """Work that takes this long: the first time, the second time, and so on; the last ever after."""
        left = list(takes)

        def once() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return once


def test_a_ratio_above_one_is_faster_than_the_reference() -> None:
    clock = Clock()
    assert rate_ratios(clock.work(6.0), clock.work(2.0), clock=clock) == [3.0] * RUNS


def test_the_first_run_of_both_is_not_measured() -> None:
    clock = Clock()
    assert rate_ratios(clock.work(100.0, 1.0), clock.work(50.0, 4.0), runs=2, clock=clock) == [0.25, 0.25]


def test_there_are_at_least_seven_runs() -> None:
    assert RUNS >= 7


def test_work_that_takes_no_time_takes_some() -> None:
    assert seconds(lambda: None, Clock()) > 0


def test_comparing_reads_all_of_both() -> None:
    one = np.arange(1001, dtype=np.uint16)
    other = one.copy()
    compare(one, other)
    other[-1] ^= 1
    with pytest.raises(ValueError, match="equal"):
        compare(one, other)


def test_two_threads_do_every_part_once() -> None:
    done: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        on_two_threads(pool, done.append, range(10))
    assert sorted(done) == list(range(10))


def test_halves_are_views_of_everything() -> None:
    whole = np.arange(7)
    parts = halves(whole)
    assert np.array_equal(np.concatenate(parts), whole)
    assert all(part.base is whole for part in parts)
