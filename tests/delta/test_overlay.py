"""A chain of deltas staged beside weights that stay as they are, whatever coders it is made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.delta.backend import Mode
from deltad.delta.codec import Patch, apply_patch, read_patches, sum_weights
from deltad.delta.coding import Coder
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.overlay import Overlay
from deltad.delta.weights import read_segments
from deltad.errors import FormatError, IntegrityError
from tests.kit.deltas import BACKEND, MODES, SMALL, encoder, frames, held
from tests.kit.weights import ArrayWeights, layouts, weights

HOW = (*MODES, "anchor")
"""How a step of a chain is made; an anchor's frames are all raw and cover everything."""


def stage(layout: Layout, below: ArrayWeights, chain: list[tuple[str, ArrayWeights]]) -> list[list[Patch]]:
    """The patches of every step, each read beside `below` and the steps before it."""
    beside = Overlay(below, layout)
    before, staged = below, []
    for how, target in chain:
        base, mode = (None, "blind") if how == "anchor" else (before, how)
        edge = encoder(layout, target, base, mode=mode)
        patches = [
            patch
            for chunk in edge.chunks()
            for patch in read_patches([chunk.data], layout, BACKEND, base=beside, limits=SMALL)
        ]
        beside.add(patches)
        staged.append(patches)
        before = target
    return staged


def commit(layout: Layout, onto: ArrayWeights, staged: list[list[Patch]]) -> ArrayWeights:
    after = onto.copy()
    sums = sum_weights(layout, after)
    for patches in staged:
        for patch in patches:
            apply_patch(patch, after.arrays[patch.tensor], layout.tensors[patch.tensor], sums, BACKEND)
    assert np.array_equal(sums, sum_weights(layout, after)), "the sums followed every write"
    return after


@st.composite
def chains(draw: st.DrawFn) -> tuple[Layout, ArrayWeights, list[tuple[str, ArrayWeights]]]:
    layout = draw(layouts())
    versions = draw(st.lists(st.tuples(st.sampled_from(HOW), weights(layout)), min_size=1, max_size=4))
    return layout, draw(weights(layout)), versions


@given(chains())
@settings(deadline=None)
def test_a_chain_of_any_coders_is_staged_as_if_each_step_had_been_applied(
    drawn: tuple[Layout, ArrayWeights, list[tuple[str, ArrayWeights]]],
) -> None:
    layout, below, chain = drawn
    as_it_was = below.copy()
    staged = stage(layout, below, chain)
    assert below.equals(as_it_was), "staging writes nothing"
    assert commit(layout, below, staged).equals(chain[-1][1])


@given(st.lists(st.sampled_from(HOW), min_size=2, max_size=5), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_so_is_one_over_many_frames_whose_steps_change_the_same_lanes(hows: list[str], seed: int) -> None:
    layout = Layout(
        1, (TensorSpec("a", "BF16", (40, 60)), TensorSpec("b", "F32", (7,)), TensorSpec("c", "I8", (3000,)))
    )
    below = ArrayWeights.random(layout, seed)
    chain, before = [], below
    for i, how in enumerate(hows):
        before = before.changed(0.2, seed=seed + i + 1)
        chain.append((how, before))
    assert commit(layout, below, stage(layout, below, chain)).equals(before)


@pytest.mark.parametrize("mode", ["fast", "dense"])
def test_without_what_came_before_a_later_step_by_context_is_refused(mode: Mode) -> None:
    layout = Layout(1, (TensorSpec("a", "BF16", (64, 64)),))
    below = ArrayWeights.random(layout, 1)
    first = below.changed(0.3, seed=2)
    second = first.changed(0.3, seed=3)
    stored = held(encoder(layout, second, first, mode=mode).chunks())
    assert {frame.header.coder for frame in frames(stored, layout)} == {Coder.CONTEXT}
    data = next(stored.data())
    with pytest.raises((FormatError, IntegrityError)):
        list(read_patches([data], layout, BACKEND, base=Overlay(below, layout), limits=SMALL))


def test_a_window_that_no_patch_touches_is_a_view_and_any_other_a_copy() -> None:
    layout = Layout(1, (TensorSpec("a", "U8", (100,)),))
    below = ArrayWeights.zeros(layout)
    overlay = Overlay(below, layout)
    overlay.add([Patch(0, np.array([10, 60]), np.array([1, 2], np.uint8), absolute=False)])
    overlay.add([Patch(0, slice(58, 62), np.array([7, 7, 7, 7], np.uint8), absolute=True)])
    assert np.shares_memory(overlay.lanes(0, 70, 30), below.arrays[0])
    assert overlay.lanes(0, 5, 10).tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert overlay.lanes(0, 59, 5).tolist() == [7, 7, 7, 0, 0]
    assert overlay.lanes(0, 60, 1).tolist() == [7]
    assert not below.arrays[0].any()


def test_columns_of_a_tensor_are_read_window_by_window() -> None:
    """What lies between the rows of such a rectangle may be nearly the whole tensor."""
    layout = Layout(1, (TensorSpec("a", "U8", (1300, 1000)),))
    whole = ArrayWeights.random(layout)

    class Watched(ArrayWeights):
        widest = 0

        def lanes(self, tensor: int, start: int, count: int) -> np.ndarray:
            Watched.widest = max(Watched.widest, count)
            return super().lanes(tensor, start, count)

    (found,) = read_segments(Watched(whole.arrays), [Rect(0, (5, 990), (1290, 10))], layout)
    assert np.array_equal(found, whole.arrays[0].reshape(1300, 1000)[5:1295, 990:].reshape(-1))
    assert Watched.widest <= 1 << 20
