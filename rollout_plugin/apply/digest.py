"""Element sums by torch, on the device where a tensor lies: a host that reads back what a GPU serves moves 16 bytes.

The formula and its keys are `deltad.delta.digest`'s; torch's int64 wraps as the format's u64 does. Owns the
invariant that nothing is written, and that memory is bounded by the window and not by the tensor.
"""

from __future__ import annotations

import numpy as np
import torch

from deltad.delta.digest import BLOCK_BYTES, BLOCK_CELLS, CELL_BYTES, LANES, U64, block_multipliers, cell_keys

_WINDOW_BLOCKS = 256  # 16 MiB of weights, and eight times as much while they are summed


def sum_tensor(tensor: torch.Tensor, seed: int) -> U64:
    """The element sum of a contiguous tensor of any dtype: u64, shape [2]. `seed` is its `tensor_seed`.

    Raises ValueError for a tensor that is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()}; expected a contiguous one")
    plain = tensor.detach().reshape(-1).view(torch.uint8)
    keys = torch.from_numpy(cell_keys().view(np.int64)).to(plain.device)
    total = torch.zeros(LANES, dtype=torch.int64, device=plain.device)
    window = _WINDOW_BLOCKS * BLOCK_BYTES
    for first in range(0, plain.numel(), window):
        cells = _cells(plain[first : first + window])
        blocks = np.arange(cells.shape[0], dtype=np.uint64) + np.uint64(first // BLOCK_BYTES)
        multipliers = torch.from_numpy(block_multipliers(seed, blocks).view(np.int64)).to(plain.device)
        for lane in range(LANES):
            total[lane] += ((cells * keys[lane]).sum(dim=1) * multipliers[lane]).sum()
    return total.cpu().numpy().view(np.uint64)


def _cells(part: torch.Tensor) -> torch.Tensor:
    """Bytes from a block's start on as u32 cells held in int64, with zeros behind the last. Shape [blocks, 16384]."""
    blocks = -(-part.numel() // BLOCK_BYTES)
    if part.numel() < blocks * BLOCK_BYTES or part.storage_offset() % CELL_BYTES:
        padded = part.new_zeros(blocks * BLOCK_BYTES)
        padded[: part.numel()] = part
        part = padded
    return part.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF).reshape(blocks, BLOCK_CELLS)
