"""A device that fails costs time, never a version: the CPU goes on in the same call, and the bytes are the same."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import Backend, Mode, Place
from deltad.delta.backend.fallback import (
    FIRST_REST_SECONDS,
    LONGEST_REST_SECONDS,
    Fallback,
    Switch,
    next_rest,
)
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import DeviceError, FormatError
from deltad.types import DTYPES
from tests.kit.deltas import MODES, SMALL, applied, encoder, held
from tests.kit.devices import Clock, FakeDevice
from tests.kit.weights import ArrayWeights

LAYOUT = Layout(1, (TensorSpec("a", "BF16", (30, 60)), TensorSpec("b", "F32", (300,)), TensorSpec("c", "U8", (5, 40))))
BASE = ArrayWeights.random(LAYOUT, 3)
TARGET = BASE.changed(0.05)
DATA = np.arange(100, dtype=np.uint8)
PLACES = [Place(7, 0)]


class Guarded:
    """A `Fallback` over a device that fails where it is told to, and all that it said. No second device comes."""

    def __init__(self, device: Backend, *, then: Backend | None = None) -> None:
        self.clock = Clock()
        self.switches: list[Switch] = []
        self.next = then
        self.reopened = 0
        self.backend = Fallback(
            device, NumpyBackend(), reopen=self._reopen, now=self.clock, on_switch=self.switches.append
        )

    def _reopen(self) -> Backend:
        self.reopened += 1
        if self.next is None:
            raise DeviceError("GPU 0", found="still lost")
        return self.next

    def call(self) -> None:
        assert np.array_equal(self.backend.sum([DATA], PLACES), NumpyBackend().sum([DATA], PLACES))


def broken() -> FakeDevice:
    return FakeDevice(lambda number: True)


def calls_of_an_edge(mode: Mode) -> int:
    device = FakeDevice()
    list(encoder(LAYOUT, TARGET, BASE, mode=mode, backend=device).chunks())
    return device.calls


@given(mode=st.sampled_from(MODES), data=st.data())
def test_a_device_that_is_lost_at_any_call_gives_the_same_chunks(mode: Mode, data: st.DataObject) -> None:
    lost_at = data.draw(st.integers(0, calls_of_an_edge(mode) - 1))
    guarded = Guarded(FakeDevice(lambda number: number >= lost_at))
    edge = encoder(LAYOUT, TARGET, BASE, mode=mode, backend=guarded.backend)
    expected = encoder(LAYOUT, TARGET, BASE, mode=mode, backend=NumpyBackend())
    assert list(edge.chunks()) == list(expected.chunks())
    assert edge.root == expected.root
    assert [switch.failed for switch in guarded.switches] == ["cupy"]


@given(mode=st.sampled_from(MODES), failures=st.sets(st.integers(0, 40)), data=st.data())
def test_a_device_that_fails_and_comes_back_at_any_calls_applies_to_the_same_weights(
    mode: Mode, failures: set[int], data: st.DataObject
) -> None:
    device = FakeDevice(lambda number: number in failures)
    guarded = Guarded(device, then=device)
    stored = held(encoder(LAYOUT, TARGET, BASE, mode=mode).chunks())
    after = BASE
    for _ in range(3):
        after = applied(stored, LAYOUT, BASE, limits=SMALL, backend=guarded.backend)
        guarded.clock.now += data.draw(st.sampled_from([0.0, FIRST_REST_SECONDS, LONGEST_REST_SECONDS]))
    assert after.equals(TARGET)


def test_a_failed_device_is_left_alone_and_said_to_have_failed_once() -> None:
    device = broken()
    guarded = Guarded(device)
    assert guarded.backend.name == "cupy"
    for _ in range(5):
        guarded.call()
    assert guarded.backend.name == "numpy"
    assert device.calls == 1
    assert guarded.reopened == 0
    (switch,) = guarded.switches
    assert (switch.backend, switch.failed) == ("numpy", "cupy")
    assert "GPU 0: lost in call 0" in switch.reason


def test_a_rested_device_is_opened_anew_and_said_to_be_back() -> None:
    second = FakeDevice()
    guarded = Guarded(broken(), then=second)
    guarded.call()
    guarded.clock.now += FIRST_REST_SECONDS
    guarded.call()
    assert second.calls == 1
    assert guarded.backend.name == "cupy"
    assert guarded.switches[1:] == [Switch("cupy", "it works again")]


def test_a_device_that_stays_lost_is_tried_after_longer_and_longer_rests() -> None:
    guarded = Guarded(broken())
    guarded.call()
    tries = []
    for second in range(4 * int(LONGEST_REST_SECONDS)):
        before = guarded.reopened
        guarded.clock.now = 1000.0 + second
        guarded.call()
        if guarded.reopened > before:
            tries.append(second)
    assert np.diff([0, *tries]).tolist() == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert len(guarded.switches) == 1


def test_a_device_that_fails_each_time_it_is_back_rests_longer_each_time() -> None:
    guarded = Guarded(broken(), then=broken())
    guarded.call()
    for rest in (30, 60, 120):
        guarded.clock.now += rest - 1
        guarded.call()
        assert guarded.backend.name == "numpy"
        reopened = guarded.reopened
        guarded.clock.now += 1
        guarded.call()
        assert guarded.reopened == reopened + 1


@given(last=st.floats(0, LONGEST_REST_SECONDS), worked=st.floats(0, 1e9))
def test_rests_grow_up_to_a_limit_and_shrink_only_for_a_device_that_worked(last: float, worked: float) -> None:
    rest = next_rest(last, worked)
    assert FIRST_REST_SECONDS <= rest <= LONGEST_REST_SECONDS or rest == 2 * last
    if rest < last:
        assert worked >= last
    if worked < last < LONGEST_REST_SECONDS:
        assert rest > last


def test_what_is_no_failure_of_the_device_is_raised_and_not_held_against_it() -> None:
    guarded = Guarded(FakeDevice())
    old, new = np.zeros(50, np.uint16), np.arange(50, dtype=np.uint16)
    frame = guarded.backend.encode([old], [new], [Place(7, 0)], DTYPES["BF16"], "blind")
    assert frame is not None
    with pytest.raises(FormatError):
        guarded.backend.decode(frame.coding, [b"\xff\xff", *frame.streams[1:]], None, DTYPES["BF16"])
    assert guarded.backend.name == "cupy"
    assert guarded.switches == []


def test_threads_whose_calls_fail_together_tell_of_one_failure() -> None:
    together = threading.Barrier(8)

    def fails(number: int) -> bool:
        together.wait()
        return True

    guarded = Guarded(FakeDevice(fails))
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(guarded.call) for _ in range(8)]:
            done.result()
    assert len(guarded.switches) == 1


def test_while_one_thread_opens_the_device_anew_the_others_work_on() -> None:
    opening, opened = threading.Event(), threading.Event()
    guarded = Guarded(broken())
    second = FakeDevice()

    def reopen() -> Backend:
        opening.set()
        assert opened.wait(60)
        return second

    guarded.backend = Fallback(
        broken(), NumpyBackend(), reopen=reopen, now=guarded.clock, on_switch=guarded.switches.append
    )
    guarded.call()
    guarded.clock.now += FIRST_REST_SECONDS
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(guarded.call)
        assert opening.wait(60)
        guarded.call()
        assert second.calls == 0
        opened.set()
        waiting.result()
    assert second.calls == 1
