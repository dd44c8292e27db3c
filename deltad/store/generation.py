"""Reading a generation of a mirror piece by piece, against the published sums; and telling what was wrong in it.

Writes nothing. Invariant: a tensor is called wrong only if every lane of it was read and their sum is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltad.checkpoint.aligned import Aligned
from deltad.checkpoint.directory import open_checkpoint
from deltad.delta.backend import Backend, Place
from deltad.delta.digest import U64, tensor_seed, zero_sum
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.weights import Span, Weights, borrowed
from deltad.errors import IntegrityError

_WINDOW_BYTES = 4 << 20
_NAMED = 8
"""How many elements of a tensor are told of one by one."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A piece of a generation that was read: `bytes` of tensor number `tensor`, and all tensors before it.

    `wrong` names the tensor with the last piece of it, if its sum is not the published one.
    """

    tensor: int
    bytes: int
    wrong: str = ""


def check_generation(
    directory: Path, layout: Layout, sums: U64, backend: Backend, *, first: int = 0
) -> Iterator[Checked]:
    """Read the weights from tensor number `first` on, a few MiB a piece.

    Raises CheckpointError, FormatError or IntegrityError for a directory that is not a checkpoint of `layout` any
    more: its headers, its table or its other files are damaged.
    """
    with open_checkpoint(directory) as checkpoint:
        if checkpoint.layout.files != layout.files:
            raise IntegrityError(f"{directory}", expected="the version's files", found="others beside its weights")
        weights = Aligned(layout, checkpoint)
        for i, spec in enumerate(layout.tensors[first:], first):
            total = zero_sum()
            for _, start, count in _spans(i, spec):
                with borrowed(weights, (i, start, count)) as lanes:
                    total += backend.sum([lanes], [Place(tensor_seed(spec.name), start)])[0]
                wrong = start + count == spec.lanes and (total != sums[i]).any()
                yield Checked(i, count * spec.type.lane_bytes, wrong=spec.name if wrong else "")


def differences(layout: Layout, found: Path, right: Path) -> list[str]:
    """Which elements of a damaged generation are others than in a whole one, in words, one text a tensor.

    Raises what opening a checkpoint raises.
    """
    texts = []
    with open_checkpoint(found) as damaged, open_checkpoint(right) as whole:
        ours, theirs = Aligned(layout, damaged), Aligned(layout, whole)
        for i, spec in enumerate(layout.tensors):
            if text := _difference(i, spec, ours, theirs):
                texts.append(text)
    return texts


def _difference(tensor: int, spec: TensorSpec, found: Weights, right: Weights) -> str:
    wrong = 0
    named: list[str] = []
    for span in _spans(tensor, spec):
        with borrowed(found, span) as bad, borrowed(right, span) as good:
            where = np.flatnonzero(bad != good)
            wrong += where.size
            for at in where[: max(0, _NAMED - len(named))]:
                index = list(map(int, np.unravel_index(span[1] + at, spec.lane_shape)))
                width = 2 * spec.type.lane_bytes
                named.append(f"{index} was 0x{bad[at]:0{width}x}, not 0x{good[at]:0{width}x}")
    if not wrong:
        return ""
    more = f" and {wrong - len(named)} more" if wrong > len(named) else ""
    return f"{spec.name}: element {'; '.join(named)}{more}"


def _spans(tensor: int, spec: TensorSpec) -> list[Span]:
    step = _WINDOW_BYTES // spec.type.lane_bytes
    return [(tensor, start, min(step, spec.lanes - start)) for start in range(0, spec.lanes, step)]
