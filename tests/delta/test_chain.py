"""Deltas in a row: one pass over the weights gives what applying them one after the other gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.delta import FORMAT
from deltad.delta.backend import Lanes, Mode, choose
from deltad.delta.chain import apply_chain, nests
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.emit import FrameWriter
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.weights import Span, read_segments
from deltad.limits import Limits
from tests.kit.deltas import MODES
from tests.kit.versions import SMALL_CHUNKS
from tests.kit.weights import ArrayWeights, layouts


def deltas(layout: Layout, states: list[ArrayWeights], cuts: list[Limits], modes: list[Mode]) -> list[list[bytes]]:
    """The chunks of every delta from one state to the next."""
    edges = []
    for old, new, limits, mode in zip(states[:-1], states[1:], cuts, modes, strict=True):
        encoder = EdgeEncoder(
            layout, new, choose(), base=old, base_sums=sum_weights(layout, old), limits=limits, mode=mode
        )
        edges.append([chunk.data for chunk in encoder.chunks()])
    return edges


@settings(max_examples=settings.default.max_examples // 4)
@given(
    layout=layouts(),
    seed=st.integers(0, 100),
    how=st.lists(st.tuples(st.sampled_from(MODES), st.sampled_from([SMALL_CHUNKS, Limits()])), min_size=1, max_size=4),
    threads=st.sampled_from([1, 2]),
)
def test_one_pass_gives_every_lane_once_as_it_is_after_the_last_delta(
    layout: Layout, seed: int, how: list[tuple[Mode, Limits]], threads: int
) -> None:
    states = [ArrayWeights.random(layout, seed)]
    for number in range(len(how)):
        states.append(states[-1].changed(0.3, seed=seed + number))
    edges = deltas(layout, states, [limits for _, limits in how], [mode for mode, _ in how])
    found = ArrayWeights.zeros(layout)
    given_lanes = [0] * len(layout.tensors)

    def put(span: Span, lanes: Lanes) -> None:
        tensor, start, count = span
        found.arrays[tensor][start : start + count] = lanes
        given_lanes[tensor] += count

    assert nests(edges, layout)
    assert apply_chain(edges, layout, states[0], put, choose(), threads=threads)
    assert found.equals(states[-1])
    assert given_lanes == [spec.lanes for spec in layout.tensors]


@pytest.mark.parametrize("mode", MODES)
def test_frames_that_are_cut_in_another_way_are_left_to_be_applied_one_after_the_other(mode: Mode) -> None:
    layout = Layout(FORMAT, (TensorSpec("w", "BF16", (64, 48)),))
    old = ArrayWeights.random(layout)
    new = old.changed(0.1)
    edge = by_columns(layout, old, new, mode)
    assert not nests([edge], layout)
    assert not apply_chain([edge], layout, old, lambda span, lanes: None, choose())


def by_columns(layout: Layout, old: ArrayWeights, new: ArrayWeights, mode: Mode) -> list[bytes]:
    """A delta that changes some columns of the one tensor."""
    rects = (Rect(0, (0, 8), (64, 16)),)
    before, after = read_segments(old, rects, layout), read_segments(new, rects, layout)
    frames = FrameWriter(layout, choose(), mode, Limits())
    encoded = frames.encode(rects, before, after)
    assert encoded is not None
    return [frames.coded(rects, before, after, encoded).data]


def test_what_is_written_to_may_be_what_is_read() -> None:
    layout = Layout(FORMAT, (TensorSpec("w", "BF16", (64, 48)), TensorSpec("x", "F32", (7,))))
    states = [ArrayWeights.random(layout)]
    for number in range(3):
        states.append(states[-1].changed(0.1, seed=number))
    weights = states[0].copy()

    def put(span: Span, lanes: Lanes) -> None:
        np.copyto(weights.lanes(*span), lanes)

    edges = deltas(layout, states, [Limits()] * 3, ["dense", "blind", "fast"])
    assert apply_chain(edges, layout, weights, put, choose())
    assert weights.equals(states[-1])
