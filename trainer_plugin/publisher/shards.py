"""What a rank holds, without torch: shards and where their lanes are read; and the copy of what was published.

Owns one invariant: once the fence has passed, no live lane is read any more.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltad.client.handover import ShardSpec
from deltad.delta.backend import UNSIGNED, Lanes
from deltad.types import DTYPES

_PIECE = 1 << 22
"""Lanes that are copied at a time."""


@dataclass(frozen=True, slots=True)
class Held:
    """A shard of a live tensor: what and where it is, and how its lanes are read.

    `read(start, count)` gives lanes from `start` on, row-major within the shard, as contiguous unsigned integers: a
    view where the bits are published as they are, else a copy in the precision that is published.
    """

    spec: ShardSpec
    read: Callable[[int, int], Lanes]

    @property
    def lanes(self) -> int:
        return int(np.prod(self.spec.extent, dtype=np.int64))

    @property
    def unsigned(self) -> type[np.unsignedinteger]:
        return UNSIGNED[DTYPES[self.spec.dtype].lane_bytes]


def held_array(name: str, dtype: str, array: Lanes, shape: Sequence[int] = (), offset: Sequence[int] = ()) -> Held:
    """A shard that is an array of unsigned integers. Without `shape`, it is the whole tensor."""
    flat = array.reshape(-1)
    extent = array.shape
    spec = ShardSpec(name, dtype, tuple(shape) or extent, tuple(offset) or (0,) * len(extent), extent)
    return Held(spec, lambda start, count: flat[start : start + count])


class GivenUpError(Exception):
    """The step is given up while its weights are read."""


class LiveShards:
    """The shards of one step while they are read. `sources` implement `deltad.delta.shards.Source`."""

    def __init__(self, shards: Sequence[Held]) -> None:
        self._shards = shards
        self._copies: list[Lanes] | None = None
        self._changed = threading.Condition()
        self._readers = 0
        self._copying = False
        self._given_up = False
        self.sources = [_LiveShard(self, i) for i in range(len(shards))]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Entered while a frame's lanes are looked at. Raises GivenUpError."""
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
            if self._given_up:
                raise GivenUpError
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def copy(self) -> None:
        """Copy all shards, so that the live ones may change. What is being read is waited for."""
        with self._changed:
            self._copying = True
            self._changed.wait_for(lambda: not self._readers)
        try:
            self._copies = [np.array(shard.read(0, shard.lanes)) for shard in self._shards]
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()

    def copy_to(self, room: Sequence[Lanes]) -> None:
        """Copy all shards there, a piece at a time. Raises GivenUpError."""
        for source, target in zip(self.sources, room, strict=True):
            for start in range(0, target.size, _PIECE):
                with self.reading():
                    target[start : start + _PIECE] = source.lanes(start, min(_PIECE, target.size - start))

    def give_up(self) -> None:
        """Nothing is read any more on return."""
        with self._changed:
            self._given_up = True
            self._changed.wait_for(lambda: not self._readers)

    def lanes(self, shard: int, start: int, count: int) -> Lanes:
        """Lanes of one shard; see `Held.read`."""
        if self._copies is not None:
            return self._copies[shard][start : start + count]
        return self._shards[shard].read(start, count)


@dataclass(frozen=True, slots=True)
class _LiveShard:
    live: LiveShards
    shard: int

    def lanes(self, start: int, count: int) -> Lanes:
        return self.live.lanes(self.shard, start, count)


def room_for(shards: Sequence[Held], directory: Path | None = None) -> list[Lanes]:
    """Arrays for the lanes of each shard: in memory, or in a nameless file of `directory` that is mapped.

    Raises OSError where there is no room.
    """
    if directory is None:
        return [np.empty(shard.lanes, shard.unsigned) for shard in shards]
    import os

    sizes = [shard.lanes * np.dtype(shard.unsigned).itemsize for shard in shards]
    starts = np.cumsum([0, *((size + 63) // 64 * 64 for size in sizes)])
    if not starts[-1]:
        return [np.empty(0, shard.unsigned) for shard in shards]
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, int(starts[-1]))
        room = mmap.mmap(descriptor, int(starts[-1]))
    finally:
        os.close(descriptor)
    return [
        np.frombuffer(room, shard.unsigned, shard.lanes, int(start))
        for shard, start in zip(shards, starts, strict=False)
    ]
