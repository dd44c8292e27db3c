"""Deltas are a group: they fold, invert and change their coder, and do what their parts did."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import Mode
from deltad.delta.coding import WHOLE, Coder
from deltad.delta.emit import ChunkBuilder, FrameWriter
from deltad.delta.fold import StoredDelta, fold, invert, transcode
from deltad.delta.frame import Rect
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.weights import read_segments
from deltad.errors import FormatError, IntegrityError
from deltad.limits import Limits
from deltad.types import Digest
from tests.kit.deltas import BACKEND, MODES, SMALL, applied, delta, frames, held, made
from tests.kit.weights import ArrayWeights, layouts, weights

MODEL = Layout(
    1,
    (
        TensorSpec("a", "BF16", (300, 33)),
        TensorSpec("b", "F32", (77,)),
        TensorSpec("c", "BF16", ()),
        TensorSpec("d", "BF16", (2, 1, 4001)),
        TensorSpec("e", "F8_E4M3", (5, 90)),
        TensorSpec("f", "I64", (900,)),
        TensorSpec("g", "F4", (3, 80)),
    ),
)
CUTS = [SMALL, Limits(chunk_bytes=900, frame_lanes=512), Limits(chunk_bytes=2048, frame_lanes=100)]
"""Frames of the first and the last nest in those that SMALL plans; those of the second run across them."""


def chain(length: int, density: float = 0.02) -> list[ArrayWeights]:
    states = [ArrayWeights.random(MODEL)]
    for seed in range(length):
        states.append(states[-1].changed(density, seed))
    return states


def contents(stored: StoredDelta) -> list[tuple[object, ...]]:
    """Everything that the frames say but their checks."""
    return [(f.header.coder, f.header.rects, f.header.changed, f.streams) for f in frames(stored, MODEL)]


@given(st.data())
def test_a_fold_does_what_its_parts_did_one_after_the_other(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    a, b, c = (data.draw(weights(layout)) for _ in range(3))
    joined = made(fold([delta(layout, a, b), delta(layout, b, c)], layout, BACKEND, limits=SMALL))
    assert applied(joined, layout, a).equals(c)


@given(st.data())
def test_folding_is_associative(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    states = [data.draw(weights(layout)) for _ in range(4)]
    ab, bc, cd = (delta(layout, states[i], states[i + 1]) for i in range(3))
    early = made(fold([made(fold([ab, bc], layout, BACKEND, limits=SMALL)), cd], layout, BACKEND, limits=SMALL))
    late = made(fold([ab, made(fold([bc, cd], layout, BACKEND, limits=SMALL))], layout, BACKEND, limits=SMALL))
    assert list(early.data()) == list(late.data())


@given(st.data())
def test_an_inverse_undoes_and_the_fold_with_it_changes_nothing(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    a = data.draw(weights(layout))
    b = a.changed(0.1) if data.draw(st.booleans()) else data.draw(weights(layout))
    forth = delta(layout, a, b)
    if any(frame.header.coder in WHOLE for frame in frames(forth, layout)):
        with pytest.raises(FormatError, match=r"a (raw|packed) frame"):
            made(invert(forth, layout, BACKEND, limits=SMALL))
        return
    back = made(invert(forth, layout, BACKEND, limits=SMALL))
    assert applied(back, layout, b).equals(a)
    assert list(fold([forth, back], layout, BACKEND, limits=SMALL).chunks()) == []
    assert list(fold([back, forth], layout, BACKEND, limits=SMALL).chunks()) == []


@given(st.data(), st.sampled_from(MODES), st.sampled_from(MODES))
def test_a_transcoded_delta_does_the_same_in_the_other_coder(data: st.DataObject, before: Mode, after: Mode) -> None:
    layout = data.draw(layouts())
    a, b = data.draw(weights(layout)), data.draw(weights(layout))
    original = delta(layout, a, b, mode=before)
    other = made(transcode(original, layout, a, BACKEND, after, limits=SMALL))
    assert applied(other, layout, a).equals(b)
    if not any(frame.header.coder in WHOLE for frame in frames(original, layout)):  # which stay as they are
        assert list(other.data()) == list(delta(layout, a, b, mode=after).data())


@pytest.mark.parametrize("second", CUTS)
@pytest.mark.parametrize("first", CUTS)
def test_deltas_whose_frames_are_cut_differently_fold(first: Limits, second: Limits) -> None:
    a, b, c = chain(2)
    parts = delta(MODEL, a, b, limits=first), delta(MODEL, b, c, limits=second)
    joined = made(fold(parts, MODEL, BACKEND, limits=SMALL))
    assert applied(joined, MODEL, a).equals(c)
    if not any(frame.header.coder in WHOLE for part in parts for frame in frames(part, MODEL)):
        assert contents(joined) == contents(delta(MODEL, a, c))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", MODES)
def test_beside_the_base_deltas_of_any_coder_fold_to_what_would_have_been_encoded(before: Mode, mode: Mode) -> None:
    a, b, c = chain(2)
    first = delta(MODEL, a, b, mode=before, limits=CUTS[1])
    second = delta(MODEL, b, c, mode="mid")
    joined = made(fold([first, second], MODEL, BACKEND, base=a, mode=mode, limits=SMALL))
    assert list(joined.data()) == list(delta(MODEL, a, c, mode=mode).data())


def test_a_fold_is_checked_where_it_covers_all_that_it_was_made_of_and_nowhere_else() -> None:
    a, b, c = chain(2)
    nested = made(fold([delta(MODEL, a, b), delta(MODEL, b, c, limits=CUTS[2])], MODEL, BACKEND, limits=SMALL))
    assert [f.header.check for f in frames(nested, MODEL)] == [
        f.header.check for f in frames(delta(MODEL, a, c), MODEL)
    ]
    across = made(fold([delta(MODEL, a, b), delta(MODEL, b, c, limits=CUTS[1])], MODEL, BACKEND, limits=SMALL))
    assert {len(frame.header.check) for frame in frames(across, MODEL)} == {0, 16}


def test_a_checked_fold_refuses_another_base_before_it_writes() -> None:
    a, b, c = chain(2)
    joined = made(fold([delta(MODEL, a, b), delta(MODEL, b, c)], MODEL, BACKEND, limits=SMALL))
    with pytest.raises(IntegrityError, match="another base"):
        applied(joined, MODEL, ArrayWeights.random(MODEL, 5))


@pytest.mark.parametrize(("draw", "coder"), [(ArrayWeights.random, Coder.RAW), (ArrayWeights.bell, Coder.PACKED)])
def test_whole_frames_fold_with_what_follows_and_swallow_what_came_before(
    draw: Callable[[Layout, int], ArrayWeights], coder: Coder
) -> None:
    a, b, c = draw(MODEL, 1), draw(MODEL, 2), draw(MODEL, 2).changed(0.01)
    whole, blind = delta(MODEL, a, b), delta(MODEL, b, c)
    assert coder in {frame.header.coder for frame in frames(whole, MODEL)}
    joined = made(fold([whole, blind], MODEL, BACKEND, limits=SMALL))
    assert coder in {frame.header.coder for frame in frames(joined, MODEL)}
    assert applied(joined, MODEL, a).equals(c)
    back = delta(MODEL, c, b)
    other = delta(MODEL, b, draw(MODEL, 3))
    assert applied(made(fold([back, other], MODEL, BACKEND, limits=SMALL)), MODEL, c).equals(draw(MODEL, 3))
    beside = made(transcode(whole, MODEL, a, BACKEND, "dense", limits=SMALL))
    assert [c for c in contents(beside) if c[0] in WHOLE] == [c for c in contents(whole) if c[0] in WHOLE]


def test_frames_whole_and_blind_that_run_across_each_other_fold() -> None:
    a, b = chain(1)
    c = b.copy()
    c.arrays[0][300:5000] = ArrayWeights.random(MODEL, 7).arrays[0][300:5000]
    first = delta(MODEL, a, b, limits=CUTS[1])
    second = delta(MODEL, b, c)
    assert {Coder.RAW, Coder.BLIND} <= {frame.header.coder for frame in frames(second, MODEL)}
    assert applied(made(fold([first, second], MODEL, BACKEND, limits=SMALL)), MODEL, a).equals(c)
    d = c.changed(0.02, 9)
    third = delta(MODEL, c, d, limits=CUTS[1])
    assert applied(made(fold([second, third], MODEL, BACKEND, limits=SMALL)), MODEL, b).equals(d)


def test_rectangles_that_are_no_runs_fold_invert_and_transcode() -> None:
    layout = Layout(1, (TensorSpec("w", "BF16", (20, 6, 10)), TensorSpec("x", "BF16", (50,))))
    a = ArrayWeights.random(layout)
    b = a.copy()
    inside = b.arrays[0].reshape(20, 6, 10)[3:17, 1:4, 2:9]
    inside[:, 1, ::3] += np.uint16(2)
    rects = (Rect(0, (3, 1, 2), (14, 3, 7)),)
    first = rectangles(layout, rects, a, b)
    assert applied(first, layout, a).equals(b)
    back = made(invert(first, layout, BACKEND, limits=SMALL))
    assert applied(back, layout, b).equals(a)
    c = b.changed(0.05)
    assert applied(made(fold([first, delta(layout, b, c)], layout, BACKEND, limits=SMALL)), layout, a).equals(c)
    dense = made(transcode(first, layout, a, BACKEND, "dense", limits=SMALL))
    assert {frame.header.rects for frame in frames(dense, layout)} == {rects}
    assert applied(dense, layout, a).equals(b)
    assert list(made(transcode(dense, layout, a, BACKEND, "blind", limits=SMALL)).data()) == list(first.data())


def rectangles(
    layout: Layout, rects: tuple[Rect, ...], base: ArrayWeights, target: ArrayWeights, mode: Mode = "blind"
) -> StoredDelta:
    """A delta of one frame over `rects`."""
    writer = FrameWriter(layout, BACKEND, mode, SMALL)
    old, new = read_segments(base, rects, layout), read_segments(target, rects, layout)
    builder = ChunkBuilder(SMALL.chunk_bytes)
    for frame in writer.delta(rects, old, new, writer.encode(rects, old, new)):
        list(builder.add(frame))
    return held(builder.flush())


def test_what_is_coded_by_context_is_not_folded_or_inverted_without_its_base() -> None:
    a, b, c = chain(2)
    dense, blind = delta(MODEL, a, b, mode="dense"), delta(MODEL, b, c)
    for refused in (
        fold([dense, blind], MODEL, BACKEND, limits=SMALL),
        fold([blind, dense], MODEL, BACKEND, limits=SMALL),
    ):
        with pytest.raises(FormatError, match="the base beside a frame of the context coder"):
            made(refused)
    with pytest.raises(FormatError, match="a context frame; transcode it"):
        made(invert(dense, MODEL, BACKEND, limits=SMALL))
    with pytest.raises(ValueError, match="takes the base"):
        fold([blind, blind], MODEL, BACKEND, mode="mid")


def test_a_delta_that_was_made_counts_what_it_changes_and_names_its_coders() -> None:
    a, b, c = chain(2)
    result = fold([delta(MODEL, a, b), delta(MODEL, b, c)], MODEL, BACKEND, limits=SMALL)
    list(result.chunks())
    assert result.changed == sum(int((x != y).sum()) for x, y in zip(a.arrays, c.arrays, strict=True))
    assert result.coders == (Coder.BLIND,)


@given(st.data(), st.integers(2, 6))
def test_any_number_of_deltas_fold_in_one_pass_to_what_pairs_of_them_fold_to(data: st.DataObject, count: int) -> None:
    layout = data.draw(layouts())
    states = [data.draw(weights(layout)) for _ in range(count + 1)]
    parts = [delta(layout, before, after) for before, after in pairwise(states)]
    at_once = made(fold(parts, layout, BACKEND, limits=SMALL))
    assert applied(at_once, layout, states[0]).equals(states[-1])
    joined = parts[0]
    for part in parts[1:]:
        joined = made(fold([joined, part], layout, BACKEND, limits=SMALL))
    assert list(at_once.data()) == list(joined.data())


@pytest.mark.parametrize("density", [0.0005, 0.02, 0.4])
def test_few_changes_and_many_fold_alike_and_a_fold_that_is_inverted_undoes_itself(density: float) -> None:
    """Few are sorted, and many scattered: the frames do not tell."""
    layout = Layout(
        1, (TensorSpec("a", "BF16", (200, 300)), TensorSpec("b", "F64", (9000,)), TensorSpec("c", "F4", (64,)))
    )
    limits = Limits()
    states = [ArrayWeights.random(layout)]
    for seed in range(3):
        states.append(states[-1].changed(density, seed))
    parts = [delta(layout, before, after, limits=limits) for before, after in pairwise(states)]
    forth = made(fold(parts, layout, BACKEND, limits=limits))
    assert list(forth.data()) == list(delta(layout, states[0], states[-1], limits=limits).data())
    if any(frame.header.coder in WHOLE for frame in frames(forth, layout, limits)):
        return
    back = made(fold(parts, layout, BACKEND, inverted=True, limits=limits))
    assert list(back.data()) == list(delta(layout, states[-1], states[0], limits=limits).data())


def test_each_chunk_of_every_part_is_read_once() -> None:
    states = chain(3)
    read: list[Digest] = []

    def counted(stored: StoredDelta) -> StoredDelta:
        return StoredDelta(stored.chunks, lambda digest: read.append(digest) or stored.read(digest))  # type: ignore[func-returns-value]

    parts = [counted(delta(MODEL, before, after)) for before, after in pairwise(states)]
    made(fold(parts, MODEL, BACKEND, limits=SMALL))
    assert sorted(read) == sorted(Digest(ref.digest) for part in parts for ref in part.chunks)


def test_a_chunk_with_frames_of_tensors_that_its_page_does_not_name_is_refused() -> None:
    a, b, c = chain(2)
    true = delta(MODEL, a, b)
    first = true.chunks[0]
    lying = StoredDelta([msgspec.structs.replace(first, first_tensor=6, last_tensor=6), *true.chunks[1:]], true.read)
    with pytest.raises(FormatError, match="frames of the tensors 6 to 6"):
        made(fold([lying, delta(MODEL, b, c)], MODEL, BACKEND, limits=SMALL))


def test_what_cannot_be_inverted_is_refused() -> None:
    a, b = ArrayWeights.random(MODEL), ArrayWeights.random(MODEL, 2)
    whole = delta(MODEL, a, b)
    with pytest.raises(FormatError, match=r"a (raw|packed) frame; transcode it"):
        made(fold([whole], MODEL, BACKEND, inverted=True, limits=SMALL))
    with pytest.raises(ValueError, match="fold first"):
        fold([whole], MODEL, BACKEND, inverted=True, base=b)
    with pytest.raises(ValueError, match="at least one"):
        fold([], MODEL, BACKEND)
