"""Caps hold, bursts are bounded, turns are fair, and who no cap covers never waits (P26)."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.protocol.pacing import BURST_SECONDS, DAY_MINUTES, LAG_BYTES, Block, Cap, Pacing

MIB = 1 << 20
BLOCK = 128 << 10
"""The largest piece that a socket gives at once."""
Passed = list[tuple[float, Block]]


class Link:
    """Connections that each ask for their next block as soon as the one before has passed; time is simulated."""

    def __init__(self, caps: list[Cap], seed: int = 0, minute: int = 0) -> None:
        self.now = 100.0
        self.minute = minute
        self.pacing = Pacing(caps, self.now)
        self.passed: Passed = []
        self._rng = random.Random(seed)

    def run(self, connections: list[tuple[str, str]], seconds: float, *, block: int = BLOCK) -> Passed:
        """What passes, and when; one entry of `connections` is a run and a peer."""
        ends, waiting = self.now + seconds, dict[Block, tuple[str, str]]()
        for connection in connections:
            self._ask(waiting, connection, block)
        begun = len(self.passed)
        while self.now < ends:
            done, again = self.pacing.let_pass(self.now, self.minute)
            for passed in done:
                self.passed.append((self.now, passed))
                self._ask(waiting, waiting.pop(passed), block)
            if not done and again is not None:
                # Timers are late by a little, never early.
                self.now = max(self.now, again) + self._rng.random() * 0.002
        for left in waiting:
            self.pacing.withdraw(left)
        return self.passed[begun:]

    def _ask(self, waiting: dict[Block, tuple[str, str]], connection: tuple[str, str], block: int) -> None:
        asked = self.pacing.ask(*connection, self._rng.randint(1, block))
        assert asked is not None
        waiting[asked] = connection


def most_within(passed: Passed, seconds: float) -> int:
    """The most bytes that passed in any span of so many seconds."""
    times = [when for when, _ in passed]
    sums = [0, *accumulate(block.bytes for _, block in passed)]
    return max(sums[bisect_left(times, when + seconds)] - sums[i] for i, when in enumerate(times))


@given(
    rate=st.integers(MIB, 200 * MIB),
    connections=st.integers(1, 16),
    seed=st.integers(0, 2**32),
)
def test_a_cap_holds_within_five_percent_over_any_ten_seconds_and_the_link_is_not_left_idle(
    rate: int, connections: int, seed: int
) -> None:
    # Blocks in proportion, so that a fast link takes no more steps than a slow one.
    block = max(BLOCK, rate // 16)
    passed = Link([Cap(rate)], seed).run([("r", "p")] * connections, 25.0, block=block)
    assert most_within(passed, 10.0) <= 1.05 * 10.0 * rate
    assert sum(b.bytes for _, b in passed) >= 0.95 * 25.0 * rate


@given(rate=st.integers(MIB, 100 * MIB), idle=st.floats(0.0, 1e6))
def test_after_however_long_an_idle_time_a_burst_is_bounded(rate: int, idle: float) -> None:
    link = Link([Cap(rate)])
    link.now += idle
    link.run([("r", "p")] * 8, 0.001)
    assert sum(block.bytes for _, block in link.passed) <= rate * (BURST_SECONDS + 0.004) + BLOCK


@given(
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_runs_at_one_cap_get_equal_shares_however_many_connections_each_has(counts: list[int], seed: int) -> None:
    rate = 8 * MIB
    link = Link([Cap(rate)], seed)
    connections = [(f"run-{i}", f"peer-{i}") for i, count in enumerate(counts) for _ in range(count)]
    shares = {f"run-{i}": 0 for i in range(len(counts))}
    for _, block in link.run(connections, 3.0):
        shares[block.run] += block.bytes
        # A burst may go to whoever has blocks waiting at that moment.
        assert max(shares.values()) - min(shares.values()) <= rate * BURST_SECONDS + 2 * BLOCK


def test_a_run_with_a_cap_of_its_own_leaves_the_rest_to_the_others() -> None:
    link = Link([Cap(10 * MIB), Cap(2 * MIB, run="slow")])
    passed = link.run([("slow", "p")] * 8 + [("fast", "p")], 10.0)
    slow = sum(block.bytes for _, block in passed if block.run == "slow")
    fast = sum(block.bytes for _, block in passed if block.run == "fast")
    assert slow == pytest.approx(20 * MIB, rel=0.05)
    assert fast == pytest.approx(80 * MIB, rel=0.05)


def test_a_capped_peer_holds_up_no_other_of_the_same_run() -> None:
    link = Link([Cap(MIB, peer="thin"), Cap(10 * MIB, peer="wide")])
    passed = link.run([("r", "thin")] * 4 + [("r", "wide")], 10.0)
    wide = sum(block.bytes for _, block in passed if block.levels[0].cap.peer == "wide")
    assert wide == pytest.approx(100 * MIB, rel=0.05)


def test_a_run_that_was_held_back_does_not_take_the_link_for_as_long_when_it_may_go_on() -> None:
    link = Link([Cap(10 * MIB), Cap(MIB, run="night", since=8 * 60, until=20 * 60)], minute=12 * 60)
    both = [("night", "p"), ("day", "p")]
    link.run(both, 60.0)
    link.minute = 21 * 60
    passed = link.run(both, 2.0)
    day = sum(block.bytes for _, block in passed if block.run == "day")
    assert day >= 10 * MIB - LAG_BYTES


def test_bytes_that_no_cap_covers_never_wait() -> None:
    pacing = Pacing([Cap(MIB, run="other"), Cap(MIB, peer="elsewhere")], 0.0)
    assert pacing.ask("r", "p", 1 << 40) is None


@given(since=st.integers(0, DAY_MINUTES - 1), until=st.integers(0, DAY_MINUTES - 1), minute=st.integers(0, 1439))
def test_a_cap_holds_by_the_time_of_day_over_midnight_too(since: int, until: int, minute: int) -> None:
    after, length = (minute - since) % DAY_MINUTES, (until - since) % DAY_MINUTES
    assert Cap(1, since=since, until=until).holds(minute) == (since == until or after < length)


def test_who_gives_up_waiting_is_forgotten_and_costs_nothing() -> None:
    pacing = Pacing([Cap(MIB)], 0.0)
    first, second = pacing.ask("r", "p", MIB), pacing.ask("r", "p", 1)
    assert first is not None
    pacing.withdraw(first)
    assert pacing.let_pass(0.0, 0) == ([second], None)
