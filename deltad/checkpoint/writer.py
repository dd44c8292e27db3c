"""Writing a checkpoint directory that safetensors and transformers load.

Files carry the suffix `.incomplete` until `finish` has synced them; the index, or the only weight file,
gets its name last. Owns one invariant: a directory that loads is whole and durable. Killed before the
last rename, it leaves `.incomplete` files and nothing that loads.

Space is allocated before anything is mapped: a full disk must be an error here, not a SIGBUS later.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from deltad.checkpoint.files import INDEX_NAME, SINGLE_NAME
from deltad.checkpoint.safetensors import format_header
from deltad.delta.backend import UNSIGNED, Lanes
from deltad.delta.encoding import sha256
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import IntegrityError, UsageError
from deltad.store.disk import DISK, File, FileSystem, make_directory, read_file, store_error

SHARD_BYTES = 5_000_000_000
_SUFFIX = ".incomplete"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes are: the number of its shard, and the offset there."""

    shard: int
    offset: int


class CheckpointWriter:
    """Writes a layout's weights and files into a new or empty `directory`. Also a codec target.

    Tensors read as zeros until they are written. Aliases are not written: what loads the result ties
    them again by its config. Shards are cut at whole tensors in layout order, each of at most
    `shard_bytes` unless one tensor is larger. As a context manager, it removes what it made when it is
    left without `finish`.

    With `like`, a directory that this class wrote, weight files begin as those there, if they have the same
    tensors: they share its blocks where the file system can do that, and are copied where it cannot.

    Raises UsageError if the directory holds something, StoreFullError or StoreError if it cannot be
    written.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        *,
        shard_bytes: int = SHARD_BYTES,
        files: FileSystem = DISK,
        like: Path | None = None,
    ) -> None:
        self.directory = directory
        self.layout = layout
        self._made: list[str] = []
        self._maps: list[mmap.mmap] = []
        self._weight_files: list[File] = []
        self._places: dict[int, _Place] = {}
        self._finished = False
        self._files = files
        self._like = like
        self.taken: set[int] = set()
        """The tensors that already have the weights that they have in `like`."""
        make_directory(directory, files)
        with self._refusals():
            if files.entries(directory):
                raise UsageError(f"{directory}", expected="a new or an empty directory", found="one with files")
        self._shards = _cut(layout, shard_bytes)
        self._names = _names(len(self._shards))
        try:
            for number, tensors in enumerate(self._shards):
                self._create(number, tensors)
        except BaseException:
            self.close()
            raise

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        """A writable view of `count` lanes of tensor number `tensor` from canonical position `start`."""
        spec = self.layout.tensors[tensor]
        if not self._maps or not 0 <= start <= start + count <= spec.lanes:
            raise ValueError(f"lanes {start} to {start + count} of {spec.name!r}, which has {spec.lanes}, or is closed")
        width = spec.type.lane_bytes
        if not count:
            return np.empty(0, UNSIGNED[width])
        place = self._places[tensor]
        return np.frombuffer(self._maps[place.shard], UNSIGNED[width], count, place.offset + start * width)

    def put(self, tensor: int, start: int, lanes: Lanes) -> None:
        """Write lanes from canonical position `start` on, as a write to the file. Several threads may.

        For what is written once, this takes less time than writing to `lanes`, which faults page by page.
        """
        spec = self.layout.tensors[tensor]
        if not self._maps or not 0 <= start <= start + lanes.size <= spec.lanes:
            raise ValueError(
                f"lanes {start} to {start + lanes.size} of {spec.name!r}, which has {spec.lanes}, or is closed"
            )
        if lanes.size:
            place = self._places[tensor]
            data = np.ascontiguousarray(lanes).view(np.uint8).data
            with self._refusals(len(data)):
                self._weight_files[place.shard].write(data, place.offset + start * spec.type.lane_bytes)

    def release(self, tensor: int, start: int, count: int) -> None:
        """Let go of the memory behind these lanes; what was written there stays written."""
        if count and self._maps:
            place, width = self._places[tensor], self.layout.tensors[tensor].type.lane_bytes
            first = (place.offset + start * width) // mmap.PAGESIZE * mmap.PAGESIZE
            last = place.offset + (start + count) * width
            self._maps[place.shard].madvise(mmap.MADV_DONTNEED, first, last - first)

    def write_file(self, name: str, data: bytes) -> None:
        """Write the non-weight file `name` of the layout. Raises IntegrityError if `data` is another one's."""
        spec = next((file for file in self.layout.files if file.name == name), None)
        if spec is None:
            raise UsageError(f"{self.directory}", expected="a file of its layout", found=repr(name[:120]))
        if sha256(data) != spec.digest:
            raise IntegrityError(f"{self.directory / name}", expected=f"SHA-256 {spec.digest.hex()}", found="another")
        with self._refusals(len(data)):
            self._write(name, data)

    def finish(self) -> None:
        """Make everything durable and give it its names. Nothing can be written afterwards."""
        if self._finished or not self._maps:
            raise ValueError(f"{self.directory} is finished or closed")
        # In this order: files that nothing depends on, then weights, then what makes them a checkpoint.
        ordered = [name for name in self._made if name not in self._names] + self._names
        with self._refusals(self.layout.weight_bytes):
            if len(self._names) > 1:
                self._write(INDEX_NAME, self._index())
                ordered.append(INDEX_NAME)
            for name in ordered:
                if name not in self._names:
                    self._sync(self._path(name))
            for file in self._weight_files:
                file.sync()  # on Linux that is what was mapped, too
            for name in ordered:
                if name == ordered[-1]:
                    self._files.sync_directory(self.directory)
                self._files.rename(self._path(name), self.directory / name)
            self._files.sync_directory(self.directory)
        self._finished = True
        self._let_go()

    def close(self) -> None:
        """Remove what was written, unless it is finished. Does no harm twice."""
        self._let_go()
        if not self._finished:
            for name in self._made:
                with suppress(OSError):
                    self._files.unlink(self._path(name))
            self._made.clear()

    def _let_go(self) -> None:
        self._maps.clear()
        for file in self._weight_files:
            file.close()
        self._weight_files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _create(self, number: int, tensors: Sequence[int]) -> None:
        specs = [self.layout.tensors[i] for i in tensors]
        header = format_header(specs)
        offset = len(header)
        for i, spec in zip(tensors, specs, strict=True):
            self._places[i] = _Place(number, offset)
            offset += spec.bytes
        name = self._names[number]
        with self._refusals(offset):
            if self._take(name, header, offset):
                self.taken.update(tensors)
            else:
                self._write(name, header, size=offset)
            self._weight_files.append(self._files.edit(self._path(name)))
            with self._path(name).open("r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), offset))

    def _take(self, name: str, header: bytes, size: int) -> bool:
        """Begin a weight file as the one in `like`. False if that one has other tensors."""
        if self._like is None:
            return False
        source, target = self._like / name, self._path(name)
        found = self._files.entry(source)
        if found is None or found.size != size or read_file(source, self._files, len(header)) != header:
            return False
        self._made.append(name)
        if not self._files.reflink(source, target):
            self._files.copy(source, target)
        return True

    def _write(self, name: str, data: bytes, *, size: int = 0) -> None:
        """Create `name`, with room for `size` bytes if that is more than `data` needs."""
        file = self._files.create(self._path(name))
        try:
            self._made.append(name)
            if size:
                file.allocate(size)
            file.write(data, 0)
        finally:
            file.close()

    def _sync(self, path: Path) -> None:
        file = self._files.open(path)
        try:
            file.sync()
        finally:
            file.close()

    def _path(self, name: str) -> Path:
        return self.directory / (name + _SUFFIX)

    def _index(self) -> bytes:
        weight_map = {
            self.layout.tensors[i].name: self._names[number]
            for number, tensors in enumerate(self._shards)
            for i in tensors
        }
        index = {"metadata": {"total_size": self.layout.weight_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        return json.dumps(index, ensure_ascii=False, indent=2).encode() + b"\n"

    @contextmanager
    def _refusals(self, size: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise store_error(error, self.directory, size) from error


def _cut(layout: Layout, shard_bytes: int) -> list[list[int]]:
    """Tensor numbers by shard. Within a shard, wide lanes come first, so that every tensor is aligned."""
    shards: list[list[int]] = [[]]
    room = shard_bytes
    for i, spec in enumerate(layout.tensors):
        if spec.alias_of:
            continue
        if spec.bytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(i)
        room -= spec.bytes

    def widest_first(i: int) -> int:
        spec: TensorSpec = layout.tensors[i]
        return -spec.type.lane_bytes

    return [sorted(shard, key=widest_first) for shard in shards]


def _names(shards: int) -> list[str]:
    if shards == 1:
        return [SINGLE_NAME]
    return [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
