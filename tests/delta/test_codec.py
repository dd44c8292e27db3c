"""Edges: whatever the weights, applying what was encoded gives the target, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.delta.backend import choose
from deltad.delta.codec import EdgeEncoder, EncodedChunk, Patch, apply_patch, read_patches, sum_weights
from deltad.delta.frame import Rect, plan_frames, slabs
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import BaseMismatchError, FormatError
from deltad.limits import Limits
from tests.kit.weights import ArrayWeights, layouts, weights

BACKEND = choose()
SMALL = Limits(chunk_bytes=2048, frame_lanes=700)


def encode(
    layout: Layout, target: ArrayWeights, base: ArrayWeights | None = None, limits: Limits = SMALL
) -> EdgeEncoder:
    sums = None if base is None else sum_weights(layout, base)
    return EdgeEncoder(layout, target, BACKEND, base=base, base_sums=sums, limits=limits)


def apply(layout: Layout, chunks: list[EncodedChunk], onto: ArrayWeights) -> list[tuple[Patch, np.ndarray]]:
    """Apply in place with the sums following; returns what undoes it."""
    sums = sum_weights(layout, onto)
    undo = []
    for chunk in chunks:
        for patch in read_patches(chunk.data, layout, BACKEND, limits=SMALL):
            old = apply_patch(patch, onto.arrays[patch.tensor], layout.tensors[patch.tensor], sums, BACKEND)
            undo.append((patch, old))
    assert np.array_equal(sums, sum_weights(layout, onto)), "the sums followed every write"
    return undo


@given(st.data())
def test_a_delta_carries_any_weights_to_any_others(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    base, target = data.draw(weights(layout)), data.draw(weights(layout))
    encoder = encode(layout, target, base)
    chunks = list(encoder.chunks())
    served = base.copy()
    apply(layout, chunks, served)
    assert served.equals(target)
    assert np.array_equal(encoder.sums, sum_weights(layout, target))


@given(st.data())
def test_an_anchor_needs_no_base(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    target = data.draw(weights(layout))
    rebuilt = ArrayWeights.zeros(layout)
    apply(layout, list(encode(layout, target).chunks()), rebuilt)
    assert rebuilt.equals(target)


@given(st.data())
def test_undoing_patches_in_reverse_order_restores_the_base(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    base, target = data.draw(weights(layout)), data.draw(weights(layout))
    served = base.copy()
    sums = sum_weights(layout, target)
    for patch, old in reversed(apply(layout, list(encode(layout, target, base).chunks()), served)):
        spec = layout.tensors[patch.tensor]
        apply_patch(patch.inverted(old, spec), served.arrays[patch.tensor], spec, sums, BACKEND)
    assert served.equals(base)
    assert np.array_equal(sums, sum_weights(layout, base))


LARGE = Layout(
    0,
    (
        TensorSpec("a", "BF16", (300, 33)),
        TensorSpec("b", "F32", (77,)),
        TensorSpec("c", "BF16", ()),
        TensorSpec("d", "BF16", (2, 1, 4001)),
        TensorSpec("e", "F8_E4M3", (5, 0)),
        TensorSpec("f", "I64", (900,)),
        TensorSpec("g", "F4", (3, 80)),
    ),
)


@pytest.mark.parametrize("density", [0.0002, 0.01, 0.2, 1.0])
def test_many_frames_and_chunks_at_any_density(density: float) -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(density)
    encoder = encode(LARGE, target, base)
    chunks = list(encoder.chunks())
    assert all(chunk.ref.size == len(chunk.data) <= SMALL.chunk_bytes for chunk in chunks)
    served = base.copy()
    apply(LARGE, chunks, served)
    assert served.equals(target)
    changed = [int((a != b).sum()) for a, b in zip(base.arrays, target.arrays, strict=True)]
    assert encoder.changed.tolist() == changed
    for chunk in chunks:
        touched = {patch.tensor for patch in read_patches(chunk.data, LARGE, BACKEND, limits=SMALL)}
        assert min(touched) >= chunk.ref.first_tensor
        assert max(touched) <= chunk.ref.last_tensor


def test_equal_weights_give_an_edge_without_chunks() -> None:
    base = ArrayWeights.random(LARGE)
    encoder = encode(LARGE, base.copy(), base)
    assert list(encoder.chunks()) == []
    assert encoder.changed.sum() == 0


def test_equal_inputs_give_equal_bytes() -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(0.05)
    first, second = (list(encode(LARGE, target.copy(), base.copy()).chunks()) for _ in range(2))
    assert first == second


def test_random_bits_cost_hardly_more_than_themselves() -> None:
    base, target = ArrayWeights.random(LARGE, 1), ArrayWeights.random(LARGE, 2)
    size = sum(chunk.ref.size for chunk in encode(LARGE, target, base, Limits()).chunks())
    assert size < 1.02 * LARGE.weight_bytes + 500


@pytest.mark.parametrize("tensor", [0, 1, 3, 5])
def test_a_base_that_is_not_the_published_one_is_noticed_even_where_nothing_changed(tensor: int) -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(0.01)
    sums = sum_weights(LARGE, base)
    base.arrays[tensor][5] ^= 1
    encoder = EdgeEncoder(LARGE, target, BACKEND, base=base, base_sums=sums, limits=SMALL)
    with pytest.raises(BaseMismatchError, match=LARGE.tensors[tensor].name):
        list(encoder.chunks())


def test_everything_read_is_released() -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(0.01)
    list(encode(LARGE, target, base).chunks())
    lanes = sum(spec.lanes for spec in LARGE.tensors)
    assert target.released == lanes
    assert base.released >= lanes


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 60))
def test_slabs_cover_a_tensor_once_in_contiguous_runs(shape: list[int], limit: int) -> None:
    at = 0
    for rect in slabs(0, shape, limit):
        assert rect.lanes <= limit
        assert rect.is_contiguous(shape)
        assert rect.flat_start(shape) == at
        at += rect.lanes
    assert at == int(np.prod(shape, dtype=int))


@given(layouts(max_tensors=8), st.integers(8, 400))
def test_a_plan_covers_every_lane_once_and_mixes_no_dtypes(layout: Layout, frame_bytes: int) -> None:
    seen = ArrayWeights.zeros(layout)
    for rects in plan_frames(layout, frame_bytes=frame_bytes):
        assert len({layout.tensors[rect.tensor].dtype for rect in rects}) == 1
        for rect in rects:
            start = rect.flat_start(layout.tensors[rect.tensor].lane_shape)
            seen.arrays[rect.tensor][start : start + rect.lanes] += 1
    assert all((array == 1).all() for array in seen.arrays)


@settings(max_examples=50)
@given(st.data())
def test_positions_within_any_rectangle_map_to_canonical_ones(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    offset = [data.draw(st.integers(0, size - 1)) for size in shape]
    extent = [data.draw(st.integers(1, size - at)) for size, at in zip(shape, offset, strict=True)]
    rect = Rect(0, tuple(offset), tuple(extent))
    canonical = np.arange(int(np.prod(shape))).reshape(shape)
    window = canonical[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
    local = np.arange(rect.lanes, dtype=np.int64)
    assert rect.flat_positions(local, shape).tolist() == window.reshape(-1).tolist()
    run = window.reshape(-1)
    assert rect.is_contiguous(shape) == bool((np.diff(run) == 1).all())


HOSTILE = Layout(1, (TensorSpec("w", "BF16", (40, 50)), TensorSpec("x", "F32", (60,))))


def hostile_chunk() -> bytes:
    base = ArrayWeights.random(HOSTILE)
    (chunk,) = encode(HOSTILE, base.changed(0.02), base, Limits()).chunks()
    return chunk.data


def test_a_chunk_with_any_byte_changed_is_refused_or_stays_within_its_tensors() -> None:
    data = hostile_chunk()
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            mutated = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            target = ArrayWeights.zeros(HOSTILE)
            try:
                apply(HOSTILE, [EncodedChunk(None, mutated)], target)
            except FormatError:
                continue


@pytest.mark.parametrize("length", [0, 1, 3, 4, 10, -1, -5])
def test_a_truncated_chunk_is_refused(length: int) -> None:
    data = hostile_chunk()[:length] if length else b""
    if not data:
        assert list(read_patches(data, HOSTILE, BACKEND)) == []
        return
    with pytest.raises(FormatError):
        list(read_patches(data, HOSTILE, BACKEND))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_as_a_chunk(data: bytes) -> None:
    if data:
        with pytest.raises(FormatError):
            list(read_patches(data, HOSTILE, BACKEND))


def test_a_chunk_made_for_another_layout_is_refused() -> None:
    other = replace_shape(HOSTILE, (40, 49))
    with pytest.raises(FormatError, match="rectangle"):
        list(read_patches(hostile_chunk(), other, BACKEND))


def replace_shape(layout: Layout, shape: tuple[int, ...]) -> Layout:
    first = layout.tensors[0]
    return Layout(1, (TensorSpec(first.name, first.dtype, shape), *layout.tensors[1:]))


def test_a_chunk_above_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(FormatError, match="at most"):
        list(read_patches(hostile_chunk(), HOSTILE, BACKEND, limits=replace(Limits(), chunk_bytes=100)))
