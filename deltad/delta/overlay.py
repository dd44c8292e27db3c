"""Weights as they will be once staged patches are applied, while what lies below stays as it is.

A delta that is coded by context is read beside the weights that it starts from. In a chain those are not
written anywhere yet: they are the weights below with the patches of the deltas before on top. Owns the
invariant that nothing below is written; a window that is read costs its own size, and the patches are
those that are staged anyhow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from deltad.delta.backend import Lanes, Positions
from deltad.delta.codec import Patch
from deltad.delta.difference import compose
from deltad.delta.layout import Layout
from deltad.delta.weights import Weights
from deltad.types import DType


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one delta does to one tensor: disjoint patches, and the canonical positions that each lies between."""

    patches: tuple[Patch, ...]
    starts: Positions
    ends: Positions

    def over(self, start: int, end: int) -> list[Patch]:
        return [self.patches[i] for i in np.flatnonzero((self.starts < end) & (self.ends > start))]


class Overlay:
    """Implements `deltad.delta.weights.Weights` over `below` and the patches added so far."""

    def __init__(self, below: Weights, layout: Layout) -> None:
        self._below = below
        self._layout = layout
        self._layers: defaultdict[int, list[_Layer]] = defaultdict(list)

    def add(self, patches: Iterable[Patch]) -> None:
        """All that one delta does, on top of what was added before. Its patches are disjoint, as frames are."""
        by_tensor: defaultdict[int, list[Patch]] = defaultdict(list)
        for patch in patches:
            if patch.values.size:
                by_tensor[patch.tensor].append(patch)
        for tensor, found in by_tensor.items():
            spans = np.array([_span(patch) for patch in found], np.int64)
            self._layers[tensor].append(_Layer(tuple(found), spans[:, 0], spans[:, 1]))

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        """A view of what lies below where no patch touches the window, else a copy with the patches applied."""
        lanes = self._below.lanes(tensor, start, count)
        dtype = self._layout.tensors[tensor].type
        copied = False
        for layer in self._layers.get(tensor, ()):
            for patch in layer.over(start, start + count):
                if not copied:
                    lanes, copied = lanes.copy(), True
                _play(patch, lanes, start, dtype)
        return lanes

    def release(self, tensor: int, start: int, count: int) -> None:
        self._below.release(tensor, start, count)


def _span(patch: Patch) -> tuple[int, int]:
    if isinstance(patch.index, slice):
        return patch.index.start, patch.index.stop
    return int(patch.index[0]), int(patch.index[-1]) + 1


def _play(patch: Patch, lanes: Lanes, start: int, dtype: DType) -> None:
    """Let a patch happen to the window of its tensor that begins at `start`."""
    if isinstance(patch.index, slice):
        first, last = max(patch.index.start, start), min(patch.index.stop, start + lanes.size)
        lanes[first - start : last - start] = patch.values[first - patch.index.start : last - patch.index.start]
        return
    begin, end = np.searchsorted(patch.index, (start, start + lanes.size))
    at, values = patch.index[begin:end] - start, patch.values[begin:end]
    lanes[at] = values if patch.absolute else compose(lanes[at], values, dtype)
