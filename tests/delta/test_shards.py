"""What ranks encode of their own shards is, all together, the edge that one process would have made."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta import FORMAT
from deltad.delta.backend import Backend, Lanes, Mode, choose
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.codec import apply_chunks, sum_weights
from deltad.delta.digest import sum_bytes, tensor_seed
from deltad.delta.emit import share_of_changes, share_of_lanes
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.shards import ArraySource, ShardCopy, ShardEncoder
from deltad.errors import BaseMismatchError
from tests.kit.weights import ArrayWeights

NUMPY = NumpyBackend()
LAYOUT = Layout(
    FORMAT,
    (
        TensorSpec("a.bias", "BF16", (7,)),
        TensorSpec("b.experts", "BF16", (6, 10, 4)),
        TensorSpec("c.weight", "F32", (9, 33)),
        TensorSpec("d.scale", "F8_E4M3", ()),
        TensorSpec("e.weight", "BF16", (40, 16)),
    ),
)


def cut_evenly(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and extents of a grid over a tensor: each dimension in so many parts, uneven where it does not divide."""
    axes = []
    for size, count in zip(shape, parts, strict=True):
        borders = [size * i // count for i in range(count + 1)]
        axes.append([(a, b - a) for a, b in itertools.pairwise(borders) if b > a])
    return [(tuple(a for a, _ in cell), tuple(e for _, e in cell)) for cell in itertools.product(*axes)]


def lanes_of(weights: ArrayWeights, rect: Rect, layout: Layout = LAYOUT) -> Lanes:
    shape = layout.tensors[rect.tensor].lane_shape
    where = tuple(slice(o, o + e) for o, e in zip(rect.offset, rect.extent, strict=True))
    return np.ascontiguousarray(weights.arrays[rect.tensor].reshape(shape)[where]).reshape(-1)


def by_rank(parts: dict[int, tuple[int, ...]], ranks: int) -> list[list[Rect]]:
    """Deal the cells of every tensor out to ranks, in turn."""
    dealt: list[list[Rect]] = [[] for _ in range(ranks)]
    turn = itertools.cycle(range(ranks))
    for i, spec in enumerate(LAYOUT.tensors):
        for offset, extent in cut_evenly(spec.lane_shape, parts.get(i, (1,) * len(spec.lane_shape))):
            dealt[next(turn)].append(Rect(i, offset, extent))
    return dealt


GRIDS = st.fixed_dictionaries(
    {
        0: st.tuples(st.integers(1, 7)),
        1: st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)),
        2: st.tuples(st.integers(1, 4), st.integers(1, 4)),
        4: st.tuples(st.integers(1, 4), st.integers(1, 4)),
    }
)


@given(GRIDS, st.integers(1, 5), st.sampled_from(["blind", "fast", "dense"]), st.floats(0, 1), st.integers(0, 99))
def test_the_frames_of_all_ranks_are_the_edge_whatever_the_mesh(
    parts: dict[int, tuple[int, ...]], ranks: int, mode: Mode, density: float, seed: int
) -> None:
    old = ArrayWeights.bell(LAYOUT, seed)
    new = old.changed(density, seed=seed + 1)
    total = np.zeros((len(LAYOUT.tensors), 2), np.uint64)
    chunks = []
    changed = 0
    for shards in by_rank(parts, ranks):
        was, now = ([ArraySource(lanes_of(w, rect)) for rect in shards] for w in (old, new))
        base = ShardEncoder(LAYOUT, shards, was, NUMPY)
        list(base.chunks())
        encoder = ShardEncoder(LAYOUT, shards, now, NUMPY, was, base.sums, mode=mode, threads=2)
        made = [chunk.data for chunk in encoder.chunks()]
        copy = ShardCopy(LAYOUT, shards, [source.array.copy() for source in was], NUMPY)
        copy.apply(made)
        for moved, source in zip(copy.sources, now, strict=True):
            assert np.array_equal(moved.lanes(0, source.array.size), source.array)
        np.add.at(total, [rect.tensor for rect in shards], encoder.sums)
        chunks += made
        changed += encoder.changed
    assert np.array_equal(total, sum_weights(LAYOUT, new))
    assert changed == sum(int((a != b).sum()) for a, b in zip(old.arrays, new.arrays, strict=True))
    target, sums = old.copy(), sum_weights(LAYOUT, old)
    apply_chunks(chunks, LAYOUT, target, sums, NUMPY)
    assert target.equals(new)
    assert np.array_equal(sums, total)


@given(GRIDS, st.integers(1, 4))
def test_without_a_base_the_frames_hold_the_weights_themselves(parts: dict[int, tuple[int, ...]], ranks: int) -> None:
    weights = ArrayWeights.random(LAYOUT, 5)
    target, sums = ArrayWeights.zeros(LAYOUT), np.zeros((len(LAYOUT.tensors), 2), np.uint64)
    for shards in by_rank(parts, ranks):
        encoder = ShardEncoder(LAYOUT, shards, [ArraySource(lanes_of(weights, rect)) for rect in shards], NUMPY)
        apply_chunks([chunk.data for chunk in encoder.chunks()], LAYOUT, target, sums, NUMPY)
    assert target.equals(weights)


@pytest.mark.parametrize("backend", [NUMPY, choose("auto")], ids=["numpy", "auto"])
@given(data=st.data())
def test_a_rectangle_of_any_shape_has_the_sum_of_its_lanes(backend: Backend, data: st.DataObject) -> None:
    spec = LAYOUT.tensors[1]
    bounds = [sorted((data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1)))) for size in spec.shape]
    rect = Rect(1, tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))
    weights = ArrayWeights.random(LAYOUT, 3)
    lone = np.zeros(spec.shape, np.uint16)
    where = tuple(slice(a, b + 1) for a, b in bounds)
    lone[where] = weights.arrays[1].reshape(spec.shape)[where]
    expected = sum_bytes(lone.reshape(-1).view(np.uint8), 0, tensor_seed(spec.name))
    lanes = lanes_of(weights, rect)
    assert np.array_equal(share_of_lanes([rect], [lanes], LAYOUT, backend)[0], expected)
    assert np.array_equal(share_of_changes([rect], [np.zeros_like(lanes)], [lanes], LAYOUT)[0], expected)


def test_a_base_that_somebody_wrote_to_is_refused_and_named() -> None:
    shards = [Rect(4, (0, 0), (40, 16))]
    old = ArrayWeights.bell(LAYOUT)
    base = ShardEncoder(LAYOUT, shards, [ArraySource(old.arrays[4])], NUMPY)
    list(base.chunks())
    written = old.arrays[4].copy()
    written[9] ^= 1
    encoder = ShardEncoder(
        LAYOUT, shards, [ArraySource(old.changed(0.1).arrays[4])], NUMPY, [ArraySource(written)], base.sums
    )
    with pytest.raises(BaseMismatchError, match=r"shard of 'e.weight'"):
        list(encoder.chunks())


def test_a_shard_that_is_not_summed_anew_has_the_sum_that_follows_from_its_changes() -> None:
    shards = [Rect(4, (0, 0), (20, 16)), Rect(4, (20, 0), (20, 16)), Rect(2, (0, 0), (9, 33))]
    old = ArrayWeights.bell(LAYOUT)
    new = old.changed(0.1)
    was, now = ([ArraySource(lanes_of(weights, rect)) for rect in shards] for weights in (old, new))
    base = ShardEncoder(LAYOUT, shards, was, NUMPY)
    list(base.chunks())
    whole = ShardEncoder(LAYOUT, shards, now, NUMPY, was, base.sums)
    followed = ShardEncoder(LAYOUT, shards, now, NUMPY, was, base.sums, audits=lambda shard: shard == 1)
    assert [chunk.data for chunk in followed.chunks()] == [chunk.data for chunk in whole.chunks()]
    assert np.array_equal(followed.sums, whole.sums)
    damaged = [ArraySource(source.array.copy()) for source in was]
    for source in damaged[1:]:
        source.array[3] ^= 1
    unseen = ShardEncoder(LAYOUT, shards, now, NUMPY, damaged, base.sums, audits=lambda shard: shard == 0)
    list(unseen.chunks())
    with pytest.raises(BaseMismatchError, match=r"shard of 'c.weight'"):
        list(ShardEncoder(LAYOUT, shards, now, NUMPY, damaged, base.sums, audits=lambda shard: shard == 2).chunks())
