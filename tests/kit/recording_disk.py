"""The real file system, with every operation kept, so that the power can be cut afterwards.

For what maps files into memory and reads checkpoints by path. What was written through a mapping is noted when
its file is synced; until then a power cut finds the zeros that were allocated.

    disk = RecordingDisk(store_path)
    ... Store.open(store_path, files=disk) ...
    for cut in disk.power_cuts():
        place(cut, store_path, elsewhere)          # what was left, as real files
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deltad.store.disk import Disk, File
from tests.kit.memory_disk import MemoryDisk, PowerCut


class RecordingDisk(Disk):
    """Does everything twice: for real, and on a disk in memory that began as a copy of the directory `home`."""

    def __init__(self, home: Path) -> None:
        tree: dict[str, bytes | None] = {str(path): None for path in list(home.parents)[:-1]}
        tree[str(home)] = None
        for path in sorted(home.rglob("*")):
            tree[str(path)] = None if path.is_dir() else path.read_bytes()
        self.memory = MemoryDisk(tree)

    def create(self, path: Path) -> File:
        return _BothFiles(super().create(path), self.memory.create(path))

    def edit(self, path: Path) -> File:
        return _BothFiles(super().edit(path), self.memory.edit(path))

    def open(self, path: Path) -> File:
        return _BothFiles(super().open(path), self.memory.edit(path))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.memory.rename(old, new)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.memory.unlink(path)

    def link(self, path: Path, name: Path) -> None:
        super().link(path, name)
        self._appears(name)

    def reflink(self, path: Path, copy: Path) -> bool:
        shared = super().reflink(path, copy)
        if shared:
            self._appears(copy)
        return shared

    def copy(self, path: Path, copy: Path) -> None:
        super().copy(path, copy)
        self._appears(copy)

    def _appears(self, path: Path) -> None:
        # What it has the content of may lie outside of `home`; that it is durable is nothing to build on.
        self.memory.create(path).write(path.read_bytes(), 0)

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.memory.mkdir(path)

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self.memory.rmdir(path)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.memory.sync_directory(path)

    def power_cuts(self, since: int = 0) -> Iterator[PowerCut]:
        return self.memory.power_cuts(since)


class _BothFiles:
    def __init__(self, real: File, memory: File) -> None:
        self._real = real
        self._memory = memory

    def read(self, count: int, offset: int) -> bytes:
        return self._real.read(count, offset)

    def write(self, data: bytes, offset: int) -> None:
        self._real.write(data, offset)
        self._memory.write(data, offset)

    def allocate(self, size: int) -> None:
        self._real.allocate(size)
        self._memory.allocate(size)

    def truncate(self, size: int) -> None:
        self._real.truncate(size)
        self._memory.truncate(size)

    def sync(self) -> None:
        self._real.sync()
        content = self._real.read(self._real.size(), 0)
        if content != self._memory.read(self._memory.size(), 0):
            self._memory.write(content, 0)
        self._memory.sync()

    def size(self) -> int:
        return self._real.size()

    def close(self) -> None:
        self._real.close()
        self._memory.close()


def place(cut: PowerCut, home: Path, elsewhere: Path) -> None:
    """Put what a power cut left of the directory `home` under another name, as real files."""
    for name, data in sorted(cut.disk.tree().items()):
        path = Path(name)
        if path.is_relative_to(home):
            target = elsewhere / path.relative_to(home)
            if data is None:
                target.mkdir(parents=True)
            else:
                target.write_bytes(data)
