"""Whom a puller asks: another daemon, or a bucket that one keeps a twin in.

Both answer the same questions with the same errors: UnavailableError when nobody can be reached or nothing moves on,
DeniedError for a refusal, NotFoundError for what is lacking, PeerError for what the protocol does not allow.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

from deltad.client.messages import RegionReport
from deltad.protocol.hints import Hint
from deltad.protocol.pull_plan import Wanted
from deltad.protocol.target import Statement
from deltad.relay.goodput import Goodput
from deltad.relay.wire import Hello
from deltad.types import RunId, Version

Count = Callable[[int], None]
Pace = Callable[[int], Awaitable[None]]
"""Told of bytes that came; returns when more may be read."""


class Sink(Protocol):
    """What a body is read into, such as a bytearray."""

    def __len__(self) -> int: ...

    def extend(self, piece: bytes, /) -> None: ...

    def clear(self) -> None: ...


class Source(Protocol):
    """See `deltad.relay.client.RelayClient`, which is the measure of every method."""

    url: str
    reachable: bool
    goodput: Goodput

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def hello(self) -> Hello: ...

    async def runs(self) -> tuple[RunId, ...]: ...

    async def latest(self, run: RunId, *, after: Version | None, wait: float) -> bytes | None: ...

    async def target(self, run: RunId, *, after: int, wait: float) -> tuple[Statement, ...]: ...

    async def record(self, run: RunId, version: Version, *, count: Count) -> bytes: ...

    async def versions(self, run: RunId, *, after: Version | None) -> tuple[Version, ...]: ...

    async def edges(self, run: RunId, *, after: Version | None) -> tuple[Hint, ...]: ...

    async def fetch(self, wanted: Wanted, into: Sink, *, count: Count, pace: Pace | None = None) -> None: ...

    async def report(self, report: RegionReport) -> None: ...
