"""One rank's share of the live weights: what it holds, what is staged for it, and what it wrote.

Runs in the process that holds the tensors, between steps of the engine, and knows nothing of other ranks. Owns the
invariants that a lane is written with its share of the sums counted, and that whatever was written can be taken back
until the next read-back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deltad.delta.backend import Backend, Changes, Lanes, Place
from deltad.delta.codec import Patch
from deltad.delta.difference import compose
from deltad.delta.digest import U64, sum_changes, tensor_seed
from deltad.delta.layout import Layout
from deltad.errors import ReplicaError, UsageError
from rollout_plugin.apply.export import Export
from rollout_plugin.apply.live import DTYPE_NAMES, LANE_DTYPES
from rollout_plugin.engines.vllm.held import flat
from rollout_plugin.engines.vllm.pieces import Ids, Piece

Cover = tuple[int, Ids, Ids]
"""A piece as others see it: its tensor, and the canonical intervals that it holds (starts, lengths)."""


@dataclass(frozen=True, slots=True)
class _Write:
    """What one patch does to one piece: `canonical` and `local` positions, and `values` as in the patch."""

    piece: int
    canonical: Ids
    local: Ids
    values: Lanes
    absolute: bool


class Rank:
    """The pieces of one rank, over tensors that `held` finds by name, each time anew.

    Raises ReplicaError, naming the tensor, where they are not what the pieces were found in.
    """

    def __init__(
        self, layout: Layout, held: Mapping[str, torch.Tensor], pieces: Sequence[Piece], backend: Backend
    ) -> None:
        self.layout = layout
        self.pieces = tuple(pieces)
        self._backend = backend
        self._levels, self._copies = [0] * len(self.pieces), 1
        self._flat: dict[str, Lanes] = {}
        self._addresses: dict[str, int] = {}
        for piece in self.pieces:
            lanes = self._flat.get(piece.held)
            if lanes is None:
                lanes = self._flat[piece.held] = _lanes(piece.held, held.get(piece.held))
                self._addresses[piece.held] = held[piece.held].data_ptr()
            self._check_fits(piece, held[piece.held], lanes)
        self._check_apart()
        self._token = ""
        self._staged: list[list[_Write]] = []
        self._undo: list[tuple[_Write, Lanes]] = []
        self._added = self._nothing()

    # What is here.

    def covers(self) -> list[Cover]:
        return [(piece.tensor, *piece.intervals()) for piece in self.pieces]

    def set_levels(self, levels: Sequence[int], count: int) -> None:
        """Which copy of its tensor each piece belongs to; there are `count` at most."""
        self._levels, self._copies = list(levels), count
        self._added = self._nothing()

    def check(self, held: Mapping[str, torch.Tensor]) -> None:
        """Raises ReplicaError if the engine computes with other tensors now than those that are written here."""
        for name, address in self._addresses.items():
            if name not in held or held[name].data_ptr() != address:
                raise ReplicaError(
                    f"engine tensor {name!r}",
                    expected="the storage that it was found in",
                    found="another one",
                    hint="the engine replaced its weights; restart the replica",
                )

    def lanes(self, tensor: int, start: int, count: int) -> list[tuple[int, Lanes]]:
        """What the first copy has here of this window: pieces of it, and where each starts in it."""
        parts: list[tuple[int, Lanes]] = []
        for piece, level in zip(self.pieces, self._levels, strict=True):
            if piece.tensor != tensor or level:
                continue
            held = self._flat[piece.held]
            if (run := piece.one_run()) is not None:
                canonical, local, length = run
                first, last = max(start, canonical), min(start + count, canonical + length)
                if first < last:
                    parts.append((first - start, held[local + first - canonical : local + last - canonical]))
                continue
            here, local_at = piece.locate(np.arange(start, start + count, dtype=np.int64))
            breaks = np.flatnonzero(np.diff(here) != 1) + 1
            for at, values in zip(np.split(here, breaks), np.split(held[local_at], breaks), strict=True):
                if at.size:
                    parts.append((int(at[0]), values))
        return parts

    def sums(self) -> U64:
        """The share of everything held here, by copy: shape [copies, tensors, 2]. Ends what was staged."""
        self._token, self._staged, self._undo = "", [], []
        self._added = self._nothing()
        sums = self._nothing()
        for piece, level in zip(self.pieces, self._levels, strict=True):
            seed = tensor_seed(self.layout.tensors[piece.tensor].name)
            for segments, starts in piece.segments(self._flat[piece.held]):
                shares = self._backend.sum(segments, [Place(seed, start) for start in starts.tolist()])
                sums[level, piece.tensor] += shares.sum(axis=0, dtype=np.uint64)
        return sums

    # Writing.

    def begin(self, token: str, steps: int) -> None:
        """Forget what was staged; these steps come now."""
        self._token, self._staged, self._undo = token, [[] for _ in range(steps)], []
        self._added = self._nothing()

    def stage(self, token: str, step: int, patches: Sequence[Patch]) -> None:
        """Find where these patches go. Writes no live byte."""
        self._check_token(token)
        by_tensor: dict[int, list[int]] = {}
        for at, piece in enumerate(self.pieces):
            by_tensor.setdefault(piece.tensor, []).append(at)
        for patch in patches:
            positions = (
                np.arange(patch.index.start, patch.index.stop, dtype=np.int64)
                if isinstance(patch.index, slice)
                else patch.index
            )
            for at in by_tensor.get(patch.tensor, ()):
                here, local = self.pieces[at].locate(positions)
                if here.size:
                    write = _Write(at, positions[here], local, patch.values[here], patch.absolute)
                    self._staged[step].append(write)

    def write(self, token: str, step: int) -> U64:
        """Write a step; what all writes in force add to the sums, by copy: shape [copies, tensors, 2]."""
        self._check_token(token)
        for write in self._staged[step]:
            self._write(write)
        return self._added.copy()

    def undo(self, token: str) -> U64:
        """Take back all writes, newest first; returns what those in force add, which is nothing."""
        self._check_token(token)
        while self._undo:
            write, old = self._undo[-1]
            self._put(write, old)
            self._undo.pop()
        return self._added.copy()

    def copy(self, directory: str) -> None:
        """Write a whole checkpoint over what is here. Cannot be undone."""
        by_tensor: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            by_tensor.setdefault(piece.tensor, []).append(piece)
        for tensor, lanes in Export(Path(directory), self.layout).tensors():
            for piece in by_tensor.get(tensor, ()):
                held = self._flat[piece.held]
                if (run := piece.one_run()) is not None:
                    canonical, local, length = run
                    held[local : local + length] = lanes[canonical : canonical + length]
                    continue
                for canonical_at, local_at in piece.windows():
                    held[local_at] = lanes[canonical_at]

    def _write(self, write: _Write) -> None:
        piece = self.pieces[write.piece]
        spec, held, run = self.layout.tensors[piece.tensor], self._flat[piece.held], piece.one_run()
        if run is not None and run[0] == 0 and not write.absolute:
            # Canonical positions are those of the view itself, so a compiled loop can do it in one pass.
            whole = held[run[1] : run[1] + run[2]]
            changes = Changes(write.canonical, write.values)
            old, share = self._backend.apply(whole, changes, spec.type, tensor_seed(spec.name))
            self._undo.append((write, old))
            self._added[self._levels[write.piece], piece.tensor] += share
            return
        old = held[write.local]
        self._undo.append((write, old))
        self._put(write, write.values if write.absolute else compose(old, write.values, spec.type))

    def _put(self, write: _Write, new: Lanes) -> None:
        piece = self.pieces[write.piece]
        held = self._flat[piece.held]
        seed = tensor_seed(self.layout.tensors[piece.tensor].name)
        share = sum_changes(write.canonical, held[write.local], new, seed)
        held[write.local] = new
        self._added[self._levels[write.piece], piece.tensor] += share

    def _nothing(self) -> U64:
        return np.zeros((self._copies, len(self.layout.tensors), 2), np.uint64)

    # Checks.

    def _check_token(self, token: str) -> None:
        if token != self._token:
            raise UsageError("rank", expected="the deltas that were staged last", found="others")

    def _check_fits(self, piece: Piece, tensor: torch.Tensor, lanes: Lanes) -> None:
        spec = self.layout.tensors[piece.tensor]
        name = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        if name != spec.dtype:
            raise ReplicaError(
                f"tensor {spec.name!r}",
                expected=f"{spec.dtype} in the engine's {piece.held!r}",
                found=name,
                hint="an engine that casts does not serve the bits that were published",
            )
        if int((piece.local + piece.length).max()) > lanes.size:
            raise ReplicaError(
                f"engine tensor {piece.held!r}",
                expected="the size that it had when the map was made",
                found=f"{lanes.size} elements",
                hint="remove the cached map",
            )

    def _check_apart(self) -> None:
        """Two tensors that differ in the map must not share memory: a write to one would be one to the other."""
        end, owner = 0, ""
        for name, lanes in sorted(self._flat.items(), key=lambda item: item[1].ctypes.data):
            if lanes.ctypes.data < end:
                raise ReplicaError(
                    f"engine tensor {name!r}",
                    expected="a storage of its own",
                    found=f"that of {owner!r}",
                    hint="an engine ties what is equal when it loads; publish the model with the tie in its config",
                )
            end, owner = lanes.ctypes.data + lanes.nbytes, name


def _lanes(name: str, tensor: torch.Tensor | None) -> Lanes:
    thing = f"engine tensor {name!r}"
    if tensor is None:
        raise ReplicaError(thing, expected="a tensor of that name, as when the map was made", found="none")
    if tensor.device.type != "cpu":
        raise ReplicaError(thing, expected="a tensor in host memory", found=f"device {tensor.device}")
    plain = flat(tensor)
    if plain is None:
        raise ReplicaError(thing, expected="elements without gaps", found=f"strides {tensor.stride()}")
    lanes: Lanes = plain.view(LANE_DTYPES[tensor.element_size()]).numpy()
    return lanes
