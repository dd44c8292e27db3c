"""Anchors, measured: their bytes against byte planes through zstd, as they were made before, and their rates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import zstandard

from bench.harness import Measurement, Spec, median_of
from bench.pairs import Bits, States
from bench.subject import Subject
from bench.timing import rate_ratios
from deltad.delta.backend import Backend
from deltad.delta.codec import EdgeEncoder, frame_patches
from deltad.delta.emit import FrameWriter
from deltad.delta.frame import plan_frames, read_chunk
from deltad.delta.weights import read_segments
from deltad.limits import DEFAULT_LIMITS

SIZES = (
    Spec(name="anchor / all weights", unit="×", direction="min"),
    Spec(name="anchor / byte planes through zstd-1", unit="×", direction="min"),
)
RATES = (
    Spec(name="write an anchor / memcpy", unit="×", direction="max"),
    Spec(name="read an anchor / memcpy", unit="×", direction="max"),
)
_FRAME_BYTES = DEFAULT_LIMITS.chunk_bytes // 2


def sizes(states: States, backend: Backend) -> Iterator[Measurement]:
    """What all chunks of the newer state's anchor take."""
    subject = Subject.of(states)
    new = subject.states.new
    size = sum(len(chunk.data) for chunk in EdgeEncoder(subject.layout, subject.new, backend).chunks())
    note = f"{states.pair.name}; chunks alone"
    for spec, other in zip(SIZES, (new.nbytes, zstd_planes(new)), strict=True):
        yield Measurement(name=spec.name, value=size / other, runs=1, note=note)


def zstd_planes(bits: Bits) -> int:
    """Both byte planes of every 4 MiB through zstd at level 1."""
    compressor = zstandard.ZstdCompressor(level=1)
    planes = np.ascontiguousarray(bits).view(np.uint8).reshape(-1, 2).T
    starts = range(0, bits.size, _FRAME_BYTES // 2)
    return sum(
        len(compressor.compress(plane[at : at + _FRAME_BYTES // 2].tobytes())) for plane in planes for at in starts
    )


def rates(subject: Subject, backend: Backend, note: str) -> Iterator[Measurement]:
    """From weights to frames with their checks, and from frames to checked weights; one thread, in memory."""
    writer = FrameWriter(subject.layout, backend, "blind", DEFAULT_LIMITS)
    plan = list(plan_frames(subject.layout, frame_bytes=_FRAME_BYTES))
    target = subject.states.old.copy()
    firsts = np.cumsum([0, *(spec.lanes for spec in subject.layout.tensors)])

    def write() -> list[bytes]:
        cut = ((rects, read_segments(subject.new, rects, subject.layout)) for rects in plan)
        return [frame.data for rects, new in cut for frame in writer.whole(rects, new)]

    def read(written: list[bytes]) -> None:
        for data in written:
            for frame in read_chunk(data, subject.layout):
                for patch in frame_patches(frame, subject.layout, backend, None):
                    assert isinstance(patch.index, slice)
                    target[firsts[patch.tensor] :][patch.index] = patch.values

    copy = partial(np.copyto, target, subject.states.old)
    yield median_of(RATES[0].name, rate_ratios(copy, write), note=note)
    read_all = partial(read, write())
    yield median_of(RATES[1].name, rate_ratios(copy, read_all), note=note)
    if not np.array_equal(target, subject.states.new):
        raise ValueError("what was read of the anchor is not the state that was written")
