"""The operations that have several implementations: numpy, numba and, on a GPU, CuPy.

All backends give the same bytes and the same arrays, and refuse the same input; `numpy` is the
reference that the others are tested against.

A frame's lanes are given as `Segments`, one array per rectangle, in the order of the header. Positions,
ranks and streams run over their concatenation, which is never made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from deltad.delta.coding import Coding
from deltad.delta.digest import U64
from deltad.types import DType

Lanes = npt.NDArray[Any]
"""A one-dimensional array of unsigned integers of the dtype's lane width."""
Segments = Sequence[Lanes]
"""The lanes of a frame: one contiguous array per rectangle, in the order of the header."""
Positions = npt.NDArray[np.int64]
Stream = bytes | memoryview | npt.NDArray[np.uint8]
"""A plain stream. Arrays are contiguous."""
Mode = Literal["blind", "fast", "mid", "dense"]
"""`blind` codes without context; the others by context, the denser the more time they may take."""

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""The array type of lanes, by their width in bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment lies, for its element sums: its tensor's seed, and the canonical position of its first lane.

    The segment's lanes follow each other canonically.
    """

    seed: int
    start: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed lanes: ascending positions and, for each, the plain group difference from old to new, never 0."""

    positions: Positions
    differences: Lanes


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A blind or context frame before its header is written.

    `changed` counts the changed lanes of every segment, shape [segments]; `sums` is what they add to the
    element sums of their tensors (new less old), shape [segments, 2]. `streams` are plain, five per class.
    """

    coding: Coding
    changed: npt.NDArray[np.int64]
    sums: U64
    streams: Sequence[Stream]


class Backend(Protocol):
    """Encode, decode, apply and sum. Raises only what is said here, and writes nothing when it raises.

    The backend of a device may raise DeviceError in any call, likewise with nothing written.

    `decode` and `decode_apply` get a coding and stream lengths that `check_coding` and `check_lengths`
    let pass, and must take any stream contents. Both raise FormatError where a stream is not used up exactly, asks
    for more than there is, names a rank or position outside, or is not in its one spelling.
    """

    @property
    def name(self) -> str:
        """What computes: numpy, numba or cupy."""

    def encode(
        self, old: Segments, new: Segments, places: Sequence[Place], dtype: DType, mode: Mode
    ) -> EncodedFrame | None:
        """The changes from `old` to `new`; None if there are none. Nothing is written to.

        A dtype without an exponent is coded blind, whatever the mode.
        """

    def decode(self, coding: Coding, streams: Sequence[Stream], base: Segments | None, dtype: DType) -> Changes:
        """The changes by frame position. `base` holds the old lanes and is needed by the context coder only."""

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        """Write old ∘ difference in place into `target`, all lanes of one tensor, of any stride.

        Positions are canonical and within it. Returns the old lanes, and what the writes add to the
        tensor's element sum, shape [2].
        """

    def decode_apply(  # noqa: PLR0917
        self,
        coding: Coding,
        check: U64,
        streams: Sequence[Stream],
        target: Segments,
        places: Sequence[Place],
        dtype: DType,
    ) -> U64:
        """`decode` on top of `target`, then write; returns what that adds to the sums, shape [segments, 2].

        Raises IntegrityError, before a byte is written, if those do not add up to `check`, shape [2].
        """

    def pack(self, lanes: Segments, dtype: DType) -> Sequence[Stream]:
        """The streams of a packed frame that holds these lanes, three for each byte of one. Nothing is written to.

        A backend without loops of its own for this and for `unpack` hands both on to `deltad.delta.packing`.
        """

    def unpack(self, streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
        """All lanes of a packed frame, as one new array. `check_lengths` let the lengths pass; takes any contents.

        Raises FormatError where a code is not complete or a stream is not used up exactly.
        """

    def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
        """The share of every segment in its tensor's element sum, shape [segments, 2]; of lanes of any width."""


def choose(kind: str = "auto") -> Backend:
    """The backend of this kind, at little cost. `auto` takes numba if it works here, else numpy, and no GPU.

    Raises ConfigError for one that does not work here. A daemon probes instead: `deltad.delta.backend.choice.probe`.
    """
    from deltad.delta.backend import choice

    return choice.choose(kind)


def warm(backend: Backend, dtypes: Sequence[str] = ("BF16",)) -> None:
    """Have all compiled that frames of these dtypes need: seconds at a first start, and no commit waits for it."""
    if backend.name == "numba":
        from deltad.delta.backend.numba import proof

        proof.warm(dtypes)
