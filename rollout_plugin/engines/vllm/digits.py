"""Tensors that carry positions: what a model's own loader is fed with, to see where it puts every element.

Nothing narrower than a position fits into bf16, so a position is cut into digits and each pass carries one of
them as a small whole number, which bf16, fp16 and fp32 hold exactly and which any copy, cut, stack or
permutation brings through unharmed. One pass more carries the complement of the first digit: what adds up came
from the checkpoint, and all else did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltad.delta.layout import Layout
from deltad.errors import ReplicaError
from rollout_plugin.apply.live import DTYPE_NAMES
from rollout_plugin.engines.vllm.pieces import NOTHING, Ids

_BASE = 256
_CARRIERS = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point and dtype.itemsize > 1}


@dataclass(frozen=True, slots=True)
class Read:
    """What one tensor of the engine showed. `ids`: of the lanes that came from the checkpoint, else `NOTHING`.

    `computed`: some lanes changed from pass to pass, and not as copies do.
    """

    ids: Ids
    computed: bool


class Positions:
    """The positions of a layout as `passes` checkpoints.

    Raises ReplicaError, naming the tensor, for a dtype that cannot carry them.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        for spec in layout.tensors:
            if spec.dtype not in _CARRIERS:
                raise ReplicaError(
                    f"tensor {spec.name!r}",
                    expected=f"a dtype of {', '.join(sorted(_CARRIERS))}",
                    found=spec.dtype,
                    hint="an engine of its own tensors is followed in place with these alone",
                )
        lanes = np.array([spec.lanes for spec in layout.tensors], np.int64)
        self.starts: Ids = np.cumsum(lanes + 1) - lanes - 1
        """The id of each tensor's first lane. Between two tensors one id is unused."""
        digits = 1
        while _BASE**digits < int((lanes + 1).sum()):
            digits += 1
        self.passes = digits + 1

    def tensor(self, at: int, number: int) -> torch.Tensor:
        """What pass `number` gives for a tensor of the layout; an alias carries what its target does."""
        spec = self._layout.tensors[at]
        if spec.alias_of:
            at = self._layout.index[spec.alias_of]
        start = int(self.starts[at])
        ids = torch.arange(start, start + spec.elements, dtype=torch.int64)
        check = number == self.passes - 1
        digit = (ids >> (0 if check else 8 * number)) & (_BASE - 1)
        carried = (_BASE - digit) if check else digit + 1
        return carried.to(_CARRIERS[spec.dtype]).reshape(spec.shape)

    def read(self, seen: Sequence[torch.Tensor]) -> Read:
        """What the passes left in one tensor of the engine, flat and in the order of the passes."""
        values = [tensor.reshape(-1).to(torch.float64).numpy() for tensor in seen]
        *digits, check = values
        carried = (digits[0] + check) == _BASE + 1
        for each in values:
            carried &= (each >= 1) & (each <= _BASE) & (each == np.floor(each))
        ids = np.full(carried.size, NOTHING, np.int64)
        ids[carried] = sum((d[carried].astype(np.int64) - 1) << (8 * i) for i, d in enumerate(digits))
        rest = ~carried
        bits = [np.ascontiguousarray(each[rest]).view(np.uint64) for each in values]
        return Read(ids, any(not np.array_equal(bits[0], other) for other in bits[1:]))
