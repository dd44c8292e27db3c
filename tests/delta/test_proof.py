"""An edge that was made without weights is proven by what its frames add, or beside the weights, or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.codec import sum_weights
from deltad.delta.digest import U64
from deltad.delta.fold import StoredDelta, fold
from deltad.delta.frame import FrameHeader
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.proof import Ledger, prove_beside
from deltad.delta.weights import hash_weights
from deltad.errors import IntegrityError
from deltad.limits import Limits
from tests.kit.deltas import BACKEND, SMALL, delta, frames, made
from tests.kit.weights import ArrayWeights, layouts, weights

MODEL = Layout(1, tuple(TensorSpec(name, "BF16", (40, 33)) for name in "abc"))
ACROSS = Limits(chunk_bytes=900, frame_lanes=512)
"""Cuts frames that run across those of SMALL."""


def headers(stored: StoredDelta, layout: Layout = MODEL) -> list[FrameHeader]:
    return [frame.header for frame in frames(stored, layout)]


def proves(found: Sequence[FrameHeader], base: U64, target: U64, layout: Layout = MODEL) -> bool:
    ledger = Ledger(layout)
    for header in found:
        ledger.add(header)
    return ledger.proves(base, target)


def three() -> tuple[list[ArrayWeights], list[U64]]:
    states = [ArrayWeights.random(MODEL)]
    states += [states[0].changed(0.02, 1)]
    states += [states[1].changed(0.02, 2)]
    return states, [sum_weights(MODEL, state) for state in states]


@given(st.data())
def test_what_leads_from_base_to_target_is_never_refused(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    a, b, c = (data.draw(weights(layout)) for _ in range(3))
    sums = [sum_weights(layout, state) for state in (a, c)]
    folded = made(fold([delta(layout, a, b), delta(layout, b, c)], layout, BACKEND, limits=SMALL))
    proves(headers(folded, layout), sums[0], sums[1], layout)
    prove_beside(folded.data(), layout, a, (sums[0], sums[1]), BACKEND, limits=SMALL)


def test_a_fold_that_nests_is_proven_and_not_for_any_other_ends() -> None:
    (a, b, c), sums = three()
    folded = headers(made(fold([delta(MODEL, a, b), delta(MODEL, b, c)], MODEL, BACKEND, limits=SMALL)))
    assert proves(folded, sums[0], sums[2])
    for ends in ((0, 1), (1, 2), (2, 0)):
        with pytest.raises(IntegrityError, match="in tensor 'a' or one that shares a frame with it"):
            proves(folded, sums[ends[0]], sums[ends[1]])


def test_a_frame_that_was_lost_is_missed() -> None:
    (a, b, c), sums = three()
    folded = headers(made(fold([delta(MODEL, a, b), delta(MODEL, b, c)], MODEL, BACKEND, limits=SMALL)))
    for lost in range(len(folded)):
        with pytest.raises(IntegrityError):
            proves([header for i, header in enumerate(folded) if i != lost], sums[0], sums[2])


def test_frames_that_do_not_tell_prove_nothing_until_they_are_followed_beside_the_base() -> None:
    (a, b, c), sums = three()
    parts = [delta(MODEL, a, b), delta(MODEL, b, c, limits=ACROSS)]
    folded = made(fold(parts, MODEL, BACKEND, limits=SMALL))
    assert not proves(headers(folded), sums[0], sums[2])
    prove_beside(folded.data(), MODEL, a, (sums[0], sums[2]), BACKEND, limits=SMALL)
    with pytest.raises(IntegrityError, match="in tensor 'a'"):
        prove_beside(folded.data(), MODEL, a, (sums[0], sums[1]), BACKEND, limits=SMALL)


def test_whole_frames_prove_the_tensors_that_they_hold_all_of() -> None:
    a, b = ArrayWeights.random(MODEL), ArrayWeights.random(MODEL, 2)
    sums = [sum_weights(MODEL, state) for state in (a, b)]
    whole = headers(delta(MODEL, a, b))
    assert proves(whole, sums[0], sums[1])
    assert proves(whole, sums[1], sums[1]), "they lead there from anywhere"
    with pytest.raises(IntegrityError):
        proves(whole, sums[0], sums[0])
    b.arrays[1][:660] = a.arrays[1][:660]
    half = headers(delta(MODEL, a, b))
    assert not proves(half, sums[0], sum_weights(MODEL, b)), "nobody knows what a part of a tensor replaces"


def test_a_check_that_was_tampered_with_is_noticed() -> None:
    (a, b, _), sums = three()
    found = headers(delta(MODEL, a, b))
    check = (int.from_bytes(found[0].check, "little") ^ 1).to_bytes(16, "little")
    with pytest.raises(IntegrityError):
        proves([msgspec.structs.replace(found[0], check=check), *found[1:]], sums[0], sums[1])


def test_a_tensors_sha256_is_that_of_its_bytes_and_an_alias_has_that_of_none() -> None:
    layout = Layout(1, (TensorSpec("a", "BF16", (7, 3)), TensorSpec("b", "BF16", (7, 3), alias_of="a")))
    state = ArrayWeights([np.arange(21, dtype=np.uint16), np.empty(0, np.uint16)])
    expected = hashlib.sha256(state.arrays[0].tobytes()).digest() + hashlib.sha256(b"").digest()
    assert hash_weights(layout, state) == expected == hash_weights(layout, state, threads=2)
