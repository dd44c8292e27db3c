"""One peer over HTTP, as a handful of questions.

The one place where aiohttp's errors become ours: UnavailableError when the peer cannot be reached, cuts
off or stalls, DeniedError when it refuses the token, NotFoundError when it lacks a thing, PeerError, which
names the peer, for everything that the protocol does not allow. It may not store or decide anything.
Owns one invariant: no reply takes more memory than was asked for, or more time than its progress earns.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import TracebackType
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from deltad.client.messages import RegionReport
from deltad.config import TlsFiles
from deltad.errors import DeltadError, DeniedError, LimitError, NotFoundError, PeerError, UnavailableError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.hints import Hint
from deltad.protocol.pull_plan import Wanted
from deltad.protocol.target import Statement, check_notice
from deltad.relay.goodput import Goodput
from deltad.relay.hints import EdgeHints, read_hints
from deltad.relay.source import Count, Pace, Sink
from deltad.relay.wire import PREFIX, SEAL, Hello, RunNames, TargetNotice, VersionNames, dotted, parse_dotted, seal
from deltad.types import RunId, Version, parse_run

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

_KEPT_SECONDS = 300.0
"""How long a connection is kept for the next version."""
_READ_BYTES = 1 << 20
_PROGRESS_BYTES = 16 << 10
"""What must arrive within `stall_seconds`, unless the body is at its end before."""
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.ASCII)


class ClientTls:
    """How one upstream is spoken to; `renew` reads the files again, for connections that are made from then on."""

    def __init__(self, files: TlsFiles, name: str | None) -> None:
        """`name` is what its certificate must be for, where that is not the host of its URL. Raises ConfigError."""
        self.name = name
        self.renew(files)

    def renew(self, files: TlsFiles) -> None:
        """Raises ConfigError; then nothing has changed."""
        self.context = files.client()


class RelayClient:
    """Asks the daemon at `url`. An async context manager; all methods belong to its event loop.

    `token` gives the bearer token as it stands now, where there is one; `tls` how an https URL is spoken to. `count`
    is told of every body byte that comes in. `stall_seconds` is how long a reply may go without progress,
    `connect_seconds` how long connecting may take.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str] | None,
        *,
        count: Count,
        tls: ClientTls | None = None,
        limits: Limits = DEFAULT_LIMITS,
        stall_seconds: float = 20.0,
        connect_seconds: float = 10.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.reachable = False
        """Whether the last request found someone to talk to."""
        self.goodput = Goodput()
        self._token = token
        self._tls = tls
        self._count = count
        self._limits = limits
        self._stall = stall_seconds
        self._connect = connect_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RelayClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS),
            read_bufsize=_READ_BYTES,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            max_line_size=self._limits.header_line_bytes,
            max_field_size=self._limits.header_line_bytes,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def hello(self) -> Hello:
        return await self._ask(Hello, "/hello")

    async def runs(self) -> tuple[RunId, ...]:
        names = await self._ask(RunNames, "/runs")
        return self._parse(lambda: tuple(map(parse_run, names.runs)))

    async def latest(self, run: RunId, *, after: Version | None, wait: float) -> bytes | None:
        """The peer's newest record if it is above `after`, within `wait` seconds; else None."""
        query = {"wait": f"{wait:.3f}"} | ({} if after is None else {"after": dotted(after)})
        async with self._request("GET", f"/runs/{run}/latest", query=query, patience=wait) as response:
            if response.status == HTTPStatus.NO_CONTENT:
                return None
            return await self._sealed_body(response, self._limits.record_bytes)

    async def target(self, run: RunId, *, after: int, wait: float) -> tuple[Statement, ...]:
        """What the peer was told of the run's target above number `after`, within `wait` seconds; checked."""
        path, query = f"/runs/{run}/target", {"after": str(after), "wait": f"{wait:.3f}"}
        async with self._request("GET", path, query=query, patience=wait) as response:
            if response.status == HTTPStatus.NO_CONTENT:
                return ()
            data = await self._sealed_body(response, self._limits.json_body_bytes)
        notice = self._decode(TargetNotice, path, data)
        try:
            check_notice(notice.statements, after)
        except DeltadError as error:
            raise PeerError(f"{self.url}: target of {run}", found=str(error)) from None
        return notice.statements

    async def record(self, run: RunId, version: Version, *, count: Count) -> bytes:
        async with self._request("GET", f"/runs/{run}/records/{dotted(version)}") as response:
            return await self._sealed_body(response, self._limits.record_bytes, count)

    async def heartbeat(self, run: RunId) -> bytes:
        """The newest heartbeat of the run's publisher that the peer has, as it was signed. Raises NotFoundError."""
        async with self._request("GET", f"/runs/{run}/heartbeat") as response:
            return await self._sealed_body(response, self._limits.heartbeat_bytes)

    async def versions(self, run: RunId, *, after: Version | None) -> tuple[Version, ...]:
        query = {} if after is None else {"after": dotted(after)}
        names = await self._ask(VersionNames, f"/runs/{run}/records", query)
        return self._parse(lambda: tuple(map(parse_dotted, names.versions)))

    async def edges(self, run: RunId, *, after: Version | None) -> tuple[Hint, ...]:
        """What the peer says of the edges that lead to its latest version from `after`, or else from an anchor.

        One that does not know the question raises NotFoundError, like one that lacks the run.
        """
        query = {} if after is None else {"after": dotted(after)}
        hints = await self._ask(EdgeHints, f"/runs/{run}/edges", query)
        return self._parse(lambda: read_hints(hints, limits=self._limits))

    async def fetch(self, wanted: Wanted, into: Sink, *, count: Count, pace: Pace | None = None) -> None:
        """Append an object's bytes to `into`, from where it ends up to the object's size.

        What came before an error stays in `into`, so that another call goes on there. The bytes are
        not checked against the digest. `pace` is awaited with the bytes of each piece, before the next is read.
        """
        start = len(into)
        headers = {"Range": f"bytes={start}-"} if start else {}
        path = f"/objects/{wanted.digest.hex()}"
        async with self._request("GET", path, headers=headers) as response:
            whole = response.status == HTTPStatus.OK
            if whole:
                into.clear()
            elif response.status != HTTPStatus.PARTIAL_CONTENT or not start:
                raise _unlike(response, f"{self.url}: {wanted}", "HTTP 200, or 206 where a range was asked for")
            self._check_range(response, wanted, 0 if whole else start)
            await self._read(response, wanted.size - len(into), into, count, pace)
        if len(into) != wanted.size:
            raise PeerError(f"{self.url}: {wanted}", expected=f"{wanted.size} bytes", found=f"{len(into)} bytes")

    async def report(self, report: RegionReport) -> None:
        """Tell the peer of this region. Returns once it has kept the report."""
        data = msgspec.json.encode(report)
        if len(data) > self._limits.report_bytes:
            raise LimitError(
                "region report", expected=f"at most {self._limits.report_bytes} bytes", found=f"{len(data)}"
            )
        headers = {SEAL: seal(data), "Content-Type": "application/json"}
        async with self._request("POST", "/report", headers=headers, data=data) as response:
            await self._sealed_body(response, self._limits.json_body_bytes)

    async def _ask(self, kind: type[S], path: str, query: dict[str, str] | None = None) -> S:
        async with self._request("GET", path, query=query) as response:
            data = await self._sealed_body(response, self._limits.json_body_bytes)
        return self._decode(kind, path, data)

    def _decode(self, kind: type[S], path: str, data: bytes) -> S:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"{self.url}{PREFIX}{path}", found=f"not a {kind.__name__}: {error}") from None

    def _parse(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except DeltadError as error:
            raise PeerError(self.url, found=str(error)) from None

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
        patience: float = 0.0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply of status 2xx whose body is read within the block; `patience` is what the peer may wait."""
        assert self._session is not None, "use it as a context manager"
        url = URL(f"{self.url}{PREFIX}{path}").with_query(query)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect, sock_read=self._stall + patience)
        authorised = {**({"Authorization": f"Bearer {self._token()}"} if self._token else {}), **(headers or {})}
        tls, name = (self._tls.context, self._tls.name) if self._tls else (True, None)
        try:
            # A head that comes byte by byte makes progress at every read, and would never end.
            async with (
                asyncio.timeout(self._connect + self._stall + patience) as until_head,
                self._session.request(
                    method,
                    url,
                    headers=authorised,
                    data=data,
                    timeout=timeout,
                    allow_redirects=False,
                    ssl=tls,
                    server_hostname=name,
                ) as response,
            ):
                until_head.reschedule(None)
                self.reachable = True
                self._check_head(response)
                yield response
        except (aiohttp.ClientConnectorCertificateError, ssl.SSLError, aiohttp.ClientSSLError) as error:
            raise self._unidentified(error) from error
        except aiohttp.ClientConnectorError as error:
            self.reachable = False
            raise UnavailableError(self.url, found=_reason(error)) from error
        except aiohttp.ClientResponseError as error:
            raise PeerError(self.url, expected="an HTTP reply", found=error.message[:200]) from error
        except TimeoutError as error:
            # Someone may sit at the other end, but nobody who can be talked to.
            self.reachable = not isinstance(error, aiohttp.ConnectionTimeoutError)
            raise UnavailableError(self.url, found="no progress within the time limit") from error
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            refused = self._tls is not None and not self.reachable
            why = ", as it is where a certificate is not accepted" if refused else ""
            raise UnavailableError(self.url, found=f"the connection was cut{why}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, ssl.SSLError):
                raise self._unidentified(error.__cause__) from error
            raise UnavailableError(self.url, found=_reason(error)) from error
        except ValueError as error:
            raise PeerError(self.url, expected="an HTTP reply", found=str(error)[:200]) from error

    def _unidentified(self, error: Exception) -> DeltadError:
        """One of the two ends is not whom the other one wants to talk to, or one of them does not speak TLS 1.3."""
        wrong = getattr(error, "certificate_error", error)
        if isinstance(wrong, ssl.SSLCertVerificationError):
            name = self._tls.name if self._tls and self._tls.name else URL(self.url).host
            expected = f"a certificate for {name} by an authority that is trusted here"
            return DeniedError(
                self.url, expected=expected, found=wrong.verify_message[:200], hint="see [[upstream]] ca"
            )
        found = getattr(wrong, "os_error", wrong)
        reason = (getattr(found, "reason", None) or str(found)).replace("_", " ").lower()[:200]
        return DeniedError(self.url, expected="TLS 1.3, and a certificate of this daemon that it accepts", found=reason)

    def _check_head(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        thing = f"{self.url}{response.url.path}"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise DeniedError(
                self.url,
                expected="a token that it accepts, or a certificate, that may read this",
                found=f"HTTP {status}",
                hint="compare the token files of both daemons, and what it says of them in [[token]] and [[peer]]",
            )
        if status == HTTPStatus.NOT_FOUND:
            raise NotFoundError(thing, found="the peer does not have it")
        if status == HTTPStatus.CONFLICT:
            raise PeerError(
                thing,
                expected="a name of its own for each daemon",
                found="the name of another one that it knows",
                hint="change `name` in the [daemon] section of one of them",
            )
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.NO_CONTENT):
            raise _unlike(response, thing, "HTTP 200")
        coding = response.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise PeerError(thing, expected="a body without content coding", found=repr(coding[:40]))

    def _check_range(self, response: aiohttp.ClientResponse, wanted: Wanted, start: int) -> None:
        if response.content_length is not None and response.content_length != wanted.size - start:
            raise PeerError(
                f"{self.url}: {wanted}",
                expected=f"{wanted.size - start} bytes from {start}",
                found=f"{response.content_length} bytes",
            )
        tag = response.headers.get("ETag", "")
        if tag != f'"{wanted.digest.hex()}"':
            raise PeerError(f"{self.url}: {wanted}", expected="an ETag that is its digest", found=repr(tag[:80]))
        if response.status == HTTPStatus.PARTIAL_CONTENT:
            text = response.headers.get("Content-Range", "")
            match = _CONTENT_RANGE.fullmatch(text)
            if not match or tuple(map(int, match.groups())) != (start, wanted.size - 1, wanted.size):
                expected = f"bytes {start}-{wanted.size - 1}/{wanted.size}"
                raise PeerError(f"{self.url}: {wanted}", expected=expected, found=repr(text[:80]))

    async def _sealed_body(self, response: aiohttp.ClientResponse, limit: int, count: Count | None = None) -> bytes:
        thing = f"{self.url}{response.url.path}"
        if response.status != HTTPStatus.OK:
            raise _unlike(response, thing, "HTTP 200")
        if response.content_length is not None and response.content_length > limit:
            raise PeerError(thing, expected=f"at most {limit} bytes", found=f"{response.content_length} bytes")
        body = bytearray()
        await self._read(response, limit, body, count)
        data = bytes(body)
        if response.headers.get(SEAL) != seal(data):
            raise PeerError(thing, expected=f"a body that its {SEAL} seals", found="other bytes")
        return data

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        limit: int,
        into: Sink,
        count: Count | None,
        pace: Pace | None = None,
    ) -> None:
        """Append the body to `into`. Raises PeerError as soon as it is longer than `limit` bytes."""
        loop = asyncio.get_running_loop()
        taken = fresh = 0
        try:
            async with asyncio.timeout(self._stall) as watch:
                async for piece in response.content.iter_any():
                    self._count(len(piece))
                    if count is not None:
                        count(len(piece))
                    if taken:
                        self.goodput.arrived(len(piece), loop.time())
                    else:
                        self.goodput.begin(loop.time())
                    taken += len(piece)
                    fresh += len(piece)
                    if taken > limit:
                        thing = f"{self.url}{response.url.path}"
                        raise PeerError(thing, expected=f"at most {limit} bytes", found="more")
                    into.extend(piece)
                    if fresh >= _PROGRESS_BYTES:
                        fresh = 0
                        watch.reschedule(loop.time() + self._stall)
                    if pace is not None:
                        await _paced(watch, pace, len(piece))
        finally:
            if taken:
                self.goodput.end(loop.time())


async def _paced(watch: asyncio.Timeout, pace: Pace, count: int) -> None:
    """Waiting for a turn of our own is not the peer's lack of progress."""
    loop, due = asyncio.get_running_loop(), watch.when()
    began = loop.time()
    watch.reschedule(None)
    await pace(count)
    if due is not None:
        watch.reschedule(due + loop.time() - began)


def _unlike(response: aiohttp.ClientResponse, thing: str, expected: str) -> PeerError:
    return PeerError(thing, expected=expected, found=f"HTTP {response.status}")


def _reason(error: Exception) -> str:
    """What the operating system says of it, in lower case like a part of a sentence."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    text = str(cause)
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        text = os.strerror(cause.errno)
    elif isinstance(cause, OSError) and cause.strerror:
        text = cause.strerror
    return (text[:1].lower() + text[1:200]) or type(error).__name__
