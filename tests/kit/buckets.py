"""Buckets for tests: a server that speaks S3 on loopback, and one in front of another that breaks at a chosen step.

with S3Server() as server:
    bucket = server.bucket("prefix")          # an `ObstoreBucket`
    breaking = BreakingBucket(bucket, writes=3)
"""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from moto.server import ThreadedMotoServer

from deltad.errors import UnavailableError
from deltad.store.bucket.obstore import ObstoreBucket
from deltad.store.bucket.port import Bucket, Found, Stamp

NAME = "policies"
KEY_ID = "AKIAPLANTEDINTESTS00"
SECRET = "a-secret-key-that-only-the-tests-know"


class S3Server:
    """Moto's S3, in memory, with one bucket called `policies`."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.endpoint = ""

    def settings(self) -> dict[str, str]:
        """What a client has to be told."""
        return {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def bucket(self, prefix: str) -> ObstoreBucket:
        return ObstoreBucket(f"s3://{NAME}/{prefix}", self.settings, stall_seconds=10.0)

    def __enter__(self) -> S3Server:
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        request = urllib.request.Request(f"{self.endpoint}/{NAME}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()


class BreakingBucket:
    """Implements `Bucket`. After `writes` more writes nothing goes in any more, as when its user is killed there.

    With `lost_reply`, the write at which it breaks is done, and nobody is told. `lie` changes what is read of a key.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        writes: float = float("inf"),
        lost_reply: bool = False,
        lie: Callable[[str, bytes], bytes] = lambda key, data: data,
    ) -> None:
        self.url = bucket.url
        self.writes = writes
        self.log: list[tuple[str, str]] = []
        """What was written and removed, in order: the verb and the key."""
        self._bucket = bucket
        self._lost_reply = lost_reply
        self._lie = lie

    async def head(self, key: str) -> Found:
        return await self._bucket.head(key)

    async def read(self, key: str, most: int, *, unlike: Stamp | None = None) -> tuple[bytes, Stamp] | None:
        found = await self._bucket.read(key, most, unlike=unlike)
        return None if found is None else (self._lie(key, found[0]), found[1])

    async def stream(self, key: str, start: int, size: int) -> AsyncIterator[bytes]:
        data = b"".join([piece async for piece in self._bucket.stream(key, 0, size)])
        yield self._lie(key, data)[start:]

    async def create(self, key: str, data: bytes) -> bool:
        breaks = self._begin("create", key)
        made = await self._bucket.create(key, data)
        self._end(breaks)
        return made

    async def put(self, key: str, data: bytes) -> None:
        breaks = self._begin("put", key)
        await self._bucket.put(key, data)
        self._end(breaks)

    async def swap(self, key: str, data: bytes, stamp: Stamp | None) -> Stamp:
        breaks = self._begin("swap", key)
        made = await self._bucket.swap(key, data, stamp)
        self._end(breaks)
        return made

    async def remove(self, key: str) -> None:
        breaks = self._begin("remove", key)
        await self._bucket.remove(key)
        self._end(breaks)

    def keys(self, prefix: str) -> AsyncIterator[str]:
        return self._bucket.keys(prefix)

    def _begin(self, verb: str, key: str) -> bool:
        """Whether this write is the one at which it breaks, and is done."""
        if self.writes < 0 or (self.writes < 1 and not self._lost_reply):
            raise UnavailableError(self.url, found="broken here")
        breaks = self.writes < 1
        self.writes -= 1
        self.log.append((verb, key))
        return breaks

    def _end(self, breaks: bool) -> None:
        if breaks:
            raise UnavailableError(self.url, found="broken here, after the deed")
