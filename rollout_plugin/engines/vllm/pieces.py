"""Where the lanes of a layout's tensors lie inside an engine's own tensors.

Pure: arrays in, arrays out. An engine fuses, cuts, stacks and permutes what a checkpoint holds; however it
does that, a tensor of its own is a set of runs of canonical lanes. Owns one invariant: within a piece every
canonical position, and every local one, is there once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import Lanes
from deltad.errors import ReplicaError

Ids = npt.NDArray[np.int64]

NOTHING = -2
"""The id of a lane that is not from the checkpoint; such that the first id of all does not seem to follow it."""

_WINDOW_LANES = 1 << 20
_LONG_RUN = 256
"""From here on a run is read as a view; shorter ones are gathered, many at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The runs of one tensor of the layout in one tensor of the engine, ascending by canonical position.

    `canonical`, `local` and `length` have an entry a run: where it starts in the layout's tensor and in the
    engine's, and how many lanes it has.
    """

    tensor: int
    held: str
    canonical: Ids
    local: Ids
    length: Ids

    @property
    def lanes(self) -> int:
        return int(self.length.sum())

    def one_run(self) -> tuple[int, int, int] | None:
        """(canonical, local, length) where there is a single run."""
        if self.length.size != 1:
            return None
        return int(self.canonical[0]), int(self.local[0]), int(self.length[0])

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        """Which of these canonical positions, in any order, are here (as indices), and where each of those lies."""
        run = np.searchsorted(self.canonical, positions, side="right") - 1
        within = positions - self.canonical[run]
        here = np.flatnonzero((run >= 0) & (within < self.length[run]))
        return here, self.local[run[here]] + within[here]

    def intervals(self) -> tuple[Ids, Ids]:
        """What is here as maximal canonical intervals: starts and lengths."""
        return _joined(self.canonical, self.length)

    def windows(self) -> Iterator[tuple[Ids, Ids]]:
        """Canonical and local positions of every lane, ascending, a bounded number at a time."""
        ends = np.cumsum(self.length)
        for first in range(0, self.lanes, _WINDOW_LANES):
            last = min(first + _WINDOW_LANES, self.lanes)
            begin, end = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last, side="left") + 1
            starts = ends[begin:end] - self.length[begin:end]
            skip = np.maximum(first - starts, 0)
            count = np.minimum(ends[begin:end], last) - starts - skip
            yield (
                _expanded(self.canonical[begin:end] + skip, count),
                _expanded(self.local[begin:end] + skip, count),
            )

    def segments(self, held: Lanes) -> Iterator[tuple[list[Lanes], Ids]]:
        """All lanes of the piece, read from the engine's flat tensor: contiguous canonical runs, and their starts.

        Views where runs are long, else copies; a bounded number at a time.
        """
        if self.length.size and self.lanes >= _LONG_RUN * self.length.size:
            for first in range(0, self.length.size, 1024):
                runs = slice(first, first + 1024)
                spans = zip(self.local[runs].tolist(), self.length[runs].tolist(), strict=True)
                yield [held[start : start + count] for start, count in spans], self.canonical[runs]
            return
        for canonical, local in self.windows():
            starts, lengths = _joined(canonical, np.ones_like(canonical))
            yield np.split(held[local], np.cumsum(lengths)[:-1]), starts


def find_pieces(held: str, ids: Ids, starts: Ids, names: list[str]) -> list[Piece]:
    """The pieces of one tensor of the engine. `ids` has for each of its lanes the id of the canonical lane in it.

    Ids count the lanes of all tensors, whose firsts are `starts`, ascending, with at least one id unused between
    two tensors; `NOTHING` is that of a lane which no checkpoint fills. Raises ReplicaError where a lane is there twice.
    """
    if not ids.size:
        return []
    begins = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1)).astype(np.int64)
    length = np.diff(np.append(begins, ids.size))
    first = ids[begins]
    filled = first >= 0
    begins, length, first = begins[filled], length[filled], first[filled]
    of = np.searchsorted(starts, first, side="right") - 1
    pieces = []
    for tensor in np.unique(of).tolist():
        mine = np.flatnonzero(of == tensor)
        mine = mine[np.argsort(first[mine], kind="stable")]
        canonical = first[mine] - starts[tensor]
        if (canonical[1:] < canonical[:-1] + length[mine][:-1]).any():
            raise ReplicaError(
                f"engine tensor {held!r}",
                expected=f"each element of {names[tensor]!r} once",
                found="some of them twice",
                hint="this model cannot be followed in place",
            )
        pieces.append(Piece(tensor, held, canonical, begins[mine], length[mine]))
    return pieces


def _joined(starts: Ids, lengths: Ids) -> tuple[Ids, Ids]:
    """Ascending disjoint runs, with those that touch made one."""
    if not starts.size:
        return starts, lengths
    breaks = np.concatenate(([0], np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1)).astype(np.int64)
    ends = (starts + lengths)[np.append(breaks[1:], starts.size) - 1]
    return starts[breaks], ends - starts[breaks]


def _expanded(starts: Ids, counts: Ids) -> Ids:
    """Every position of runs, in the order of the runs."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)
