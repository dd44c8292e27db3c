"""Which mode a version is coded in: the fewest bytes that the links below and their readers allow.

Pure. It may not measure anything; it is told what each region below pulls at and reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltad.delta.backend import Mode
from deltad.delta.coding import Coder

MODES: tuple[Mode, ...] = ("dense", "mid", "fast", "blind")
"""From the fewest bytes to the least work."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Reader:
    """A region below, as its last report tells.

    `rate`: bytes a second at which it pulls, 0 where it has not told or not lately. `coders`: those that it
    reads, empty where it has not told.
    """

    name: str
    rate: float = 0.0
    coders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode, and in a few words why it is this one."""

    mode: Mode
    reason: str


FASTEST_LINK: dict[Mode, float] = {"dense": 5.4e6, "mid": 6.7e6, "fast": 9.5e6}
"""The bytes a second that one thread gives in each context mode. A link that is faster waits for the encoder."""

UNMEASURED = ModeChoice("dense", "no region below has told what it pulls at")


def choose_mode(coder: str, readers: Sequence[Reader], *, threads: int = 1) -> ModeChoice:
    """The mode for `coder`, as configured, where `readers` pull and `threads` encode.

    A mode that is configured is taken. `auto` takes the densest mode whose bytes leave the encoder no slower
    than the slowest measured link carries them: below that rate the link is what a version waits for, and
    bytes are seconds; above it the encoder is. For a model of one copy, one thread, and single steps of a
    policy off the quantisation grid at learning rates of 1e-6 and 3e-6 (geometric means of three pairs):

        mode    bytes on the wire   encode      decode + apply   bytes a second = bytes on the wire · encode
        dense   0.136 %             4.0 GB/s    4.9 GB/s         5.4 MB/s    (43 Mbit/s)
        mid     0.141 %             4.7 GB/s    6.4 GB/s         6.7 MB/s    (53 Mbit/s)
        fast    0.168 %             5.7 GB/s    7.8 GB/s         9.5 MB/s    (76 Mbit/s)

    Decoding is never the slower side. Above the last line coding by context is the bottleneck, and `blind` is
    taken, which needs half as many bytes again as dense and about half the time. The slowest link decides,
    since its region is the one that lags. Before anything is measured, it is `dense`: bytes that were not
    sent cannot be had back.

    No context mode is chosen while a reader has told that it does not read the context coder.
    """
    unread = next((r.name for r in readers if r.coders and Coder.CONTEXT not in r.coders), "")
    unread = unread and f"{unread} does not read coder {int(Coder.CONTEXT)} (context)"
    for mode in MODES:
        if coder == mode:
            warns = unread if mode != "blind" else ""
            return ModeChoice(mode, f"as configured, though {warns}" if warns else "as configured")
    if unread:
        return ModeChoice("blind", unread)
    slowest = min((r for r in readers if r.rate > 0), key=lambda r: r.rate, default=None)
    if slowest is None:
        return UNMEASURED
    per_thread = slowest.rate / threads
    mode = next((mode for mode in MODES if per_thread <= FASTEST_LINK.get(mode, per_thread)), MODES[-1])
    return ModeChoice(mode, f"{slowest.name} pulls at {slowest.rate / 1e6:.1f} MB/s")
