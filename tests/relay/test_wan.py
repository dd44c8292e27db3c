"""The long-distance link of the tests does what it says: delay, rate, loss and a bounded queue, under real TCP."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.wan import Lane, Line, Wan, missing


def drained(lane: Lane) -> list[tuple[float, bytes]]:
    """All packets with the times at which they come out."""
    found = []
    while (due := lane.due) is not None:
        packet = lane.take(due)
        assert packet is not None
        found.append((due, packet))
    return found


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(20, 1500)), max_size=50))
def test_packets_keep_their_order_their_delay_and_the_rate(sent: list[tuple[float, int]]) -> None:
    line = Line(rtt=0.1, rate=1e5, queue=10**9)
    lane, now = Lane(line, 0), 0.0
    came = []
    for gap, size in sent:
        now += gap
        came.append((now, bytes(size)))
        lane.put(came[-1][1], now)
    found = drained(lane)
    assert [packet for _, packet in found] == [packet for _, packet in came]
    departed = 0.0
    for (out, packet), (entered, _) in zip(found, came, strict=True):
        departed = max(departed, entered) + len(packet) / line.rate
        assert out == pytest.approx(departed + 0.05)


def test_a_packet_is_not_taken_before_it_is_due() -> None:
    lane = Lane(Line(rtt=1.0, rate=1e6), 0)
    lane.put(bytes(1000), 5.0)
    assert lane.take(5.5) is None
    assert lane.take(5.502) == bytes(1000)


def test_what_does_not_fit_the_queue_is_dropped_and_counted() -> None:
    line = Line(rtt=0.1, rate=1500.0, queue=0)
    lane = Lane(line, 0)
    for _ in range(200):
        lane.put(bytes(1500), 0.0)
    assert lane.counts.dropped == 200 - len(drained(lane))
    assert line.queue_bytes <= (200 - lane.counts.dropped) * 1500 <= line.queue_bytes + 1500


def test_the_same_seed_loses_the_same_packets_and_about_as_many_as_it_should() -> None:
    def lost(seed: int) -> list[int]:
        lane = Lane(Line(rtt=0.0, rate=1e12, loss=0.1), seed)
        for number in range(5000):
            lane.put(number.to_bytes(40), number / 1e6)
        kept = {int.from_bytes(packet) for _, packet in drained(lane)}
        assert lane.counts.lost == 5000 - len(kept)
        return sorted(set(range(5000)) - kept)

    assert lost(1) == lost(1) != lost(2)
    assert 400 < len(lost(3)) < 600


SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.sendall(bytes(300_000))
    connection.close()
"""

CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as connection:
    print(sum(len(data) for data in iter(lambda: connection.recv(65536), b"")))
"""


@pytest.mark.skipif(bool(missing()), reason=f"a link between namespaces: {missing()}")
def test_tcp_gets_everything_across_a_line_that_loses_packets() -> None:
    with Wan(Line(rtt=0.02, rate=2e6, loss=0.05, seed=3)) as wan:
        server = wan.popen("a", [sys.executable, "-c", SERVER, wan.address("a")], stdout=-1, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        reader = wan.popen("b", [sys.executable, "-c", CLIENT, wan.address("a")], stdout=-1, text=True)
        assert reader.communicate(timeout=60)[0] == "300000\n"
        counts = wan.counts()
    assert counts["b"].bytes > 300_000
    assert counts["b"].lost + counts["a"].lost > 0
