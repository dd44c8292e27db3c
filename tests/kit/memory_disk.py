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
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltad.store.disk import Entry, File, Lock

SECTOR = 512
STATES_PER_POINT = 96
"""Where more combinations than these are possible at one point, they are sampled, the same ones every time."""


@dataclass(frozen=True, slots=True)
class Write:
    node: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Content of a file, or names of a directory. One that failed has made nothing durable, and never will."""

    node: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Name:
    """Names in directories stand for other nodes now, or for none. Each may survive without the others."""

    names: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    text: str


Operation = Write | Truncate | Sync | Name | Mark
Change = Write | Truncate


class _Node:
    """A file, or a directory if it has `names`. Directories have numbers below 1."""

    def __init__(self, number: int, *, directory: bool) -> None:
        self.number = number
        self.data = bytearray()
        self.names: dict[str, int] | None = {} if directory else None


class MemoryDisk:
    """Implements `deltad.store.disk.FileSystem`. `tree` maps paths to contents, and directories to None."""

    def __init__(self, tree: dict[str, bytes | None] | None = None, *, free: int = 1 << 40) -> None:
        self.free = free
        self._refused = range(0)
        self._kinds: tuple[str, ...] = ()
        self._code = 0
        self.operations: Counter[str] = Counter()
        """How many operations of each kind that change something were asked for."""
        self._nodes = {0: _Node(0, directory=True)}
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
        return _Platter(self._nodes).tree({})

    @property
    def point(self) -> int:
        """How many operations have been carried out."""
        return len(self._log)

    def power_cuts(self, since: int = 0, until: int | None = None) -> Iterator[PowerCut]:
        """What a power cut may leave after each operation from number `since` (to `until`) on. No state twice."""
        platter, marks = _Platter(MemoryDisk(self._before)._nodes), tuple[str, ...]()
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

    def sync(self, node: _Node, path: Path) -> None:
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

    def _new(self, *, directory: bool) -> _Node:
        number = len(self._nodes)
        node = _Node(-number if directory else number, directory=directory)
        self._nodes[node.number] = node
        return node

    def _find(self, path: Path) -> _Node:
        node = self._nodes[0]
        for part in path.parts[1:]:
            if node.names is None:
                raise _refusal(errno.ENOTDIR, path)
            if part not in node.names:
                raise _refusal(errno.ENOENT, path)
            node = self._nodes[node.names[part]]
        return node

    def _file(self, path: Path) -> _Node:
        node = self._find(path)
        if node.names is not None:
            raise _refusal(errno.EISDIR, path)
        return node

    def _names(self, path: Path) -> dict[str, int]:
        names = self._find(path).names
        if names is None:
            raise _refusal(errno.ENOTDIR, path)
        return names

    def _entry(self, name: str, node: _Node) -> Entry:
        return Entry(name, len(node.data), node.names is not None)


@dataclass(frozen=True, slots=True)
class PowerCut:
    """What a power cut left after `point` operations. `marks` had been reached."""

    point: int
    marks: tuple[str, ...]
    disk: MemoryDisk


class _MemoryFile:
    def __init__(self, disk: MemoryDisk, node: _Node, *, readonly: bool = False) -> None:
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
        _carry_out(write, self.node.data)
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


@dataclass(eq=False, slots=True)
class _Held:
    """Something that was done, and whether it is there after a power cut."""

    value: Change | int | None
    durable: bool = False
    doomed: bool = False
    """Its sync failed: it may be there, and nothing can make sure of it any more."""


Outcome = tuple[Change, ...] | int | None
"""What became of a change to a file, in pieces; or what a name stands for."""
Answers = dict[_Held, Outcome]


class _Platter:
    """What is durable, and what is on its way: by file the changes since `start`, by name what it stood for."""

    def __init__(self, nodes: dict[int, _Node]) -> None:
        """All that is visible, all of it durable."""
        self._start = {node.number: bytes(node.data) for node in nodes.values() if node.names is None}
        self._changes: dict[int, list[_Held]] = {}
        self._names = {
            node.number: {name: [_Held(number, durable=True)] for name, number in node.names.items()}
            for node in nodes.values()
            if node.names is not None
        }

    def apply(self, operation: Operation) -> None:
        match operation:
            case Write(node) | Truncate(node):
                self._changes.setdefault(node, []).append(_Held(operation))
            case Name(names):
                for directory, name, number in names:
                    held = self._names.setdefault(directory, {})
                    held.setdefault(name, [_Held(None, durable=True)]).append(_Held(number))
            case Sync(node, failed):
                for held in self._changes.get(node, []):
                    held.doomed = (held.doomed or failed) and not held.durable
                    held.durable = not held.doomed
                for history in self._names.get(node, {}).values():
                    for held in history:
                        held.durable = held.durable or not failed
                self._forget_what_is_past(node)

    def _forget_what_is_past(self, node: int) -> None:
        changes = self._changes.get(node, [])
        if all(held.durable for held in changes):
            self._start[node] = self._content(node, {})
            self._changes.pop(node, None)
        for name, history in self._names.get(node, {}).items():
            last = max(i for i, held in enumerate(history) if held.durable)
            self._names[node][name] = history[last:]

    def survivors(self, rng: random.Random) -> Iterator[dict[str, bytes | None]]:
        """All trees that may be left, or a fixed sample of them."""
        questions = self._questions()
        for choice in _choices([len(options) for options in questions], rng):
            answers: Answers = {}
            for options, i in zip(questions, choice, strict=True):
                answers |= options[i]
            yield self.tree(answers)

    def _questions(self) -> list[list[Answers]]:
        """What is open, each with all its answers: first lost, last kept."""
        found: list[list[Answers]] = []
        for changes in self._changes.values():
            for held in changes:
                if not held.durable:
                    answers: list[Answers] = [{held: outcome} for outcome in _outcomes(held.value)]
                    found.append(answers)
        gone: Answers = {}
        for names in self._names.values():
            for history in names.values():
                last, options = history[-1], dict.fromkeys(held.value for held in history)
                if history[0].value is None and last.value is None and len(options) > 1:
                    gone[last] = next(value for value in reversed(options) if value is not None)
                elif len(options) > 1:
                    found.append([{last: value} for value in options])
        # Names that came and went without a sync come back all at once, or not at all.
        return [*found, [dict.fromkeys(gone), gone]] if gone else found

    def tree(self, answers: Answers) -> dict[str, bytes | None]:
        """What is left with these answers; what is not answered is there as it was done last."""
        found: dict[str, bytes | None] = {}
        self._walk(0, "", answers, found)
        return found

    def _walk(self, node: int, path: str, answers: Answers, found: dict[str, bytes | None]) -> None:
        for name, history in self._names.get(node, {}).items():
            number = answers.get(history[-1], history[-1].value)
            if number is None:
                continue
            assert isinstance(number, int)
            below = f"{path}/{name}"
            if number > 0:
                found[below] = self._content(number, answers)
            else:
                found[below] = None
                self._walk(number, below, answers, found)

    def _content(self, node: int, answers: Answers) -> bytes:
        changes = self._changes.get(node, [])
        if not changes:
            return self._start.get(node, b"")
        data = bytearray(self._start.get(node, b""))
        for held in changes:
            parts = answers.get(held, (held.value,))
            assert isinstance(parts, tuple)
            for part in parts:
                assert isinstance(part, Write | Truncate)
                _carry_out(part, data)
        return bytes(data)


def _carry_out(change: Change, data: bytearray) -> None:
    if isinstance(change, Truncate):
        del data[change.size :]
    else:
        data += bytes(max(0, change.offset + len(change.data) - len(data)))
        data[change.offset : change.offset + len(change.data)] = change.data


def _outcomes(change: Change | int | None) -> list[Outcome]:
    """What may be left of a change that was not synced."""
    if not isinstance(change, Write):
        return [(), (change,)]
    end = change.offset + len(change.data)
    borders = [b for b in range(-(-change.offset // SECTOR) * SECTOR, end, SECTOR) if change.offset < b]

    def part(first: int, last: int) -> Outcome:
        data = change.data[first - change.offset : last - change.offset]
        return (Write(change.node, first, data),)

    outcomes: list[Outcome] = [(), (Write(change.node, end, b""),)]
    for border in dict.fromkeys([borders[0], borders[len(borders) // 2], borders[-1]] if borders else []):
        outcomes += [part(change.offset, border), part(border, end)]
    return [*outcomes, (change,)]


def _choices(axes: list[int], rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Combinations of answers: all, or all lost, all kept, each change of one answer of these, and some at random."""
    total = 1
    for options in axes:
        total *= options
    if total <= STATES_PER_POINT:
        yield from itertools.product(*(range(options) for options in axes))
        return
    lost, kept = [0] * len(axes), [options - 1 for options in axes]
    for near in (lost, kept):
        yield tuple(near)
        for i, options in enumerate(axes):
            for other in range(options):
                yield (*near[:i], other, *near[i + 1 :])
    for _ in range(STATES_PER_POINT // 4):
        yield tuple(rng.randrange(options) for options in axes)


def _refusal(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
