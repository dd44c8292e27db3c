"""The packed coder: whole lanes as byte planes, each of which is plain, one symbol, or Huffman coded in blocks.

What a plane becomes is decided here for every backend, and what is read is checked here; a backend brings
the two loops over symbols, and the ones of the reference are here too. Owns the invariant that equal lanes
give equal bytes everywhere: nothing of this depends on a library's version.

Three streams a plane. Coded: table, the number of words of every block (u16), words (u32). One symbol: that
symbol, nothing, nothing. Plain: nothing, nothing, the plane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from deltad.delta.backend import Lanes, Segments, Stream
from deltad.delta.coding import BLOCK_SYMBOLS, STREAMS_PER_PLANE, TABLE_BYTES, blocks_of
from deltad.delta.digest import U64
from deltad.delta.huffman import WINDOWS, Code, code_lengths, read_table, write_table
from deltad.delta.planes import byte_planes, from_byte_planes
from deltad.delta.symbols import pack_bits
from deltad.errors import FormatError
from deltad.types import DType

Plane = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
"""How often each symbol occurs. Shape [256]."""
Words = npt.NDArray[np.uint32]

Encode = Callable[[Plane, Code], tuple[npt.NDArray[np.uint16], Words]]
"""The blocks of a plane whose code takes no more bits than the plane has: words of each, and all words."""
Decode = Callable[[Code, U64, Words, int], tuple[Plane, U64]]
"""Code, first word of every block, words, symbols → the symbols, and the bits that each block's codewords take.

Takes any words. A block whose codewords take more than it has may give any symbols and any number of bits
above that.
"""


def pack(lanes: Segments, dtype: DType) -> list[Stream]:
    """`Backend.pack` of the reference."""
    planes = byte_planes(lanes, dtype)
    return [stream for plane in planes for stream in pack_plane(plane, np.bincount(plane, minlength=256), encode)]


def unpack(streams: Sequence[Stream], lanes: int, dtype: DType) -> Lanes:
    """`Backend.unpack` of the reference."""
    return from_byte_planes(unpack_planes(streams, lanes, decode), dtype)


def pack_plane(plane: Plane, counts: Counts, encode: Encode) -> list[Stream]:
    """The three streams of a plane of at least one symbol. None of them shares memory with it."""
    used = np.flatnonzero(counts)
    if used.size == 1:
        return [bytes([int(used[0])]), b"", b""]
    lengths = code_lengths(counts)
    if _gains(int((counts * lengths).sum()) // 32, plane.size):  # before blocks are filled up to whole words
        sizes, words = encode(plane, Code.of(lengths))
        if _gains(words.size, plane.size):
            return [write_table(lengths), sizes.tobytes(), words.tobytes()]
    return [b"", b"", plane.tobytes()]


def _gains(words: int, symbols: int) -> bool:
    """Whether a coded plane of so many words saves at least a 64th: less is not worth its decoding."""
    return 64 * (TABLE_BYTES + 2 * blocks_of(symbols) + 4 * words) <= 63 * symbols


def unpack_planes(streams: Sequence[Stream], lanes: int, decode: Decode) -> list[Stream]:
    """The planes of streams whose lengths have been checked. Raises FormatError unless they are used up exactly."""
    planes: list[Stream] = []
    for first in range(0, len(streams), STREAMS_PER_PLANE):
        table, sizes, data = streams[first : first + STREAMS_PER_PLANE]
        if len(table) == TABLE_BYTES:
            planes.append(_decoded(table, np.frombuffer(sizes, "<u2"), np.frombuffer(data, "<u4"), lanes, decode))
        elif len(table) == 1:
            planes.append(np.full(lanes, np.frombuffer(table, np.uint8)[0]))
        else:
            planes.append(data)
    return planes


def _decoded(table: Stream, sizes: npt.NDArray[np.uint16], words: Words, lanes: int, decode: Decode) -> Plane:
    code = read_table(table)
    ends = np.cumsum(sizes, dtype=np.uint64)
    if int(ends[-1]) != words.size:
        raise FormatError("frame: blocks", expected=f"{words.size} words in all", found=str(int(ends[-1])))
    plane, bits = decode(code, ends - sizes, words, lanes)
    wrong = np.flatnonzero((bits + np.uint64(31)) // np.uint64(32) != sizes)
    if wrong.size:
        at = int(wrong[0])
        raise FormatError(f"frame: block {at}", expected=f"{sizes[at]} words", found=f"{bits[at]} bits")
    # Every block has a word, since every symbol has a bit.
    left = bits % np.uint64(32)
    if ((words[ends.astype(np.intp) - 1] >> left.astype(np.uint32) != 0) & (left > 0)).any():
        raise FormatError("frame: blocks", expected="zeros behind the last symbol", found="other bits")
    return plane


def encode(plane: Plane, code: Code) -> tuple[npt.NDArray[np.uint16], Words]:
    """The reference of `Encode`."""
    blocks = blocks_of(plane.size)
    symbols = np.zeros(blocks * BLOCK_SYMBOLS, np.uint8)
    symbols[: plane.size] = plane
    # One more codeword a block, of zeros, brings it to the next word.
    lengths = np.zeros((blocks, BLOCK_SYMBOLS + 1), np.uint64)
    words = np.zeros_like(lengths)
    lengths[:, :-1] = code.lengths[symbols].reshape(blocks, -1)
    lengths[-1, :-1][BLOCK_SYMBOLS - (symbols.size - plane.size) :] = 0
    words[:, :-1] = code.words[symbols].reshape(blocks, -1)
    words[lengths == 0] = 0
    bits = lengths.sum(axis=1)
    sizes = (bits + np.uint64(31)) // np.uint64(32)
    lengths[:, -1] = sizes * np.uint64(32) - bits
    packed = np.frombuffer(pack_bits(words.reshape(-1), lengths.reshape(-1)), "<u4")
    return sizes.astype("<u2"), packed


def decode(code: Code, starts: U64, words: Words, symbols: int) -> tuple[Plane, U64]:
    """The reference of `Decode`."""
    ends = np.append(starts[1:], words.size).astype(np.intp)
    plane = np.empty(symbols, np.uint8)
    bits = np.empty(starts.size, np.uint64)
    for block, (start, end) in enumerate(zip(starts.astype(np.intp), ends, strict=True)):
        part = plane[block * BLOCK_SYMBOLS :][:BLOCK_SYMBOLS]
        bits[block] = _decode_block(code, words[start:end], part)
    return plane, bits


def _decode_block(code: Code, words: Words, symbols: Plane) -> int:
    """Fill in the symbols; returns how many bits they took, or one more than there are."""
    end = 32 * words.size
    held = np.zeros(words.size + 2, np.uint64)
    held[: words.size] = words
    bit = np.arange(end + 2)
    shift = (bit & 31).astype(np.uint64)
    windows = (held[bit >> 5] | held[(bit >> 5) + 1] << np.uint64(32)) >> shift & np.uint64(WINDOWS - 1)
    # What follows a codeword at every bit is known, so steps of one symbol make those of two, of four, and so on.
    step = np.minimum(bit + code.sizes[windows], end + 1)
    at = np.zeros(1, np.int64)
    while at.size <= symbols.size:
        at = np.concatenate([at, step[at]])
        step = step[step]
    symbols[:] = code.symbols[windows[at[: symbols.size]]]
    return int(at[symbols.size])
