"""What every backend must do, and do like the reference: any lanes, any cut into segments, any streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltad.delta.backend import UNSIGNED, Backend, Changes, EncodedFrame, Lanes, Mode, Place
from deltad.delta.backend.numpy import NumpyBackend, context_streams
from deltad.delta.coding import (
    BULK_CLASSES,
    MANTISSA_BITS,
    SMALL_CLASSES,
    STREAMS_PER_CLASS,
    Coder,
    Coding,
    check_coding,
    check_lengths,
    exponents,
)
from deltad.delta.digest import sum_bytes, sum_changes
from deltad.errors import FormatError, IntegrityError
from deltad.types import DTYPES, Difference, DType
from tests.kit.backends import present
from tests.kit.weights import SPECIAL_BITS

BACKENDS = present()
REFERENCE = NumpyBackend()
MODES: tuple[Mode, ...] = ("blind", "fast", "mid", "dense")

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
dtypes = st.sampled_from(sorted(DTYPES)).map(DTYPES.__getitem__)


@st.composite
def pairs(draw: st.DrawFn, dtype: DType, most: int = 60) -> tuple[list[Lanes], list[Lanes], list[Place]]:
    """Old and new lanes of a frame, in up to four segments, some of them alike; special bits often."""
    width = dtype.lane_bytes
    bits = st.one_of(st.sampled_from(SPECIAL_BITS[width]), st.integers(0, 2 ** (8 * width) - 1))
    old, new, places = [], [], []
    for i in range(draw(st.integers(1, 4))):
        before = draw(hnp.arrays(UNSIGNED[width], draw(st.integers(1, most)), elements=bits))
        after = before.copy()
        for at in draw(st.lists(st.integers(0, before.size - 1), max_size=before.size)):
            after[at] = draw(bits)
        old.append(before)
        new.append(after)
        places.append(Place(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 100_000)) + 1000 * i))
    return old, new, places


def copies(segments: Sequence[Lanes]) -> list[Lanes]:
    return [segment.copy() for segment in segments]


def same(found: Sequence[Lanes], expected: Sequence[Lanes]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def check_of(encoded: EncodedFrame) -> np.ndarray:
    return encoded.sums.sum(axis=0, dtype=np.uint64)


@backends
@given(data=st.data(), dtype=dtypes, mode=st.sampled_from(MODES))
def test_what_was_encoded_is_decoded_and_written_bit_for_bit(
    backend: Backend, data: st.DataObject, dtype: DType, mode: Mode
) -> None:
    old, new, places = data.draw(pairs(dtype))
    before, after = copies(old), copies(new)
    encoded = backend.encode(old, new, places, dtype, mode)
    assert same(old, before), "encoding writes nothing"
    assert same(new, after), "encoding writes nothing"
    if encoded is None:
        assert same(old, new)
        return
    counts = [int((a != b).sum()) for a, b in zip(old, new, strict=True)]
    assert encoded.changed.tolist() == counts
    assert encoded.coding.coder is (Coder.CONTEXT if mode != "blind" and exponents(dtype) else Coder.BLIND)
    check_coding(encoded.coding, dtype)
    check_lengths(encoded.coding, dtype, [len(stream) for stream in encoded.streams])
    sums = backend.decode_apply(encoded.coding, check_of(encoded), encoded.streams, before, places, dtype)
    assert same(before, new)
    assert np.array_equal(sums, encoded.sums)
    for place, a, b, share in zip(places, old, new, sums, strict=True):
        offset = place.start * dtype.lane_bytes
        whole = [sum_bytes(lanes.view(np.uint8), offset, place.seed) for lanes in (b, a)]
        assert np.array_equal(share, whole[0] - whole[1])


@backends
@given(data=st.data(), dtype=dtypes, mode=st.sampled_from(MODES))
def test_every_backend_makes_what_the_reference_makes(
    backend: Backend, data: st.DataObject, dtype: DType, mode: Mode
) -> None:
    old, new, places = data.draw(pairs(dtype))
    expected, found = (b.encode(old, new, places, dtype, mode) for b in (REFERENCE, backend))
    if expected is None or found is None:
        assert expected is found
        return
    assert found.coding == expected.coding
    assert np.array_equal(found.changed, expected.changed)
    assert np.array_equal(found.sums, expected.sums)
    assert [bytes(stream) for stream in found.streams] == [bytes(stream) for stream in expected.streams]


@backends
@given(data=st.data(), name=st.sampled_from(sorted(MANTISSA_BITS)))
def test_every_class_table_that_keeps_the_rules_is_read(backend: Backend, data: st.DataObject, name: str) -> None:
    dtype = DTYPES[name]
    old, new, places = data.draw(pairs(dtype))
    encoded = REFERENCE.encode(old, new, places, dtype, "blind")
    if encoded is None:
        return
    tops = st.integers(1, exponents(dtype) - 1)
    starts = (0, *data.draw(st.lists(tops, unique=True, max_size=SMALL_CLASSES + BULK_CLASSES - 1).map(sorted)))
    small = data.draw(st.integers(max(0, len(starts) - BULK_CLASSES), min(SMALL_CLASSES, len(starts) - 1)))
    marked = data.draw(st.integers(0, (1 << small) - 1))
    lanes, changed = encoded.coding.lanes, encoded.coding.changed
    coding = Coding(Coder.CONTEXT, lanes, changed, small, starts, marked)
    check_coding(coding, dtype)
    streams = context_streams(coding, old, new, dtype)
    check_lengths(coding, dtype, [len(stream) for stream in streams])
    backend.decode_apply(coding, check_of(encoded), streams, old, places, dtype)
    assert same(old, new)


@backends
@given(data=st.data(), dtype=dtypes, mode=st.sampled_from(MODES))
def test_changes_are_decoded_by_position_and_applied_at_any_stride(
    backend: Backend, data: st.DataObject, dtype: DType, mode: Mode
) -> None:
    old, new, places = data.draw(pairs(dtype))
    encoded = backend.encode(old, new, places, dtype, mode)
    if encoded is None:
        return
    changes = backend.decode(encoded.coding, encoded.streams, old, dtype)
    whole, after = np.concatenate(old), np.concatenate(new)
    assert np.array_equal(changes.positions, np.flatnonzero(whole != after))
    stride = data.draw(st.integers(1, 3))
    spread = np.zeros(whole.size * stride, whole.dtype)
    target = spread[::stride]
    target[:] = whole
    replaced, share = backend.apply(target, changes, dtype, 77)
    assert np.array_equal(target, after)
    assert np.array_equal(replaced, whole[changes.positions])
    expected = sum_changes(changes.positions, replaced, after[changes.positions], 77)
    assert np.array_equal(share, expected)
    assert not spread.reshape(-1, stride)[:, 1:].any(), "what lies between is not touched"


@backends
@given(data=st.data(), dtype=dtypes, mode=st.sampled_from(MODES))
def test_hostile_streams_are_refused_with_nothing_written_or_mean_something(
    backend: Backend, data: st.DataObject, dtype: DType, mode: Mode
) -> None:
    old, new, places = data.draw(pairs(dtype))
    encoded = backend.encode(old, new, places, dtype, mode)
    if encoded is None:
        return
    coding, streams = data.draw(mutated(encoded))
    try:
        check_coding(coding, dtype)
        check_lengths(coding, dtype, [len(stream) for stream in streams])
    except FormatError:
        return
    target = copies(old)
    try:
        changes = backend.decode(coding, streams, old, dtype)
    except FormatError:
        with pytest.raises(FormatError):
            REFERENCE.decode(coding, streams, old, dtype)
        with pytest.raises((FormatError, IntegrityError)):
            backend.decode_apply(coding, check_of(encoded), streams, target, places, dtype)
        assert same(target, old)
        return
    expected = REFERENCE.decode(coding, streams, old, dtype)
    assert np.array_equal(changes.positions, expected.positions)
    assert np.array_equal(changes.differences, expected.differences)
    well_formed(changes, coding)
    try:
        backend.decode_apply(coding, check_of(encoded), streams, target, places, dtype)
    except IntegrityError:
        assert same(target, old)


def well_formed(changes: Changes, coding: Coding) -> None:
    assert changes.positions.size == coding.changed == changes.differences.size
    assert (np.diff(changes.positions, prepend=-1) > 0).all()
    assert int(changes.positions.max(initial=-1)) < coding.lanes
    assert changes.differences.all()


@st.composite
def mutated(draw: st.DrawFn, encoded: EncodedFrame) -> tuple[Coding, list[bytes]]:
    """Some streams replaced, and at times counts and classes too."""
    streams = [bytes(stream) for stream in encoded.streams]
    coding = encoded.coding
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(streams) - 1))
        size = draw(st.sampled_from([len(streams[at]), draw(st.integers(0, 40))]))
        streams[at] = draw(st.binary(min_size=size, max_size=size))
    if draw(st.booleans()):
        coding = Coding(
            coding.coder,
            coding.lanes,
            draw(st.sampled_from([coding.changed, coding.changed + 1, max(0, coding.changed - 1), coding.lanes])),
            coding.small,
            coding.starts,
            coding.marked,
        )
    if coding.coder is Coder.CONTEXT and draw(st.booleans()):
        starts = draw(st.lists(st.integers(1, 40), unique=True, max_size=3).map(sorted))
        small = draw(st.integers(0, len(starts)))
        marked = draw(st.integers(0, (1 << small) - 1))
        coding = Coding(Coder.CONTEXT, coding.lanes, coding.changed, small, (0, *starts), marked)
        missing = STREAMS_PER_CLASS * coding.classes - len(streams)
        streams = streams[: STREAMS_PER_CLASS * coding.classes] + [b""] * missing
    return coding, streams


@backends
@given(data=st.data(), dtype=dtypes, mode=st.sampled_from(MODES))
def test_another_base_is_refused_with_nothing_written_or_changed_by_just_the_check(
    backend: Backend, data: st.DataObject, dtype: DType, mode: Mode
) -> None:
    old, new, places = data.draw(pairs(dtype))
    encoded = backend.encode(old, new, places, dtype, mode)
    if encoded is None:
        return
    other = [data.draw(hnp.arrays(segment.dtype, segment.size)) for segment in old]
    target = copies(other)
    try:
        sums = backend.decode_apply(encoded.coding, check_of(encoded), encoded.streams, target, places, dtype)
    except (FormatError, IntegrityError):
        assert same(target, other)
        return
    assert np.array_equal(sums.sum(axis=0, dtype=np.uint64), check_of(encoded))
    for place, a, b, share in zip(places, other, target, sums, strict=True):
        offset = place.start * dtype.lane_bytes
        whole = [sum_bytes(lanes.view(np.uint8), offset, place.seed) for lanes in (b, a)]
        assert np.array_equal(share, whole[0] - whole[1])


@backends
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["BF16", "F32", "F64", "F8_E4M3", "I16", "BOOL"])
def test_large_frames_of_many_windows_and_segments_round_trip(backend: Backend, name: str, mode: Mode) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(3)
    sizes = [1, 1_400_000, 63, 64, 65, 300_001, 8192]
    old = [rng.integers(0, 256, n * dtype.lane_bytes, dtype=np.uint8).view(UNSIGNED[dtype.lane_bytes]) for n in sizes]
    if dtype.difference is Difference.LINE:
        bell = [
            rng.normal(0, 0.02, n).astype(
                {2: np.float32, 4: np.float32, 8: np.float64, 1: np.float32}[dtype.lane_bytes]
            )
            for n in sizes
        ]
        shift = {1: 24, 2: 16, 4: 0, 8: 0}[dtype.lane_bytes]
        old = [(b.view(f"u{b.itemsize}") >> shift).astype(UNSIGNED[dtype.lane_bytes]) for b in bell]
    new = copies(old)
    for segment in new:
        at = rng.choice(segment.size, max(1, segment.size // 50), replace=False)
        segment[at] += rng.integers(1, 9, at.size).astype(segment.dtype)
    places = [Place(i, 1000 * i + 1) for i in range(len(sizes))]
    encoded = backend.encode(old, new, places, dtype, mode)
    assert encoded is not None
    expected = REFERENCE.encode(old, new, places, dtype, mode)
    assert expected is not None
    assert [bytes(stream) for stream in encoded.streams] == [bytes(stream) for stream in expected.streams]
    sums = backend.decode_apply(encoded.coding, check_of(encoded), encoded.streams, old, places, dtype)
    assert same(old, new)
    assert np.array_equal(sums, expected.sums)


@backends
@given(
    segments=st.lists(
        st.tuples(
            st.sampled_from((1, 2, 4, 8)),
            st.binary(max_size=300),
            st.integers(0, 200_000),
            st.integers(0, 2**64 - 1),
        ),
        max_size=4,
    )
)
def test_every_backend_sums_alike(backend: Backend, segments: list[tuple[int, bytes, int, int]]) -> None:
    lanes = [np.frombuffer(data[: len(data) // width * width], UNSIGNED[width]) for width, data, _, _ in segments]
    places = [Place(seed, start) for _, _, start, seed in segments]
    found = backend.sum(lanes, places)
    assert found.shape == (len(segments), 2)
    for share, part, place in zip(found, lanes, places, strict=True):
        assert np.array_equal(share, sum_bytes(part.view(np.uint8), place.start * part.itemsize, place.seed))
