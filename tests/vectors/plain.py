"""A second reader of frames, written from `deltad/docs/FORMAT.md` alone: plain integers, nothing of deltad.

Slow and trusting; it is here so that the document and the code cannot part unnoticed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zstandard

KINDS = {"line": "BF16 F16 F32 F64 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ", "xor": "F4 F6_E2M3 F6_E3M2 BOOL C64"}
WIDTH = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8}
MANTISSA = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52, "F8_E4M3": 3, "F8_E5M2": 2, "F8_E4M3FNUZ": 3, "F8_E5M2FNUZ": 2}
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
M64 = (1 << 64) - 1

Tensor = tuple[str, str, Sequence[int]]


def read(data: bytes, tensors: Sequence[Tensor], base: Sequence[bytes]) -> list[bytes]:
    """Apply a chunk of frames to the canonical bytes of all tensors; the checks are verified."""
    lanes = [to_lanes(part, WIDTH.get(dtype, 1)) for part, (_, dtype, _) in zip(base, tensors, strict=True)]
    while data:
        length = int.from_bytes(data[:4], "little")
        header, data = msgspec.msgpack.decode(data[4 : 4 + length]), data[4 + length :]
        streams = []
        for plain, stored in header[9]:
            packed, data = data[:stored], data[stored:]
            assert stored == plain or header[1] in (1, 2)
            streams.append(packed if stored == plain else zstandard.decompress(packed))
            assert len(streams[-1]) == plain
        apply(header, streams, tensors, lanes)
    return [from_lanes(part, WIDTH.get(dtype, 1)) for part, (_, dtype, _) in zip(lanes, tensors, strict=True)]


def to_lanes(data: bytes, width: int) -> list[int]:
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def from_lanes(lanes: list[int], width: int) -> bytes:
    return b"".join(lane.to_bytes(width, "little") for lane in lanes)


def apply(header: Any, streams: list[bytes], tensors: Sequence[Tensor], lanes: list[list[int]]) -> None:
    number, coder, dtype, rects, changed, check, _, starts, marked, _ = header
    assert number == 1
    where = [at for rect in rects for at in positions(rect, tensors)]
    old = [lanes[tensor][at] for tensor, at in where]
    width = WIDTH.get(dtype, 1)
    if coder == 0:
        new = dict(enumerate(to_lanes(streams[0], width)))
    elif coder == 3:
        new = dict(enumerate(unpack(dtype, streams, len(where))))
    else:
        new = decode(dtype, starts if coder == 2 else [0], marked, streams, old, adjust=coder == 2)
    assert len(new) == changed
    added = [0, 0]
    for i, value in new.items():
        tensor, at = where[i]
        for s in (0, 1):
            before = 0 if coder in (0, 3) else share(old[i], tensors[tensor][0], at, width, s)
            added[s] = (added[s] + share(value, tensors[tensor][0], at, width, s) - before) & M64
    assert check in (b"", b"".join(part.to_bytes(8, "little") for part in added))
    for i, value in new.items():
        tensor, at = where[i]
        lanes[tensor][at] = value


def unpack(dtype: str, streams: list[bytes], count: int) -> list[int]:
    """The lanes of a packed frame."""
    width = WIDTH.get(dtype, 1)
    assert len(streams) == 3 * width
    lanes = [0] * count
    for byte in range(width):
        table, sizes, words = streams[3 * byte : 3 * byte + 3]
        if (len(table), len(sizes), len(words)) == (0, 0, count):
            plane = words
        elif (len(table), len(sizes), len(words)) == (1, 0, 0):
            plane = table * count
        else:
            plane = bytes(uncoded(table, sizes, words, count))
        lanes = [lane | symbol << 8 * byte for lane, symbol in zip(lanes, plane, strict=True)]
    if dtype in KINDS["line"].split() and width > 1:
        lanes = [lane >> 1 | (lane & 1) << 8 * width - 1 for lane in lanes]
    return lanes


def uncoded(table: bytes, sizes: bytes, words: bytes, count: int) -> Iterator[int]:
    """The symbols of a coded plane."""
    assert len(table) == 128
    assert len(sizes) == 2 * ((count + 4095) // 4096)
    lengths = [table[symbol // 2] >> 4 * (symbol % 2) & 15 for symbol in range(256)]
    codewords: dict[tuple[int, int], int] = {}
    codeword, before = -1, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        codeword = codeword + 1 << length - before
        codewords[length, codeword], before = symbol, length
    assert 1 <= before <= 12
    assert codeword + 1 == 1 << before
    for block, size in enumerate(to_lanes(sizes, 2)):
        held, words = int.from_bytes(words[: 4 * size], "little"), words[4 * size :]
        at = 0
        for _ in range(min(4096, count - 4096 * block)):
            length, codeword = 0, 0
            while (length, codeword) not in codewords:
                length, codeword, at = length + 1, codeword << 1 | held >> at & 1, at + 1
            yield codewords[length, codeword]
        assert size == (at + 31) // 32
        assert held >> at == 0
    assert not words


def code_lengths(counts: Sequence[int]) -> list[int]:
    """The lengths of the codewords that a writer gives to symbols with these counts."""
    leaves = [(count, [symbol]) for count, symbol in sorted((n, symbol) for symbol, n in enumerate(counts) if n)]
    # Every entry names the leaves that it is made of, through all lists down; a sort keeps leaves before equal sums.
    entries = leaves
    for _ in range(11):
        pairs = zip(entries[0::2], entries[1::2], strict=False)
        sums = [(a + b, of_a + of_b) for (a, of_a), (b, of_b) in pairs]
        entries = sorted(leaves + sums, key=lambda entry: entry[0])
    taken = [symbol for _, symbols in entries[: 2 * len(leaves) - 2] for symbol in symbols]
    return [taken.count(symbol) for symbol in range(len(counts))]


def positions(rect: Any, tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """(tensor, canonical position) of every lane, row-major."""
    tensor, offset, extent = rect
    _, dtype, shape = tensors[tensor]
    if dtype in PACKED:
        elements = 1
        for size in shape:
            elements *= size
        shape = [elements * PACKED[dtype] // 8]
    for index in itertools.product(*(range(o, o + e) for o, e in zip(offset, extent, strict=True))):
        at = 0
        for i, size in zip(index, shape, strict=True):
            at = at * size + i
        yield tensor, at


def decode(
    dtype: str, starts: list[int], marked: int, streams: list[bytes], old: list[int], *, adjust: bool
) -> dict[int, int]:
    """New lanes by frame position."""
    bits = 8 * WIDTH.get(dtype, 1)
    kind = next((kind for kind, names in KINDS.items() if dtype in names.split()), "ring")
    found = {}
    for c, start in enumerate(starts):
        end = starts[c + 1] if c + 1 < len(starts) else 1 << 64
        members = list(range(len(old)))
        if adjust:
            magnitudes = [(x & ((1 << bits - 1) - 1)) >> MANTISSA[dtype] for x in old]
            members = [i for i in members if start <= magnitudes[i] < end]
        gaps, gap_bits, pairs, symbols, value_bits = streams[5 * c : 5 * c + 5]
        rank, ranks = -1, set()
        for gap in numbers(gaps, gap_bits, 3, 0):
            rank += gap + 1
            assert rank < len(members)
            ranks.add(rank)
        unchanged = bool(marked >> c & 1)
        moved = [i for r, i in enumerate(members) if (r in ranks) != unchanged]
        k, s = (2 if bits == 64 else 3), int(bits <= 16 and kind != "xor")
        codes = list(numbers(symbols, value_bits, k, s))
        if pairs:
            assert len(pairs) == (len(moved) + 3) // 4
            exceptions = iter(codes)
            two = [pairs[i // 4] >> 2 * (i % 4) & 3 for i in range(len(moved))]
            codes = [code if code < 3 else 3 + next(exceptions) for code in two]
            assert next(exceptions, None) is None
        assert len(codes) == len(moved)
        for i, code in zip(moved, codes, strict=True):
            found[i] = moved_by(old[i], code, bits, kind, adjust=adjust)
    return found


def numbers(symbols: bytes, bits: bytes, k: int, s: int) -> Iterator[int]:
    stream, at = int.from_bytes(bits, "little"), 0
    for symbol in symbols:
        m, low = symbol >> s, symbol & s
        if m >= 2 << k:
            length = (m >> k) - 1
            m = ((1 << k | m & ((1 << k) - 1)) << length) | (stream >> at & ((1 << length) - 1))
            at += length
        yield m << s | low
    assert len(bits) == (at + 31) // 32 * 4
    assert stream >> at == 0


def moved_by(old: int, code: int, bits: int, kind: str, *, adjust: bool) -> int:
    mask = (1 << bits) - 1
    if kind == "xor":
        return old ^ (code + 1)
    z = code + 1
    d = z >> 1 if z % 2 == 0 else -(z + 1 >> 1)
    if adjust and kind == "line" and old >> bits - 1:
        d = -d
    if kind == "ring":
        return (old + d) & mask
    return phi((phi(old, bits) + d) & mask, bits)


def phi(x: int, bits: int) -> int:
    return x ^ ((1 << bits - 1) - 1) if x >> bits - 1 else x


KEYS = hashlib.shake_128(b"deltad element sum, cell keys").digest(131_072)


def share(value: int, tensor: str, at: int, width: int, s: int) -> int:
    """What a lane adds to element sum `s` of its tensor."""
    if width == 8:
        halves = share(value & 0xFFFFFFFF, tensor, 2 * at, 4, s) + share(value >> 32, tensor, 2 * at + 1, 4, s)
        return halves & M64
    offset = at * width
    cell, block = offset // 4 % 16384, offset // 65536
    key = int.from_bytes(KEYS[65_536 * s + 4 * cell :][:4], "little")
    seed = int.from_bytes(hashlib.sha256(b"deltad element sum, tensor\0" + tensor.encode()).digest()[:8], "little")
    multiplier = mix(mix(seed + s * 0x9E3779B97F4A7C15) + block) | 1
    return (value << 8 * (offset % 4)) * key * multiplier & M64


def mix(x: int) -> int:
    x &= M64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31
