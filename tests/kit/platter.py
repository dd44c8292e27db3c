"""What a disk has for good, what is on its way there, and all that a power cut may leave of that. Pure.

Content is for good up to the last sync of its file, names up to the last sync of their directory.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

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


class Node:
    """A file, or a directory if it has `names`. Directories have numbers below 1."""

    def __init__(self, number: int, *, directory: bool) -> None:
        self.number = number
        self.data = bytearray()
        self.names: dict[str, int] | None = {} if directory else None


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


class Platter:
    """What is durable, and what is on its way: by file the changes since `start`, by name what it stood for."""

    def __init__(self, nodes: dict[int, Node]) -> None:
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
                carry_out(part, data)
        return bytes(data)


def carry_out(change: Change, data: bytearray) -> None:
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
