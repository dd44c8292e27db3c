"""How fast bytes may move: caps over peers, runs and everything, and whose turn it is. Pure.

Takes the time (seconds on a monotonic clock) and the minute of the day as arguments. Owns three invariants: over any
time no more bytes pass a cap than its rate allows, but for a burst and the last block; runs that wait at the same
caps get equal shares, however many blocks each has waiting; and whoever no cap covers never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

BURST_SECONDS = 0.1
"""For how long at its rate a cap that was idle lets bytes pass at once."""
LAG_BYTES = 1 << 20
"""How far a run that could not go on falls behind the others and still catches up."""
DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Cap:
    """At most `rate` bytes a second of `run` from or to `peer`, each of them all where it is empty.

    It holds from minute `since` of the day until minute `until`, over midnight too, and always where both are equal.
    """

    rate: int
    run: str = ""
    peer: str = ""
    since: int = 0
    until: int = 0

    def covers(self, run: str, peer: str) -> bool:
        return self.run in ("", run) and self.peer in ("", peer)

    def holds(self, minute: int) -> bool:
        if self.since <= self.until:
            return self.since == self.until or self.since <= minute < self.until
        return minute >= self.since or minute < self.until


@dataclass(slots=True)
class _Level:
    """What may pass a cap at once; below zero while a block that was larger is being made up for."""

    cap: Cap
    bytes: float
    at: float

    def fill(self, now: float) -> None:
        passed, self.at = max(now - self.at, 0.0), now
        self.bytes = min(self.cap.rate * BURST_SECONDS, self.bytes + self.cap.rate * passed)

    def opens_at(self) -> float:
        """When something may pass."""
        return self.at if self.bytes > 0 else self.at + (1 - self.bytes) / self.cap.rate


@dataclass(slots=True, eq=False)
class Block:
    """Bytes that wait to go on."""

    run: str
    bytes: int
    levels: tuple[_Level, ...]
    passed: bool = False


@dataclass(slots=True)
class _Line:
    """The blocks of one run that wait, and the bytes of it that have passed, as far as turns go by them."""

    passed: int = 0
    blocks: deque[Block] = field(default_factory=deque)


class Pacing:
    """All caps of a daemon, and everybody who waits. Methods belong to one thread."""

    def __init__(self, caps: Sequence[Cap], now: float) -> None:
        self._levels = [_Level(cap, cap.rate * BURST_SECONDS, now) for cap in caps]
        self._lines: dict[str, _Line] = {}
        self._front = 0
        """Where the run that went on last stands: a new one begins beside it."""

    def ask(self, run: str, peer: str, count: int) -> Block | None:
        """`count` bytes of a run, from or to a peer, would go on; None where no cap will ever concern them."""
        levels = tuple(level for level in self._levels if level.cap.covers(run, peer))
        if not levels:
            return None
        block = Block(run, count, levels)
        self._lines.setdefault(run, _Line(self._front)).blocks.append(block)
        return block

    def withdraw(self, block: Block) -> None:
        """Nobody waits for it any more."""
        line = self._lines.get(block.run)
        if line is not None and not block.passed:
            line.blocks.remove(block)

    def let_pass(self, now: float, minute: int) -> tuple[list[Block], float | None]:
        """The blocks that go on now, in turn; and when to ask again, None if nobody waits."""
        for level in self._levels:
            level.fill(now)
        passed: list[Block] = []
        while (block := self._next(minute)) is not None:
            line = self._lines[block.run]
            line.blocks.remove(block)
            line.passed += block.bytes
            self._front = line.passed
            for level in _holding(block, minute):
                level.bytes -= block.bytes
            for other in self._lines.values():
                other.passed = max(other.passed, line.passed - LAG_BYTES)
            block.passed = True
            passed.append(block)
        waiting = (block for line in self._lines.values() for block in line.blocks)
        opens = (max(level.opens_at() for level in _holding(block, minute)) for block in waiting)
        return passed, min(opens, default=None)

    def _next(self, minute: int) -> Block | None:
        """The block whose turn it is: of the run that has had least, the first that all its caps let pass."""
        for line in sorted((line for line in self._lines.values() if line.blocks), key=lambda line: line.passed):
            for block in line.blocks:
                if all(level.bytes > 0 for level in _holding(block, minute)):
                    return block
        return None


def _holding(block: Block, minute: int) -> Iterator[_Level]:
    return (level for level in block.levels if level.cap.holds(minute))
