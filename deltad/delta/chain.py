"""Applying several deltas in a row in one pass over the weights.

Delta by delta, every pass would touch every page again, for scattered changes are everywhere. Here a region of the
weights is read once, taken through all deltas in memory, and given away once; memory is bounded by the regions that
threads work on. Owns one invariant: what is given away is what the deltas, applied one after the other, make of the
base.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from deltad.delta.backend import UNSIGNED, Backend, Lanes
from deltad.delta.codec import DELTA_FRAME_BYTES, apply_frame
from deltad.delta.frame import Rect, StoredFrame, plan_frames, stored_frames
from deltad.delta.layout import Layout
from deltad.delta.threads import in_order
from deltad.delta.weights import Span, Weights, borrowed
from deltad.limits import DEFAULT_LIMITS, Limits

Put = Callable[[Span, Lanes], None]
"""Takes the lanes of a span; they are not looked at any more when it returns."""


def nests(edges: Sequence[Iterable[bytes]], layout: Layout, *, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Whether the frames of all edges, as `apply_chain` takes them, are cut as `plan_frames` cuts, or more finely."""
    heads = _Heads([_frames(edge, layout, limits) for edge in edges])
    for rects in plan_frames(layout, frame_bytes=DELTA_FRAME_BYTES, limits=limits):
        _region(rects, heads, layout)
    return heads.none_left


def apply_chain(
    edges: Sequence[Iterable[bytes]],
    layout: Layout,
    base: Weights,
    put: Put,
    backend: Backend,
    *,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 1,
) -> bool:
    """Give every lane of `base` to `put` once, as it is after all `edges`, which are the chunks of one delta each.

    The chunks' SHA-256 have been checked, and every frame checks what it does to the element sums; the caller sums
    the result. Of each edge one chunk is held at a time. `put` is called by several threads. `base` may be what it
    writes to, if the edges nest.

    False for edges that do not nest, which have to be applied one after the other: then what was given is not the
    result. Raises what `apply_chunks` raises.
    """
    mine = threading.local()

    def work(region: _Region) -> None:
        buffer = getattr(mine, "buffer", None)
        if buffer is None or buffer.size < region.bytes:
            # Kept for the next region: fresh memory costs more in page faults than it takes to fill.
            buffer = mine.buffer = np.empty(max(region.bytes, DELTA_FRAME_BYTES), np.uint8)
        weights = _Memory(region.spans, layout, buffer)
        for span in region.spans:
            with borrowed(base, span) as lanes:
                weights.lanes(*span)[:] = lanes
        for frame in region.frames:
            apply_frame(frame, layout, weights, backend)
        for span in region.spans:
            put(span, weights.lanes(*span))

    heads = _Heads([_frames(edge, layout, limits) for edge in edges])
    plan = plan_frames(layout, frame_bytes=DELTA_FRAME_BYTES, limits=limits)
    with closing(in_order(work, (_region(rects, heads, layout) for rects in plan), threads)) as done:
        for _ in done:
            pass
    return heads.none_left


def _frames(chunks: Iterable[bytes], layout: Layout, limits: Limits) -> Iterator[StoredFrame]:
    for data in chunks:
        yield from stored_frames(data, layout, limits=limits)


@dataclass(frozen=True, slots=True)
class _Region:
    """Some lanes of one dtype, and all frames that change them, those of earlier edges first."""

    spans: tuple[Span, ...]
    frames: tuple[StoredFrame, ...]
    bytes: int


class _Heads:
    """The next frame of every edge."""

    def __init__(self, edges: Sequence[Iterator[StoredFrame]]) -> None:
        self._edges = edges
        self._next = [next(edge, None) for edge in edges]

    @property
    def none_left(self) -> bool:
        return all(frame is None for frame in self._next)

    def take(self, fits: Callable[[StoredFrame], bool]) -> Iterator[StoredFrame]:
        """The next frames that fit, edge by edge."""
        for i, edge in enumerate(self._edges):
            while (frame := self._next[i]) is not None and fits(frame):
                yield frame
                self._next[i] = next(edge, None)


def _region(rects: Sequence[Rect], heads: _Heads, layout: Layout) -> _Region:
    spans: list[Span] = []
    for rect in rects:
        tensor, start, end = _run(rect, layout)
        if spans and spans[-1][0] == tensor and sum(spans[-1][1:]) == start:
            _, start, _ = spans.pop()
        spans.append((tensor, start, end - start))
    within = {tensor: (start, start + count) for tensor, start, count in spans}

    def fits(frame: StoredFrame) -> bool:
        for rect in frame.header.rects:
            tensor, start, end = _run(rect, layout)
            low, high = within.get(tensor, (0, 0))
            if not low <= start < end <= high or not rect.is_contiguous(layout.tensors[tensor].lane_shape):
                return False
        return True

    width = layout.tensors[rects[0].tensor].type.lane_bytes
    return _Region(tuple(spans), tuple(heads.take(fits)), width * sum(count for _, _, count in spans))


def _run(rect: Rect, layout: Layout) -> tuple[int, int, int]:
    shape = layout.tensors[rect.tensor].lane_shape
    return rect.tensor, rect.flat_start(shape), rect.flat_end(shape)


class _Memory:
    """Implements `Weights` for the spans of a region, one behind the other in a buffer."""

    def __init__(
        self, spans: Sequence[Span], layout: Layout, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]
    ) -> None:
        self._at: dict[int, tuple[int, Lanes]] = {}
        at = 0
        for tensor, start, count in spans:
            width = layout.tensors[tensor].type.lane_bytes
            self._at[tensor] = (start, buffer[at : at + count * width].view(UNSIGNED[width]))
            at += count * width

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        first, lanes = self._at[tensor]
        return lanes[start - first : start - first + count]

    def release(self, tensor: int, start: int, count: int) -> None:
        """Nothing to let go: the buffer is used again."""
