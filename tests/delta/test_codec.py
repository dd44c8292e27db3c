"""Edges: whatever the weights, applying what was encoded gives the target, bit for bit."""

import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.delta.backend import Mode
from deltad.delta.codec import (
    EdgeEncoder,
    EncodedChunk,
    Patch,
    apply_chunks,
    apply_patch,
    read_patches,
    sum_weights,
)
from deltad.delta.coding import Coder, Coding
from deltad.delta.frame import FrameHeader, Rect, plan_frames, slabs, write_frame
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import BaseMismatchError, CheckpointError, FormatError, IntegrityError, LimitError
from deltad.limits import Limits
from tests.kit.deltas import BACKEND, MODES, SMALL, applied, encoder, frames, held
from tests.kit.weights import ArrayWeights, layouts, weights


def encode(
    layout: Layout,
    target: ArrayWeights,
    base: ArrayWeights | None = None,
    limits: Limits = SMALL,
    mode: Mode = "blind",
) -> EdgeEncoder:
    return encoder(layout, target, base, limits=limits, mode=mode)


def apply(layout: Layout, chunks: list[EncodedChunk], onto: ArrayWeights) -> list[tuple[Patch, np.ndarray]]:
    """Apply patch by patch, in place, with the sums following; returns what undoes it."""
    sums = sum_weights(layout, onto)
    undo = []
    for chunk in chunks:
        for patch in read_patches([chunk.data], layout, BACKEND, base=onto, limits=SMALL):
            old = apply_patch(patch, onto.arrays[patch.tensor], layout.tensors[patch.tensor], sums, BACKEND)
            undo.append((patch, old))
    assert np.array_equal(sums, sum_weights(layout, onto)), "the sums followed every write"
    return undo


@given(st.data(), st.sampled_from(MODES))
def test_a_delta_carries_any_weights_to_any_others(data: st.DataObject, mode: Mode) -> None:
    layout = data.draw(layouts())
    base, target = data.draw(weights(layout)), data.draw(weights(layout))
    edge = encode(layout, target, base, mode=mode)
    chunks = list(edge.chunks())
    served = base.copy()
    apply(layout, chunks, served)
    assert served.equals(target)
    assert applied(held(chunks), layout, base).equals(target)
    assert np.array_equal(edge.sums, sum_weights(layout, target))
    coders = {frame.header.coder for frame in frames(held(chunks), layout)}
    assert edge.coders == tuple(sorted(coders))


@given(st.data())
def test_blind_patches_are_read_without_the_base(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    base, target = data.draw(weights(layout)), data.draw(weights(layout))
    sums = sum_weights(layout, base)
    for chunk in list(encode(layout, target, base).chunks()):
        for patch in list(read_patches([chunk.data], layout, BACKEND, limits=SMALL)):
            apply_patch(patch, base.arrays[patch.tensor], layout.tensors[patch.tensor], sums, BACKEND)
    assert base.equals(target)


@given(st.data())
def test_an_anchor_needs_no_base(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    target = data.draw(weights(layout))
    rebuilt = ArrayWeights.zeros(layout)
    apply(layout, list(encode(layout, target).chunks()), rebuilt)
    assert rebuilt.equals(target)


@given(st.data(), st.sampled_from(MODES))
def test_undoing_patches_in_reverse_order_restores_the_base(data: st.DataObject, mode: Mode) -> None:
    layout = data.draw(layouts())
    base, target = data.draw(weights(layout)), data.draw(weights(layout))
    served = base.copy()
    sums = sum_weights(layout, target)
    for patch, old in reversed(apply(layout, list(encode(layout, target, base, mode=mode).chunks()), served)):
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("density", [0.0002, 0.01, 0.2, 1.0])
def test_many_frames_and_chunks_at_any_density(density: float, mode: Mode) -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(density)
    edge = encode(LARGE, target, base, mode=mode)
    chunks = list(edge.chunks())
    assert all(chunk.ref.size == len(chunk.data) <= SMALL.chunk_bytes for chunk in chunks)
    served = base.copy()
    apply(LARGE, chunks, served)
    assert served.equals(target)
    changed = [int((a != b).sum()) for a, b in zip(base.arrays, target.arrays, strict=True)]
    assert edge.changed.tolist() == changed
    for chunk in chunks:
        touched = {patch.tensor for patch in read_patches([chunk.data], LARGE, BACKEND, base=base, limits=SMALL)}
        assert min(touched) >= chunk.ref.first_tensor
        assert max(touched) <= chunk.ref.last_tensor


def test_equal_weights_give_an_edge_without_chunks() -> None:
    base = ArrayWeights.random(LARGE)
    edge = encode(LARGE, base.copy(), base)
    assert list(edge.chunks()) == []
    assert edge.changed.sum() == 0
    assert edge.coders == ()


def test_equal_inputs_give_equal_bytes() -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(0.05)
    first, second = (list(encode(LARGE, target.copy(), base.copy()).chunks()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("mode", [*MODES, None])
def test_any_number_of_threads_gives_the_same_edge(mode: Mode | None) -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(0.05)
    edges = [encode(LARGE, target, None if mode is None else base, mode=mode or "blind") for _ in range(4)]
    for threads, edge in enumerate(edges, start=1):
        edge.threads = threads
    chunks = [list(edge.chunks()) for edge in edges]
    assert len(chunks[0]) >= 3
    for edge, same in zip(edges, chunks, strict=True):
        assert same == chunks[0]
        assert np.array_equal(edge.sums, sum_weights(LARGE, target))
        assert np.array_equal(edge.changed, edges[0].changed)
        assert edge.coders == edges[0].coders


@pytest.mark.parametrize("mode", [*MODES, None])
@pytest.mark.parametrize("threads", [2, 4])
def test_an_edge_is_read_and_applied_by_several_threads(mode: Mode | None, threads: int) -> None:
    base = ArrayWeights.random(LARGE)
    target = base.changed(0.05)
    data = [c.data for c in encode(LARGE, target, None if mode is None else base, mode=mode or "blind").chunks()]
    after = base.copy()
    sums = sum_weights(LARGE, base)
    apply_chunks(data, LARGE, after, sums, BACKEND, limits=SMALL, threads=threads)
    assert after.equals(target)
    assert np.array_equal(sums, sum_weights(LARGE, target, threads=threads))
    one, several = (
        list(read_patches(data, LARGE, BACKEND, base=base, limits=SMALL, threads=count)) for count in (1, threads)
    )
    assert [patch.tensor for patch in several] == [patch.tensor for patch in one]
    assert all(np.array_equal(a.values, b.values) for a, b in zip(one, several, strict=True))


class Apart(ArrayWeights):
    """Weights whose first loan lasts until another thread borrows the same lanes, or for a while."""

    def __init__(self, weights: ArrayWeights) -> None:
        super().__init__(weights.arrays)
        self.first: tuple[int, int, int, int] | None = None
        self.met = threading.Event()

    def lanes(self, tensor: int, start: int, count: int) -> np.ndarray:
        if self.first is None:
            self.first = (threading.get_ident(), tensor, start, start + count)
            self.met.wait(0.2)
            self.first = (0, tensor, 0, 0)
        thread, other, low, high = self.first
        if thread != threading.get_ident() and tensor == other and start < high and low < start + count:
            self.met.set()
        return super().lanes(tensor, start, count)


@pytest.mark.parametrize("threads", [1, 3])
def test_frames_that_are_not_disjoint_are_applied_one_after_the_other(threads: int) -> None:
    base = ArrayWeights.random(HOSTILE)
    first = base.changed(0.05)
    second = first.changed(0.05, seed=5)
    steps = [(base, first), (first, second)]
    data = [chunk.data for old, new in steps for chunk in encode(HOSTILE, new, old).chunks()]
    after = Apart(base.copy())
    sums = sum_weights(HOSTILE, base)
    apply_chunks(data, HOSTILE, after, sums, BACKEND, limits=SMALL, threads=threads)
    assert not after.met.is_set()
    assert after.equals(second)
    assert np.array_equal(sums, sum_weights(HOSTILE, second))


class Lending(ArrayWeights):
    """Weights that know what is on loan in which thread, and one of whose tensors cannot be read."""

    def __init__(self, weights: ArrayWeights, unreadable: int = -1) -> None:
        super().__init__(weights.arrays)
        self.unreadable = unreadable
        self.on_loan: list[tuple[int, int, int, int]] = []

    def lanes(self, tensor: int, start: int, count: int) -> np.ndarray:
        if tensor == self.unreadable:
            raise CheckpointError("tensor", expected="something readable", found="a broken disk")
        self.on_loan.append((threading.get_ident(), tensor, start, count))
        return super().lanes(tensor, start, count)

    def release(self, tensor: int, start: int, count: int) -> None:
        loan = (threading.get_ident(), tensor, start, count)
        if loan in self.on_loan:
            self.on_loan.remove(loan)


@pytest.mark.parametrize("threads", [1, 3])
def test_whatever_ends_an_encoder_everything_that_it_borrowed_is_given_back(threads: int) -> None:
    weights = ArrayWeights.random(LARGE)
    sums = sum_weights(LARGE, weights)
    for unreadable in (-1, 3):
        base, target = Lending(weights), Lending(weights.changed(0.05), unreadable)
        edge = EdgeEncoder(LARGE, target, BACKEND, base=base, base_sums=sums, limits=SMALL, threads=threads)
        chunks = edge.chunks()
        if unreadable < 0:
            next(chunks)
            chunks.close()
        else:
            with pytest.raises(CheckpointError, match="broken disk"):
                list(chunks)
        assert base.on_loan == target.on_loan == []


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_frame_among_good_ones_ends_the_reading(threads: int) -> None:
    base = ArrayWeights.random(LARGE)
    data = [chunk.data for chunk in encode(LARGE, base.changed(0.05), base, mode="dense").chunks()]
    other = base.changed(0.3, seed=9)
    target = Lending(other.copy())
    with pytest.raises((FormatError, IntegrityError)):
        apply_chunks(data, LARGE, target, sum_weights(LARGE, other), BACKEND, limits=SMALL, threads=threads)
    assert target.on_loan == []


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
    edge = EdgeEncoder(LARGE, target, BACKEND, base=base, base_sums=sums, limits=SMALL)
    with pytest.raises(BaseMismatchError, match=LARGE.tensors[tensor].name):
        list(edge.chunks())


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


@pytest.mark.parametrize("mode", MODES)
def test_a_chunk_with_any_byte_changed_is_refused_or_right(mode: Mode) -> None:
    base = ArrayWeights.random(HOSTILE)
    target = base.changed(0.02)
    (chunk,) = encode(HOSTILE, target, base, Limits(), mode).chunks()
    for at in range(len(chunk.data)):
        for flip in (0x01, 0x80, 0xFF):
            mutated = chunk.data[:at] + bytes([chunk.data[at] ^ flip]) + chunk.data[at + 1 :]
            served = base.copy()
            try:
                apply(HOSTILE, [EncodedChunk(None, mutated)], served)
            except (FormatError, IntegrityError):
                continue
            assert served.equals(target)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 10, -1, -5])
def test_a_truncated_chunk_is_refused(length: int) -> None:
    data = hostile_chunk()[:length] if length else b""
    if not data:
        assert list(read_patches([data], HOSTILE, BACKEND)) == []
        return
    with pytest.raises(FormatError):
        list(read_patches([data], HOSTILE, BACKEND))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_as_a_chunk(data: bytes) -> None:
    if data:
        with pytest.raises(FormatError):
            list(read_patches([data], HOSTILE, BACKEND))


def test_a_chunk_made_for_another_layout_is_refused() -> None:
    other = replace_shape(HOSTILE, (40, 49))
    with pytest.raises(FormatError, match="rectangle"):
        list(read_patches([hostile_chunk()], other, BACKEND))


def replace_shape(layout: Layout, shape: tuple[int, ...]) -> Layout:
    first = layout.tensors[0]
    return Layout(1, (TensorSpec(first.name, first.dtype, shape), *layout.tensors[1:]))


def test_a_chunk_above_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(FormatError, match="at most"):
        list(read_patches([hostile_chunk()], HOSTILE, BACKEND, limits=replace(Limits(), chunk_bytes=100)))


def frame_of(**fields: object) -> bytes:
    """A frame over three lanes of HOSTILE's first tensor, with changes to its header."""
    plain = [b"\0\1", b"", b"\1", b"", b""]
    data = write_frame("BF16", (Rect(0, (0, 0), (1, 3)),), Coding(Coder.BLIND, 3, 2), bytes(16), plain)
    length = int.from_bytes(data[:4], "little")
    header = msgspec.msgpack.decode(data[4 : 4 + length], type=FrameHeader)
    changed = msgspec.msgpack.encode(msgspec.structs.replace(header, **fields))
    return len(changed).to_bytes(4, "little") + changed + data[4 + length :]


ROWS = (Rect(0, (0, 0), (2, 3)), Rect(0, (1, 2), (2, 3)))
CLASSES = {"coder": 2, "starts": (0,), "streams": ((2, 2), (0, 0), (1, 1), (0, 0), (0, 0))}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": 0}, "expected format 1, found format 0"),
        ({"format": 2}, "expected format 1, found format 2"),
        ({"coder": 4}, "found coder 4"),
        ({"coder": -1}, "found coder -1"),
        ({"dtype": "F32"}, "dtype BF16"),
        ({"rects": ()}, "rectangles"),
        ({"rects": (Rect(2, (0,), (1,)),)}, "a tensor below 2"),
        ({"rects": (Rect(0, (0, 0), (41, 3)),)}, "within"),
        ({"rects": (Rect(0, (0, -1), (1, 3)),)}, "within"),
        ({"rects": (Rect(0, (0, 0), (0, 3)),)}, "within"),
        ({"rects": (Rect(0, (0,), (3,)),)}, "2 dimensions"),
        ({"rects": (Rect(0, (0, 0), (1, 3)),) * 2}, "disjoint"),
        ({"rects": ROWS}, "disjoint"),
        ({"changed": 4}, "0 to 3 changes"),
        ({"changed": -1}, "0 to 3 changes"),
        ({"changed": 1}, "streams for 1 changes"),
        ({"check": bytes(15)}, "a check of 16 bytes"),
        ({"small": 1}, "no classes in a blind frame"),
        ({"starts": (0,)}, "no classes in a blind frame"),
        ({"marked": 1}, "no classes in a blind frame"),
        ({**CLASSES, "check": b""}, "a check of 16 bytes"),
        ({**CLASSES, "starts": ()}, "1 to 4 bulk ones"),
        ({**CLASSES, "starts": tuple(range(5))}, "1 to 4 bulk ones"),
        ({**CLASSES, "starts": tuple(range(14)), "small": 13}, "0 to 12 small classes"),
        ({**CLASSES, "small": -1}, "0 to 12 small classes"),
        ({**CLASSES, "starts": (1,)}, "ascend from 0"),
        ({**CLASSES, "starts": (0, 256)}, "below 256"),
        ({**CLASSES, "starts": (0, 7, 7)}, "ascend from 0"),
        ({**CLASSES, "marked": 1}, "polarities of 0"),
        ({**CLASSES, "starts": (0, 7)}, "10 streams"),
        ({"streams": ()}, "5 streams"),
        ({"streams": ((2, 2), (4, 0), (1, 1), (0, 0), (0, 0))}, "zstd"),
        ({"streams": ((2, 2), (12, 0), (1, 1), (0, 0), (0, 0))}, "lengths 2, 12"),
        ({"streams": ((2, 3), (0, 0), (0, 0), (0, 0), (0, 0))}, "bytes of streams"),
        ({"streams": ((2, -1), (0, 0), (1, 1), (0, 0), (0, 0))}, "bytes of streams"),
        ({"streams": ((2**63, 2), (0, 0), (1, 1), (0, 0), (0, 0))}, "frame"),
    ],
)
def test_a_frame_header_that_breaks_a_rule_is_refused_in_words(fields: dict[str, object], said: str) -> None:
    base = ArrayWeights.zeros(HOSTILE)
    assert len(list(read_patches([frame_of()], HOSTILE, BACKEND))) == 1
    with pytest.raises(FormatError, match=said):
        list(read_patches([frame_of(**fields)], HOSTILE, BACKEND, base=base))


def test_rectangles_that_are_no_runs_may_interlock() -> None:
    rects = (Rect(0, (0, 0), (2, 1)), Rect(0, (0, 1), (1, 1)))
    assert len(list(read_patches([frame_of(rects=rects)], HOSTILE, BACKEND))) == 2


def test_a_stream_that_zstd_would_blow_up_is_refused_before_it_is_unpacked() -> None:
    lanes = 2000
    coding = Coding(Coder.BLIND, lanes, lanes)
    plain = [bytes(lanes), b"", bytes(lanes // 4), b"", b""]
    bomb = write_frame("BF16", (Rect(0, (0, 0), (40, 50)),), coding, b"", plain)
    assert len(list(read_patches([bomb], HOSTILE, BACKEND, limits=replace(Limits(), frame_plain_bytes=2500)))) == 1
    with pytest.raises(LimitError, match="plain bytes"):
        list(read_patches([bomb], HOSTILE, BACKEND, limits=replace(Limits(), frame_plain_bytes=2499)))
    with pytest.raises(LimitError, match="lanes"):
        list(read_patches([bomb], HOSTILE, BACKEND, limits=replace(Limits(), frame_lanes=1999)))
    larger = zstandard.compress(bytes(100_000))
    length = int.from_bytes(bomb[:4], "little")
    header = msgspec.msgpack.decode(bomb[4 : 4 + length], type=FrameHeader)
    streams = ((lanes, len(larger)), (0, 0), *header.streams[2:])
    lying = msgspec.msgpack.encode(msgspec.structs.replace(header, streams=streams))
    with pytest.raises(FormatError, match="zstd claims 100000"):
        list(read_patches([len(lying).to_bytes(4, "little") + lying + larger + bytes(lanes)], HOSTILE, BACKEND))


def test_a_frame_that_would_add_other_than_its_check_is_refused_before_it_is_written() -> None:
    base = ArrayWeights.random(HOSTILE)
    (chunk,) = encode(HOSTILE, base.changed(0.02), base, Limits()).chunks()
    (first, _) = frames(held([chunk]), HOSTILE, Limits())
    wrong = bytes(16)
    data = write_frame("BF16", first.header.rects, first.header.coding, wrong, first.streams)
    before = base.copy()
    with pytest.raises(IntegrityError, match="nothing was written"):
        apply_chunks([data], HOSTILE, base, sum_weights(HOSTILE, base), BACKEND)
    assert base.equals(before)
    with pytest.raises(IntegrityError, match="nothing was written"):
        list(read_patches([data], HOSTILE, BACKEND, base=base))


@pytest.mark.parametrize(("draw", "coder"), [(ArrayWeights.random, Coder.RAW), (ArrayWeights.bell, Coder.PACKED)])
def test_weights_that_gain_nothing_from_a_delta_go_whole_and_say_so(
    draw: Callable[[Layout, int], ArrayWeights], coder: Coder
) -> None:
    layout = Layout(0, LARGE.tensors[:1])
    base, target = draw(layout, 1), draw(layout, 2)
    edge = encode(layout, target, base, Limits(), mode="dense")
    list(edge.chunks())
    assert edge.coders == (coder,)


def test_a_lane_that_no_chunk_can_hold_is_an_error_and_no_endless_halving() -> None:
    base = ArrayWeights.random(HOSTILE)
    with pytest.raises(LimitError, match="single lane"):
        list(encode(HOSTILE, base.changed(0.1), base, Limits(chunk_bytes=20, frame_lanes=64)).chunks())
