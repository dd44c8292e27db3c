"""One streamed answer of one replica, over HTTP. The boundary at which aiohttp's errors become ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from deltad.client.client import rebuild_error
from deltad.errors import DeltadError, LimitError, PeerError, UnavailableError
from rollout_plugin.messages import GenerateRequest, Refusal, StreamLine

_LINE_BYTES = 4 << 20
_LINES = msgspec.json.Decoder(StreamLine)


class FencedError(UnavailableError):
    """A replica broke its answer off by itself: what it gave of it may be wrong."""


class Replicas:
    """Connections to replicas, kept between requests. `silence`: seconds without a byte that an answer survives."""

    def __init__(self, *, connections: int, silence: float) -> None:
        self._connector = aiohttp.TCPConnector(limit=connections, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0),
            auto_decompress=False,
            read_bufsize=256 << 10,
        )
        # aiohttp's own timeout for reading sets a timer anew at every token, which costs more than to look at all
        # answers now and then.
        self._silence = silence
        self._heard: dict[aiohttp.ClientResponse, float] = {}
        self._watching = asyncio.create_task(self._watch())

    async def stream(self, address: str, request: GenerateRequest) -> AsyncGenerator[list[StreamLine], None]:
        """The lines of an answer, as many at once as came at once, up to the last one.

        Raises what the replica refuses, FencedError where it broke off, UnavailableError where it was cut or cannot be
        reached, PeerError for nonsense.
        """
        try:
            async with (
                self._session.post(
                    f"{address}/v1/generate", data=msgspec.json.encode(request), allow_redirects=False
                ) as response,
                self._watched(response),
            ):
                if response.status != 200:
                    raise _refusal(address, response.status, await response.content.read(_LINE_BYTES))
                rest, ended = b"", False
                heard, clock = self._heard, asyncio.get_running_loop().time
                async for data in response.content.iter_any():
                    heard[response] = clock()
                    *whole, rest = (rest + data).split(b"\n")
                    if len(rest) > _LINE_BYTES:
                        raise LimitError(f"replica at {address}", expected=f"lines of at most {_LINE_BYTES} bytes")
                    if lines := [_LINES.decode(line) for line in whole]:
                        if (error := lines[-1].error) is not None:
                            raise FencedError(error.message)
                        yield lines
                        ended = lines[-1].ended is not None
                if ended:  # and read to the last byte, so that the connection serves the next answer
                    return
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"replica at {address}", found=str(error) or type(error).__name__) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerError(f"replica at {address}", expected="lines of an answer", found=str(error)) from None
        raise UnavailableError(f"replica at {address}", found="the connection was cut")

    @asynccontextmanager
    async def _watched(self, response: aiohttp.ClientResponse) -> AsyncGenerator[None, None]:
        self._heard[response] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._heard[response]

    async def _watch(self) -> None:
        """Cut what has been silent for too long; whoever reads it finds the connection closed."""
        while True:
            await asyncio.sleep(self._silence / 8)
            now = asyncio.get_running_loop().time()
            for response in [one for one, heard in self._heard.items() if now - heard > self._silence]:
                response.close()

    async def close(self) -> None:
        self._watching.cancel()
        await self._session.close()


def _refusal(address: str, status: int, data: bytes) -> DeltadError:
    try:
        reply = msgspec.json.decode(data, type=Refusal)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return PeerError(f"replica at {address}", expected="an answer", found=f"status {status}")
    error = rebuild_error(reply)
    error.retryable = reply.retryable
    return error
