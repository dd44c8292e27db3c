"""What ranks hand over, over HTTP: reads the blocks of a request and asks the daemon.

Beside `server`, and under its invariants. A body is of any length, so each block is bounded, and so is the time in
which the next has to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import msgspec
from aiohttp import StreamReader, web

from deltad.client.handover import BLOCK, CHUNK, HEAD, TAIL, HandedOver, HandOver, HandOverReply, JoinReply, JoinRequest
from deltad.errors import LimitError, UsageError
from deltad.limits import Limits
from deltad.local.operations import Operations
from deltad.types import RunId, parse_daemon_name, parse_version

_Body = TypeVar("_Body", bound=msgspec.Struct)

BLOCK_SECONDS = 120.0
"""How long a rank may work on its next chunk."""
_MOST_NUMBER = 10**15 - 1
_IDENTITY_CHARACTERS = 256


class HandOverRoutes:
    """The two routes of a publisher."""

    def __init__(self, operations: Operations, limits: Limits, *, progress_seconds: float) -> None:
        self._operations = operations
        self._limits = limits
        self._progress = progress_seconds

    async def join(self, run: RunId, request: web.Request) -> JoinReply:
        """POST /v1/runs/{run}/ranks: a `JoinRequest` in MessagePack; answers once all ranks have joined."""
        blocks = _Blocks(request.content, self._limits.join_bytes, self._progress)
        body = _decode(await blocks.rest(), JoinRequest)
        parse_daemon_name(body.session)
        return await self._operations.join(run, body)

    async def hand_over(self, run: RunId, request: web.Request) -> HandOverReply:
        """POST /v1/runs/{run}/steps: a rank's share of a step in blocks."""
        blocks = _Blocks(request.content, self._limits.chunk_bytes, BLOCK_SECONDS)
        kind, data = await blocks.next()
        if kind != HEAD:
            raise UsageError("a step", expected="its head as the first block", found=f"a block of kind {kind}")
        head = _decode(data, HandOver)
        if not 0 <= head.number <= _MOST_NUMBER:
            raise UsageError("number", expected=f"0 to {_MOST_NUMBER}", found=str(head.number))
        if head.epoch < 0 or len(head.identity) > _IDENTITY_CHARACTERS:
            raise UsageError("a step", expected=f"an epoch of 0 or more, an identity of {_IDENTITY_CHARACTERS} at most")
        if head.resume_from:
            parse_version(head.resume_from)
        ends: list[bytes] = []

        async def chunks() -> AsyncIterator[bytes]:
            while True:
                kind, data = await blocks.next()
                if kind == TAIL:
                    ends.append(data)
                    return
                if kind != CHUNK or not data:
                    raise UsageError("a step", expected="chunks and then its end", found=f"a block of kind {kind}")
                yield data

        async def tail() -> HandedOver:
            return _decode(ends[0], HandedOver)

        return await self._operations.hand_over(run, head, chunks(), tail)


class _Blocks:
    """The blocks of a body. Raises UsageError for one that is cut off or stalls, LimitError for a large one."""

    def __init__(self, content: StreamReader, limit: int, seconds: float) -> None:
        self._content = content
        self._limit = limit
        self._seconds = seconds

    async def next(self) -> tuple[int, bytes]:
        kind, size = BLOCK.unpack(await self._exactly(BLOCK.size))
        if size > self._limit:
            raise LimitError("block", expected=f"at most {self._limit} bytes", found=str(size))
        return kind, await self._exactly(size)

    async def rest(self) -> bytes:
        """All that is left, as one piece."""
        parts: list[bytes] = []
        size = 0
        while part := await self._within(self._content.readany()):
            size += len(part)
            if size > self._limit:
                raise LimitError("body", expected=f"at most {self._limit} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self._within(self._content.readexactly(size))
        except asyncio.IncompleteReadError as error:
            raise UsageError(
                "a step", expected="its end", found=f"a body cut off {size - len(error.partial)} bytes short"
            ) from None

    async def _within(self, reading: Awaitable[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._seconds):
                return await reading
        except TimeoutError:
            raise UsageError("a body", expected=f"its next bytes within {self._seconds:g} s", found="none") from None


def _decode(data: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("body", expected=f"a {kind.__name__} in MessagePack", found=str(error)) from None
