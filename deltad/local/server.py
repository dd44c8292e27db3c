"""The local API over HTTP, on a Unix socket and over TLS: parses what comes in, asks the daemon, words the answer.

A thin shell: what is decided is decided by `Operations`, `Fleet` and the store. Invariants: a caller who is not
recognised hears nothing but 401, and one who may not do a thing nothing but 403, whatever there is; every path
variable, query and body becomes a type of ours before it is used; every refusal is an `ErrorReply` with
its error's status; no input is answered with a 5xx, which is left to real faults; and no caller that
stops sending or reading holds a handler for longer than `progress_seconds`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import structlog
from aiohttp import hdrs, web

from deltad.client.messages import (
    CollectRequest,
    DerivedEdgesReply,
    DerivedEdgeView,
    ExportRequest,
    FleetView,
    LatestReply,
    NextReply,
    PinRequest,
    PublishRequest,
    PullRequest,
    RegisterRequest,
    StateRequest,
    Target,
    TargetRequest,
    VerifyRequest,
    VersionInfo,
    VersionsReply,
)
from deltad.errors import DeniedError, LimitError, NotFoundError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.local.binding import caller_name, may_connect
from deltad.local.fleet import Fleet
from deltad.local.handing import HandOverRoutes
from deltad.local.operations import Operations
from deltad.local.requests import (
    Handler,
    answer_errors,
    check_directory,
    done,
    json_reply,
    number_of,
    optional_version,
    query_of,
    replica_of,
    run_of,
    version_of,
)
from deltad.protocol.access import EVERYTHING, Doorkeeper, Principal, Right, certificate_names
from deltad.protocol.target import REASON_CHARACTERS
from deltad.store.announce import Announcements
from deltad.store.objects import ObjectReader
from deltad.store.store import Store
from deltad.types import (
    RunId,
    VersionId,
    parse_daemon_name,
    parse_digest,
    parse_run,
    parse_variant,
    parse_version,
)

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)

Answer = Callable[[web.Request, Principal], Awaitable[web.StreamResponse]]
Face = tuple[str, str, Answer, Right]

_KEY = "X-Api-Key"
_PIECE = 1 << 20
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)
_MOST_NUMBER = 10**15 - 1
_IDENTITY_CHARACTERS = 256
_REASON_CHARACTERS = 256
_CALLER = web.RequestKey("caller", Principal)

log = structlog.get_logger()


class _StrangerError(DeniedError):
    """The caller is nobody who is known here."""

    http_status = 401

    @property
    def kind(self) -> str:
        return "Denied"


class LocalServer:
    """The application for one daemon. Everything in it belongs to the event loop's thread."""

    def __init__(
        self,
        store: Store,
        operations: Operations,
        fleet: Fleet,
        announcements: Announcements,
        limits: Limits = DEFAULT_LIMITS,
        *,
        door: Doorkeeper | None = None,
        faces: Sequence[Face] = (),
        group: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress_seconds: float = 30.0,
    ) -> None:
        """`clock`: the monotonic seconds that `fleet` is told everywhere in this process. `door` recognises who comes
        over TCP, nobody if there is none; over the Unix socket it is root, this process's user, and `group`. `faces`
        are routes that others bring: method, path, what answers a caller who was recognised, and the right that it
        takes to get there."""
        self._door = door or Doorkeeper(lambda: ())
        self._group = group
        self._faces = faces
        self._store = store
        self._operations = operations
        self._fleet = fleet
        self._announcements = announcements
        self._limits = limits
        self._clock = clock
        self._progress = progress_seconds
        self._handing = HandOverRoutes(operations, limits, progress_seconds=progress_seconds)
        self._draining = False
        self._polls: dict[str, web.Request] = {}
        """Questions that are open, by replica, and those whose connection was cut."""

    def app(self) -> web.Application:
        """The application. Shutting it down answers all long polls at once."""
        app = web.Application(
            middlewares=[answer_errors, self._recognise], client_max_size=self._limits.json_body_bytes
        )
        app.on_shutdown.append(self._drain)
        get, post = hdrs.METH_GET, hdrs.METH_POST
        delete = hdrs.METH_DELETE
        read, publish, control, administer = Right.READ, Right.PUBLISH, Right.CONTROL, Right.ADMINISTER
        # What is about a replica is about its run, which only its handler knows.
        routes: list[tuple[str, str, Handler, Right]] = [
            (get, "/v1/status", self._status, read),
            (get, "/v1/runs/{run}/versions", self._versions, read),
            (get, "/v1/runs/{run}/versions/{version}", self._version, read),
            (post, "/v1/runs/{run}/versions/{version}/pin", self._pin, control),
            (delete, "/v1/runs/{run}/versions/{version}/pin", self._unpin, control),
            (get, "/v1/runs/{run}/records/{version}", self._record, read),
            (get, "/v1/runs/{run}/edges/{version}", self._edges, read),
            (get, "/v1/runs/{run}/latest", self._latest, read),
            (post, "/v1/runs/{run}/publish", self._publish, publish),
            (post, "/v1/runs/{run}/ranks", self._join, publish),
            (post, "/v1/runs/{run}/steps", self._hand_over, publish),
            (post, "/v1/runs/{run}/pull", self._pull, control),
            (post, "/v1/runs/{run}/export", self._export, read),
            (post, "/v1/runs/{run}/verify", self._verify, control),
            (get, "/v1/runs/{run}/target", self._targets, read),
            (post, "/v1/runs/{run}/target", self._move_target, control),
            (get, "/v1/runs/{run}/plan", self._plan, read),
            (post, "/v1/collect", self._collect, administer),
            (get, "/v1/runs/{run}/fleet", self._fleet_view, read),
            (get, "/v1/objects/{digest}", self._object, read),
            (post, "/v1/replicas", self._register, read),
            (get, "/v1/replicas/{replica}/next", self._next, read),
            (post, "/v1/replicas/{replica}/state", self._report_state, read),
            (delete, "/v1/replicas/{replica}", self._unregister, read),
        ]
        for method, path, handler, right in routes:
            app.router.add_route(method, path, _for_those_who_may(right, handler))
        for method, path, answer, right in self._faces:
            app.router.add_route(method, path, _for_those_who_may(right, _knowing_the_caller(answer)))
        return app

    @web.middleware
    async def _recognise(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.get_extra_info("socket")
        if connection is not None and connection.family == socket.AF_UNIX:
            caller = Principal("", EVERYTHING) if may_connect(connection, self._group) else None
        else:
            names = certificate_names(request.get_extra_info("peercert"))
            caller = self._door.admit(_authorization(request), names)
        if caller is None:
            raise _StrangerError("local API", expected="an identity that this daemon accepts")
        request[_CALLER] = caller
        return await handler(request)

    async def _drain(self, app: web.Application) -> None:
        self._draining = True
        self._announcements.announce()

    # Versions.

    async def _status(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        _require(request, request[_CALLER].sees_all)
        return json_reply(self._operations.status())

    async def _versions(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        return json_reply(VersionsReply(tuple(self._operations.versions(run_of(request)))))

    async def _version(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, version = run_of(request), version_of(request)
        for info in self._operations.versions(run):
            if parse_version(info.version) == version:
                return json_reply(info)
        if run in self._store.runs():
            self._store.run(run).record(version)  # knows best what has become of it
        raise NotFoundError(f"{VersionId(run, version)}", found="not held here", hint="see `deltad log`")

    async def _pin(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, version, body = run_of(request), version_of(request), await self._body(request, PinRequest)
        if len(body.why) > _REASON_CHARACTERS:
            raise UsageError("reason", expected=f"at most {_REASON_CHARACTERS} characters")
        by = await _name(request)
        return json_reply(await self._operations.pin(run, version, by, body.why))

    async def _unpin(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        return json_reply(await self._operations.unpin(run_of(request), version_of(request)))

    async def _record(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, version = run_of(request), version_of(request)
        if run not in self._store.runs():
            raise NotFoundError(f"{VersionId(run, version)}", found="no version of this run is held here")
        return web.Response(body=self._store.run(run).record_bytes(version), content_type="application/octet-stream")

    async def _edges(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, version = run_of(request), version_of(request)
        if run not in self._store.runs():
            raise NotFoundError(f"{VersionId(run, version)}", found="no version of this run is held here")
        record = self._store.run(run).record(version)
        edges = tuple(
            DerivedEdgeView(
                variant=edge.variant,
                kind=edge.kind.value,
                base="" if edge.base is None else str(edge.base),
                manifest=edge.manifest.hex(),
                size=edge.size,
                local=edge.local,
            )
            for edge in self._store.run(run).derived()
            if edge.target == record.version
        )
        return json_reply(DerivedEdgesReply(edges))

    async def _latest(self, request: web.Request) -> web.StreamResponse:
        query = query_of(request, "after", "wait")
        run, after = run_of(request), optional_version(query, "after")

        def newer() -> VersionInfo | None:
            versions = self._held(run)
            if versions and (after is None or parse_version(versions[-1].version) > after):
                return versions[-1]
            return None

        found = await self._wait(newer, self._wait_seconds(query))
        if found is None:
            self._operations.versions(run)  # refuses a run that has still not been heard of
        return json_reply(LatestReply(found))

    async def _publish(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, body = run_of(request), await self._body(request, PublishRequest)
        check_directory(body.directory)
        if body.number is not None and not 0 <= body.number <= _MOST_NUMBER:
            raise UsageError("number", expected=f"0 to {_MOST_NUMBER}", found=str(body.number))
        if len(body.identity) > _IDENTITY_CHARACTERS:
            raise UsageError("identity", expected=f"at most {_IDENTITY_CHARACTERS} characters")
        return json_reply(await self._operations.publish(run, body))

    async def _join(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        return json_reply(await self._handing.join(run_of(request), request))

    async def _hand_over(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        return json_reply(await self._handing.hand_over(run_of(request), request))

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, body = run_of(request), await self._body(request, PullRequest)
        wait = min(max(body.wait, 0.0), self._limits.long_poll_seconds)
        return json_reply(LatestReply(await self._operations.pull(run, wait)))

    async def _export(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, body = run_of(request), await self._body(request, ExportRequest)
        if body.version:
            parse_version(body.version)
        if body.directory:
            _require(request, request[_CALLER].may(Right.ADMINISTER))  # it writes wherever it is told
            check_directory(body.directory)
        if body.disk_delta is not None and (body.replica or not body.directory):
            raise UsageError("an export as a disk-delta", expected="a directory, and no replica")
        if body.disk_delta is not None and body.disk_delta.base:
            parse_version(body.disk_delta.base)
        if body.replica or not body.directory:
            self._fleet.registration(parse_daemon_name(body.replica))
        return json_reply(await self._operations.export(run, body))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, body = run_of(request), await self._body(request, VerifyRequest)
        if body.version:
            parse_version(body.version)
        return json_reply(await self._operations.verify(run, body))

    async def _plan(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        return json_reply(await self._operations.plan(run_of(request)))

    async def _targets(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        return json_reply(self._operations.targets(run_of(request)))

    async def _move_target(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        run, body = run_of(request), await self._body(request, TargetRequest)
        if body.version:
            parse_version(body.version)
        if body.fleet:
            parse_daemon_name(body.fleet)
        if len(body.why) > REASON_CHARACTERS:
            raise UsageError("reason", expected=f"at most {REASON_CHARACTERS} characters", found=f"{len(body.why)}")
        by = await _name(request)
        return json_reply(await self._operations.move_target(run, body, by))

    async def _collect(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        _require(request, request[_CALLER].sees_all)
        return json_reply(await self._operations.collect(await self._body(request, CollectRequest)))

    # Objects.

    async def _object(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        digest = parse_digest(request.match_info["digest"])
        with await asyncio.to_thread(self._store.open_object, digest) as reader:
            response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/octet-stream"})
            response.content_length = reader.size
            await self._stream(request, response, reader)
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, reader: ObjectReader) -> None:
        """Send the object, or cut the connection: a short reply must not look like a whole one."""
        try:
            await response.prepare(request)
            sent = 0
            while sent < reader.size:
                piece = await asyncio.to_thread(reader.read, _PIECE, sent)
                if not piece:
                    raise EOFError
                async with asyncio.timeout(self._progress):
                    await response.write(piece)
                sent += len(piece)
            await response.write_eof()
        except (OSError, EOFError) as error:  # TimeoutError and a caller that has gone are OSErrors
            log.debug("object_cut_off", path=request.rel_url.raw_path, error=repr(error))
            if request.transport is not None:
                request.transport.abort()

    # Replicas.

    async def _fleet_view(self, request: web.Request) -> web.StreamResponse:
        query = query_of(request, "version", "verified", "wait")
        run, version = run_of(request), optional_version(query, "version")
        enough = number_of(query, "verified", _COUNT, "a whole number")

        def view() -> FleetView:
            return self._fleet.view(run, self._held(run), self._clock(), version=version, target=self._target(run))

        def verified() -> FleetView | None:
            found = view()
            return found if found.verified >= enough else None

        found = await self._wait(verified, self._wait_seconds(query)) or view()
        if not found.replicas:
            self._operations.versions(run)  # refuses a run that has still not been heard of
        return json_reply(found)

    async def _register(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        body = await self._body(request, RegisterRequest)
        _require(request, request[_CALLER].may(Right.READ, body.run))
        self._require_replica(request, body.replica, known=False)
        poll = self._polls.get(body.replica)
        self._fleet.register(body, self._clock(), hung_up=poll is not None and poll.transport is None)
        self._polls.pop(body.replica, None)
        self._announcements.announce()
        return done()

    async def _next(self, request: web.Request) -> web.StreamResponse:
        query = query_of(request, "after", "wait")
        replica, after = replica_of(request), optional_version(query, "after")
        self._require_replica(request, replica)

        def anything() -> NextReply | None:
            registration = self._fleet.registration(replica)
            run, variant = parse_run(registration.run), parse_variant(registration.variant)
            return self._operations.next_for(run, variant, after)

        # An open poll is a sign of life, and so is renewed while its connection stands.
        ends = self._clock() + self._wait_seconds(query)
        found = None
        while found is None:
            self._fleet.heard(replica, self._clock())
            self._polls[replica] = request
            left = ends - self._clock()
            found = await self._wait(anything, min(max(left, 0.0), self._fleet.quiet_for / 3))
            if self._clock() >= ends or self._draining or request.transport is None:
                break
        if request.transport is not None and self._polls.get(replica) is request:
            del self._polls[replica]
        return json_reply(found or NextReply())

    async def _report_state(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        replica, body = replica_of(request), await self._body(request, StateRequest)
        self._require_replica(request, replica)
        run = parse_run(self._fleet.registration(replica).run)
        try:
            self._fleet.report_state(replica, body, self._held(run), self._clock())
        finally:
            self._announcements.announce()
        return done()

    async def _unregister(self, request: web.Request) -> web.StreamResponse:
        query_of(request)
        replica = replica_of(request)
        self._require_replica(request, replica)
        self._fleet.unregister(replica)
        self._announcements.announce()
        await asyncio.to_thread(self._operations.drop_export, replica)
        return done()

    # What several routes need.

    def _require_replica(self, request: web.Request, replica: str, *, known: bool = True) -> None:
        """Whoever is bound to runs deals with replicas of these alone, and hears of no other.

        With `known` unset the name may be free.
        """
        if not request[_CALLER].sees_all:
            registered = self._fleet.is_registered(replica)
            run = self._fleet.registration(replica).run if registered else None
            allowed = not known if run is None else request[_CALLER].may(Right.READ, run)
            _require(request, allowed)

    def _held(self, run: RunId) -> list[VersionInfo]:
        """The run's versions; none for a run that is not known (yet)."""
        try:
            return list(self._operations.versions(run))
        except NotFoundError:
            return []

    def _target(self, run: RunId) -> Target | None:
        """Where this daemon's fleet is held; None too for a run that is not known (yet)."""
        try:
            return self._operations.targets(run).target
        except NotFoundError:
            return None

    async def _wait(self, answer: Callable[[], T | None], wait: float) -> T | None:
        def asked() -> tuple[T | None] | None:
            found = answer()
            return (found,) if found is not None or self._draining else None

        reply = await self._announcements.wait_until(asked, wait)
        return reply[0] if reply else None

    def _wait_seconds(self, query: dict[str, str]) -> float:
        return min(number_of(query, "wait", _SECONDS, "seconds, such as 30"), self._limits.long_poll_seconds)

    async def _body(self, request: web.Request, kind: type[Body]) -> Body:
        thing = f"body of {request.method} {request.rel_url.raw_path[:200]}"
        try:
            async with asyncio.timeout(self._progress):
                data = await request.read()
        except TimeoutError:
            raise UsageError(thing, expected=f"the whole body within {self._progress:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            limit = self._limits.json_body_bytes
            raise LimitError(thing, expected=f"at most {limit} bytes (json_body_bytes)") from None
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(thing, expected=f"a {kind.__name__} in JSON", found=str(error)) from None


def _for_those_who_may(right: Right, handler: Handler) -> Handler:
    async def guarded(request: web.Request) -> web.StreamResponse:
        _require(request, request[_CALLER].may(right, request.match_info.get("run")))
        return await handler(request)

    return guarded


def _authorization(request: web.Request) -> str:
    """The token that is offered, as `Authorization` has it. Some clients of the hot-load APIs call it their key."""
    if key := request.headers.get(_KEY, ""):
        return request.headers.get(hdrs.AUTHORIZATION, f"Bearer {key}")
    return request.headers.get(hdrs.AUTHORIZATION, "")


def _knowing_the_caller(answer: Answer) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await answer(request, request[_CALLER])

    return handler


def _require(request: web.Request, allowed: bool) -> None:
    """Raises DeniedError, which says nothing of what there is."""
    if not allowed:
        raise DeniedError("local API", expected="an identity that may do this", found="one that may not")


async def _name(request: web.Request) -> str:
    """Who asks, for the record."""
    if name := request[_CALLER].name:
        return name
    return await asyncio.to_thread(caller_name, request.get_extra_info("socket"))
