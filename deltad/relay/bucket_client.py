"""One bucket with twins in it, asked the questions that a daemon would be asked.

A run's pointer is its notice board: it is looked at again every `poll` seconds while somebody waits, once for all who
do, and costs a request without a body while it is unchanged. It may not store or decide anything. Owns one invariant:
nothing of a pointer is used before the whole of it was parsed, and no object comes longer than was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from deltad.client.messages import RegionReport
from deltad.delta import FORMAT
from deltad.delta.coding import CODERS
from deltad.delta.encoding import sha256
from deltad.errors import DeltadError, NotFoundError, PeerError, UnavailableError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.hints import Hint
from deltad.protocol.pull_plan import Wanted
from deltad.protocol.target import Statement
from deltad.relay.goodput import Goodput
from deltad.relay.source import Count, Pace, Sink
from deltad.relay.wire import LISTED_VERSIONS, Hello
from deltad.store.bucket.index import (
    OWNER,
    RUNS,
    Entry,
    Index,
    hints_to_newest,
    object_key,
    parse_index,
    parse_owner,
    pointer_key,
    run_of,
)
from deltad.store.bucket.port import Bucket, Stamp
from deltad.types import RunId, Version

T = TypeVar("T")


@dataclass(slots=True)
class _Board:
    """What a run's pointer said when it was last looked at."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    looked_at: float = float("-inf")
    index: Index | None = None
    stamp: Stamp | None = None


class BucketClient:
    """Implements `deltad.relay.source.Source`. An async context manager; all methods belong to its event loop.

    `count` is told of every body byte that comes in. `poll` is how long an unchanged pointer is believed, in seconds.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        count: Count,
        poll: float,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.url = bucket.url
        self.reachable = False
        self.goodput = Goodput()
        self._bucket = bucket
        self._count = count
        self._poll = poll
        self._limits = limits
        self._boards: dict[RunId, _Board] = {}

    async def __aenter__(self) -> BucketClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._boards.clear()

    async def hello(self) -> Hello:
        """Who writes to the bucket, if anybody does yet. A bucket takes every format, so ours is named."""
        coders = tuple(sorted(CODERS))
        try:
            data, _ = await self._told(self._read(OWNER, self._limits.json_body_bytes))
        except NotFoundError:
            return Hello("", "", (FORMAT,), coders)
        owner = self._parse(lambda: parse_owner(data))
        return Hello(owner.daemon, owner.boot, (FORMAT,), coders)

    async def runs(self) -> tuple[RunId, ...]:
        async def listed() -> tuple[RunId, ...]:
            found: list[RunId] = []
            async for key in self._bucket.keys(RUNS):
                if (run := run_of(key)) is not None and len(found) < self._limits.runs:
                    found.append(run)
            return tuple(sorted(found))

        return await self._told(listed())

    async def latest(self, run: RunId, *, after: Version | None, wait: float) -> bytes | None:
        def newer(index: Index) -> Entry | None:
            return index.entries[-1] if after is None or index.newest > after else None

        entry = await self._wait(run, newer, wait)
        return None if entry is None else await self._record(entry, lambda count: None)

    async def target(self, run: RunId, *, after: int, wait: float) -> tuple[Statement, ...]:
        def newer(index: Index) -> tuple[Statement, ...] | None:
            return tuple(said for said in index.targets if said.sequence > after) or None

        return await self._wait(run, newer, wait) or ()

    async def record(self, run: RunId, version: Version, *, count: Count) -> bytes:
        entry = (await self._look(run, self._poll)).entry(version)
        if entry is None:
            raise NotFoundError(f"{self.url}: {version} of {run}", found="the bucket does not have it")
        return await self._record(entry, count)

    async def versions(self, run: RunId, *, after: Version | None) -> tuple[Version, ...]:
        index = await self._look(run, self._poll)
        found = [entry.version for entry in index.entries if after is None or entry.version > after]
        return tuple(found[-LISTED_VERSIONS:])

    async def edges(self, run: RunId, *, after: Version | None) -> tuple[Hint, ...]:
        index = await self._look(run, self._poll)
        return await asyncio.to_thread(hints_to_newest, index, after)

    async def fetch(self, wanted: Wanted, into: Sink, *, count: Count, pace: Pace | None = None) -> None:
        await self._told(self._fetch(object_key(wanted.digest), wanted.size, into, count, pace))

    async def report(self, report: RegionReport) -> None:
        """Nobody at a bucket can be told."""

    async def _wait(self, run: RunId, answer: Callable[[Index], T | None], wait: float) -> T | None:
        """The first answer that a run's pointer gives within `wait` seconds; looked at afresh if that is 0."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait
        while True:
            found = answer(await self._look(run, self._poll if wait else 0.0))
            left = ends - loop.time()
            if found is not None or left <= 0:
                return found
            due = self._boards[run].looked_at + self._poll - loop.time()
            await asyncio.sleep(min(max(due, 0.0), left))

    async def _look(self, run: RunId, most_age: float) -> Index:
        """What the pointer says, or said at most so many seconds ago. Raises NotFoundError where there is none."""
        board = self._boards.setdefault(run, _Board())
        asked = asyncio.get_running_loop().time()
        async with board.lock:
            if board.looked_at < asked and asked - board.looked_at >= most_age:
                await self._told(self._renew(run, board))
        if board.index is None:
            raise NotFoundError(f"{self.url}: {run}", found="the bucket does not have it")
        return board.index

    async def _renew(self, run: RunId, board: _Board) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await self._bucket.read(pointer_key(run), self._limits.json_body_bytes, unlike=board.stamp)
        except NotFoundError:
            board.index = board.stamp = None
        else:
            if found is not None:
                data, stamp = found
                self._count(len(data))
                index = self._parse(lambda: parse_index(data, run, limits=self._limits))
                board.index, board.stamp = index, stamp
        board.looked_at = loop.time()

    async def _record(self, entry: Entry, count: Count) -> bytes:
        data = bytearray()
        await self._told(self._fetch(object_key(entry.record), entry.size, data, count))
        if sha256(bytes(data)) != entry.record:
            raise PeerError(
                f"{self.url}: record of {entry.version}", expected="bytes with the SHA-256 that the pointer names"
            )
        return bytes(data)

    async def _fetch(self, key: str, size: int, into: Sink, count: Count, pace: Pace | None = None) -> None:
        loop = asyncio.get_running_loop()
        begun = False
        if len(into) >= size:
            into.clear()
        try:
            async for piece in self._bucket.stream(key, len(into), size):
                self._count(len(piece))
                count(len(piece))
                if begun:
                    self.goodput.arrived(len(piece), loop.time())
                else:
                    self.goodput.begin(loop.time())
                    begun = True
                into.extend(piece)
                if pace is not None:
                    await pace(len(piece))
        finally:
            if begun:
                self.goodput.end(loop.time())

    async def _read(self, key: str, most: int) -> tuple[bytes, Stamp]:
        found = await self._bucket.read(key, most)
        assert found is not None, "no stamp was given that it could be like"
        return found

    async def _told(self, work: Awaitable[T]) -> T:
        """Notes whether anybody was there to be talked to."""
        try:
            found = await work
        except UnavailableError:
            self.reachable = False
            raise
        except DeltadError:
            self.reachable = True
            raise
        self.reachable = True
        return found

    def _parse(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except DeltadError as error:
            raise PeerError(self.url, found=str(error)) from None
