"""The numba backend: `deltad.delta.backend.Backend` by compiled kernels, on one thread per frame.

Equal to the numpy reference in every byte and every refusal. All scratch is the calling thread's own, and
kernels let go of the GIL, so that threads work on frames side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import UNSIGNED, Changes, EncodedFrame, Lanes, Mode, Place, Segments, Stream
from deltad.delta.backend.numba import packing
from deltad.delta.backend.numba.decoding import apply_changes, compose_blind, decode_context, write_lanes
from deltad.delta.backend.numba.encoding import encode
from deltad.delta.backend.numba.job import (
    COMPOSE,
    COUNT,
    LANES_OUT,
    POSITIONS,
    Job,
    address,
    keys_address,
    like,
)
from deltad.delta.backend.numba.planning import plan, sample
from deltad.delta.backend.numba.streams import Input, Output
from deltad.delta.backend.numba.sums import sum_runs
from deltad.delta.backend.numpy import check_sums
from deltad.delta.coding import Coder, Coding, exponents
from deltad.delta.difference import from_codes
from deltad.delta.digest import U64
from deltad.errors import FormatError
from deltad.types import DType

_PREFETCHED = 64  # entries beyond the last position that a kernel looks at


class NumbaBackend:
    """Implements `deltad.delta.backend.Backend`."""

    name = "numba"

    def encode(
        self, old: Segments, new: Segments, places: Sequence[Place], dtype: DType, mode: Mode
    ) -> EncodedFrame | None:
        lanes = sum(segment.size for segment in old)
        job = Job(dtype, old, new, places)
        coding = Coding(Coder.BLIND, lanes, 0)
        if mode != "blind" and exponents(dtype):
            table = plan(sample(job, lanes), lanes, mode)
            coding = Coding(Coder.CONTEXT, lanes, 0, table.small, table.starts, table.marked)
            job.set_coding(coding)
        output = Output(job)
        while not encode(job.address, like(dtype)):
            output.enlarge()
        counts = job.segments[:, COUNT].astype(np.int64)
        changed = int(counts.sum())
        if not changed:
            return None
        coding = Coding(coding.coder, lanes, changed, coding.small, coding.starts, coding.marked)
        return EncodedFrame(coding, counts, job.sums, output.streams())

    def decode(self, coding: Coding, streams: Sequence[Stream], base: Segments | None, dtype: DType) -> Changes:
        given = Input(coding, streams, dtype)
        if coding.coder is not Coder.CONTEXT:
            positions = given.marks[0][:-1].astype(np.int64)
            _check_changed(coding, positions.size)
            given.check_count(0, positions.size)
            return Changes(positions, from_codes(given.values(0)[: positions.size], dtype))
        assert base is not None, "context frames are decoded beside their base"
        job = Job(dtype, base, None, [])
        found, differences = _decode(job, coding, given, composes=False)
        firsts = np.cumsum([0, *(segment.size for segment in base)])[:-1]
        positions = found + np.repeat(firsts, job.segments[:, COUNT].astype(np.int64))
        order = np.argsort(positions, kind="stable")
        return Changes(positions[order], differences[order])

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        positions, differences = np.ascontiguousarray(changes.positions), np.ascontiguousarray(changes.differences)
        if positions.size and not 0 <= positions[0] <= positions[-1] < target.size:
            raise ValueError(f"positions {positions[0]} to {positions[-1]} in {target.size} lanes")
        job = Job(dtype, [target], None, [Place(seed, 0)])
        job.set_coding(Coding(Coder.BLIND, target.size, positions.size))
        old = np.empty(positions.size, UNSIGNED[dtype.lane_bytes])
        apply_changes(
            job.address,
            np.uint64(address(positions)),
            np.uint64(address(differences)),
            np.uint64(address(old)),
            np.uint64(target.strides[0] % 2**64),
            like(dtype),
        )
        return old, job.sums[0]

    def decode_apply(
        self,
        coding: Coding,
        check: U64,
        streams: Sequence[Stream],
        target: Segments,
        places: Sequence[Place],
        dtype: DType,
    ) -> U64:
        job = Job(dtype, target, None, places)
        _decode(job, coding, Input(coding, streams, dtype), composes=True)
        check_sums(job.sums, check)
        write_lanes(job.address, like(dtype))
        return job.sums

    def pack(self, lanes: Segments, dtype: DType) -> list[Stream]:
        return packing.pack(lanes, dtype)

    def unpack(self, streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
        return packing.unpack(streams, lanes, dtype)

    def sum(self, lanes: Segments, places: Sequence[Place]) -> U64:
        runs = [
            (address(segment), segment.nbytes, place.start * segment.itemsize, place.seed)
            for segment, place in zip(lanes, places, strict=True)
        ]
        table, sums = np.array(runs, np.uint64), np.zeros((len(runs), 2), np.uint64)
        sum_runs(*(np.uint64(number) for number in (address(table), len(runs), keys_address(), address(sums))))
        return sums


def _decode(job: Job, coding: Coding, given: Input, *, composes: bool) -> tuple[npt.NDArray[np.uint32], Lanes]:
    """Changes by segment: positions within it, and new lanes or plain differences. Raises FormatError."""
    positions = np.zeros(coding.changed + _PREFETCHED, np.uint32)
    lanes = np.empty(coding.changed + _PREFETCHED, UNSIGNED[job.dtype.lane_bytes])
    job.words[POSITIONS], job.words[LANES_OUT] = address(positions), address(lanes)
    job.words[COMPOSE] = composes
    job.set_coding(coding)
    given.give_to(job)
    if coding.coder is Coder.CONTEXT:
        fits = decode_context(job.address, like(job.dtype))
    else:
        marked = given.marks[0].size - 1
        _check_changed(coding, marked)
        given.check_count(0, marked)
        fits = compose_blind(job.address, like(job.dtype))
    if not fits:
        raise FormatError(
            "frame",
            expected="ranks and values that fit the classes of the base",
            found="others",
            hint="it was made for another base, or is damaged",
        )
    given.check_used(job)
    _check_changed(coding, int(job.segments[:, COUNT].sum()))
    job.held += (positions, lanes)
    return positions[: coding.changed], lanes[: coding.changed]


def _check_changed(coding: Coding, found: int) -> None:
    if found != coding.changed:
        raise FormatError("frame", expected=f"{coding.changed} changes", found=str(found))
