"""Hand kept streams, right and spoilt, to the numba backend: `python -m tests.corpus.replay`.

For a process whose allocator checks what lies around every block, since kernels write into memory of their own,
which no test can put a guard zone around.
"""

from __future__ import annotations

import contextlib

import numpy as np

from deltad.delta.backend import Place
from deltad.delta.backend.numba.engine import NumbaBackend
from deltad.delta.coding import check_lengths
from deltad.errors import FormatError, IntegrityError
from tests.corpus.make import BASES, Hostile, base, kept_streams

SPOILT = 20


def main() -> None:
    backend, rng = NumbaBackend(), np.random.default_rng(1)
    places = [Place(7, 11)]
    for hostile in kept_streams().values():
        for kind in BASES:
            for turn in range(SPOILT):
                tried = spoilt(hostile, rng) if turn else hostile
                old, check = base(kind), np.array([1, 2], np.uint64)
                with contextlib.suppress(FormatError, IntegrityError):
                    check_lengths(tried.coding, tried.dtype, [len(stream) for stream in tried.streams])
                    backend.decode_apply(tried.coding, check, tried.streams, [old], places, tried.dtype)
                with contextlib.suppress(FormatError, IntegrityError):
                    check_lengths(tried.coding, tried.dtype, [len(stream) for stream in tried.streams])
                    backend.decode(tried.coding, tried.streams, [old], tried.dtype)
    print("replayed")


def spoilt(hostile: Hostile, rng: np.random.Generator) -> Hostile:
    """The same lengths, and other bytes in a few places."""
    streams = [np.frombuffer(stream, np.uint8).copy() for stream in hostile.streams]
    for stream in streams:
        for _ in range(rng.integers(3) if stream.size else 0):
            begin = rng.integers(stream.size)
            stream[begin : begin + rng.integers(1, 20)] = rng.choice([0, 1, 15, 16, 127, 128, 255])
    return Hostile(hostile.dtype, hostile.coding, tuple(stream.tobytes() for stream in streams))


if __name__ == "__main__":
    main()
