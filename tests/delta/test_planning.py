"""numba's planner and its coding of tables that the planner never chooses: nothing may differ from the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta import classes
from deltad.delta.backend import UNSIGNED, Lanes, Mode, Place
from deltad.delta.backend.numpy import context_streams
from deltad.delta.classes import Histogram
from deltad.delta.coding import BULK_CLASSES, MANTISSA_BITS, SMALL_CLASSES, Coder, Coding, exponents
from deltad.types import DTYPES, DType

pytest.importorskip("numba", exc_type=ImportError)

from deltad.delta.backend.numba import planning
from deltad.delta.backend.numba.encoding import encode
from deltad.delta.backend.numba.engine import NumbaBackend
from deltad.delta.backend.numba.job import BATCH, BLOCK, Job, like
from deltad.delta.backend.numba.streams import Output

CONTEXT_MODES: tuple[Mode, ...] = ("fast", "mid", "dense")


@st.composite
def histograms(draw: st.DrawFn, dtype: DType) -> Histogram:
    """Any sample: few exponents or more than the planner tells apart, of no lanes, some, or very many."""
    lanes, changed = np.zeros((2, exponents(dtype)), np.int64)
    for exponent in draw(st.sets(st.integers(0, lanes.size - 1), max_size=90)):
        lanes[exponent] = draw(st.integers(0, 1 << draw(st.integers(0, 20))))
        changed[exponent] = draw(st.integers(0, int(lanes[exponent])))
    return Histogram(lanes, changed)


@given(data=st.data(), name=st.sampled_from(sorted(MANTISSA_BITS)), mode=st.sampled_from(CONTEXT_MODES))
def test_the_compiled_planner_chooses_what_the_reference_chooses(data: st.DataObject, name: str, mode: Mode) -> None:
    histogram = data.draw(histograms(DTYPES[name]))
    lanes = min(int(histogram.lanes.sum()) * data.draw(st.integers(1, 64)), 1 << 30)
    assert planning.plan(histogram, lanes, mode) == classes.plan(histogram, lanes, mode)


def some_lanes(dtype: DType, size: int, seed: int = 0) -> tuple[Lanes, Lanes]:
    """Lanes of all exponents; a quarter of them changed."""
    rng = np.random.default_rng(seed)
    old, new = (
        rng.integers(0, 256, size * dtype.lane_bytes, dtype=np.uint8).view(UNSIGNED[dtype.lane_bytes]) for _ in range(2)
    )
    return old, np.where(rng.random(size) < 0.25, new, old)


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F32", "F64"])
@pytest.mark.parametrize("sizes", [(1,), (1023, 1, 1025), (300_000, 7, 600_001)])
def test_the_compiled_sample_counts_what_the_reference_counts(name: str, sizes: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    old, new = some_lanes(dtype, sum(sizes))
    before, after = (np.split(lanes, np.cumsum(sizes)[:-1]) for lanes in (old, new))
    found = planning.sample(Job(dtype, before, after, []), old.size)
    expected = classes.sample(before, after, dtype)
    assert np.array_equal(found.lanes, expected.lanes)
    assert np.array_equal(found.changed, expected.changed)


@pytest.mark.parametrize("name", ["BF16", "F64"])
@pytest.mark.parametrize(
    ("small", "bulk"), [(0, 1), (0, BULK_CLASSES), (1, 1), (5, 2), (SMALL_CLASSES, 1), (SMALL_CLASSES, BULK_CLASSES)]
)
def test_any_table_of_classes_is_coded_as_the_reference_codes_it(name: str, small: int, bulk: int) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(small * 10 + bulk)
    inner = rng.choice(np.arange(1, exponents(dtype)), small + bulk - 1, replace=False)
    starts = (0, *sorted(inner.tolist()))
    old, new = some_lanes(dtype, 5 * BLOCK + 3 * BATCH + 77)
    cuts = [BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 9]
    before, after = (np.split(lanes, cuts) for lanes in (old, new))
    places = [Place(n, 100 * n) for n in range(len(before))]
    coding = Coding(Coder.CONTEXT, old.size, int((old != new).sum()), small, starts, int(rng.integers(1 << small)))
    job = Job(dtype, before, after, places)
    job.set_coding(coding)
    output = Output(job)
    while not encode(job.address, like(dtype)):
        output.enlarge()
    streams = output.streams()
    assert [bytes(stream) for stream in streams] == [
        bytes(stream) for stream in context_streams(coding, before, after, dtype)
    ]
    NumbaBackend().decode_apply(coding, job.sums.sum(axis=0, dtype=np.uint64), streams, before, places, dtype)
    assert np.array_equal(np.concatenate(before), new)
