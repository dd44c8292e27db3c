"""The kernel's TCP settings against the configured links. Pure.

The configuration names neither rate nor distance of a link, so both are assumed, and said, where the running daemon
has not measured them: 1 Gbit/s over 100 ms, a good line between two continents.
"""

from __future__ import annotations

from collections.abc import Iterator

from deltad.config import Config
from deltad.figures import count, duration, rate, size
from deltad.ops.doctor.facts import Facts
from deltad.ops.doctor.finding import Finding, Level

ASSUMED_RATE = 125_000_000
ASSUMED_ROUND_TRIP = 0.1
_ASSUMED_CONNECTIONS = 4
_NEAR = 0.01


def windows_carry(window: int, connections: int, round_trip: float) -> float:
    """Bytes a second that so many connections move if each has at most `window` bytes of buffer: one window, half
    of its buffer by the kernel's accounting (tcp(7), tcp_adv_win_scale), for every round trip."""
    return connections * window / 2 / round_trip


def window_for(connections: int, round_trip: float) -> int:
    """The buffer that each connection needs for the assumed rate."""
    return int(2 * ASSUMED_RATE * round_trip / connections)


def examine_tcp(config: Config, facts: Facts) -> Iterator[Finding]:
    """Nothing, where this daemon has no link to others."""
    if not config.upstreams and config.relay is None:
        return
    far = not config.upstreams
    for upstream in config.upstreams:
        measured = facts.round_trips.get(upstream.url, 0.0)
        far |= not measured or measured > _NEAR
        yield from _window(
            f"link to {upstream.url}", "tcp_rmem", facts.tcp.receive, upstream.connections, measured or None
        )
    if config.relay is not None:
        yield from _window("regions that pull from here", "tcp_wmem", facts.tcp.send, _ASSUMED_CONNECTIONS, None)
    if far:
        yield from _habits(config, facts)


def _window(
    about: str, setting: str, window: int | None, connections: int, round_trip: float | None
) -> Iterator[Finding]:
    if window is None:
        return
    trip = round_trip or ASSUMED_ROUND_TRIP
    carries = windows_carry(window, connections, trip)
    known = "measured" if round_trip else "assumed"
    found = (
        f"{count(connections, 'connection')} with {size(window)} of buffer ({setting}) carry at most {rate(carries)} "
        f"at {duration(trip)} ({known})"
    )
    if carries >= ASSUMED_RATE:
        yield Finding(Level.OK, about, found)
        return
    needed = window_for(connections, trip)
    yield Finding(
        Level.NOTE if 2 * carries >= ASSUMED_RATE else Level.WARNING,
        about,
        found,
        f"{rate(ASSUMED_RATE)} (1 Gbit/s, assumed), which takes {size(needed)} each",
        f"`sysctl -w net.ipv4.{setting}='4096 131072 {1 << (needed - 1).bit_length()}'`, or more `connections`, "
        "unless the line is slower or nearer than assumed",
    )


def _habits(config: Config, facts: Facts) -> Iterator[Finding]:
    tcp = facts.tcp
    if tcp.slow_start_after_idle:
        yield Finding(
            Level.NOTE,
            "TCP",
            "a connection that was idle starts slowly again (tcp_slow_start_after_idle = 1)",
            "0, since versions come in bursts",
            "`sysctl -w net.ipv4.tcp_slow_start_after_idle=0` on the sending side saves round trips for every version",
        )
    if not tcp.congestion or config.relay is None:
        return
    if tcp.congestion in ("cubic", "reno"):
        there = "bbr" in tcp.available
        yield Finding(
            Level.NOTE,
            "TCP",
            f"congestion control is {tcp.congestion}, which takes every lost packet for a full line",
            advice="on long lines that lose packets bbr carries more: "
            + ("" if there else "`modprobe tcp_bbr`, then ")
            + "`sysctl -w net.ipv4.tcp_congestion_control=bbr` here, where versions are sent from",
        )
    else:
        yield Finding(Level.OK, "TCP", f"congestion control is {tcp.congestion}")
