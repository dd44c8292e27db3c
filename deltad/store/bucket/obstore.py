"""Buckets through `obstore`: S3 and what speaks like it, Google Cloud Storage, Azure, and a directory.

The one module that imports the library. It may not decide or verify anything. Owns two invariants: the library's
errors become ours here, without anything that may be secret; and no reply takes more memory than was asked for, or
more time than its progress earns.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from deltad.errors import (
    ConfigError,
    ConflictError,
    DeltadError,
    DeniedError,
    MissingPackageError,
    NotFoundError,
    PeerError,
    UnavailableError,
)
from deltad.store.bucket.port import PART_BYTES, Found, Stamp

try:
    import obstore
    from obstore import exceptions, store
except ModuleNotFoundError as missing:  # the rest of deltad works without it
    raise MissingPackageError(
        "object storage", expected="the package obstore", found="none", hint="run `pip install 'deltad[s3]'`"
    ) from missing

_PIECE_BYTES = 64 << 10
_LEAST_RATE = 64 << 10
"""An upload that is slower than this, in bytes a second, has stalled: nobody tells how far one has come."""
_LOCK = ".pointer-lock"
_LOCK_SECONDS = 0.01
_SCHEMES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|SIGNATURE", re.IGNORECASE)
_REFUSED = re.compile(r"status code: 40[137]|InvalidAccessKeyId|SignatureDoesNotMatch")


class ObstoreBucket:
    """The bucket, and prefix, at `url`: `s3://bucket/prefix`, `gs://`, `az://container/prefix` or `file:///directory`;
    `memory:///` is a bucket of its own that ends with this object.

    `settings` gives what is set beside the provider's environment, by the same names, as it stands now; it is asked
    again after a refusal. `stall_seconds` is how long a request may go without progress.
    """

    def __init__(
        self,
        url: str,
        settings: Callable[[], Mapping[str, str]] = dict,
        *,
        stall_seconds: float = 20.0,
        connect_seconds: float = 10.0,
    ) -> None:
        """Raises ConfigError for settings that the provider cannot mean anything by. Connects to nobody."""
        self.url = url
        self._settings = settings
        self._stall = stall_seconds
        self._connect = connect_seconds
        self._secrets: tuple[str, ...] = ()
        self._directory = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
        self._store = self._open()

    # The port.

    async def head(self, key: str) -> Found:
        found = await self._ask(key, obstore.head_async(self._store, key))
        return Found(key, found["size"], _stamp(found))

    async def read(self, key: str, most: int, *, unlike: Stamp | None = None) -> tuple[bytes, Stamp] | None:
        options: Any = {} if unlike is None else {"if_none_match": unlike.tag}
        try:
            result = await self._ask(key, obstore.get_async(self._store, key, options=options))
        except exceptions.NotModifiedError:
            return None
        size = result.meta["size"]
        if size > most:
            raise PeerError(f"{self.url}/{key}", expected=f"at most {most} bytes", found=f"{size}")
        data = bytearray()
        async for piece in self._pieces(key, result, size):
            data += piece
        return bytes(data), _stamp(result.meta)

    async def stream(self, key: str, start: int, size: int) -> AsyncIterator[bytes]:
        # An empty range is an error, and nothing is left of it to read.
        options: Any = {"range": (start, size)} if 0 < start < size else {}
        result = await self._ask(key, obstore.get_async(self._store, key, options=options))
        found = result.meta["size"]
        if found != size:
            raise PeerError(f"{self.url}/{key}", expected=f"{size} bytes", found=f"{found}")
        if options and tuple(result.range) != (start, size):
            raise PeerError(f"{self.url}/{key}", expected=f"bytes {start} to {size}", found=f"{result.range}")
        async for piece in self._pieces(key, result, size - (start if options else 0)):
            yield piece

    async def create(self, key: str, data: bytes) -> bool:
        try:
            await self._send(key, data, obstore.put_async(self._store, key, data, mode="create"))
        except exceptions.AlreadyExistsError:
            return False
        return True

    async def put(self, key: str, data: bytes) -> None:
        large = len(data) > PART_BYTES
        await self._send(
            key, data, obstore.put_async(self._store, key, data, use_multipart=large, chunk_size=PART_BYTES)
        )

    async def swap(self, key: str, data: bytes, stamp: Stamp | None) -> Stamp:
        if stamp is None:
            mode: Any = "create"
        else:
            mode = {"e_tag": stamp.tag} | ({"version": stamp.generation} if stamp.generation else {})
        try:
            if self._directory is not None and stamp is not None:
                return await self._swap_file(key, data, stamp)
            return _stamp(await self._send(key, data, obstore.put_async(self._store, key, data, mode=mode)))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise self._overtaken(key) from None

    async def remove(self, key: str) -> None:
        with suppress(NotFoundError):
            await self._ask(key, obstore.delete_async(self._store, key))

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        listing = obstore.list(self._store, prefix)
        while True:
            try:
                found = await self._ask(prefix, _next(listing))
            except StopAsyncIteration:
                return
            for item in found or ():
                yield item["path"]

    # How.

    def _open(self) -> Any:
        scheme = self.url.partition(":")[0]
        try:
            if self._directory is not None:
                return store.LocalStore(self._directory, mkdir=True)
            if scheme == "memory":
                return store.MemoryStore()
            settings = dict(self._settings())
            environment = {name: value for name, value in os.environ.items() if name.startswith(_SCHEMES[scheme])}
            from_url: Any = store.from_url  # which settings there are, the provider knows
            known = environment | settings
            self._secrets = tuple(value for name, value in known.items() if _SECRET.search(name) and len(value) > 3)
            clear = any(value.startswith("http://") for name, value in known.items() if "ENDPOINT" in name.upper())
            return from_url(
                self.url,
                config=settings or None,
                client_options={
                    "allow_http": clear,
                    "connect_timeout": timedelta(seconds=self._connect),
                    "read_timeout": timedelta(seconds=self._stall),
                    "timeout": timedelta(seconds=self._stall + PART_BYTES / _LEAST_RATE),
                },
                retry_config={"max_retries": 0},
            )
        except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
            raise ConfigError(
                self.url, expected="a bucket and settings that go together", found=self._reason(error)
            ) from None

    async def _ask(self, key: str, request: Any, seconds: float | None = None) -> Any:
        """What the library answers; its errors as ours, but for those that a caller asked to be told."""
        try:
            async with asyncio.timeout(self._stall + self._connect if seconds is None else seconds):
                return await request
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError):
            raise
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise self._ours(key, error) from None

    async def _send(self, key: str, data: bytes, request: Any) -> Any:
        return await self._ask(key, request, self._stall + self._connect + len(data) / _LEAST_RATE)

    async def _pieces(self, key: str, result: Any, size: int) -> AsyncIterator[bytes]:
        """The body, as it comes, and exactly `size` bytes of it. Raises UnavailableError where it ends before."""
        stream, left = result.stream(min_chunk_size=_PIECE_BYTES), size
        while left:
            try:
                piece = await self._ask(key, _next(stream))
            except StopAsyncIteration:
                raise UnavailableError(self.url, found="the connection was cut") from None
            left -= len(piece)
            if left < 0:
                raise PeerError(f"{self.url}/{key}", expected=f"{size} bytes", found="more")
            yield bytes(piece)

    async def _swap_file(self, key: str, data: bytes, stamp: Stamp) -> Stamp:
        """A directory has no conditional write: compare and replace under a lock, which a kill lets go of."""
        assert self._directory is not None
        async with _locked(self._directory / _LOCK):
            if (await self.head(key)).stamp != stamp:
                raise self._overtaken(key)
            return _stamp(await self._send(key, data, obstore.put_async(self._store, key, data)))

    def _overtaken(self, key: str) -> ConflictError:
        return ConflictError(
            f"{self.url}/{key}",
            expected="the content that was read before",
            found="another",
            hint="somebody else writes below this prefix",
        )

    def _ours(self, key: str, error: Exception) -> DeltadError:
        thing, reason = f"{self.url}/{key}", self._reason(error)
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            return PeerError(self.url, expected="a bucket of that name", found="none")
        if isinstance(error, FileNotFoundError):
            return NotFoundError(thing, found="the bucket does not have it")
        denied = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError))
        if denied or _REFUSED.search(str(error)):
            with suppress(ConfigError):
                self._store = self._open()  # credentials that were replaced meanwhile
            return DeniedError(
                self.url,
                expected="credentials that it accepts",
                found="a refusal",
                hint="see the provider's variables in the daemon's environment, or `credentials_file`",
            )
        if isinstance(error, TimeoutError):
            return UnavailableError(self.url, found="no progress within the time limit")
        return UnavailableError(self.url, found=reason)

    def _reason(self, error: Exception) -> str:
        """The first line of what the library says, without queries, durations, and whatever is secret."""
        text = str(error).strip().partition("\n")[0]
        text = re.sub(r"\?\S*", "", re.sub(r" in [0-9.]+[^ ]*s\b", "", text))
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text[:200] or type(error).__name__


async def _next(stream: Any) -> Any:
    return await anext(stream)


def _stamp(meta: Mapping[str, Any]) -> Stamp:
    return Stamp(meta["e_tag"] or "", meta.get("version") or "")


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_SECONDS)
        yield
    finally:
        os.close(descriptor)
