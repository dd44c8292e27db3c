"""Inputs that are worth keeping for fuzzers, each named after its lie: `python -m tests.corpus.make`.

`chunks.json` holds chunks over `LAYOUT` in hex. `streams.json` holds the plain streams of frames, with their
coding, as a reader hands them to a backend once their lengths have been checked. Whatever a fuzzer finds
belongs here too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltad.delta import FORMAT
from deltad.delta.backend import UNSIGNED, Lanes
from deltad.delta.coding import Coder, Coding
from deltad.delta.encoding import encode
from deltad.delta.frame import FrameHeader, Rect
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.symbols import GAPS, encode_gaps, encode_values, to_symbols, value_scheme
from deltad.types import DTYPES, DType

HERE = Path(__file__).parent
LAYOUT = Layout(
    FORMAT, (TensorSpec("w", "BF16", (40, 50)), TensorSpec("x", "F64", (60,)), TensorSpec("y", "U8", (3000,)))
)
BF16 = DTYPES["BF16"]
LANES = 20_000
ROW = (Rect(0, (0, 0), (1, 50)),)
ALL = (Rect(2, (0,), (3000,)),)


@dataclass(frozen=True)
class Hostile:
    """What a backend is given: streams that are not what their coding says, or not for this base."""

    dtype: DType
    coding: Coding
    streams: tuple[bytes, ...]


def main() -> None:
    for name, corpus in (("chunks", chunks()), ("streams", streams())):
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(_fields(value))}" for key, value in corpus.items())
        (HERE / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")


def kept_chunks() -> dict[str, bytes]:
    return {name: bytes.fromhex(data) for name, data in json.loads((HERE / "chunks.json").read_text()).items()}


def kept_streams() -> dict[str, Hostile]:
    kept = json.loads((HERE / "streams.json").read_text())
    return {
        name: Hostile(
            DTYPES[fields["dtype"]],
            Coding(
                Coder(fields["coder"]),
                fields["lanes"],
                fields["changed"],
                fields["small"],
                tuple(fields["starts"]),
                fields["marked"],
            ),
            tuple(bytes.fromhex(stream) for stream in fields["streams"]),
        )
        for name, fields in kept.items()
    }


def _fields(value: bytes | Hostile) -> object:
    if isinstance(value, bytes):
        return value.hex()
    coding = value.coding
    return {
        "dtype": value.dtype.name,
        "coder": int(coding.coder),
        "lanes": coding.lanes,
        "changed": coding.changed,
        "small": coding.small,
        "starts": list(coding.starts),
        "marked": coding.marked,
        "streams": [stream.hex() for stream in value.streams],
    }


def chunks() -> dict[str, bytes]:
    """Chunks that no reader may take."""
    good = frame([(1, b"\0"), (0, b""), (0, b""), (1, b"\0"), (0, b"")])
    raw = {"coder": 0, "dtype": "U8", "rects": ALL, "changed": 3000, "check": bytes(16)}
    zeros = [(3000, repeated(0, 3000))]
    return {
        "zstd that claims more than the header": frame([(3000, repeated(0, 4000))], **raw),
        "zstd that does not say how much it holds": frame([(3000, b"\x28\xb5\x2f\xfd\0\x58" + run(0, 3000))], **raw),
        "zstd that holds less than it says": frame([(3000, repeated(0, 3000, holds=2000))], **raw),
        "zstd that holds more than it says": frame([(3000, repeated(0, 3000, holds=4000))], **raw),
        "zstd that ends early": frame([(3000, repeated(0, 3000)[:-1])], **raw),
        "zstd with a byte behind it": frame([(3000, repeated(0, 3000) + b"\0")], **raw),
        "zstd that needs a dictionary": frame([(3000, b"\x28\xb5\x2f\xfd\x61\x07\xb8\x0a" + run(0, 3000))], **raw),
        "zstd that is skipped": frame([(3000, b"\x50\x2a\x4d\x18\x04\0\0\0" + bytes(4))], **raw),
        "nothing stored": frame([(3000, b"")], **raw),
        "a stored length above the plain one": frame([(2, b"\0\0\0"), *[(0, b"")] * 4]),
        "a plain length above every limit": frame([(2**40, repeated(0, 3000))], **raw),
        "lengths that pass 2^64 together": frame([(2**63, b""), (2**63, b""), (1, b""), (1, b""), (1, b"")]),
        "a header of no bytes": bytes(4),
        "a header that is longer than the chunk": b"\xff\xff\xff\xff" + good[4:],
        "a header with a byte behind it": longer_header(good, b"\0"),
        "a chunk that ends within its second frame": good + good[:-1],
        "a check of other sums": frame(zeros, **{**raw, "check": b"\1" + bytes(15)}),
        "all lanes changed and none marked": frame([(0, b"")] * 5, changed=50),
        "no lane changed and one marked": frame([(1, b"\0"), *[(0, b"")] * 4], changed=0),
        "context for a dtype that has none": frame(
            [(1, b"\0"), (0, b""), (0, b""), (1, b"\0"), (0, b"")], coder=2, dtype="U8", rects=ALL, starts=(0,)
        ),
        "a class beyond the last exponent": frame(
            [(1, b"\0"), (0, b""), (0, b""), (1, b"\0"), (0, b""), *[(0, b"")] * 5], coder=2, starts=(0, 256)
        ),
        "classes without end": frame([], coder=2, small=0, starts=tuple(range(200)), marked=2**63),
        "a rectangle beyond 2^63": frame([(1, b"\0")] * 5, rects=(Rect(0, (2**63, 0), (1, 50)),)),
        "a rectangle in no tensor": frame([(1, b"\0")] * 5, rects=(Rect(2**63, (0, 0), (1, 50)),)),
        "the same row twice": frame([(1, b"\0")] * 5, rects=ROW * 2),
    }


def frame(streams: Sequence[tuple[int, bytes]], **fields: object) -> bytes:
    """A blind frame of one change in a row of the first tensor, but for the fields; streams as (length, stored)."""
    lengths = tuple((plain, len(stored)) for plain, stored in streams)
    header = {
        "format": FORMAT,
        "coder": 1,
        "dtype": "BF16",
        "rects": ROW,
        "changed": 1,
        "check": bytes(16),
        "small": 0,
        "starts": (),
        "marked": 0,
        "streams": lengths,
    }
    data = encode(FrameHeader(**{**header, **fields}))  # type: ignore[arg-type]
    return len(data).to_bytes(4, "little") + data + b"".join(stored for _, stored in streams)


def longer_header(frame: bytes, more: bytes) -> bytes:
    length = int.from_bytes(frame[:4], "little")
    return (length + len(more)).to_bytes(4, "little") + frame[4 : 4 + length] + more + frame[4 + length :]


def run(byte: int, count: int) -> bytes:
    """The last block of a zstd frame: one byte, many times."""
    return (count << 3 | 0b011).to_bytes(3, "little") + bytes([byte])


def repeated(byte: int, count: int, *, holds: int | None = None) -> bytes:
    """A zstd frame that says it holds `count` bytes, from 256 on, and holds that many of one."""
    return b"\x28\xb5\x2f\xfd\x60" + (count - 256).to_bytes(2, "little") + run(byte, count if holds is None else holds)


def streams() -> dict[str, Hostile]:
    """Streams whose lengths are possible, and whose contents are not."""
    ranks = np.arange(300, dtype=np.int64) * 60
    codes = np.full(300, 7, np.uint16)
    tiny = np.resize(np.array([0, 1, 2, 0, 1, 2, 9, 0], np.uint16), 300)
    gaps, marks = encode_gaps(ranks)
    values, packed = encode_values(codes, BF16), encode_values(tiny, BF16)
    wide = encode_values(np.full(300, value_scheme(BF16).top, np.uint16), BF16)
    longest = to_symbols(np.full(300, GAPS.top, np.uint64), GAPS)
    wrapping = to_symbols(np.array([2**30 - 1] * 4 + [0] * 296, np.uint64), GAPS)
    return {
        "the right ones, to be spoilt": blind(gaps, marks, values),
        "the right ones in pairs, to be spoilt": blind(gaps, marks, packed),
        "gaps that pass 2^32": blind(*wrapping, values),
        "gaps that pass 2^38": blind(*longest, values),
        "a rank just behind the last lane": blind(*encode_gaps(np.append(ranks[:-1], LANES)), values),
        "gap symbols above the largest": blind(b"\xff" * 300, marks, values),
        "gap bits that are not there": blind(longest[0], b"", values),
        "gap bits that nobody owns": blind(gaps, marks + bytes(4 * 30), values),
        "gap bits with a one behind the last": blind(gaps, marks[:-1] + bytes([marks[-1] | 0x80]), values),
        "value symbols above the largest": blind(gaps, marks, (b"", b"\xff" * 300, b"")),
        "value bits that are not there": blind(gaps, marks, (wide[0], wide[1], b"")),
        "value bits that nobody owns": blind(gaps, marks, (values[0], values[1], values[2] + bytes(4))),
        "pairs of exceptions without a symbol": blind(gaps, marks, (b"\xff" * 75, b"", b"")),
        "pairs without exceptions, and symbols": blind(gaps, marks, (bytes(75), bytes(300), b"")),
        "pairs whose exceptions pass the largest value": blind(gaps, marks, (b"\xff" * 75, wide[1], wide[2])),
        "pairs with more than zeros behind the last": blind(
            *encode_gaps(ranks[:299]), (bytes(74) + b"\xc0", b"", b""), changed=299
        ),
        "one change more than marks": blind(gaps, marks, values, changed=301),
        "every lane changed, without a mark": context((), starts=(0, 5), marked=1, changed=300),
        "every lane unchanged, without a mark": context((), starts=(0, 5), changed=300),
        "marks in a class that has no lanes": context((gaps, marks, *values), starts=(0, 1, 250), at=2),
        "marks behind the last lane of a class": context(
            (*encode_gaps(np.arange(LANES - 300, LANES)), *values), starts=(0, 120)
        ),
        "values of unchanged lanes": context((gaps, marks, *values), starts=(0, 120), marked=1),
        "values of a class that has no lanes": context(
            (b"", b"", b"\0\0", b"", b"", gaps, marks, *values), starts=(0, 1), marked=1
        ),
        "as many classes as there may be, all of them empty": context(
            (), starts=(*range(1, 12), 20, 30, 40, 50), small=12, marked=0xFFF, changed=20_000
        ),
    }


def blind(gaps: bytes, marks: bytes, values: tuple[bytes, bytes, bytes], *, changed: int = 300) -> Hostile:
    return Hostile(BF16, Coding(Coder.BLIND, LANES, changed), (gaps, marks, *values))


def context(
    streams: Sequence[bytes],
    *,
    starts: tuple[int, ...],
    small: int = 1,
    marked: int = 0,
    changed: int = 300,
    at: int = 0,
) -> Hostile:
    """A context frame whose classes have these streams, from class `at` on, and nothing where they end."""
    starts = starts if starts[0] == 0 else (0, *starts)
    coding = Coding(Coder.CONTEXT, LANES, changed, small, starts, marked)
    parts = [b""] * (5 * coding.classes)
    parts[5 * at : 5 * at + len(streams)] = streams
    return Hostile(BF16, coding, tuple(parts))


def base(kind: str) -> Lanes:
    """Lanes for `LANES` of bfloat16: `bell`, as weights are, or one bit pattern for all."""
    if kind == "bell":
        bell = np.random.default_rng(0).normal(0, 0.02, LANES).astype(np.float32)
        return (bell.view(np.uint32) >> 16).astype(np.uint16)
    return np.full(LANES, int(kind, 16), UNSIGNED[2])


BASES = ("bell", "0000", "ffff", "7f80", "8001")

if __name__ == "__main__":
    main()
