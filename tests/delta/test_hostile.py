"""Whatever bytes come: every parser of the format answers or refuses, touches nothing outside, and stays within limits.

Rules broken one by one are in `test_descriptions` and `test_codec`, single bytes of frames in `tests/vectors`; here
are lies that are kept in `tests/corpus`, what a fuzzer makes of them and of the vectors, and bases that are wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta import FORMAT
from deltad.delta.backend import Backend, Changes, Lanes, Place, warm
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.codec import apply_chunks, read_patches
from deltad.delta.coding import check_coding, check_lengths
from deltad.delta.encoding import encode
from deltad.delta.frame import Rect, read_chunk, read_headers
from deltad.delta.layout import Layout, TensorSpec, decode_layout
from deltad.delta.manifest import ChunkRef, PageRef, decode_manifest, decode_page
from deltad.delta.record import decode_record
from deltad.delta.symbols import GAPS, from_symbols, to_symbols, value_scheme
from deltad.errors import FormatError, IntegrityError, LimitError
from deltad.limits import Limits
from deltad.types import DTYPES
from tests.corpus.make import BASES, Hostile, base, chunks, frame, kept_chunks, kept_streams, streams
from tests.corpus.make import LAYOUT as CORPUS_LAYOUT
from tests.kit.backends import present
from tests.kit.guard import Guards, at_most
from tests.kit.weights import ArrayWeights
from tests.vectors.vector import HERE as VECTORS
from tests.vectors.vector import Vector, all_vectors

KIB = 1 << 10
LIMITS = Limits(chunk_bytes=64 * KIB, frame_lanes=16 * KIB, frame_plain_bytes=128 * KIB)
FRAME_BYTES = 16 * (8 * LIMITS.frame_lanes + LIMITS.frame_plain_bytes)
"""What reading a frame within these limits may take: a few copies of its lanes, and of its symbols as numbers."""

REFERENCE = NumpyBackend()
CHUNKS = kept_chunks()
STREAMS = kept_streams()
FRAMES = [vector for vector in all_vectors() if len(vector.frame) < 4000]
REFUSALS = (FormatError, IntegrityError)

BACKENDS = present()

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """What a compiler takes is not what a frame takes."""
    for backend in BACKENDS:
        warm(backend, ["F8_E4M3", "BF16", "F32", "F64"])


def test_the_corpus_is_what_its_source_makes() -> None:
    assert chunks() == CHUNKS
    assert streams() == STREAMS


# Layouts, records, manifests and pages.

_edge = json.loads((VECTORS / "edge.json").read_text())
EDGE = {name: bytes.fromhex(_edge[name]) for name in ("layout", "record", "manifest", "page")}
EDGE_LAYOUT = decode_layout(EDGE["layout"])
PAGE = PageRef(bytes(32), len(EDGE["page"]), 1)
PARSERS: dict[str, Callable[[bytes], object]] = {
    "layout": decode_layout,
    "record": decode_record,
    "manifest": decode_manifest,
    "page": lambda data: decode_page(data, PAGE, EDGE_LAYOUT),
}
each_parser = pytest.mark.parametrize("name", PARSERS)

BOMBS = {
    "an array of 2^32 elements": b"\xdd\xff\xff\xff\xff",
    "a map of 2^32 fields": b"\xdf\xff\xff\xff\xff",
    "4 GiB of bytes": b"\xc6\xff\xff\xff\xff",
    "4 GiB of text": b"\xdb\xff\xff\xff\xff",
    "an extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "arrays in arrays": b"\x91" * 5000 + b"\xc0",
    "maps in maps": b"\x81\xa1a" * 5000 + b"\xc0",
    "a reserved byte": b"\xc1",
    "no number": b"\xcb\x7f\xf8\0\0\0\0\0\0",
    "text of half a surrogate": b"\xa3\xed\xa0\x80",
}


def answers_or_refuses(parse: Callable[[bytes], object], data: bytes) -> None:
    """Little memory for little input; what is accepted has one spelling."""
    with at_most(256 * KIB + 32 * len(data), data[:40]):
        try:
            value = parse(data)
        except FormatError:
            return
    if isinstance(value, msgspec.Struct):
        assert encode(value) == data


@each_parser
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_at_any_place_of_a_description_is_refused_at_no_cost(name: str, bomb: str) -> None:
    for at in range(len(EDGE[name])):
        answers_or_refuses(PARSERS[name], EDGE[name][:at] + BOMBS[bomb])
        answers_or_refuses(PARSERS[name], EDGE[name][:at] + BOMBS[bomb] + EDGE[name][at + 1 :])


@each_parser
def test_every_byte_of_the_vector_of_an_edge_may_be_wrong(name: str) -> None:
    for at, byte in enumerate(EDGE[name]):
        for other in {byte ^ 0x01, byte ^ 0x80, byte ^ 0xFF, 0x00, 0xC0, 0x91} - {byte}:
            answers_or_refuses(PARSERS[name], EDGE[name][:at] + bytes([other]) + EDGE[name][at + 1 :])


@st.composite
def spoilt(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A seed with up to four places cut out, doubled, overwritten, or filled with a part of another seed."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 64)))
        other = draw(st.sampled_from(seeds))
        start = draw(st.integers(0, len(other)))
        middle = draw(
            st.one_of(
                st.just(b""),
                st.just(2 * data[begin:end]),
                st.binary(max_size=12),
                st.sampled_from([b"\0", b"\xff", b"\x7f"]).map(lambda byte: byte * (end - begin)),  # noqa: B023
                st.just(other[start : start + 40]),
            )
        )
        data = data[:begin] + middle + data[end:]
    return data


@each_parser
@given(data=spoilt([EDGE[name] for name in PARSERS]))
def test_a_spoilt_description_is_refused_or_has_one_spelling(name: str, data: bytes) -> None:
    answers_or_refuses(PARSERS[name], data)


def many(head: bytes, element: bytes, count: int, tail: bytes = b"") -> bytes:
    return head + b"\xdd" + count.to_bytes(4, "big") + element * count + tail


LONG: dict[str, tuple[str, bytes]] = {
    "tensors": ("layout", many(b"\x83\xa6format\x01\xa7tensors", encode(TensorSpec("", "", ())), 250_000)),
    "dimensions": ("layout", many(b"\x82\xa6format\x01\xa7tensors\x91\x94\xa0\xa0", b"\0", 250_000)),
    "files": ("layout", many(b"\x83\xa6format\x01\xa7tensors\x90\xa5files", b"\x93\xa0\0\xc4\0", 100_000)),
    "chunks": ("page", many(b"\x81\xa6chunks", encode(ChunkRef(b"", 0, 0, 0)), 250_000)),
    "pages": (
        "manifest",
        EDGE["manifest"].split(b"\xa5pages")[0] + many(b"\xa5pages", encode(PageRef(b"", 0, 0)), 600_000),
    ),
    "coders": ("manifest", EDGE["manifest"].split(b"\xa6coders")[0] + many(b"\xa6coders", b"\0", 250_000)),
}


@pytest.mark.parametrize("what", LONG)
def test_a_list_beyond_its_limit_is_refused_before_its_elements_are_made(what: str) -> None:
    name, data = LONG[what]
    with at_most(64 * KIB, what), pytest.raises(LimitError, match="length <="):
        PARSERS[name](data)


# Numbers.


@pytest.mark.parametrize(("name", "vector"), json.loads((VECTORS / "symbols.json").read_text()).items())
def test_every_byte_of_the_vector_of_a_scheme_may_be_wrong(name: str, vector: dict[str, str]) -> None:
    scheme = GAPS if name == "gaps" else value_scheme(DTYPES[name.removeprefix("values ")])
    symbols, bits = bytes.fromhex(vector["symbols"]), bytes.fromhex(vector["bits"])
    whole = symbols + bits
    for at in range(len(whole)):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            other = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
            spelled = other[: len(symbols)], other[len(symbols) :]
            try:
                numbers = from_symbols(*spelled, scheme)
            except FormatError:
                continue
            assert int(numbers.max(initial=0)) <= scheme.top
            assert to_symbols(numbers, scheme) == spelled


# Chunks.


def read_in_every_way(data: bytes, layout: Layout, before: ArrayWeights, backend: Backend) -> ArrayWeights | None:
    """What applying a chunk makes of weights between guard zones; None where it is refused.

    A frame that is refused has written nothing.
    """
    guards = Guards()
    after = guards.weights(before)
    sums = np.zeros((len(layout.tensors), 2), np.uint64)
    refused = False
    with at_most(FRAME_BYTES + 8 * len(data), data[:40]):
        for read in (
            lambda: list(read_headers(data, layout, limits=LIMITS)),
            lambda: list(read_patches([data], layout, backend, limits=LIMITS)),
            lambda: list(read_patches([data], layout, backend, base=after, limits=LIMITS)),
        ):
            try:
                read()
            except REFUSALS:
                continue
    assert after.equals(before), "reading writes nothing"
    with at_most(FRAME_BYTES + 8 * len(data), data[:40]):
        try:
            apply_chunks([data], layout, after, sums, backend, limits=LIMITS)
        except REFUSALS:
            refused = True
    guards.check()
    return None if refused else after


@each_backend
@pytest.mark.parametrize("name", CHUNKS)
def test_a_kept_chunk_is_refused(name: str, backend: Backend) -> None:
    before = ArrayWeights.random(CORPUS_LAYOUT)
    assert read_in_every_way(CHUNKS[name], CORPUS_LAYOUT, before, backend) is None


@each_backend
@given(data=st.data(), vector=st.sampled_from(FRAMES))
def test_a_spoilt_vector_is_refused_or_read_alike_by_every_backend(
    backend: Backend, data: st.DataObject, vector: Vector
) -> None:
    chunk = data.draw(spoilt([vector.frame, *CHUNKS.values()] if vector.frame else list(CHUNKS.values())))
    found = read_in_every_way(chunk, vector.layout, vector.base, backend)
    expected = read_in_every_way(chunk, vector.layout, vector.base, REFERENCE)
    assert (found is None) == (expected is None)
    assert found is None or expected is None or found.equals(expected)


EXTREMES = ("zeros", "ones", "smallest", "largest", "reversed")


def extreme(weights: ArrayWeights, kind: str) -> ArrayWeights:
    """Other weights of the same shapes, all of which have one exponent, or which stand in another order."""
    made = []
    for array in weights.arrays:
        bits = 8 * array.itemsize
        fill = {"zeros": 0, "ones": 2**bits - 1, "smallest": 1, "largest": 2 ** (bits - 1) - 1}.get(kind)
        made.append(array[::-1].copy() if fill is None else np.full_like(array, fill))
    return ArrayWeights(made)


@each_backend
@pytest.mark.parametrize("kind", EXTREMES)
def test_a_vector_on_a_base_of_one_exponent_or_in_another_order_reaches_nothing_outside(
    kind: str, backend: Backend
) -> None:
    for vector in all_vectors():
        wrong = extreme(vector.base, kind)
        found = read_in_every_way(vector.frame, vector.layout, wrong, backend)
        expected = read_in_every_way(vector.frame, vector.layout, wrong, REFERENCE)
        assert (found is None) == (expected is None), vector.name
        assert found is None or expected is None or found.equals(expected), vector.name


def test_a_small_chunk_that_would_become_a_large_frame_is_refused_before_it_does() -> None:
    lanes = 1 << 26
    layout = Layout(FORMAT, (TensorSpec("w", "BF16", (lanes,)),))
    whole = (Rect(0, (0,), (lanes,)),)
    plane = zstandard.compress(bytes(lanes))
    bomb = frame([(lanes, plane), (lanes, plane)], coder=0, rects=whole, changed=lanes)
    claim = frame(
        [(1, b"\0"), (0, b""), (0, b""), (1, b"\0"), (0, b"")], coder=2, rects=whole, changed=lanes, starts=(0,)
    )
    for data in (bomb, claim):
        assert len(data) < LIMITS.chunk_bytes
        with at_most(64 * KIB, "a refusal"), pytest.raises(LimitError):
            next(read_chunk(data, layout, limits=LIMITS))


# Streams.


def decoded_both_ways(hostile: Hostile, old: Lanes, backend: Backend) -> Changes | None:
    """The changes, or None where they are refused; everything lies between guard zones."""
    guards = Guards()
    read = [guards.reading(stream) for stream in hostile.streams]
    base, target = guards.reading(old), guards.around(old)
    before = target.copy()
    check = np.array([1, 2], np.uint64)
    changes = None
    with at_most(FRAME_BYTES, hostile.coding):
        with contextlib.suppress(FormatError):
            changes = backend.decode(hostile.coding, read, [base], hostile.dtype)
        with pytest.raises(REFUSALS):
            backend.decode_apply(hostile.coding, check, read, [target], [Place(7, 11)], hostile.dtype)
    assert np.array_equal(target, before), "what is refused has written nothing"
    guards.check()
    return changes


def alike(hostile: Hostile, old: Lanes, backend: Backend) -> Changes | None:
    """What the backend decodes, once the reference has been seen to do the same."""
    found, expected = (decoded_both_ways(hostile, old, each) for each in (backend, REFERENCE))
    if found is None or expected is None:
        assert found is expected
        return None
    assert np.array_equal(found.positions, expected.positions)
    assert np.array_equal(found.differences, expected.differences)
    assert found.positions.size == hostile.coding.changed
    return found


@each_backend
@pytest.mark.parametrize("name", STREAMS)
def test_kept_streams_are_refused_where_they_lie_whatever_the_base(name: str, backend: Backend) -> None:
    hostile = STREAMS[name]
    check_coding(hostile.coding, hostile.dtype)
    check_lengths(hostile.coding, hostile.dtype, [len(stream) for stream in hostile.streams])
    found = [alike(hostile, base(kind), backend) for kind in BASES]
    if "to be spoilt" in name:
        assert None not in found
    else:
        assert None in found


@st.composite
def spoilt_streams(draw: st.DrawFn) -> Hostile:
    """Kept streams with runs of one byte, turned bits, a cut or a longer end, or in each other's place."""
    hostile = draw(st.sampled_from(sorted(STREAMS.items())))[1]
    parts = list(hostile.streams)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(parts) - 1))
        data = bytearray(parts[at])
        match draw(st.sampled_from(["run", "bit", "cut", "longer", "swap", "other"])):
            case "run" if data:
                begin = draw(st.integers(0, len(data) - 1))
                end = draw(st.integers(begin, len(data)))
                data[begin:end] = bytes([draw(st.sampled_from([0, 1, 15, 16, 127, 128, 255]))]) * (end - begin)
            case "bit" if data:
                data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[draw(st.integers(0, len(data))) :]
            case "longer":
                data += bytes([draw(st.sampled_from([0, 1, 255]))]) * draw(st.sampled_from([1, 4, 64, 1000]))
            case "swap":
                other = draw(st.integers(0, len(parts) - 1))
                data, parts[other] = bytearray(parts[other]), bytes(data)
            case "other":
                data = bytearray(draw(st.sampled_from(sorted(STREAMS.items())))[1].streams[at % 5])
        parts[at] = bytes(data)
    return Hostile(hostile.dtype, hostile.coding, tuple(parts))


@each_backend
@given(hostile=spoilt_streams(), kind=st.sampled_from(BASES))
def test_spoilt_streams_are_refused_or_decoded_alike_by_every_backend(
    backend: Backend, hostile: Hostile, kind: str
) -> None:
    try:
        check_lengths(hostile.coding, hostile.dtype, [len(stream) for stream in hostile.streams])
    except FormatError:
        return
    alike(hostile, base(kind), backend)


CHECKING = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "LD_PRELOAD": "libc_malloc_debug.so.0"}
CHECKING |= {"MALLOC_CHECK_": "3"}
ONE_BYTE_TOO_FAR = "import ctypes, numpy; a = numpy.empty(5000, 'u1'); ctypes.memset(a.ctypes.data + 5000, 1, 1); del a"


def under_a_checking_allocator(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=CHECKING, capture_output=True, text=True, check=False)


def test_no_kernel_writes_beyond_the_memory_that_it_made_for_itself() -> None:
    pytest.importorskip("numba", exc_type=ImportError)
    if under_a_checking_allocator("-c", ONE_BYTE_TOO_FAR).returncode != -signal.SIGABRT:
        pytest.skip("needs a C library whose allocator checks what is written; on glibc this runs")
    replayed = under_a_checking_allocator("-m", "tests.corpus.replay")
    assert (replayed.returncode, replayed.stdout) == (0, "replayed\n"), replayed.stderr
