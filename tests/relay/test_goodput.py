"""What a link carries while it is busy."""

import pytest

from deltad.relay.goodput import HALF_LIFE, LEAST_BYTES, Goodput

MB = 1_000_000


def body(goodput: Goodput, at: float, *, rate: float, size: int) -> float:
    """A body that begins at `at` and comes in ten equal pieces; returns when it ends."""
    goodput.begin(at)
    for i in range(1, 11):
        goodput.arrived(size // 10, at + i / 10 * size / rate)
    goodput.end(at + size / rate)
    return at + size / rate


def test_nothing_is_known_before_anything_has_come() -> None:
    assert Goodput().rate(100.0) == 0.0


def test_waiting_between_bodies_does_not_make_a_link_slow() -> None:
    goodput = Goodput()
    for start in (10.0, 40.0, 70.0):
        end = body(goodput, start, rate=5 * MB, size=MB)
    assert goodput.rate(end) == pytest.approx(5 * MB)
    assert goodput.rate(end + 25.0) == pytest.approx(5 * MB)


def test_bodies_that_come_side_by_side_share_the_time() -> None:
    goodput = Goodput()
    goodput.begin(0.0)
    goodput.begin(0.0)
    for tenth in range(1, 11):
        goodput.arrived(MB, tenth / 10)
        goodput.arrived(MB, tenth / 10)
    goodput.end(1.0)
    goodput.end(1.0)
    assert goodput.rate(1.0) == pytest.approx(20 * MB, rel=0.01)


def test_a_body_that_stalls_and_is_cut_off_counts_with_its_time() -> None:
    goodput = Goodput()
    goodput.begin(0.0)
    goodput.arrived(MB, 0.1)
    goodput.end(20.0)
    assert goodput.rate(20.0) == pytest.approx(MB / 20, rel=0.05)


def test_bodies_of_one_piece_say_nothing() -> None:
    goodput = Goodput()
    for at in range(1000):
        goodput.begin(float(at))
        goodput.end(float(at))
    assert goodput.rate(1000.0) == 0.0


def test_a_link_that_changed_is_believed_after_a_while() -> None:
    goodput = Goodput()
    now = body(goodput, 0.0, rate=50 * MB, size=500 * MB)
    for _ in range(20):
        now = body(goodput, now + HALF_LIFE / 2, rate=MB, size=5 * MB)
    assert goodput.rate(now) == pytest.approx(MB, rel=0.1)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    goodput = Goodput()
    now = body(goodput, 0.0, rate=MB, size=16 * LEAST_BYTES)
    assert goodput.rate(now + 3 * HALF_LIFE) == pytest.approx(MB, rel=0.01)
    assert goodput.rate(now + 5 * HALF_LIFE) == 0.0
