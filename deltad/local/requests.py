"""Requests to the local API parsed, and its answers worded: what every route of it needs.

Owns the invariant that a path variable, a query or a body is a type of ours before anybody uses it, and that every
refusal is an `ErrorReply` with its error's status.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from deltad.client.messages import ErrorReply
from deltad.errors import DeltadError, NotFoundError, UsageError
from deltad.types import RunId, Version, parse_daemon_name, parse_run, parse_version

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PATH_CHARACTERS = 4096

log = structlog.get_logger()


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error becomes an ErrorReply; only what nobody foresaw becomes a 500, with its traceback in the log."""
    began = time.monotonic()
    try:
        response = await handler(request)
    except DeltadError as error:
        response = _refusal(error)
    except web.HTTPException as error:
        response = _refusal(_routing_error(request, error), status=error.status)
    except Exception:
        log.exception("internal_error", method=request.method, path=request.rel_url.raw_path)
        sentence = f"{request.method} {request.rel_url.raw_path[:200]}: internal error; see the daemon's log"
        response = json_reply(ErrorReply("Internal", sentence, exit_code=70), status=500)
    log.debug(
        "request",
        method=request.method,
        path=request.rel_url.raw_path,
        status=response.status,
        seconds=round(time.monotonic() - began, 6),
    )
    return response


def _routing_error(request: web.Request, error: web.HTTPException) -> DeltadError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods))
        return UsageError(f"{request.rel_url.raw_path[:200]}", expected=allowed, found=request.method)
    if isinstance(error, web.HTTPNotFound):
        return NotFoundError(f"{request.rel_url.raw_path[:200]}", found="no such route")
    return UsageError(f"{request.method} {request.rel_url.raw_path[:200]}", found=error.reason)


def _refusal(error: DeltadError, *, status: int | None = None) -> web.Response:
    reply = ErrorReply(error.kind, str(error), error.retryable, error.exit_code)
    return json_reply(reply, status=status or error.http_status)


def json_reply(reply: msgspec.Struct, *, status: int = 200) -> web.Response:
    """A reply that is a struct, in JSON."""
    return web.Response(body=msgspec.json.encode(reply), status=status, content_type="application/json")


def done() -> web.Response:
    """The reply that says only that it was done."""
    return web.Response(body=b"{}", content_type="application/json")


def run_of(request: web.Request) -> RunId:
    """The run in the path. Raises UsageError."""
    return parse_run(request.match_info["run"])


def version_of(request: web.Request) -> Version:
    """The version in the path. Raises UsageError."""
    return parse_version(request.match_info["version"])


def replica_of(request: web.Request) -> str:
    """The replica in the path. Raises UsageError."""
    return parse_daemon_name(request.match_info["replica"])


def query_of(request: web.Request, *known: str) -> dict[str, str]:
    """The query, each parameter at most once and none but the known. Raises UsageError."""
    query: dict[str, str] = {}
    for name, value in request.query.items():
        if name not in known or name in query:
            expected = f"each of {', '.join(known)} at most once" if known else "no query"
            raise UsageError(f"query of {request.rel_url.raw_path[:200]}", expected=expected, found=f"{name[:80]!r}")
        query[name] = value
    return query


def optional_version(query: dict[str, str], name: str) -> Version | None:
    """A version in the query, if it is there. Raises UsageError."""
    return parse_version(query[name]) if query.get(name) else None


def number_of(query: dict[str, str], name: str, form: re.Pattern[str], expected: str) -> float:
    """A number in the query, 0 if it is not there. Raises UsageError for one that is not of `form`."""
    value = query.get(name, "0")
    if not form.fullmatch(value):
        raise UsageError(f"query parameter {name}", expected=expected, found=f"{value[:80]!r}")
    return float(value)


def check_directory(directory: str) -> None:
    """A directory of this host; a relative one would be relative to the wrong process. Raises UsageError."""
    if not directory.startswith("/") or "\0" in directory or len(directory) > _PATH_CHARACTERS:
        raise UsageError(f"directory {directory[:200]!r}", expected="an absolute path of this host")
