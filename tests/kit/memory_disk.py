"""A file system in memory that keeps every operation, refuses where it is told to, and can lose its power.

    disk = MemoryDisk()
    store = Store.open(Path("/store"), files=disk)
    ...
    disk.mark("durable")
    for cut in disk.power_cuts():
        Store.open(Path("/store"), files=cut.disk)    # what a power cut left; cut.marks were reached before it

What survives: content up to the last `sync` of its file, names up to the last `sync_directory` of their
directory. Everything after that is lost or kept, each write and each name for itself, in any order; a write
may also be torn at any border of a sector, or leave a file of the new size without the new bytes. After a
sync of content that failed, what it should have written stays in that state for ever, whatever later syncs
say. (After one of names it does not: a file system that cannot write its own records stops.)
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltad.store.disk import Entry, File, Lock
from tests.kit.platter import Mark, Name, Node, Operation, Platter, Sync, Truncate, Write, carry_out


class MemoryDisk:
    """Implements `deltad.store.disk.FileSystem`. `tree` maps paths to contents, and directories to None."""

    def __init__(self, tree: dict[str, bytes | None] | None = None, *, free: int = 1 << 40) -> None:
        self.free = free
        self._refused = range(0)
        self._kinds: tuple[str, ...] = ()
        self._code = 0
        self.operations: Counter[str] = Counter()
        """How many operations of each kind that change something were asked for."""
        self._nodes = {0: Node(0, directory=True)}
        self._log: list[Operation] = []
        self._locks: set[int] = set()
        for path, data in sorted((tree or {}).items()):
            node = self._new(directory=data is None)
            node.data += data or b""
            self._names(Path(path).parent)[Path(path).name] = node.number
        self._before = dict(tree or {})

    # The port.

    def create(self, path: Path) -> File:
        names = self._names(path.parent)
        if path.name in names:
            raise _refusal(errno.EEXIST, path)
        self._may("create", path)
        node = self._new(directory=False)
        self._name((path, node.number))
        return _MemoryFile(self, node)

    def edit(self, path: Path) -> File:
        return _MemoryFile(self, self._file(path))

    def open(self, path: Path) -> File:
        return _MemoryFile(self, self._file(path), readonly=True)

    def rename(self, old: Path, new: Path) -> None:
        node = self._find(old)
        self._may("rename", new)
        self._name((old, None), (new, node.number))

    def unlink(self, path: Path) -> None:
        if self._find(path).names is not None:
            raise _refusal(errno.EISDIR, path)
        self._may("unlink", path)
        self._name((path, None))

    def link(self, path: Path, name: Path) -> None:
        if name.name in self._names(name.parent):
            raise _refusal(errno.EEXIST, name)
        node = self._find(path)
        self._may("link", name)
        self._name((name, node.number))

    def reflink(self, path: Path, copy: Path) -> bool:
        return False

    def copy(self, path: Path, copy: Path) -> None:
        data = bytes(self._file(path).data)
        self.create(copy).write(data, 0)

    def mkdir(self, path: Path) -> None:
        if path.name in self._names(path.parent):
            raise _refusal(errno.EEXIST, path)
        self._may("mkdir", path)
        self._name((path, self._new(directory=True).number))

    def rmdir(self, path: Path) -> None:
        if self._names(path):
            raise _refusal(errno.ENOTEMPTY, path)
        self._may("rmdir", path)
        self._name((path, None))

    def entries(self, path: Path) -> list[Entry]:
        return [self._entry(name, self._nodes[number]) for name, number in sorted(self._names(path).items())]

    def entry(self, path: Path) -> Entry | None:
        try:
            return self._entry(path.name, self._find(path))
        except FileNotFoundError:
            return None

    def sync_directory(self, path: Path) -> None:
        self._names(path)
        self.sync(self._find(path), path)

    def free_bytes(self, path: Path) -> int:
        return self.free

    def lock(self, path: Path) -> Lock:
        file = _MemoryFile(self, self._file(path)) if self.entry(path) else self.create(path)
        assert isinstance(file, _MemoryFile)
        if file.node.number in self._locks:
            raise BlockingIOError(errno.EAGAIN, "locked")
        self._locks.add(file.node.number)
        return _MemoryLock(self._locks, file.node.number)

    # Beside the port.

    def refuse(self, code: int, operations: range, kinds: tuple[str, ...] = ()) -> None:
        """Let operations that change something end with an errno, by their numbers, from 1; all `kinds`, or these."""
        self._code, self._refused, self._kinds = code, operations, kinds

    def mark(self, text: str) -> None:
        """Note that something was acknowledged: a power cut after this must not undo it."""
        self._log.append(Mark(text))

    def tree(self) -> dict[str, bytes | None]:
        """Everything that is visible now."""
        return Platter(self._nodes).tree({})

    @property
    def point(self) -> int:
        """How many operations have been carried out."""
        return len(self._log)

    def power_cuts(self, since: int = 0, until: int | None = None) -> Iterator[PowerCut]:
        """What a power cut may leave after each operation from number `since` (to `until`) on. No state twice."""
        platter, marks = Platter(MemoryDisk(self._before)._nodes), tuple[str, ...]()
        seen: set[tuple[tuple[str, ...], int]] = set()
        for point in range((self.point if until is None else until) + 1):
            if point:
                operation = self._log[point - 1]
                if isinstance(operation, Mark):
                    marks += (operation.text,)
                platter.apply(operation)
            for tree in platter.survivors(random.Random(point)) if point >= since else ():
                key = (marks, hash(frozenset(tree.items())))
                if key not in seen:
                    seen.add(key)
                    yield PowerCut(point, marks, MemoryDisk(tree))

    def record(self, operation: Operation) -> None:
        self._log.append(operation)

    def sync(self, node: Node, path: Path) -> None:
        try:
            self._may("sync", path)
        except OSError:
            self.record(Sync(node.number, failed=True))
            raise
        self.record(Sync(node.number))

    def may(self, kind: str) -> None:
        self._may(kind, Path())

    def _may(self, kind: str, path: Path) -> None:
        self.operations[kind] += 1
        if self.operations.total() in self._refused and (not self._kinds or kind in self._kinds):
            raise _refusal(self._code, path)

    def _name(self, *changes: tuple[Path, int | None]) -> None:
        named = []
        for path, number in changes:
            directory = self._find(path.parent)
            assert directory.names is not None
            if number is None:
                del directory.names[path.name]
            else:
                directory.names[path.name] = number
            named.append((directory.number, path.name, number))
        self.record(Name(tuple(named)))

    def _new(self, *, directory: bool) -> Node:
        number = len(self._nodes)
        node = Node(-number if directory else number, directory=directory)
        self._nodes[node.number] = node
        return node

    def _find(self, path: Path) -> Node:
        node = self._nodes[0]
        for part in path.parts[1:]:
            if node.names is None:
                raise _refusal(errno.ENOTDIR, path)
            if part not in node.names:
                raise _refusal(errno.ENOENT, path)
            node = self._nodes[node.names[part]]
        return node

    def _file(self, path: Path) -> Node:
        node = self._find(path)
        if node.names is not None:
            raise _refusal(errno.EISDIR, path)
        return node

    def _names(self, path: Path) -> dict[str, int]:
        names = self._find(path).names
        if names is None:
            raise _refusal(errno.ENOTDIR, path)
        return names

    def _entry(self, name: str, node: Node) -> Entry:
        return Entry(name, len(node.data), node.names is not None)


@dataclass(frozen=True, slots=True)
class PowerCut:
    """What a power cut left after `point` operations. `marks` had been reached."""

    point: int
    marks: tuple[str, ...]
    disk: MemoryDisk


class _MemoryFile:
    def __init__(self, disk: MemoryDisk, node: Node, *, readonly: bool = False) -> None:
        self._disk = disk
        self.node = node
        self._readonly = readonly

    def read(self, count: int, offset: int) -> bytes:
        return bytes(self.node.data[offset : offset + count])

    def write(self, data: bytes, offset: int) -> None:
        assert not self._readonly
        try:
            self._disk.may("write")
        except OSError:
            self._write(bytes(data[: len(data) // 2]), offset)
            raise
        self._write(bytes(data), offset)

    def _write(self, data: bytes, offset: int) -> None:
        write = Write(self.node.number, offset, data)
        carry_out(write, self.node.data)
        self._disk.record(write)

    def allocate(self, size: int) -> None:
        assert not self._readonly
        self._disk.may("allocate")
        self._write(b"", size)

    def truncate(self, size: int) -> None:
        assert not self._readonly
        self._disk.may("truncate")
        del self.node.data[size:]
        self._disk.record(Truncate(self.node.number, size))

    def sync(self) -> None:
        self._disk.sync(self.node, Path())

    def size(self) -> int:
        return len(self.node.data)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _MemoryLock:
    locks: set[int]
    node: int

    def close(self) -> None:
        self.locks.discard(self.node)


def _refusal(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
