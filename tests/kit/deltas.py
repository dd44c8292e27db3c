"""Deltas in memory: encoded, held by digest, applied."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deltad.delta.backend import Backend, Mode, choose
from deltad.delta.codec import EdgeEncoder, EncodedChunk, apply_chunks, sum_weights
from deltad.delta.fold import MadeDelta, StoredDelta
from deltad.delta.frame import Frame, read_chunk
from deltad.delta.layout import Layout
from deltad.limits import Limits
from tests.kit.weights import ArrayWeights

BACKEND = choose()
SMALL = Limits(chunk_bytes=2048, frame_lanes=700)
MODES: tuple[Mode, ...] = ("blind", "fast", "mid", "dense")


def encoder(
    layout: Layout,
    target: ArrayWeights,
    base: ArrayWeights | None = None,
    *,
    mode: Mode = "blind",
    limits: Limits = SMALL,
    backend: Backend = BACKEND,
) -> EdgeEncoder:
    sums = None if base is None else sum_weights(layout, base)
    return EdgeEncoder(layout, target, backend, base=base, base_sums=sums, limits=limits, mode=mode)


def held(chunks: Iterable[EncodedChunk]) -> StoredDelta:
    """A delta whose chunks are read from memory."""
    kept = list(chunks)
    data = {chunk.ref.digest: chunk.data for chunk in kept}
    return StoredDelta([chunk.ref for chunk in kept], lambda digest: data[digest])


def delta(
    layout: Layout, base: ArrayWeights, target: ArrayWeights, *, mode: Mode = "blind", limits: Limits = SMALL
) -> StoredDelta:
    return held(encoder(layout, target, base, mode=mode, limits=limits).chunks())


def made(result: MadeDelta) -> StoredDelta:
    return held(result.chunks())


def frames(stored: StoredDelta, layout: Layout, limits: Limits = SMALL) -> list[Frame]:
    return [frame for data in stored.data() for frame in read_chunk(data, layout, limits=limits)]


def applied(
    stored: StoredDelta, layout: Layout, onto: ArrayWeights, *, limits: Limits = SMALL, backend: Backend = BACKEND
) -> ArrayWeights:
    """What the delta makes of a copy of `onto`; the sums are held to follow."""
    after = onto.copy()
    sums = sum_weights(layout, after)
    for data in stored.data():
        apply_chunks([data], layout, after, sums, backend, limits=limits)
    assert np.array_equal(sums, sum_weights(layout, after)), "the sums followed every write"
    return after
