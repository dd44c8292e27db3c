"""Some rectangles of a layout, and what deltas have done to each of their lanes so far.

For what cannot be told by changes alone: whole frames, and whatever is read beside the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Lanes, Positions
from deltad.delta.codec import Patch
from deltad.delta.difference import compose, join
from deltad.delta.emit import Checks, FrameWriter, WrittenFrame, cut_segments, halves
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout


class Region:
    """Some rectangles, and what has happened to each of their lanes so far.

    A lane's number is the difference from what it was, or its pattern where `known` says that it is known:
    from the start beside the base, else from the first whole frame on.
    """

    def __init__(self, rects: Sequence[Rect], layout: Layout, lanes: Sequence[Lanes] | None = None) -> None:
        self.rects = tuple(rects)
        self.layout = layout
        self.dtype = layout.tensors[rects[0].tensor].type
        unsigned = UNSIGNED[self.dtype.lane_bytes]
        self.numbers: list[Lanes]
        if lanes is None:
            self.numbers = [np.zeros(rect.lanes, unsigned) for rect in rects]
        else:
            self.numbers = [segment.copy() for segment in lanes]
        self.known = [np.full(rect.lanes, lanes is not None) for rect in rects]

    def play(self, patch: Patch) -> None:
        """Let a patch happen to the lanes that it shares with this region."""
        shape = self.layout.tensors[patch.tensor].lane_shape
        for rect, numbers, known in zip(self.rects, self.numbers, self.known, strict=True):
            if rect.tensor != patch.tensor:
                continue
            which, at = rect.locate(_positions(patch), shape)
            values = patch.values[which]
            if patch.absolute:
                numbers[at], known[at] = values, True
            else:
                was, pattern = numbers[at], known[at]
                after = join(was, values, self.dtype)
                after[pattern] = compose(was[pattern], values[pattern], self.dtype)
                numbers[at] = after

    def emit(self, writer: FrameWriter, checks: Checks) -> Iterator[WrittenFrame]:
        """Frames that do what has happened: whole where lanes are known, blind where they are not."""
        yield from self._emit(writer, checks, self.rects, self.numbers, self.known)

    def _emit(
        self,
        writer: FrameWriter,
        checks: Checks,
        rects: tuple[Rect, ...],
        numbers: list[Lanes],
        known: list[npt.NDArray[np.bool_]],
    ) -> Iterator[WrittenFrame]:
        if all(part.all() for part in known):
            yield from writer.whole(rects, numbers)
        elif not any(part.any() for part in known):
            # From a lane of zero bits, a difference leads to a pattern that differs from it by just that.
            zeros = [np.zeros_like(part) for part in numbers]
            after = [compose(zero, part, self.dtype) for zero, part in zip(zeros, numbers, strict=True)]
            yield from writer.delta(rects, zeros, after, writer.encode(rects, zeros, after), checks)
        else:
            for half, start, end in halves(rects):
                parts = cut_segments(numbers, start, end), cut_segments(known, start, end)
                yield from self._emit(writer, checks, half, *parts)


def _positions(patch: Patch) -> Positions:
    if isinstance(patch.index, slice):
        return np.arange(patch.index.start, patch.index.stop, dtype=np.int64)
    return patch.index
