"""A long-distance link for real TCP: two network namespaces, and between them delay, a rate and lost packets.

    with Wan(Line(rtt=0.1, rate=50e6, loss=0.001)) as wan:
        server = wan.popen("a", [sys.executable, "-m", "http.server", "--bind", wan.address("a")])
        wan.popen("b", ["curl", f"http://{wan.address('a')}:8000/file"])

Each namespace has one TUN device. A process reads packets from either, decides by a seeded random source which of
them are lost, lets the others through at the rate, each after half a round trip, and drops what does not fit the
queue. So it is the kernel's own TCP that fills the link, retransmits and backs off. It needs root and /dev/net/tun;
`missing()` says why it cannot be had.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_CLONE_NEWNET = 0x40000000
_DEVICE = "wan0"
_BATCH = 64
_MOST_BYTES = 64 << 10
_NAMES = ("a", "b")


@dataclass(frozen=True, slots=True)
class Line:
    """A link, the same in both directions: `rtt` in seconds, `rate` in bytes of IP packets a second.

    `loss` is the share of packets that vanish. `queue` is how many bytes wait for the rate before more are dropped;
    None stands for what the line carries in one round trip. `mtu` in bytes: larger packets are fewer, and each costs
    the box its share of a processor.
    """

    rtt: float
    rate: float
    loss: float = 0.0
    seed: int = 0
    queue: int | None = None
    mtu: int = 1500

    @property
    def queue_bytes(self) -> int:
        """At least 64 packets."""
        return max(64 * self.mtu, int(self.rate * self.rtt) if self.queue is None else self.queue)


@dataclass(slots=True)
class Counts:
    """What happened to the packets of one direction."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    dropped: int = 0


class Lane:
    """One direction: which packets come out, and when. Does no IO; times are on any monotonic clock."""

    def __init__(self, line: Line, seed: int) -> None:
        self._line = line
        self._rng = random.Random(seed)
        self._departed = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()
        self.counts = Counts()

    def put(self, packet: bytes, now: float) -> None:
        """A packet has come in at `now`."""
        line, counts = self._line, self.counts
        begins = max(now, self._departed)
        if (begins - now) * line.rate > line.queue_bytes:
            counts.dropped += 1
            return
        self._departed = begins + len(packet) / line.rate
        if line.loss and self._rng.random() < line.loss:
            counts.lost += 1
            return
        self._waiting.append((self._departed + line.rtt / 2, packet))

    @property
    def due(self) -> float | None:
        """When the next packet comes out."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, now: float) -> bytes | None:
        """The next packet, if it is due."""
        if not self._waiting or self._waiting[0][0] > now:
            return None
        packet = self._waiting.popleft()[1]
        self.counts.packets += 1
        self.counts.bytes += len(packet)
        return packet


def missing() -> str:
    """Why there can be no `Wan` here; empty if there can."""
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    name = f"wan-probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Wan:
    """Two namespaces, `a` and `b`, and the line between them. What was started in them ends with it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._token = uuid.uuid4().hex[:6]
        self._box: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def namespace(self, end: str) -> str:
        """The name of a namespace, as `ip netns` knows it."""
        return f"wan-{self._token}-{end}"

    def address(self, end: str) -> str:
        """The address of an end, for the other one."""
        return f"10.77.0.{1 + _NAMES.index(end)}"

    def popen(self, end: str, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a command at one end."""
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace(end), *command], **how)
        self._started.append(process)
        return process

    def counts(self) -> dict[str, Counts]:
        """What came out at each end until now."""
        assert self._box is not None, "counts are those of a line that is up"
        assert self._box.stdin is not None
        assert self._box.stdout is not None
        self._box.stdin.write("\n")
        self._box.stdin.flush()
        return {end: Counts(**counts) for end, counts in json.loads(self._box.stdout.readline()).items()}

    def __enter__(self) -> Self:
        try:
            for end in _NAMES:
                _ip("netns", "add", self.namespace(end))
            self._box = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.wan", *map(self.namespace, _NAMES), json.dumps(asdict(self.line))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            assert self._box.stdout is not None
            if self._box.stdout.readline() != "ready\n":
                raise RuntimeError(f"the line did not come up: exit status {self._box.wait(10)}")
            for end in _NAMES:
                other = _NAMES[1 - _NAMES.index(end)]
                inside = ("-n", self.namespace(end))
                _ip(*inside, "link", "set", "lo", "up")
                _ip(*inside, "addr", "add", self.address(end), "peer", self.address(other), "dev", _DEVICE)
                _ip(*inside, "link", "set", _DEVICE, "mtu", str(self.line.mtu), "txqueuelen", "10000", "up")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in (*self._started, self._box):
            if process is None:
                continue
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for end in _NAMES:
            subprocess.run(["ip", "netns", "del", self.namespace(end)], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _open_tun(namespace: str) -> int:
    """A TUN device in a namespace; this process is left in it."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN_NO_PI))
    return descriptor


def _receive(descriptor: int, lane: Lane) -> None:
    for _ in range(_BATCH):
        try:
            packet = os.read(descriptor, _MOST_BYTES)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EIO):  # nothing there, or the device is not up yet
                return
            raise
        lane.put(packet, time.monotonic())


def _send(descriptor: int, lane: Lane) -> None:
    now = time.monotonic()
    while (packet := lane.take(now)) is not None:
        with contextlib.suppress(OSError):  # a packet that an end does not take is lost, as anywhere
            os.write(descriptor, packet)


def _forward(ends: dict[str, int], lanes: dict[str, Lane]) -> None:
    """Carry packets until standard input ends; a line on it asks for the counts."""
    poll = select.poll()
    other = {ends["a"]: lanes["b"], ends["b"]: lanes["a"]}
    for descriptor in (*ends.values(), 0):
        poll.register(descriptor, select.POLLIN)
    while True:
        due = min((lane.due for lane in lanes.values() if lane.due is not None), default=None)
        wait = None if due is None else max(0.0, 1000 * (due - time.monotonic()))
        for descriptor, _ in poll.poll(wait):
            if descriptor == 0:
                if not os.read(0, 1):
                    return
                print(json.dumps({end: asdict(lane.counts) for end, lane in lanes.items()}), flush=True)
            else:
                _receive(descriptor, other[descriptor])
        for end, descriptor in ends.items():
            _send(descriptor, lanes[end])


def main() -> None:
    """The process between the namespaces."""
    parser = argparse.ArgumentParser()
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("line", type=json.loads)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = Line(**arguments.line)
    ends = {end: _open_tun(name) for end, name in zip(_NAMES, arguments.namespaces, strict=True)}
    lanes = {end: Lane(line, 2 * line.seed + i) for i, end in enumerate(_NAMES)}
    print("ready", flush=True)
    _forward(ends, lanes)


if __name__ == "__main__":
    main()
