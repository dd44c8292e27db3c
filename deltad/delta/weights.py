"""Weights as the delta sees them: lanes of tensors, by window; and a frame's share of them, by rectangle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import numpy as np

from deltad.delta.backend import UNSIGNED, Backend, Lanes, Place, Positions
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.digest import U64, tensor_seed
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout
from deltad.delta.threads import in_order

_WINDOW_LANES = 1 << 20
_HASHED_BYTES = 4 << 20


class Weights(Protocol):
    """Something that holds the tensors of a layout, for several threads. A tensor is named by its index there."""

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        """`count` lanes from canonical position `start`, as unsigned integers, on loan until they are released.

        A view where possible, of any alignment. What must be waited for while they are on loan may be
        someone's writing to a file, so no loan outlasts the work on a frame.
        """

    def release(self, tensor: int, start: int, count: int) -> None:
        """The same thread is done with these lanes: memory that backs them may be dropped.

        Does nothing for lanes that are not on loan.
        """


Span = tuple[int, int, int]
"""Lanes of one tensor: its index, the canonical position of the first, and how many."""


@contextmanager
def borrowed(weights: Weights, span: Span) -> Iterator[Lanes]:
    """The lanes of a span, released at the end."""
    try:
        yield weights.lanes(*span)
    finally:
        weights.release(*span)


def spans_of(layout: Layout, span_bytes: int) -> Iterator[list[Span]]:
    """Every lane of every tensor once, in lists of spans that are worth a thread's while: `span_bytes` at most."""
    found: list[Span] = []
    room = span_bytes
    for i, spec in enumerate(layout.tensors):
        width = spec.type.lane_bytes
        step = max(1, span_bytes // width)
        for start in range(0, spec.lanes, step):
            count = min(step, spec.lanes - start)
            if found and count * width > room:
                yield found
                found, room = [], span_bytes
            found.append((i, start, count))
            room -= count * width
    if found:
        yield found


def sum_weights(
    layout: Layout, weights: Weights, backend: Backend | None = None, *, window_bytes: int = 4 << 20, threads: int = 1
) -> U64:
    """Element sums of everything in `weights`, read window by window. Shape [tensors, 2]."""
    backend = backend or NumpyBackend()

    def add_up(spans: list[Span]) -> tuple[list[int], U64]:
        places = [Place(tensor_seed(layout.tensors[i].name), start) for i, start, _ in spans]
        with ExitStack() as loans:
            lanes = [np.ascontiguousarray(loans.enter_context(borrowed(weights, span))) for span in spans]
            return [i for i, _, _ in spans], backend.sum(lanes, places)

    sums = np.zeros((len(layout.tensors), 2), np.uint64)
    for tensors, shares in in_order(add_up, spans_of(layout, window_bytes), threads):
        np.add.at(sums, tensors, shares)
    return sums


def hash_weights(layout: Layout, weights: Weights, *, threads: int = 1) -> bytes:
    """SHA-256 of every tensor's canonical bytes, in layout order, as an anchor's manifest holds them.

    That of an alias is of no bytes.
    """

    def hashed(tensor: int) -> bytes:
        spec = layout.tensors[tensor]
        digest, step = hashlib.sha256(), _HASHED_BYTES // spec.type.lane_bytes
        for start in range(0, spec.lanes, step):
            with borrowed(weights, (tensor, start, min(step, spec.lanes - start))) as lanes:
                digest.update(np.ascontiguousarray(lanes).view(np.uint8).data)
        return digest.digest()

    return b"".join(in_order(hashed, range(len(layout.tensors)), threads))


@contextmanager
def borrowed_segments(weights: Weights, rects: Sequence[Rect], layout: Layout) -> Iterator[list[Lanes]]:
    """What `read_segments` gives, released at the end."""
    try:
        yield read_segments(weights, rects, layout)
    finally:
        release_segments(weights, rects, layout)


def read_segments(weights: Weights, rects: Sequence[Rect], layout: Layout) -> list[Lanes]:
    """The lanes of each rectangle, row-major: views where the rectangle is one run, else copies."""
    segments = []
    for rect in rects:
        shape = layout.tensors[rect.tensor].lane_shape
        start = rect.flat_start(shape)
        if rect.is_contiguous(shape):
            segments.append(np.ascontiguousarray(weights.lanes(rect.tensor, start, rect.lanes)))
        else:
            segments.append(_gather(weights, rect, layout))
    return segments


def _gather(weights: Weights, rect: Rect, layout: Layout) -> Lanes:
    """Window by window, since what lies between its rows may be nearly the whole tensor."""
    spec = layout.tensors[rect.tensor]
    positions = flat_positions(rect, layout)
    segment = np.empty(rect.lanes, UNSIGNED[spec.type.lane_bytes])
    for start in range(rect.flat_start(spec.lane_shape), rect.flat_end(spec.lane_shape), _WINDOW_LANES):
        count = min(_WINDOW_LANES, spec.lanes - start)
        begin, end = np.searchsorted(positions, (start, start + count))
        if begin < end:
            segment[begin:end] = weights.lanes(rect.tensor, start, count)[positions[begin:end] - start]
            weights.release(rect.tensor, start, count)
    return segment


def release_segments(weights: Weights, rects: Sequence[Rect], layout: Layout) -> None:
    """The caller is done with what `read_segments` gave."""
    for rect in rects:
        shape = layout.tensors[rect.tensor].lane_shape
        start = rect.flat_start(shape)
        weights.release(rect.tensor, start, rect.flat_end(shape) - start)


def places_of(rects: Sequence[Rect], layout: Layout) -> list[Place]:
    """Where each rectangle's segment lies. True of rectangles that are one run of canonical positions."""
    specs = [layout.tensors[rect.tensor] for rect in rects]
    return [
        Place(tensor_seed(spec.name), rect.flat_start(spec.lane_shape)) for rect, spec in zip(rects, specs, strict=True)
    ]


def all_contiguous(rects: Sequence[Rect], layout: Layout) -> bool:
    """Whether every rectangle is one run of canonical positions."""
    return all(rect.is_contiguous(layout.tensors[rect.tensor].lane_shape) for rect in rects)


def flat_positions(rect: Rect, layout: Layout) -> Positions:
    """Canonical positions of every lane of `rect`, row-major."""
    return rect.flat_positions(np.arange(rect.lanes, dtype=np.int64), layout.tensors[rect.tensor].lane_shape)


def by_rect(rects: Sequence[Rect], positions: Positions) -> Iterator[tuple[Rect, slice, Positions]]:
    """Cut ascending frame positions into (rectangle, which of them, positions within it), where there are any."""
    first = 0
    for rect in rects:
        begin, end = np.searchsorted(positions, (first, first + rect.lanes))
        if end > begin:
            yield rect, slice(int(begin), int(end)), positions[begin:end] - first
        first += rect.lanes
