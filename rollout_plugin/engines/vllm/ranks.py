"""The live weights of an engine whose tensors lie in one or several ranks.

Talks to the ranks through one function that asks all of them the same; knows no engine and no torch. Owns the
invariants that every element of the layout is held by each copy of its tensor exactly once, whichever ranks it is
cut over, and that a step is in force only where all copies in all ranks took it alike.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from deltad.delta.backend import UNSIGNED, Backend, Lanes
from deltad.delta.codec import Patch
from deltad.delta.digest import U64
from deltad.delta.layout import Layout
from deltad.errors import IntegrityError, ReplicaError
from rollout_plugin.engines import Checkpoint
from rollout_plugin.engines.vllm.rank import Cover

_MESSAGE_BYTES = 16 << 20


class Ask(Protocol):
    """Asks every rank the same, and returns their answers in the order of ranks.

    All ranks are asked and heard even where one fails; only then it raises, what that one raised.
    """

    def __call__(self, method: str, *arguments: object) -> list[Any]: ...


class LiveRanks:
    """Implements `rollout_plugin.engines.LiveTensors` over ranks that have found their pieces.

    Raises ReplicaError, naming the tensor, for one that the ranks do not hold as a whole, or hold parts of once more.
    """

    def __init__(self, layout: Layout, ask: Ask) -> None:
        self.layout = layout
        self._ask = ask
        covers: list[list[Cover]] = ask("covers")
        levels, self._copies = find_copies(layout, covers)
        ask("set_levels", levels, max(self._copies, default=1))

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        """A view where one rank holds the window as it is, else a copy; empty for an alias."""
        parts = [part for answer in self._ask("lanes", tensor, start, count) for part in answer]
        if len(parts) == 1:
            whole: Lanes = parts[0][1]
            return whole
        window = np.empty(count, UNSIGNED[self.layout.tensors[tensor].type.lane_bytes])
        for at, lanes in parts:
            window[at : at + lanes.size] = lanes
        return window

    def release(self, tensor: int, start: int, count: int) -> None:
        """Nothing: the engine needs them."""

    def check_live(self) -> None:
        self._ask("check")

    def sums(self, backend: Backend) -> U64:
        return self.agreed(self._ask("sums"), "reading back")

    def stage(self, steps: Sequence[Sequence[Patch]], backend: Backend) -> RankWrites:
        token = uuid.uuid4().hex
        self._ask("begin", token, len(steps))
        for at, patches in enumerate(steps):
            for message in _messages(patches):
                self._ask("stage", token, at, message)
        return RankWrites(self, self._ask, token)

    def copy_from(self, checkpoint: Checkpoint) -> None:
        self._ask("copy", str(checkpoint.directory))

    def agreed(self, answers: Iterable[U64], what: str) -> U64:
        """What ranks say of all copies, [copies, tensors, 2] each, as what is true of each tensor: [tensors, 2].

        Raises IntegrityError, naming the tensor, where copies differ.
        """
        total: U64 = np.sum(list(answers), axis=0, dtype=np.uint64)
        for copy in range(1, total.shape[0]):
            wrong = [t for t in np.flatnonzero((total[copy] != total[0]).any(axis=1)) if self._copies[t] > copy]
            if wrong:
                raise IntegrityError(
                    f"{what}: tensor {self.layout.tensors[wrong[0]].name!r}",
                    expected=f"{self._copies[wrong[0]]} equal copies in the engine",
                    found=f"copy {copy + 1} differs from the first",
                )
        first: U64 = total[0]
        return first


class RankWrites:
    """Implements `rollout_plugin.engines.Writes` over all ranks."""

    def __init__(self, live: LiveRanks, ask: Ask, token: str) -> None:
        self._live = live
        self._ask = ask
        self._token = token

    def write(self, step: int) -> U64:
        return self._live.agreed(self._ask("write", self._token, step), "writing")

    def undo(self) -> U64:
        return self._live.agreed(self._ask("undo", self._token), "roll back")


def find_copies(layout: Layout, covers: Sequence[Sequence[Cover]]) -> tuple[list[list[int]], list[int]]:
    """To which copy each rank's pieces belong, and how many copies there are of each tensor (none of an alias).

    Ranks that hold the same part hold it for different copies. Raises ReplicaError unless each copy is whole.
    """
    levels = [[0] * len(of_rank) for of_rank in covers]
    copies = [0] * len(layout.tensors)
    every = sorted(
        ((cover[0], rank, at) for rank, of_rank in enumerate(covers) for at, cover in enumerate(of_rank)),
    )
    by_tensor = {tensor: list(group) for tensor, group in groupby(every, key=lambda item: item[0])}
    for tensor, spec in enumerate(layout.tensors):
        if not spec.lanes:
            continue
        taken: list[list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = []
        for _, rank, at in by_tensor.get(tensor, ()):
            _, starts, lengths = covers[rank][at]
            level = next((i for i, held in enumerate(taken) if not _meets([*held, (starts, lengths)])), len(taken))
            if level == len(taken):
                taken.append([])
            taken[level].append((starts, lengths))
            levels[rank][at] = level
        held = [sum(int(lengths.sum()) for _, lengths in level) for level in taken]
        if not held or min(held) != spec.lanes:
            raise ReplicaError(
                f"tensor {spec.name!r}",
                expected=f"all of its {spec.lanes} elements in the engine, in each copy",
                found=f"{min(held)} in one of {len(held)}" if held else "none",
                hint="the engine does not compute with it as it was published, and could not follow its updates",
            )
        copies[tensor] = len(held)
    return levels, copies


def _meets(parts: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> bool:
    """Whether two of these sets of intervals have an element in common."""
    starts = np.concatenate([starts for starts, _ in parts])
    ends = starts + np.concatenate([lengths for _, lengths in parts])
    order = np.argsort(starts)
    return bool((starts[order][1:] < ends[order][:-1]).any())


def _messages(patches: Sequence[Patch]) -> Iterator[list[Patch]]:
    """Patches in lists of bounded size."""
    message: list[Patch] = []
    size = 0
    for patch in patches:
        message.append(patch)
        size += patch.values.nbytes + (0 if isinstance(patch.index, slice) else patch.index.nbytes)
        if size >= _MESSAGE_BYTES:
            yield message
            message, size = [], 0
    if message:
        yield message
