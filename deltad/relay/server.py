"""Serving what this daemon holds to daemons that pull.

It may not change the store: all it takes in is a region's report. Owns three invariants: nothing but 401 is said to
whoever is not recognised; nothing but 403 to whoever may not read a run, whether there is such a run or not; and no
request, however malformed, is answered with a 5xx or reaches
a file that its digest does not name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
import structlog
from aiohttp import web

from deltad.client.messages import ErrorReply, RegionReport
from deltad.delta import FORMAT
from deltad.delta.coding import CODERS
from deltad.errors import (
    DeltadError,
    DeniedError,
    FormatError,
    LimitError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.protocol.access import Doorkeeper, Principal, Right, certificate_names
from deltad.relay.hints import offer
from deltad.relay.wire import (
    LISTED_VERSIONS,
    PREFIX,
    SEAL,
    Hello,
    RunNames,
    TargetNotice,
    VersionNames,
    dotted,
    parse_dotted,
    parse_range,
    parse_seconds,
    parse_sequence,
    seal,
)
from deltad.store.announce import Announcements
from deltad.store.objects import ObjectReader
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version, parse_daemon_name, parse_digest, parse_run

log = structlog.get_logger()

_READ_BYTES = 1 << 20
_WRITE_BYTES = 32 << 10
_WARN_SECONDS = 60.0
_CALLER = web.RequestKey("caller", Principal)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RelayServer:
    """The application that other daemons pull from.

    `door` recognises callers; `on_report` takes a report from a region below.
    `stall_seconds` is how long a client may go without making progress before it is cut off.
    """

    def __init__(
        self,
        store: Store,
        *,
        daemon: str,
        boot: str,
        door: Doorkeeper,
        announcements: Announcements,
        on_report: Callable[[RegionReport], None],
        heartbeat: Callable[[RunId], bytes | None] = lambda run: None,
        limits: Limits = DEFAULT_LIMITS,
        stall_seconds: float = 30.0,
        on_sent: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`heartbeat` gives the newest one of a run, if there is one; `on_sent` is told of every piece of an object
        that was sent, in bytes."""
        self._store = store
        self._on_sent = on_sent
        self._hello = Hello(daemon, boot, (FORMAT,), tuple(sorted(CODERS)))
        self._door = door
        self._announcements = announcements
        self._on_report = on_report
        self._heartbeat = heartbeat
        self._limits = limits
        self._stall_seconds = stall_seconds
        self._draining = False
        self._warned_at = -_WARN_SECONDS

    def app(self) -> web.Application:
        """The routes under `/v1/relay`. When it shuts down, long polls are answered at once."""
        app = web.Application(middlewares=[self._guard], client_max_size=self._limits.report_bytes)
        for path, handler in (
            ("/hello", self._get_hello),
            ("/runs", self._get_runs),
            ("/runs/{run}/latest", self._get_latest),
            ("/runs/{run}/target", self._get_target),
            ("/runs/{run}/heartbeat", self._get_heartbeat),
            ("/runs/{run}/records", self._get_versions),
            ("/runs/{run}/records/{version}", self._get_record),
            ("/runs/{run}/edges", self._get_edges),
            ("/objects/{digest}", self._get_object),
        ):
            app.router.add_get(PREFIX + path, _for_readers(handler), allow_head=False)
        app.router.add_post(PREFIX + "/report", _for_readers(self._post_report))
        app.on_shutdown.append(self._drain)
        return app

    async def _drain(self, app: web.Application) -> None:
        self._draining = True
        self._announcements.announce()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Identity first; then every refusal becomes an ErrorReply."""
        names = certificate_names(request.get_extra_info("peercert"))
        caller = self._door.admit(request.headers.get("Authorization", ""), names)
        if caller is None:
            self._warn(request)
            denied = DeniedError("relay", expected="a bearer token or a certificate that this daemon accepts")
            return _refusal(denied, HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})
        request[_CALLER] = caller
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            expected = f"at most report_bytes ({self._limits.report_bytes})"
            return _refusal(LimitError("report", expected=expected, found="more"), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        except web.HTTPException as refused:
            error = NotFoundError(request.path[:80], found=refused.reason)
            headers = {"Allow": refused.headers["Allow"]} if "Allow" in refused.headers else {}
            return _refusal(error, HTTPStatus(refused.status), headers)
        except DeltadError as error:
            return _refusal(error, HTTPStatus(error.http_status))
        except Exception:
            log.exception("relay_request_failed", path=request.path[:200])
            return _refusal(UnavailableError("relay", found="an internal error"), HTTPStatus.INTERNAL_SERVER_ERROR)

    def _warn(self, request: web.Request) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= _WARN_SECONDS:
            self._warned_at = now
            log.warning("relay_caller_refused", remote=request.remote)

    async def _get_hello(self, request: web.Request) -> web.StreamResponse:
        return _json(self._hello)

    async def _get_runs(self, request: web.Request) -> web.StreamResponse:
        return _json(RunNames(tuple(run for run in self._store.runs() if request[_CALLER].may(Right.READ, run))))

    async def _get_latest(self, request: web.Request) -> web.StreamResponse:
        run = parse_run(request.match_info["run"])
        after = _after(request)
        wait = min(parse_seconds(request.query.get("wait", "0")), self._limits.long_poll_seconds)

        def newer() -> bytes | None:
            latest = self._store.run(run).latest() if run in self._store.runs() else None
            if latest is not None and (after is None or latest.version > after):
                return self._store.run(run).record_bytes(latest.version)
            return b"" if self._draining else None

        found = await self._announcements.wait_until(newer, wait)
        if found:
            return _bytes(found)
        self._run(run)
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _get_target(self, request: web.Request) -> web.StreamResponse:
        run = parse_run(request.match_info["run"])
        after = parse_sequence(request.query.get("after", "0"))
        wait = min(parse_seconds(request.query.get("wait", "0")), self._limits.long_poll_seconds)

        def newer() -> TargetNotice | None:
            said = self._store.run(run).targets().after(after) if run in self._store.held_runs() else ()
            return TargetNotice(said) if said or self._draining else None

        found = await self._announcements.wait_until(newer, wait)
        if found is not None and found.statements:
            return _json(found)
        if run not in self._store.held_runs():
            raise NotFoundError(f"run {run}", found="it is not known here")
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _get_heartbeat(self, request: web.Request) -> web.StreamResponse:
        run = parse_run(request.match_info["run"])
        beat = self._heartbeat(run)
        if beat is None:
            raise NotFoundError(f"heartbeat of run {run}", found="none is known here")
        return _bytes(beat)

    async def _get_versions(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request.match_info["run"])
        after = _after(request)
        versions = [record.version for record in run.records() if after is None or record.version > after]
        return _json(VersionNames(tuple(dotted(version) for version in versions[-LISTED_VERSIONS:])))

    async def _get_record(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request.match_info["run"])
        return _bytes(run.record_bytes(parse_dotted(request.match_info["version"])))

    async def _get_edges(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request.match_info["run"])
        return _json(await asyncio.to_thread(offer, run, _after(request)))

    def _run(self, name: str) -> RunStore:
        run = parse_run(name)
        if run not in self._store.runs():
            raise NotFoundError(f"run {run}", found="no version of it is held here")
        return self._store.run(run)

    async def _get_object(self, request: web.Request) -> web.StreamResponse:
        digest = parse_digest(request.match_info["digest"])
        with await asyncio.to_thread(self._store.open_object, digest) as reader:
            return await self._send(request, digest, reader)

    async def _send(self, request: web.Request, digest: Digest, reader: ObjectReader) -> web.StreamResponse:
        size = reader.size
        start = parse_range(request.headers.get("Range", ""))
        # `no-transform` keeps a proxy from compressing what is compressed already.
        headers = {"ETag": f'"{digest.hex()}"', "Accept-Ranges": "bytes", "Cache-Control": "no-transform"}
        if start is not None and start >= size:
            error = FormatError(f"object {digest.hex()}", expected=f"a range within {size} bytes", found=f"{start}-")
            headers["Content-Range"] = f"bytes */{size}"
            return _refusal(error, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers)
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/octet-stream"
        if start is not None:
            response.set_status(HTTPStatus.PARTIAL_CONTENT)
            response.headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        at = start or 0
        response.content_length = size - at
        await response.prepare(request)
        try:
            while at < size:
                piece = await asyncio.to_thread(reader.read, _READ_BYTES, at)
                if not piece:
                    raise OSError("the file has become shorter")
                await self._write(response, piece)
                self._on_sent(len(piece))
                at += len(piece)
            async with asyncio.timeout(self._stall_seconds):
                await response.write_eof()
        except (OSError, TimeoutError) as error:
            # The head is out, so no other reply is possible: cut the connection, and the peer resumes.
            log.info("relay_send_cut", remote=request.remote, sent=at, size=size, error=str(error) or "no progress")
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        view = memoryview(piece)
        for start in range(0, len(view), _WRITE_BYTES):
            async with asyncio.timeout(self._stall_seconds):
                await response.write(view[start : start + _WRITE_BYTES])

    async def _post_report(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._stall_seconds):
                data = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        except web.RequestPayloadError as error:
            raise UsageError("report", expected="a body in one piece or in chunks", found=str(error)[:200]) from None
        if SEAL in request.headers and request.headers[SEAL] != seal(data):
            raise FormatError("report", expected=f"a body that its {SEAL} seals", found="other bytes")
        self._on_report(_about(request[_CALLER], _parse_report(data)))
        return _json({})


def _for_readers(handler: Handler) -> Handler:
    """The handler for those who may read the run in the path, or any run where there is none in it."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        if not request[_CALLER].may(Right.READ, request.match_info.get("run")):
            raise DeniedError("relay", expected="an identity that may do this")
        return await handler(request)

    return guarded


def _about(caller: Principal, report: RegionReport) -> RegionReport:
    """The report without the runs that are none of the caller's business."""
    if caller.sees_all:
        return report
    runs = {run: said for run, said in report.runs.items() if caller.may(Right.READ, run)}
    below = tuple(_about(caller, inner) for inner in report.below)
    return msgspec.structs.replace(report, runs=runs, below=below)


def _after(request: web.Request) -> Version | None:
    text = request.query.get("after")
    return None if text is None else parse_dotted(text)


def _parse_report(data: bytes) -> RegionReport:
    try:
        report = msgspec.json.decode(data, type=RegionReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError("report", found=f"not a RegionReport: {error}") from None
    parse_daemon_name(report.daemon)
    for run in report.runs:
        parse_run(run)
    return report


def _json(value: object) -> web.Response:
    return _bytes(msgspec.json.encode(value), "application/json")


def _bytes(data: bytes, content_type: str = "application/octet-stream") -> web.Response:
    return web.Response(body=data, content_type=content_type, headers={SEAL: seal(data)})


def _refusal(error: DeltadError, status: HTTPStatus, headers: dict[str, str] | None = None) -> web.Response:
    reply = ErrorReply(error.kind, str(error), error.retryable, error.exit_code)
    return web.Response(
        status=status, body=msgspec.json.encode(reply), content_type="application/json", headers=headers
    )
