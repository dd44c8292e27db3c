"""What others make of a pair, in bytes: dense XOR, int32 gaps with values, zstd --patch-from; and the bound.

Written from what the systems say of their formats, and simpler than they are: names, shapes and checksums are
left out, which is in their favour.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from bench.pairs import Bits, States

CHUNK_LANES = 16 << 20
"""32 MiB of 16-bit patterns."""


def dense_xor(old: Bits, new: Bits) -> int:
    """The XOR of all weights in chunks of 32 MiB, each through zstd at level 1. What all ratios are against."""
    compressor = zstandard.ZstdCompressor(level=1)
    starts = range(0, old.size, CHUNK_LANES)
    return sum(
        len(compressor.compress((old[at : at + CHUNK_LANES] ^ new[at : at + CHUNK_LANES]).tobytes())) for at in starts
    )


def tensor_xor(states: States) -> int:
    """The XOR of every tensor that changed through zstd at level 1, as slime writes it."""
    compressor = zstandard.ZstdCompressor(level=1)
    deltas = (old ^ new for old, new in _tensors(states))
    return sum(len(compressor.compress(delta.tobytes())) for delta in deltas if delta.any())


def sparse_int32(states: States) -> int:
    """An int32 per change for its place, told as the gap from the one before, and its new value; through zstd."""
    compressor = zstandard.ZstdCompressor(level=1)
    total = 0
    for old, new in _tensors(states):
        positions = np.flatnonzero(old != new)
        if positions.size:
            total += len(compressor.compress(np.diff(positions, prepend=0).astype("<i4").tobytes()))
            total += len(compressor.compress(new[positions].tobytes()))
    return total


def patch_from(old: Bits, new: Bits) -> int:
    """`zstd -1 --patch-from` of the first 32 MiB. Raises FileNotFoundError where there is no zstd program."""
    program = shutil.which("zstd")
    if program is None:
        raise FileNotFoundError("there is no zstd program")
    with tempfile.TemporaryDirectory(prefix="deltad-bench-") as directory:
        paths = [Path(directory, name) for name in ("old", "new", "patch")]
        old[:CHUNK_LANES].tofile(paths[0])
        new[:CHUNK_LANES].tofile(paths[1])
        arguments = [program, "-1", "-q", "--long=27", f"--patch-from={paths[0]}", str(paths[1]), "-o", str(paths[2])]
        subprocess.run(arguments, check=True, capture_output=True)
        return paths[2].stat().st_size


def bound(old: Bits, new: Bits) -> float:
    """(H(mask | exponent) + H(difference | exponent)) of the pair, in bytes.

    The exponent is the old weight's; the difference that on the monotone line, negated where the old weight is
    negative. Both entropies are those of the pair's own frequencies, whose cost is not counted; and neighbours
    are taken for independent, which they are not quite, so that a coder may come out below.
    """
    mask = old != new
    exponents = ((old >> np.uint16(7)) & np.uint16(0xFF)).astype(np.int64)
    lanes = np.bincount(exponents, minlength=256)
    before, after = old[mask], new[mask]
    changed = exponents[mask]
    marks = np.bincount(changed, minlength=256)
    of_mask = sum(_bits(np.array([marks[e], lanes[e] - marks[e]])) for e in np.flatnonzero(lanes))
    differences = adjusted(before, after)
    of_values = sum(_bits(_counts(differences[changed == e])) for e in np.flatnonzero(marks))
    return (of_mask + of_values) / 8


def adjusted(old: Bits, new: Bits) -> npt.NDArray[np.int64]:
    """The distance from old to new on the monotone line of bf16, modulo 2^16; its sign is that of magnitudes."""
    line = [bits.view(np.int16).astype(np.int64) for bits in (old, new)]
    one, other = (np.where(x < 0, x ^ 0x7FFF, x) for x in line)
    distance = np.where(line[0] < 0, one - other, other - one)
    return (distance + 0x8000) % 0x10000 - 0x8000


def _counts(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.unique(values, return_counts=True)[1]


def _bits(counts: npt.NDArray[np.int64]) -> float:
    """The bits that an ideal coder needs for symbols with these counts."""
    present = counts[counts > 0].astype(np.float64)
    return float((present * np.log2(present.sum() / present)).sum())


def _tensors(states: States) -> Iterator[tuple[Bits, Bits]]:
    at = 0
    for extent in states.tensors:
        yield states.old[at : at + extent.lanes], states.new[at : at + extent.lanes]
        at += extent.lanes
