"""Which mode a version is coded in: the fewest bytes that the links below and their readers allow.

Pure. It may not measure anything; it is told what each region below pulls at and reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltad.delta.backend import Mode
from deltad.delta.coding import Coder, coder_name

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


FASTEST_LINK: dict[Mode, float] = {"dense": 6.9e6, "mid": 7.4e6, "fast": 8.9e6}
"""The bytes a second that one thread gives in each context mode. A link that is faster waits for the encoder."""

# What any delta may hold: lanes without an exponent go blind, and frames that gain nothing go whole.
_ALWAYS = (Coder.RAW, Coder.BLIND, Coder.PACKED)

UNMEASURED = ModeChoice("dense", "no region below has told what it pulls at")


def choose_mode(coder: str, readers: Sequence[Reader], *, threads: int = 1) -> ModeChoice:
    """The mode for `coder`, as configured, where `readers` pull and `threads` encode.

    A mode that is configured is taken. `auto` takes the densest mode whose bytes leave the encoder no slower
    than the slowest measured link carries them: below that rate the link is what a version waits for, and
    bytes are seconds; above it the encoder is. Of single steps of a policy off the quantisation grid, from files
    to chunks and with the digest of the target, on one thread:

        mode    bytes on the wire   encode      bytes a second = bytes on the wire · encode
        dense   0.160 %             4.3 GB/s    6.9 MB/s    (55 Mbit/s)
        mid     0.166 %             4.4 GB/s    7.4 MB/s    (59 Mbit/s)
        fast    0.192 %             4.6 GB/s    8.9 MB/s    (71 Mbit/s)

    These are figures of a run of `python -m bench codec` in which memcpy went at 13.4 GB/s; they follow the rate of
    memory, and bench/results/codec.json has those of the last run. Bytes on the wire: "/ all weights, off-grid".
    Encode: memcpy times 1 / (1 / (e · f) + 1 / d), with e "encode / memcpy", f "encode
    from files / in RAM" and d "full digest / memcpy". Decoding is never the slower side.

    Above the last line coding by context is the bottleneck, and `blind` is taken, which needs two fifths more bytes
    than dense and less time. The slowest link decides, since its region is the one that lags. Before anything
    is measured, it is `dense`: bytes that were not sent cannot be had back.

    No context mode is chosen while a reader has told that it does not read the context coder, which is the only one
    that a writer may do without. A reader that has told that it lacks another is named in the reason.
    """
    choice = _choose(coder, readers, threads)
    needed = _ALWAYS if choice.mode == "blind" else (*_ALWAYS, Coder.CONTEXT)
    lack = _lack(readers, needed)
    return ModeChoice(choice.mode, f"{choice.reason}, though {lack}") if lack else choice


def _lack(readers: Sequence[Reader], needed: Sequence[Coder]) -> str:
    """Who has told that it does not read one of these, and which; empty if nobody has."""
    told = (reader for reader in readers if reader.coders)
    lacking = ((r.name, coder) for r in told for coder in needed if coder not in r.coders)
    return next((f"{name} does not read coder {int(coder)} ({coder_name(coder)})" for name, coder in lacking), "")


def _choose(coder: str, readers: Sequence[Reader], threads: int) -> ModeChoice:
    for mode in MODES:
        if coder == mode:
            return ModeChoice(mode, "as configured")
    if no_context := _lack(readers, (Coder.CONTEXT,)):
        return ModeChoice("blind", no_context)
    slowest = min((r for r in readers if r.rate > 0), key=lambda r: r.rate, default=None)
    if slowest is None:
        return UNMEASURED
    per_thread = slowest.rate / threads
    mode = next((mode for mode in MODES if per_thread <= FASTEST_LINK.get(mode, per_thread)), MODES[-1])
    return ModeChoice(mode, f"{slowest.name} pulls at {slowest.rate / 1e6:.1f} MB/s")
