"""The width of a link, on a simulated one: it grows while that pays, and what did not pay is taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deltad.protocol.width import FIRST, Width


class SimulatedLink:
    """A link that carries `capacity` bytes a second together, and at most `each` over one connection."""

    def __init__(self, most: int, *, capacity: float, each: float, rtt: float = 0.1) -> None:
        self.width = Width(most)
        self.width.measured(rtt)
        self.capacity, self.each = capacity, each
        self.now = 0.0
        self.widest = 0

    def carry(self, seconds: float, *, wanted: int = 100) -> float:
        """So many seconds of a transfer with `wanted` objects to ask for; the bytes that came."""
        step, came, until = 0.01, 0.0, self.now + seconds
        while self.now < until:
            while self.width.has_room and self.width.used < wanted:
                self.width.taken()
            while self.width.used > min(self.width.size, wanted):
                self.width.given_back()
            self.now += step
            count = step * min(self.capacity, self.each * self.width.used)
            came += count
            self.width.received(int(count), self.now)
            self.widest = max(self.widest, self.width.size)
        return came


def test_it_grows_to_the_ceiling_while_every_connection_adds_to_the_rate() -> None:
    link = SimulatedLink(16, capacity=1e9, each=1e6)
    link.carry(5.0)
    assert link.width.size == 16


def test_a_link_that_is_full_already_is_tried_wider_once_and_left_as_it_was() -> None:
    link = SimulatedLink(16, capacity=4e6, each=4e6)
    link.carry(10.0)
    assert link.widest == 2 * FIRST
    assert link.width.size == FIRST


def test_it_stays_at_the_least_doubling_that_fills_the_link() -> None:
    link = SimulatedLink(64, capacity=15e6, each=1e6)
    link.carry(12.0)
    assert link.width.size == 16
    assert link.widest == 32


def test_growth_that_did_not_pay_is_tried_again_ever_more_seldom_and_paid_for_when_the_link_has_changed() -> None:
    link = SimulatedLink(16, capacity=4e6, each=4e6)
    link.carry(10.0)
    link.capacity, link.each = 1e9, 1e6
    link.carry(60.0)
    assert link.width.size == 16


def test_a_transfer_of_a_few_objects_says_nothing_about_the_width() -> None:
    link = SimulatedLink(16, capacity=1e9, each=1e6)
    link.carry(20.0, wanted=2)
    assert link.width.size == FIRST


def test_a_pause_between_transfers_is_not_taken_for_a_slow_link() -> None:
    link = SimulatedLink(16, capacity=1e9, each=1e6)
    for _ in range(40):
        link.carry(0.3)
        while link.width.used:
            link.width.given_back()
        link.now += 30.0
    assert link.width.size == FIRST
    link.carry(5.0)
    assert link.width.size == 16


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(0, 1 << 24), st.floats(0, 5), st.sampled_from(["take", "give", "come"]))),
)
def test_it_is_never_below_one_or_above_its_ceiling(most: int, steps: list[tuple[int, float, str]]) -> None:
    width, now = Width(most), 0.0
    for count, passed, what in steps:
        now += passed
        if what == "take" and width.has_room:
            width.taken()
        elif what == "give" and width.used:
            width.given_back()
        else:
            width.received(count, now)
        assert 1 <= width.size <= most
