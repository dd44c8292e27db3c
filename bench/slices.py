"""The kept slice of the pairs: small enough for the repository, so that a quick run needs no training.

Two origins (the quantised model, and the end of the phase of text), of each one whole layer and the first rows
of the embedding, 3.6 Mi weights; and for each trained pair what changed from its origin to its old state,
and from there to its new one. Simulated pairs are not kept: they are made when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as remember
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from bench.pairs import FRESH, GRID, PAIRS, Bits, Extent, Pair, States, made, read_table, state
from bench.simulated import states as simulated_states
from bench.simulated import tensors as simulated_tensors

DATA = Path(__file__).resolve().parent / "data"
FILE = DATA / "pairs.msgpack"
COMMAND = "python -m bench.pairs slice"

LANES = 29 << 17
"""About 3.6 Mi weights: both origins and all changes stay below 8 MiB."""
SIMULATED_PART = 11
"""A simulated layer is cut to this part of its rows: 4.1 M weights."""

_LAYER = "model.layers.10."
_EMBEDDING = "model.embed_tokens.weight"
_LEVEL = 19


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """Unsigned integers of `width` bytes as byte planes, low bytes first, in one zstd frame."""

    width: int
    data: bytes


class Changed(msgspec.Struct, frozen=True, array_like=True):
    """What turns one slice into another: gaps between changed positions, and the new 16-bit patterns."""

    gaps: Plane
    values: Plane


class Kept(msgspec.Struct, frozen=True):
    """The file. `pairs` by name: the changes from the pair's origin to its old state, and from there to its new.

    `off_grid` is told from `grid`: the zigzag code of the difference of the patterns, which is a few units for most
    weights and takes half of what the patterns themselves would.
    """

    command: str
    versions: dict[str, str]
    tensors: tuple[Extent, ...]
    grid: Plane
    off_grid: Plane
    pairs: dict[str, tuple[Changed, Changed]]


def kept(pair: Pair) -> bool:
    """Whether a quick run can measure this pair."""
    return pair.run.kind == "simulated" or pair.name in _read(FILE).pairs


def load(pair: Pair, path: Path = FILE) -> States:
    """The slice of a pair. Raises KeyError for one that is not kept."""
    if pair.run.kind == "simulated":
        made_now = [
            (old.reshape(-1), new.reshape(-1)) for _, old, new in simulated_states(pair.run, part=SIMULATED_PART)
        ]
        old, new = (np.concatenate(bits) for bits in zip(*made_now, strict=True))
        return States(pair, simulated_tensors(part=SIMULATED_PART), old, new)
    file = _read(path)
    to_old, to_new = file.pairs[pair.name]
    origin = unpack(file.grid) if pair.run.kind == "grid" else _unfold(unpack(file.grid), unpack(file.off_grid))
    old = apply(origin, to_old)
    return States(pair, file.tensors, old, apply(old, to_new))


def tile(states: States, times: int) -> States:
    """The same slice several times over, as the layers of one larger model."""
    tensors = [Extent(f"part.{i:02d}.{extent.name}", extent.shape) for i in range(times) for extent in states.tensors]
    return States(states.pair, tuple(tensors), np.tile(states.old, times), np.tile(states.new, times))


def cut(path: Path = FILE, *, tiny: bool = False) -> Kept:
    """Cut the slice of every pair that is in the cache. Raises FileNotFoundError if an origin is not."""
    table = read_table(GRID, tiny=tiny)
    rows, parts = _choose(table.tensors)
    grid, off_grid = (_cut(state(run, 0, tiny=tiny), parts) for run in (GRID, FRESH))
    kept_pairs = {}
    for pair in PAIRS:
        if pair.run.kind != "simulated" and made(pair.run, tiny=tiny):
            old, new = (_cut(state(pair.run, step, tiny=tiny), parts) for step in (pair.old, pair.new))
            origin = grid if pair.run.kind == "grid" else off_grid
            kept_pairs[pair.name] = (difference(origin, old), difference(old, new))
    file = Kept(COMMAND, table.versions, rows, pack(grid), pack(_fold(grid, off_grid)), kept_pairs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.msgpack.encode(file))
    return file


def difference(old: Bits, new: Bits) -> Changed:
    """The changes from `old` to `new`."""
    positions = np.flatnonzero(old != new)
    return Changed(pack(np.diff(positions, prepend=-1).astype(np.uint32) - np.uint32(1)), pack(new[positions]))


def apply(old: Bits, changed: Changed) -> Bits:
    """`old` with the changes, as a new array."""
    new = old.copy()
    new[np.cumsum(unpack(changed.gaps).astype(np.int64) + 1) - 1] = unpack(changed.values)
    return new


def pack(values: npt.NDArray[np.unsignedinteger]) -> Plane:
    """A flat array of unsigned integers as one plane struct."""
    width = values.dtype.itemsize
    planes = np.ascontiguousarray(values.reshape(-1, 1).view(np.uint8).T)
    return Plane(width, zstandard.ZstdCompressor(level=_LEVEL).compress(planes.tobytes()))


def unpack(plane: Plane) -> npt.NDArray[np.unsignedinteger]:
    """The inverse of `pack`."""
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(plane.data), np.uint8).reshape(plane.width, -1)
    return np.ascontiguousarray(planes.T).view(f"<u{plane.width}").reshape(-1)


def _fold(one: Bits, other: Bits) -> Bits:
    distance = (other - one).view(np.int16)
    return ((distance << 1) ^ (distance >> 15)).view(np.uint16)


def _unfold(one: Bits, code: Bits) -> Bits:
    return one + ((code >> np.uint16(1)) ^ -(code & np.uint16(1)))


@remember
def _read(path: Path) -> Kept:
    return msgspec.msgpack.decode(path.read_bytes(), type=Kept)


def _choose(tensors: Sequence[Extent]) -> tuple[tuple[Extent, ...], list[slice]]:
    """One layer, and as many rows of the embedding as fill the slice up; and where these lanes lie."""
    layer = sum(extent.lanes for extent in tensors if extent.name.startswith(_LAYER))
    chosen, parts, at = [], [], 0
    for extent in tensors:
        if extent.name == _EMBEDDING:
            rows = min(extent.shape[0], (LANES - layer) // extent.shape[1])
            chosen.append(Extent(extent.name, (rows, extent.shape[1])))
        elif extent.name.startswith(_LAYER):
            chosen.append(extent)
        if chosen and chosen[-1].name == extent.name:
            parts.append(slice(at, at + chosen[-1].lanes))
        at += extent.lanes
    return tuple(chosen), parts


def _cut(bits: Bits, parts: Sequence[slice]) -> Bits:
    return np.concatenate([bits[part] for part in parts])
