"""Make the test vectors with the reference backend: `python -m tests.vectors.make`.

They are part of the format: making them anew must change nothing but, with another zstd, how streams
are stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from deltad.delta.backend import UNSIGNED, Backend, Lanes, Mode
from deltad.delta.backend.numpy import NumpyBackend, context_streams
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.coding import MANTISSA_BITS, Coder, Coding, exponents
from deltad.delta.digest import pack_sums, root_of
from deltad.delta.emit import FrameWriter
from deltad.delta.encoding import encode, sha256
from deltad.delta.frame import Rect, read_chunk, write_frame
from deltad.delta.huffman import code_lengths
from deltad.delta.layout import FileSpec, Layout, TensorSpec
from deltad.delta.manifest import EdgeKind, Manifest, State, make_pages
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.delta.symbols import GAPS, to_symbols, value_scheme
from deltad.delta.weights import places_of, read_segments
from deltad.limits import DEFAULT_LIMITS
from deltad.types import DTYPES, DType, Version
from tests.kit.weights import SPECIAL_BITS, ArrayWeights
from tests.vectors.vector import FRAMES, HERE, Vector

BACKEND = NumpyBackend()
BF16 = DTYPES["BF16"]
MODES: tuple[Mode, ...] = ("blind", "dense")


def main() -> None:
    FRAMES.mkdir(exist_ok=True)
    for path in FRAMES.glob("*.json"):
        path.unlink()
    for vector in all_made():
        vector.write()
    (HERE / "symbols.json").write_text(lines(symbols()))
    (HERE / "codes.json").write_text(lines(codes()))
    (HERE / "edge.json").write_text(lines(edge()))


def all_made() -> Iterator[Vector]:
    """Every frame, in the order of the format's document."""
    for dtype in DTYPES.values():
        for mode in MODES if exponents(dtype) else ("blind",):
            yield specials(dtype, mode)
            yield sparse(dtype, mode)
    yield nothing()
    yield everything("blind")
    yield everything("fast")
    yield raw("BF16")
    yield raw("F64")
    for name, lanes in (("BF16", 700), ("F16", 500), ("F32", 500), ("F64", 300), ("F8_E4M3", 500), ("I32", 400)):
        yield packed(name, lanes)
    yield packed_blocks()
    yield rectangles("blind")
    yield rectangles("dense")
    for mode in ("fast", "mid", "dense"):
        yield classes("BF16", mode)
    yield classes("F32", "dense")
    yield many_classes()
    yield unchecked()


def specials(dtype: DType, mode: Mode) -> Vector:
    """Every special pattern to every other, and to itself."""
    bits = np.array(SPECIAL_BITS[dtype.lane_bytes], UNSIGNED[dtype.lane_bytes])
    old, new = (grid.reshape(-1) for grid in np.meshgrid(bits, bits, indexing="ij"))
    lanes = old.size // 3 * 3  # three bytes hold whole elements of every dtype
    return whole(f"{dtype.name.lower()}-{mode}-specials", dtype, mode, old[:lanes], new[:lanes])


def sparse(dtype: DType, mode: Mode) -> Vector:
    """Random lanes of which one in 16 takes a small step, and a few lose every bit that they had."""
    old = drawn(f"sparse {dtype.name}", 210, dtype)
    steps = drawn(f"steps {dtype.name}", 210, DTYPES["U8"])
    step = np.where(steps < 16, steps % 5, 0).astype(old.dtype)
    new = np.where(steps == 20, ~old, old + step)
    return whole(f"{dtype.name.lower()}-{mode}-sparse", dtype, mode, old, new)


def nothing() -> Vector:
    lanes = drawn("nothing", 16, BF16)
    return whole("nothing-changed", BF16, "blind", lanes, lanes.copy())


def everything(mode: Mode) -> Vector:
    lanes = drawn("everything", 100, BF16)
    return whole(f"everything-changed-{mode}", BF16, mode, lanes, lanes + np.uint16(1))


def raw(name: str) -> Vector:
    old, new = drawn(f"raw {name}", 20, DTYPES[name]), drawn(f"raw {name}, new", 20, DTYPES[name])
    return framed(f"raw-{name.lower()}", {"w": (name, (4, 5))}, (Rect(0, (0, 0), (4, 5)),), "", [old], [new])


def packed(name: str, lanes: int) -> Vector:
    """Each exponent half as often as the one above; integers likewise. All but the last lane in a rectangle alone."""
    dtype = DTYPES[name]
    draws = drawn(f"packed {name}", lanes, DTYPES["U64"])
    depth = sum(((draws & np.uint64((2 << bit) - 1)) == 0).astype(np.uint64) for bit in range(12))
    new = depth
    if name in MANTISSA_BITS:
        mantissa = np.uint64(MANTISSA_BITS[name])
        top = np.uint64(exponents(dtype) * 3 // 4)
        fraction = draws >> np.uint64(16) & (np.uint64(1) << mantissa) - np.uint64(1)
        new = top - depth << mantissa | fraction | draws >> np.uint64(63) << np.uint64(8 * dtype.lane_bytes - 1)
    new = new.astype(UNSIGNED[dtype.lane_bytes])
    tensors = {"w": (name, (lanes - 1,)), "x": (name, ())}
    rects = (Rect(0, (0,), (lanes - 1,)), Rect(1, (), ()))
    parts = [new[:-1], new[-1:]]
    return framed(f"packed-{name.lower()}", tensors, rects, "", [np.zeros_like(part) for part in parts], parts)


def packed_blocks() -> Vector:
    """Two blocks, and codewords of every length from 1 to 12."""
    counts = [1, *(1 << bit for bit in range(12)), 200]
    symbols = np.repeat(np.array([*range(40, 53), 52], np.uint8), counts)
    order = np.argsort(drawn("packed blocks", symbols.size, DTYPES["U64"]), kind="stable")
    return whole("packed-u8-blocks", DTYPES["U8"], "", np.zeros_like(symbols), symbols[order])


def rectangles(mode: Mode) -> Vector:
    """A rectangle that is no run, one row that is, and a run within another tensor."""
    tensors = {"w.a": ("BF16", (6, 10)), "w.b": ("BF16", (40,))}
    rects = (Rect(0, (1, 2), (3, 7)), Rect(1, (5,), (30,)), Rect(0, (5, 0), (1, 10)))
    old = [drawn("rectangle", 60, BF16), drawn("run", 40, BF16)]
    new = [lanes.copy() for lanes in old]
    for row, column in ((1, 2), (1, 8), (2, 5), (3, 3), (3, 8), (5, 0), (5, 9)):
        new[0][row * 10 + column] += np.uint16(row + column)
    new[1][[5, 6, 20, 34]] -= np.uint16(1)
    return framed(f"rectangles-{mode}", tensors, rects, mode, old, new)


def classes(name: str, mode: Mode) -> Vector:
    """Eight exponents, each about twice as likely to change as the one above, the lowest ones nearly always."""
    dtype, mantissa, count = DTYPES[name], MANTISSA_BITS[name], 4000
    draws = drawn(f"classes {name}", count, DTYPES["U64"])
    depth, negative = (draws % np.uint64(8)).astype(np.int64), draws >> np.uint64(63)
    exponent = np.uint64(120) - draws % np.uint64(8)
    pattern = exponent << np.uint64(mantissa) | draws >> np.uint64(8) & np.uint64((1 << mantissa) - 1)
    old = (pattern | negative << np.uint64(8 * dtype.lane_bytes - 1)).astype(UNSIGNED[dtype.lane_bytes])
    chance = drawn(f"chances {name}", count, DTYPES["U16"]).astype(np.int64)
    moves = chance < np.array([300, 600, 1500, 4000, 9000, 30000, 62000, 64000])[depth]
    far = np.where(depth > 4, chance % 40, 0) + np.where(depth == 7, chance % 3001, 0)
    step = np.where(moves, 1 + far, 0).astype(old.dtype)
    new = np.where(chance % 3 == 0, old - step, old + step)
    return whole(f"classes-{name.lower()}-{mode}", dtype, mode, old, new)


def many_classes() -> Vector:
    """A table that no planner would make: three small classes, one of them empty, and three bulk ones."""
    vector = classes("BF16", "dense")
    coding = Coding(Coder.CONTEXT, 4000, 1329, small=3, starts=(0, 113, 115, 116, 118, 121), marked=0b101)
    segments = vector.base.arrays, vector.target.arrays
    streams = context_streams(coding, *segments, BF16)
    encoded = BACKEND.encode(*segments, places_of(vector.rects, vector.layout), BF16, "blind")
    assert encoded is not None
    check = pack_sums(encoded.sums.sum(axis=0, dtype=np.uint64))
    data = write_frame("BF16", vector.rects, coding, check, streams)
    return replace(vector, name="classes-many", mode="table", frame=data)


def unchecked() -> Vector:
    """What folding gives where frames run across each other: a blind frame without a check."""
    vector = sparse(BF16, "blind")
    (frame,) = read_chunk(vector.frame, vector.layout)
    data = write_frame("BF16", vector.rects, frame.header.coding, b"", frame.streams)
    return replace(vector, name="unchecked-blind", mode="folded", frame=data)


def whole(name: str, dtype: DType, mode: Mode | Literal[""], old: Lanes, new: Lanes) -> Vector:
    """One frame over one tensor of one dimension."""
    elements = old.size * 8 * dtype.lane_bytes // dtype.bits
    rects = (Rect(0, (0,), (old.size,)),)
    return framed(name, {"w": (dtype.name, (elements,))}, rects, mode, [old], [new])


def framed(  # noqa: PLR0917
    name: str,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    rects: tuple[Rect, ...],
    mode: Mode | Literal[""],
    old: list[Lanes],
    new: list[Lanes],
) -> Vector:
    specs = tuple(TensorSpec(tensor, dtype, shape) for tensor, (dtype, shape) in tensors.items())
    base, target = ArrayWeights(old), ArrayWeights(new)
    return Vector(name, specs, rects, mode, base, target, written(Layout(1, specs), rects, mode, base, target))


def written(  # noqa: PLR0917
    layout: Layout,
    rects: tuple[Rect, ...],
    mode: str,
    base: ArrayWeights,
    target: ArrayWeights,
    backend: Backend = BACKEND,
) -> bytes:
    """The frame in the mode that is asked for, even where raw would be smaller."""
    before, after = read_segments(base, rects, layout), read_segments(target, rects, layout)
    writer = FrameWriter(layout, backend, mode or "blind", DEFAULT_LIMITS)  # type: ignore[arg-type]
    if not mode:
        (frame,) = writer.whole(rects, after)
        return frame.data
    encoded = writer.encode(rects, before, after)
    return b"" if encoded is None else writer.coded(rects, before, after, encoded).data


def symbols() -> dict[str, object]:
    """Numbers, and how each scheme spells them."""
    found: dict[str, object] = {}
    for name, scheme in (
        ("gaps", GAPS),
        *((f"values {n}", value_scheme(DTYPES[n])) for n in ("U8", "BF16", "F4", "F32", "F64")),
    ):
        powers = {(1 << bit) + around for bit in range(65) for around in (-2, -1, 0, 1)}
        numbers = sorted(number for number in powers if 0 <= number <= scheme.top)
        spelled, bits = to_symbols(np.array(numbers, np.uint64), scheme)
        found[name] = {"numbers": numbers, "symbols": spelled.hex(), "bits": bits.hex()}
    return found


def codes() -> dict[str, object]:
    """Counts of symbols from 0 on, and the lengths of their codewords."""
    fibonacci = [1, 1]
    while len(fibonacci) < 30:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    counts = {
        "two": [5, 1],
        "equal, three": [0, 7, 7, 0, 7],
        "equal, all": [3] * 256,
        "ties of sums and leaves": [1, 1, 2, 2, 4, 4, 8, 8, 3, 5],
        "too steep for the limit": fibonacci,
        "steep and shuffled": fibonacci[::2] + fibonacci[1::2],
        "a long tail": [1 << 30, *[1] * 255],
        "drawn": (drawn("counts", 256, DTYPES["U32"]) >> (drawn("shifts", 256, DTYPES["U32"]) % 32)).tolist(),
    }
    found: dict[str, object] = {}
    for name, symbols in counts.items():
        lengths = code_lengths(np.array(symbols + [0] * (256 - len(symbols)), np.int64))
        found[name] = {"counts": symbols, "lengths": lengths[: len(symbols)].tolist()}
    return found


def edge() -> dict[str, object]:
    """A version with one delta of one chunk: every object that a store holds for it."""
    files = (FileSpec("config.json", 2, sha256(b"{}")),)
    tensors = (
        TensorSpec("embed", "BF16", (8, 6)),
        TensorSpec("head", "BF16", (8, 6), "embed"),
        TensorSpec("norm", "F32", (6,)),
    )
    layout = Layout(1, tensors, files)
    none = np.zeros(0, np.uint16)
    base = ArrayWeights([drawn("embed", 48, BF16), none, drawn("norm", 6, DTYPES["F32"])])
    target = base.copy()
    target.arrays[0][[3, 11, 40]] += np.uint16(1)
    target.arrays[2][1] ^= np.uint32(1)
    base_sums = sum_weights(layout, base)
    encoder = EdgeEncoder(layout, target, BACKEND, base=base, base_sums=base_sums, mode="mid")
    (chunk,) = encoder.chunks()
    ((page, page_data),) = make_pages([chunk.ref])
    before, after = Version(1, 7), Version(1, 8)
    manifest = Manifest(
        format=1,
        least_reader=1,
        kind=EdgeKind.DELTA,
        run="policy",
        variant="bf16",
        layout=layout.digest,
        base=State(before, root_of(layout, base_sums)),
        target=State(after, encoder.root),
        sums=pack_sums(encoder.sums),
        pages=(page,),
        coders=encoder.coders,
        changed=int(encoder.changed.sum()),
        elements=54,
        chunk_bytes=chunk.ref.size,
    )
    described = encode(manifest)
    ref = EdgeRef(EdgeKind.DELTA, before, sha256(described), len(described))
    variant = VariantRecord("bf16", layout.digest, len(layout.encode()), encoder.root, (ref,))
    record = VersionRecord(1, 1, "policy", after, before, 9, (variant,), created_ns=1, source="step_8")
    return {
        "layout": layout.encode().hex(),
        "base": [array.tobytes().hex() for array in base.arrays],
        "target": [array.tobytes().hex() for array in target.arrays],
        "base root": root_of(layout, base_sums).hex(),
        "target root": encoder.root.hex(),
        "sums": pack_sums(encoder.sums).hex(),
        "chunk": chunk.data.hex(),
        "page": page_data.hex(),
        "manifest": described.hex(),
        "record": record.encode().hex(),
    }


def drawn(label: str, count: int, dtype: DType) -> Lanes:
    """Lanes from a hash, so that they never depend on a generator's version."""
    data = hashlib.shake_128(f"deltad vector, {label}".encode()).digest(count * dtype.lane_bytes)
    return np.frombuffer(data, UNSIGNED[dtype.lane_bytes]).copy()


def lines(fields: dict[str, object]) -> str:
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()) + "\n}\n"


if __name__ == "__main__":
    main()
