"""The element sum: a tensor's digest, linear in every element, and the root of a whole version.

For lane s of two, D_s = Σ_b R_s[b] · Σ_j T_s[j] · x[b, j]  (mod 2^64), where x are the 32-bit
little-endian cells of the tensor's canonical row-major bytes (the last one padded with zeros), a block
b has 16,384 cells, T_s are 32-bit keys shared by all tensors and R_s[b] is an odd 64-bit multiplier
drawn from the tensor's name, s and b. All keys are fixed by the format, so equal weights have equal
sums in every run.

Linear means: an update costs O(changes), and any partition of the elements adds up to the same sum.
It proves the absence of accidents, with a miss of about 2^-54 to 2^-64; it proves nothing against
someone who wants a collision. SHA-256 over chunks and signatures do that.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from deltad.delta.encoding import sha256
from deltad.delta.layout import Layout
from deltad.types import Digest

U64 = npt.NDArray[np.uint64]

CELL_BYTES = 4
BLOCK_CELLS = 16_384
BLOCK_BYTES = BLOCK_CELLS * CELL_BYTES
LANES = 2
SUM_BYTES = 8 * LANES

_GROUP_BLOCKS = 32  # blocks per numpy pass: bounds the temporaries to 4 MiB
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@lru_cache(maxsize=1)
def cell_keys() -> U64:
    """T: shape [2, 16384], 32-bit values held in uint64."""
    stream = hashlib.shake_128(b"deltad element sum, cell keys").digest(LANES * BLOCK_BYTES)
    return np.frombuffer(stream, "<u4").astype(np.uint64).reshape(LANES, BLOCK_CELLS)


@lru_cache(maxsize=4096)
def tensor_seed(name: str) -> int:
    """The 64-bit seed of a tensor's block multipliers."""
    hashed = hashlib.sha256(b"deltad element sum, tensor\0" + name.encode()).digest()
    return int.from_bytes(hashed[:8], "little")


def _mix(x: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def multiplier_bases(seed: int) -> U64:
    """What a tensor's block multipliers are drawn from: mix(seed + s·golden). Shape [2]."""
    return _mix(np.uint64(seed) + np.arange(LANES, dtype=np.uint64) * _GOLDEN)


def block_multipliers(seed: int, blocks: U64) -> U64:
    """R: shape [2, len(blocks)], odd."""
    return _mix(multiplier_bases(seed)[:, None] + blocks[None, :]) | np.uint64(1)


def zero_sum() -> U64:
    """The sum of nothing: shape [2]."""
    return np.zeros(LANES, np.uint64)


def sum_bytes(data: npt.NDArray[np.uint8], offset: int, seed: int) -> U64:
    """The share of `data` (contiguous bytes at `offset` of the tensor's canonical bytes). Shape [2]."""
    total = zero_sum()
    keys = cell_keys()
    end = offset + data.size
    while offset < end:
        block, within = divmod(offset, BLOCK_BYTES)
        if within == 0 and end - offset >= BLOCK_BYTES:
            count = min((end - offset) // BLOCK_BYTES, _GROUP_BLOCKS)
            size = count * BLOCK_BYTES
            cells = data[:size].view("<u4").reshape(count, BLOCK_CELLS).astype(np.uint64)
            per_block = np.stack([np.einsum("bj,j->b", cells, keys[s]) for s in range(LANES)])
        else:
            size = min(BLOCK_BYTES - within, end - offset)
            cells, first = _padded_cells(data[:size], within)
            per_block = (keys[:, first : first + cells.size] * cells).sum(axis=1, dtype=np.uint64)[:, None]
            count = 1
        blocks = np.arange(block, block + count, dtype=np.uint64)
        total += (per_block * block_multipliers(seed, blocks)).sum(axis=1, dtype=np.uint64)
        data = data[size:]
        offset += size
    return total


def _padded_cells(data: npt.NDArray[np.uint8], within: int) -> tuple[U64, int]:
    """The whole cells that cover `data`, zero elsewhere, and the index of the first in its block."""
    first, lead = divmod(within, CELL_BYTES)
    padded = np.zeros(-(-(lead + data.size) // CELL_BYTES) * CELL_BYTES, np.uint8)
    padded[lead : lead + data.size] = data
    return padded.view("<u4").astype(np.uint64), first


def sum_changes(
    positions: npt.NDArray[np.int64],
    old: npt.NDArray[np.unsignedinteger],
    new: npt.NDArray[np.unsignedinteger],
    seed: int,
) -> U64:
    """What changing lanes `old` → `new` at canonical `positions` adds to the sum. Shape [2]."""
    lane_bytes = new.dtype.itemsize
    if lane_bytes == 8:
        total = zero_sum()
        for half in (0, 1):
            before, after = ((lanes >> np.uint64(32 * half)).astype(np.uint32) for lanes in (old, new))
            total += sum_changes(2 * positions + half, before, after, seed)
        return total
    at = positions.astype(np.uint64) * np.uint64(lane_bytes)
    cell = at >> np.uint64(2)
    delta = new.astype(np.uint64) - old.astype(np.uint64)
    delta <<= (at & np.uint64(3)) << np.uint64(3)
    block = cell >> np.uint64(14)
    key = cell_keys()[:, (cell & np.uint64(BLOCK_CELLS - 1)).astype(np.intp)]
    share: U64 = (delta * key * block_multipliers(seed, block)).sum(axis=1, dtype=np.uint64)
    return share


def pack_sums(sums: U64) -> bytes:
    """Sums of shape [tensors, 2] as 16 little-endian bytes a tensor."""
    return sums.astype("<u8").tobytes()


def unpack_sums(data: bytes, tensors: int) -> U64:
    """The inverse of `pack_sums`; the caller has checked the length. Shape [tensors, 2], writable."""
    return np.frombuffer(data, "<u8").astype(np.uint64).reshape(tensors, LANES)


def root_of(layout: Layout, sums: U64) -> Digest:
    """The digest of ALL weights: SHA-256 over the tensor table and every tensor's sum, in layout order."""
    return sha256(b"deltad root\0" + layout.table_digest + pack_sums(sums))
