"""Handing on what this host's ranks hand over, where another host's daemon makes the versions of a run.

Ranks talk to the daemon of their own host. One daemon of a world leads: it alone adds the shares up. The others pass
requests and answers on as they come, so that a rank cannot tell the difference. Nothing is kept here.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import aiohttp
import msgspec

from deltad.client.client import rebuild_error
from deltad.client.handover import (
    CHUNK,
    HEAD,
    TAIL,
    HandedOver,
    HandOver,
    HandOverReply,
    JoinReply,
    JoinRequest,
    block,
)
from deltad.client.messages import ErrorReply
from deltad.config import LeadConfig
from deltad.errors import PeerError, UnavailableError
from deltad.limits import Limits
from deltad.relay.client import ClientTls
from deltad.types import RunId

_Reply = TypeVar("_Reply", bound=msgspec.Struct)

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 600.0
"""How long the lead may wait for the other ranks and its own disk."""
_REPLY_BYTES = 128 << 20


class Lead:
    """The daemon that makes the versions of one run. Methods belong to the event loop's thread."""

    def __init__(self, config: LeadConfig, limits: Limits) -> None:
        """Raises ConfigError for files of TLS that cannot be used."""
        self._config = config
        self._limits = limits
        self.tls = ClientTls(config.tls, config.name)

    async def join(self, run: RunId, request: JoinRequest) -> JoinReply:
        """See `HandOvers.join`."""
        return await self._post(f"/v1/runs/{run}/ranks", JoinReply, msgspec.msgpack.encode(request))

    async def hand_over(
        self, run: RunId, head: HandOver, chunks: AsyncIterator[bytes], tail: Callable[[], Awaitable[HandedOver]]
    ) -> HandOverReply:
        """See `HandOvers.hand_over`."""

        async def body() -> AsyncIterator[bytes]:
            yield block(HEAD, msgspec.msgpack.encode(head))
            async for chunk in chunks:
                yield block(CHUNK, chunk)
            yield block(TAIL, msgspec.msgpack.encode(await tail()))

        return await self._post(f"/v1/runs/{run}/steps", HandOverReply, body())

    async def _post(self, path: str, kind: type[_Reply], data: bytes | AsyncIterator[bytes]) -> _Reply:
        url = self._config.url.rstrip("/")
        token = self._config.token_file
        headers = {"Authorization": f"Bearer {token.read()}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_ANSWER_SECONDS)
        try:
            # A connection a request: there are a few in a minute, and each is long.
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(
                    f"{url}{path}",
                    data=data,
                    headers=headers,
                    allow_redirects=False,
                    ssl=self.tls.context,
                    server_hostname=self.tls.name,
                ) as response,
            ):
                answer = await _bounded(response, url)
                status = response.status
        except (aiohttp.ClientError, ssl.SSLError, OSError) as error:
            raise UnavailableError(
                f"{url}, which leads this run",
                found=str(error)[:200] or type(error).__name__,
                hint="no version is made without it; the step may be handed over again",
            ) from None
        try:
            if status == 200:
                return msgspec.json.decode(answer, type=kind)
            raise rebuild_error(msgspec.json.decode(answer, type=ErrorReply))
        except msgspec.DecodeError as error:
            raise PeerError(f"{url}{path}", expected=f"a {kind.__name__}", found=f"HTTP {status}: {error}") from None


async def _bounded(response: aiohttp.ClientResponse, url: str) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _REPLY_BYTES:
            raise PeerError(url, expected=f"a reply of at most {_REPLY_BYTES} bytes", found="more")
        parts.append(part)
    return b"".join(parts)
