"""Whether an edge that was made without weights leads from one set of element sums to another. Pure.

What a frame adds to the sums of its tensors stands in its check. Tensors that share a frame, or a chain of them, are
a *group*: what all its frames add has to be what the published sums of target and base differ by.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deltad.delta.backend import Backend
from deltad.delta.codec import read_patches
from deltad.delta.coding import WHOLE
from deltad.delta.difference import compose
from deltad.delta.digest import U64, sum_changes, tensor_seed, unpack_sums
from deltad.delta.frame import FrameHeader
from deltad.delta.layout import Layout
from deltad.delta.weights import Weights, borrowed
from deltad.errors import IntegrityError
from deltad.limits import DEFAULT_LIMITS, Limits


class Ledger:
    """What the frames of one edge say that they add to the element sums, by group of tensors."""

    def __init__(self, layout: Layout) -> None:
        tensors = len(layout.tensors)
        self._layout = layout
        self._of = list(range(tensors))
        self._added = np.zeros((tensors, 2), np.uint64)
        self._changed = np.zeros(tensors, bool)
        self._silent = np.zeros(tensors, bool)
        self._whole = np.zeros(tensors, np.int64)

    def add(self, header: FrameHeader) -> None:
        """Take in one frame. Each lane is in one frame at most."""
        first = self._find(header.rects[0].tensor)
        for rect in header.rects:
            self._join(first, self._find(rect.tensor))
            if header.coder in WHOLE:
                self._whole[rect.tensor] += rect.lanes
        if header.coder not in WHOLE:
            self._changed[header.rects[0].tensor] = True
        if header.check:
            self._added[header.rects[0].tensor] += unpack_sums(header.check, 1)[0]
        else:
            self._silent[header.rects[0].tensor] = True

    def proves(self, base: U64, target: U64) -> bool:
        """Whether the frames lead from the sums of `base` to those of `target`, shape [tensors, 2].

        False where they do not tell: a frame has no check, or is whole and replaces what nobody knows. Raises
        IntegrityError, which names a tensor, where they lead elsewhere.
        """
        told = True
        groups: dict[int, list[int]] = {}
        for tensor in range(len(self._of)):
            groups.setdefault(self._find(tensor), []).append(tensor)
        for group in groups.values():
            lanes = sum(self._layout.tensors[tensor].lanes for tensor in group)
            whole = int(self._whole[group].sum())
            if self._silent[group].any() or (whole and (whole < lanes or self._changed[group].any())):
                told = False
                continue
            expected = target[group] if whole else target[group] - base[group]
            if not np.array_equal(
                expected.sum(axis=0, dtype=np.uint64), self._added[group].sum(axis=0, dtype=np.uint64)
            ):
                raise _elsewhere(self._layout, group[0])
        return told

    def _find(self, tensor: int) -> int:
        while self._of[tensor] != tensor:
            self._of[tensor] = self._of[self._of[tensor]]
            tensor = self._of[tensor]
        return tensor

    def _join(self, one: int, other: int) -> None:
        self._of[self._find(other)] = self._find(one)


def prove_beside(
    chunks: Iterable[bytes],
    layout: Layout,
    base: Weights,
    sums: tuple[U64, U64],
    backend: Backend,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Follow an edge beside the weights that it starts from, writing nothing; `sums` are those of base and target.

    Raises IntegrityError, which names a tensor, where it leads elsewhere.
    """
    found, target = sums[0].copy(), sums[1]
    for patch in read_patches(chunks, layout, backend, base=base, limits=limits):
        spec = layout.tensors[patch.tensor]
        index = patch.index
        if isinstance(index, slice):
            index = np.arange(index.start, index.stop, dtype=np.int64)
        if not index.size:
            continue
        first = int(index[0])
        with borrowed(base, (patch.tensor, first, int(index[-1]) + 1 - first)) as lanes:
            old = lanes[index - first]
        new = patch.values if patch.absolute else compose(old, patch.values, spec.type)
        found[patch.tensor] += sum_changes(index, old, new, tensor_seed(spec.name))
    wrong = np.flatnonzero((found != target).any(axis=1))
    if wrong.size:
        raise _elsewhere(layout, int(wrong[0]))


def _elsewhere(layout: Layout, tensor: int) -> IntegrityError:
    return IntegrityError(
        f"the edge, in tensor {layout.tensors[tensor].name!r} or one that shares a frame with it",
        expected="changes that lead to the published element sums",
        found="others",
    )
