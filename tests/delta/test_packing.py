"""The packed coder: any lanes come back, every backend makes the same bytes of them, and no bytes mislead a reader."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deltad.delta.backend import UNSIGNED, Backend, Lanes, Stream
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.codec import EdgeEncoder, read_patches
from deltad.delta.coding import BLOCK_SYMBOLS, TABLE_BYTES, Coder, Coding, check_lengths
from deltad.delta.frame import FrameHeader, Rect, read_chunk, write_frame
from deltad.delta.huffman import Code, code_lengths, read_table, write_table
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import FormatError, LimitError
from deltad.limits import Limits
from deltad.types import DTYPES, DType
from tests.kit.backends import present
from tests.kit.weights import SPECIAL_BITS, ArrayWeights

BACKENDS = present()
REFERENCE = NumpyBackend()
U8 = DTYPES["U8"]

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
dtypes = st.sampled_from(sorted(DTYPES)).map(DTYPES.__getitem__)
counted = st.lists(st.integers(0, 1 << 30), min_size=256, max_size=256).filter(lambda c: sum(n > 0 for n in c) > 1)


def packed(backend: Backend, lanes: Sequence[Lanes], dtype: DType) -> list[bytes]:
    return [bytes(stream) for stream in backend.pack(lanes, dtype)]


def check(streams: Sequence[Stream], lanes: int, dtype: DType) -> None:
    check_lengths(Coding(Coder.PACKED, lanes, lanes), dtype, [len(stream) for stream in streams])


@st.composite
def segments(draw: st.DrawFn, dtype: DType) -> list[Lanes]:
    """Lanes of one to three rectangles: random bits, special ones, or few values as often as they come in weights."""
    kind, found = UNSIGNED[dtype.lane_bytes], []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 1500))
        if draw(st.booleans()):
            values = draw(hnp.arrays(kind, draw(st.integers(1, 40))))
            rng = np.random.default_rng(draw(st.integers(0, 9)))
            found.append(values[np.minimum(rng.geometric(0.4, size) - 1, values.size - 1)])
        else:
            bits = st.one_of(
                st.sampled_from(SPECIAL_BITS[dtype.lane_bytes]), st.integers(0, 2 ** (8 * kind().itemsize) - 1)
            )
            found.append(draw(hnp.arrays(kind, min(size, 60), elements=bits)))
    return found


@backends
@given(data=st.data(), dtype=dtypes)
def test_any_lanes_come_back_and_every_backend_makes_the_same_streams_of_them(
    backend: Backend, data: st.DataObject, dtype: DType
) -> None:
    lanes = data.draw(segments(dtype))
    kept = [segment.copy() for segment in lanes]
    whole = np.concatenate(lanes)
    streams = packed(backend, lanes, dtype)
    assert streams == packed(REFERENCE, lanes, dtype)
    assert streams == packed(backend, [whole], dtype), "only the lanes count, not how they are cut"
    check(streams, whole.size, dtype)
    found = backend.unpack(streams, whole.size, dtype)
    assert found.dtype == whole.dtype
    assert np.array_equal(found, whole)
    assert all(map(np.array_equal, lanes, kept)), "packing writes nothing"


@backends
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_weights_of_many_blocks_come_back_from_the_same_streams(backend: Backend, name: str) -> None:
    layout = Layout(1, (TensorSpec("w", name, (9 * BLOCK_SYMBOLS + 8,)),))
    (lanes,) = ArrayWeights.bell(layout).arrays
    dtype = DTYPES[name]
    for size in (1, 2, 300, BLOCK_SYMBOLS - 1, BLOCK_SYMBOLS, BLOCK_SYMBOLS + 1, 4 * BLOCK_SYMBOLS, lanes.size):
        streams = packed(backend, [lanes[:size]], dtype)
        assert streams == packed(REFERENCE, [lanes[:size]], dtype)
        check(streams, size, dtype)
        assert np.array_equal(backend.unpack(streams, size, dtype), lanes[:size])
    assert sum(map(len, streams)) < 0.93 * lanes.nbytes


@backends
def test_codewords_of_every_length_come_back(backend: Backend) -> None:
    counts = [1] + [2**i for i in range(12)]
    plane = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    np.random.default_rng(1).shuffle(plane)
    streams = packed(backend, [plane], U8)
    assert sorted(set(read_table(streams[0]).lengths) - {0}) == list(range(1, 13))
    assert np.array_equal(backend.unpack(streams, plane.size, U8), plane)


@backends
def test_a_plane_is_coded_only_where_that_saves_a_64th(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    kinds = {
        "one symbol": (np.full(5000, 7, np.uint8), (1, 0, 0)),
        "random": (rng.integers(0, 256, 5000).astype(np.uint8), (0, 0, 5000)),
        "too few": (np.arange(130, dtype=np.uint8) % 2, (0, 0, 130)),
        "seven bits of eight": (rng.integers(0, 128, 5000).astype(np.uint8), (128, 4, 4376)),
        "nearly eight bits": (rng.integers(0, 253, 9000).astype(np.uint8), (0, 0, 9000)),
    }
    for what, (plane, lengths) in kinds.items():
        assert tuple(map(len, packed(backend, [plane], U8))) == lengths, what


# Codes.


@given(counted)
def test_a_code_is_complete_and_no_codeword_too_long(counts: list[int]) -> None:
    lengths = code_lengths(np.array(counts))
    assert ((lengths > 0) == (np.array(counts) > 0)).all()
    assert int(lengths.max()) <= 12
    code = read_table(write_table(lengths))
    assert np.array_equal(code.lengths, lengths)
    prefixes = [f"{int(code.words[s]):012b}"[::-1][: lengths[s]] for s in np.flatnonzero(lengths)]
    assert not any(b.startswith(a) for a, b in itertools.pairwise(sorted(prefixes)))


def spent(counts: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(count * int(length) for count, length in zip(counts, lengths, strict=True))


@settings(max_examples=50)
@given(counted)
def test_where_no_codeword_is_too_long_by_nature_a_code_is_huffmans(counts: list[int]) -> None:
    heap = [(count, 0) for count in counts if count]
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        (a, deep), (b, deeper) = heapq.heappop(heap), heapq.heappop(heap)
        bits += a + b
        heapq.heappush(heap, (a + b, max(deep, deeper) + 1))
    found = spent(counts, code_lengths(np.array(counts)).tolist())
    assert found >= bits
    assert found == bits or heap[0][1] > 12


def test_of_all_codes_of_few_symbols_the_shortest_is_found() -> None:
    complete = {
        n: [c for c in itertools.product(range(1, n), repeat=n) if sum(2.0**-length for length in c) == 1]
        for n in (2, 3, 4)
    }
    for n, codes in complete.items():
        for counts in itertools.product(range(1, 7), repeat=n):
            lengths = code_lengths(np.array([*counts, *[0] * (256 - n)]))[:n].tolist()
            assert spent(counts, lengths) == min(spent(counts, code) for code in codes)


def test_rarest_symbols_share_the_longest_codewords_where_the_limit_bites() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    lengths = code_lengths(np.array(fibonacci + [0] * 216))[:40].tolist()
    assert lengths == sorted(lengths, reverse=True)
    # The least that 40 symbols can cost with codewords of at most 12 bits, by trying all numbers of each length.
    assert spent(fibonacci, lengths) == cheapest(sorted(fibonacci, reverse=True), 12)


def cheapest(counts: Sequence[int], longest: int) -> int:
    """The cost of the best code: from the commonest symbol on, by windows that are left, lengths not falling."""
    best = {(1 << longest, 1): 0}
    for count in counts:
        following: dict[tuple[int, int], int] = {}
        for (left, least), cost in best.items():
            for length in range(least, longest + 1):
                rest = left - (1 << longest - length)
                if rest >= 0:
                    key = (rest, length)
                    following[key] = min(following.get(key, 1 << 62), cost + count * length)
        best = following
    return min(cost for (left, _), cost in best.items() if left == 0)


def test_equal_counts_give_the_shorter_codewords_to_the_higher_symbols() -> None:
    counts = np.zeros(256, np.int64)
    counts[[3, 50, 200]] = 9
    lengths = code_lengths(counts)
    assert lengths[[3, 50, 200]].tolist() == [2, 2, 1]
    code = Code.of(lengths)
    assert [f"{code.words[s]:012b}"[::-1][: lengths[s]] for s in (200, 3, 50)] == ["0", "10", "11"]


def test_of_all_tables_of_three_symbols_the_complete_codes_are_read() -> None:
    for lengths in itertools.product(range(16), repeat=3):
        table = np.zeros(256, np.uint8)
        table[[0, 1, 255]] = lengths
        used = [length for length in lengths if length]
        if used and max(used) <= 12 and sum(2.0**-length for length in used) == 1:
            assert read_table(write_table(table)).lengths[[0, 1, 255]].tolist() == list(lengths)
        else:
            with pytest.raises(FormatError, match="code table"):
                read_table(write_table(table))


# Hostile streams.


def plane_of(size: int) -> Lanes:
    return np.random.default_rng(size).geometric(0.3, size).astype(np.uint8)


@backends
@given(data=st.data())
def test_streams_of_any_content_are_refused_by_all_backends_or_read_alike(
    backend: Backend, data: st.DataObject
) -> None:
    plane = plane_of(data.draw(st.sampled_from([400, BLOCK_SYMBOLS + 1, 6 * BLOCK_SYMBOLS + 3])))
    streams = [bytearray(stream) for stream in packed(REFERENCE, [plane], U8)]
    for _ in range(data.draw(st.integers(1, 3))):
        stream = data.draw(st.sampled_from(streams))
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at] = data.draw(st.sampled_from([0, 1, stream[at] ^ 1 << data.draw(st.integers(0, 7)), 0x7F, 0xFF]))
    given_to = [bytes(stream) for stream in streams]
    try:
        expected = REFERENCE.unpack(given_to, plane.size, U8)
    except FormatError:
        with pytest.raises(FormatError):
            backend.unpack(given_to, plane.size, U8)
    else:
        assert np.array_equal(backend.unpack(given_to, plane.size, U8), expected)


@backends
@given(data=st.data(), dtype=dtypes)
def test_lengths_that_no_writer_gives_are_refused_or_what_they_hold_is(
    backend: Backend, data: st.DataObject, dtype: DType
) -> None:
    lanes = data.draw(st.integers(1, 300))
    size = st.sampled_from([0, 1, 2, 4, 127, TABLE_BYTES, lanes, 12 * lanes // 32 * 4])
    count = data.draw(st.sampled_from([3 * dtype.lane_bytes] * 3 + [0, 3, 5]))
    streams = [
        data.draw(st.binary(min_size=n, max_size=n)) for n in data.draw(st.lists(size, min_size=count, max_size=count))
    ]
    try:
        check(streams, lanes, dtype)
        assert backend.unpack(streams, lanes, dtype).size == lanes
    except FormatError:
        return


POSSIBLE = [(0, 0, 300), (1, 0, 0), (128, 2, 4), (128, 2, 452)]
IMPOSSIBLE = [
    *((0, 0, 0), (0, 0, 299), (0, 2, 300), (0, 0, 301)),
    *((1, 2, 0), (1, 0, 1), (2, 0, 0), (300, 0, 0)),
    *((127, 2, 8), (129, 2, 8), (128, 0, 8), (128, 1, 8), (128, 4, 8), (128, 2, 0), (128, 2, 7), (128, 2, 456)),
]


def test_lengths_of_a_plane_are_refused_unless_they_are_those_of_a_kind() -> None:
    for lengths in POSSIBLE:
        check_lengths(Coding(Coder.PACKED, 300, 300), U8, lengths)
    for lengths in IMPOSSIBLE:
        with pytest.raises(FormatError, match="plane 0"):
            check_lengths(Coding(Coder.PACKED, 300, 300), U8, lengths)
    two_blocks = BLOCK_SYMBOLS + 2
    check_lengths(Coding(Coder.PACKED, two_blocks, two_blocks), U8, (128, 4, 4 * (1536 + 1)))
    for lengths in ((128, 4, 4 * (1536 + 2)), (128, 2, 400), (128, 6, 400)):
        with pytest.raises(FormatError, match="plane 0"):
            check_lengths(Coding(Coder.PACKED, two_blocks, two_blocks), U8, lengths)
    for count in (0, 3, 5, 9):
        with pytest.raises(FormatError, match="6 streams"):
            check_lengths(
                Coding(Coder.PACKED, 300, 300), DTYPES["BF16"], [0, 0, 300] * (count // 3) + [0] * (count % 3)
            )


@backends
def test_what_does_not_end_where_its_block_does_is_refused(backend: Backend) -> None:
    plane = plane_of(BLOCK_SYMBOLS + 700)
    table, sizes, words = packed(REFERENCE, [plane], U8)
    first, second = np.frombuffer(sizes, np.uint16).tolist()
    assert np.array_equal(backend.unpack([table, sizes, words], plane.size, U8), plane)

    def refused(sizes: Sequence[int], words: bytes, said: str) -> None:
        streams = [table, np.array(sizes, np.uint16).tobytes(), words]
        check(streams, plane.size, U8)
        with pytest.raises(FormatError, match=said):
            backend.unpack(streams, plane.size, U8)

    refused([first + 1, second - 1], words, "block 0: expected")
    refused([first - 1, second + 1], words, "block 0: expected")
    refused([first, second + 1], words + bytes(4), "block 1: expected")
    refused([first, second - 1], words[:-4], "block 1: expected")
    refused([first, second + 1], words, f"expected {first + second} words in all")
    refused([0, first + second], words, "block 0: expected 0 words")
    refused([first + second, 0], words, "block 0: expected")
    for end in (4 * first, 4 * (first + second)):
        spoilt = words[: end - 1] + bytes([words[end - 1] | 0x80]) + words[end:]
        assert spoilt != words
        refused([first, second], spoilt, "zeros behind the last symbol")


# Frames.

BELL = Layout(1, (TensorSpec("a", "BF16", (130, 33)), TensorSpec("b", "F32", (900,)), TensorSpec("c", "I32", (40, 40))))


def anchor(weights: ArrayWeights, backend: Backend) -> list[bytes]:
    return [chunk.data for chunk in EdgeEncoder(BELL, weights, backend).chunks()]


@backends
def test_an_anchor_of_weights_is_packed_and_nothing_of_it_is_left_to_zstd(backend: Backend) -> None:
    weights = ArrayWeights.bell(BELL)
    chunks = anchor(weights, backend)
    assert chunks == anchor(weights.copy(), REFERENCE)
    headers = [frame.header for data in chunks for frame in read_chunk(data, BELL)]
    assert {header.coder for header in headers} == {Coder.PACKED}
    assert all(plain == stored for header in headers for plain, stored in header.streams)
    assert sum(map(len, chunks)) < 0.7 * BELL.weight_bytes


def test_an_anchor_of_random_bits_is_raw_and_hardly_larger_than_they_are() -> None:
    chunks = anchor(ArrayWeights.random(BELL), REFERENCE)
    headers = [frame.header for data in chunks for frame in read_chunk(data, BELL)]
    assert {header.coder for header in headers} == {Coder.RAW}
    assert sum(map(len, chunks)) < BELL.weight_bytes + 200


def test_a_frame_that_would_unpack_to_more_than_the_limit_is_refused_before_it_is() -> None:
    lanes = 4000
    streams = [bytes([symbol]) if i % 3 == 0 else b"" for symbol in (1, 2) for i in range(3)]
    data = write_frame("BF16", (Rect(0, (0, 0), (125, 32)),), Coding(Coder.PACKED, lanes, lanes), bytes(16), streams)
    with pytest.raises(LimitError, match="at most 7999 plain bytes, found 8000"):
        list(read_chunk(data, BELL, limits=Limits(frame_plain_bytes=7999)))
    (frame,) = read_chunk(data, BELL, limits=Limits(frame_plain_bytes=8000))
    assert REFERENCE.unpack(frame.streams, lanes, DTYPES["BF16"]).tolist() == [0x0201 >> 1 | 0x8000] * lanes


@pytest.mark.parametrize("coder", [Coder.RAW, Coder.PACKED])
def test_a_whole_frame_with_a_stream_through_zstd_is_refused(coder: Coder) -> None:
    lanes = 900
    streams = [bytes(4 * lanes)] if coder is Coder.RAW else [b"", b"", bytes(lanes)] * 4
    data = write_frame("F32", (Rect(1, (0,), (lanes,)),), Coding(coder, lanes, lanes), bytes(16), streams)
    length = int.from_bytes(data[:4], "little")
    header = msgspec.msgpack.decode(data[4 : 4 + length], type=FrameHeader)
    shorter = zstandard.compress(streams[-1])
    lengths = (*header.streams[:-1], (len(streams[-1]), len(shorter)))
    changed = msgspec.msgpack.encode(msgspec.structs.replace(header, streams=lengths))
    body = data[4 + length : len(data) - len(streams[-1])] + shorter
    with pytest.raises(FormatError, match="stored as they are"):
        list(read_patches([len(changed).to_bytes(4, "little") + changed + body], BELL, REFERENCE))
