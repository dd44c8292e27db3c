"""The real file system, which refuses where it is told to: for what maps files into memory and reads them by path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from deltad.store.disk import Disk, File

T = TypeVar("T")


class RefusingDisk(Disk):
    """Lets operations that change something end with an errno, by their numbers, from 1. A refused write does half."""

    def __init__(self, code: int, refused: range) -> None:
        self._code = code
        self._refused = refused
        self.operations = 0

    def refuse(self, refused: range) -> None:
        self._refused = refused

    def may(self, what: str) -> None:
        self.operations += 1
        if self.operations in self._refused:
            raise OSError(self._code, os.strerror(self._code), what)

    def _if_it_may(self, what: str, deed: Callable[[], T]) -> T:
        self.may(what)
        return deed()

    def create(self, path: Path) -> File:
        return _RefusingFile(self, self._if_it_may("create", lambda: super(RefusingDisk, self).create(path)))

    def edit(self, path: Path) -> File:
        return _RefusingFile(self, super().edit(path))

    def open(self, path: Path) -> File:
        return _RefusingFile(self, super().open(path))

    def rename(self, old: Path, new: Path) -> None:
        self._if_it_may("rename", lambda: super(RefusingDisk, self).rename(old, new))

    def unlink(self, path: Path) -> None:
        self._if_it_may("unlink", lambda: super(RefusingDisk, self).unlink(path))

    def link(self, path: Path, name: Path) -> None:
        self._if_it_may("link", lambda: super(RefusingDisk, self).link(path, name))

    def copy(self, path: Path, copy: Path) -> None:
        self._if_it_may("copy", lambda: super(RefusingDisk, self).copy(path, copy))

    def mkdir(self, path: Path) -> None:
        self._if_it_may("mkdir", lambda: super(RefusingDisk, self).mkdir(path))

    def rmdir(self, path: Path) -> None:
        self._if_it_may("rmdir", lambda: super(RefusingDisk, self).rmdir(path))

    def sync_directory(self, path: Path) -> None:
        self._if_it_may("sync", lambda: super(RefusingDisk, self).sync_directory(path))


class _RefusingFile:
    def __init__(self, disk: RefusingDisk, file: File) -> None:
        self._disk = disk
        self._file = file
        self.read, self.size, self.close = file.read, file.size, file.close

    def write(self, data: bytes | memoryview, offset: int) -> None:
        try:
            self._disk.may("write")
        except OSError:
            self._file.write(data[: len(data) // 2], offset)
            raise
        self._file.write(data, offset)

    def allocate(self, size: int) -> None:
        self._disk.may("allocate")
        self._file.allocate(size)

    def truncate(self, size: int) -> None:
        self._disk.may("truncate")
        self._file.truncate(size)

    def sync(self) -> None:
        self._disk.may("sync")
        self._file.sync()
