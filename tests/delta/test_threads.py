"""Work on several threads: in order, bounded, apart where it clashes, and never left behind."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import Changes, Segments, Stream
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.codec import read_patches
from deltad.delta.coding import Coding
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.threads import default_threads, in_order
from deltad.types import DType
from tests.kit.deltas import SMALL, encoder
from tests.kit.weights import ArrayWeights

PATIENCE = 30
THREADS = [1, 2, 3, 5]


@given(st.lists(st.integers(), max_size=30), st.sampled_from(THREADS))
def test_results_come_in_the_order_of_the_items(items: list[int], threads: int) -> None:
    assert list(in_order(lambda item: item + 1, items, threads)) == [item + 1 for item in items]


@pytest.mark.parametrize("threads", [2, 3])
def test_as_many_items_as_there_are_threads_are_worked_on_at_a_time(threads: int) -> None:
    together = threading.Barrier(threads)
    results = in_order(lambda item: together.wait(PATIENCE), range(4 * threads), threads)
    assert len(list(results)) == 4 * threads


@pytest.mark.parametrize("threads", [2, 3])
def test_no_more_are_begun_ahead_than_four_times_the_threads(threads: int) -> None:
    asked = 0

    def items() -> Iterator[int]:
        nonlocal asked
        for item in range(100):
            asked += 1
            yield item

    for given_back, _ in enumerate(in_order(lambda item: item, items(), threads)):
        assert asked <= given_back + 4 * threads + 1


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_comes_where_its_result_would_and_ends_the_rest(threads: int) -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 7:
            raise KeyError(item)
        return item

    results = in_order(work, range(100), threads)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(KeyError, match="7"):
        next(results)
    assert list(results) == []
    assert max(begun) < 7 + 4 * threads + 1


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_of_the_items_comes_behind_the_results_of_those_before_it(threads: int) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise LookupError("no more of them")

    results = in_order(lambda item: item, items(), threads)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="no more"):
        next(results)


def test_what_was_begun_is_waited_for_when_nobody_wants_the_rest() -> None:
    working, may_end, ended = threading.Semaphore(0), threading.Event(), []

    def work(item: int) -> int:
        if item:
            working.release()
            may_end.wait(PATIENCE)
            ended.append(item)
        return item

    with closing(in_order(work, range(100), 2)) as results:
        assert next(results) == 0
        assert working.acquire(timeout=PATIENCE)
        threading.Timer(0.05, may_end.set).start()
    at_the_end = list(ended)
    assert 1 <= len(at_the_end) <= 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deltad-frames")]


@given(st.lists(st.integers(0, 3), max_size=24), st.sampled_from(THREADS))
def test_items_that_clash_are_never_worked_on_together(items: list[int], threads: int) -> None:
    busy = [threading.Lock() for _ in range(4)]

    def work(item: int) -> int:
        assert busy[item].acquire(blocking=False), "another one that it clashes with is being worked on"
        hashlib.sha256(bytes(1 << 16)).digest()  # lets go of the interpreter, as kernels do
        busy[item].release()
        return item

    assert list(in_order(work, items, threads, clash=lambda one, other: one == other)) == items


def test_there_is_a_thread_by_default_and_not_one_for_each_of_many_processors() -> None:
    assert 1 <= default_threads() <= 2


def test_the_frames_of_many_chunks_are_read_by_the_same_threads() -> None:
    readers: set[threading.Thread] = set()

    class Noting(NumpyBackend):
        def decode(self, coding: Coding, streams: Sequence[Stream], base: Segments | None, dtype: DType) -> Changes:
            readers.add(threading.current_thread())
            return super().decode(coding, streams, base, dtype)

    layout = Layout(1, tuple(TensorSpec(name, "BF16", (50_000,)) for name in "abcdef"))
    base = ArrayWeights.random(layout)
    chunks = [chunk.data for chunk in encoder(layout, base.changed(0.2), base, limits=SMALL).chunks()]
    assert len(chunks) > 2
    assert len(list(read_patches(chunks, layout, Noting(), limits=SMALL, threads=2))) >= len(chunks)
    assert 1 <= len(readers) <= 2
