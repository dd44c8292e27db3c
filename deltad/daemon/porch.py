"""Who may stand on the threshold, and for how long: connections of one server, before and between requests.

What is read and written within a request is watched by its handler. Owns one invariant: whoever connects and asks for
nothing whole is cut off after `idle_seconds`, and at most `connections` of all, and `address_connections` of one
address, stand at a time, but for those that came within the last `LOOK_SECONDS`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from deltad.limits import Limits

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

log = structlog.get_logger()

LOOK_SECONDS = 1.0
_WARN_SECONDS = 60.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Porch:
    """Watches the connections of one application. All methods belong to the event loop's thread."""

    def __init__(self, limits: Limits, *, face: str) -> None:
        """`face` names the server in the log."""
        self._limits = limits
        self._face = face
        self._busy: Counter[object] = Counter()
        """Requests under way, by connection."""
        self._idle_since: dict[object, float] = {}
        self._warned_at = -_WARN_SECONDS

    def guard(self, app: web.Application) -> None:
        """Be told of the requests of an application that has not started yet."""
        app.middlewares.insert(0, self._note)

    async def watch(self, runner: web.AppRunner) -> None:
        """Look again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if runner.server is not None:
                self.look(runner.server.connections, loop.time())

    def look(self, connections: list[RequestHandler], now: float) -> None:
        """Cut off those connections, oldest first, that have been idle for too long or are too many."""
        self._idle_since = {c: self._idle_since.get(c, now) for c in connections if not self._busy[c]}
        self._busy = Counter({c: self._busy[c] for c in connections if self._busy[c]})
        left, of = 0, Counter[str]()
        for connection in connections:
            if connection.transport is None:
                continue
            address = _address(connection.transport)
            reason = ""
            if now - self._idle_since.get(connection, now) >= self._limits.idle_seconds:
                reason = f"no request for idle_seconds ({self._limits.idle_seconds:g} s)"
            elif left >= self._limits.connections:
                reason = f"more than connections ({self._limits.connections})"
            elif address and of[address] >= self._limits.address_connections:
                reason = f"more than address_connections ({self._limits.address_connections}) from one address"
            if reason:
                connection.transport.abort()
                self._warn(address, reason, now)
            else:
                left += 1
                of[address] += 1

    def _warn(self, address: str, reason: str, now: float) -> None:
        if now - self._warned_at >= _WARN_SECONDS:
            self._warned_at = now
            log.warning("connection_cut", face=self._face, remote=address, reason=reason)

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        self._busy[connection] += 1
        self._idle_since.pop(connection, None)
        try:
            return await handler(request)
        finally:
            self._busy[connection] -= 1


def _address(transport: asyncio.Transport) -> str:
    """The host at the other end; empty for a Unix socket."""
    found = transport.get_extra_info("peername")
    return str(found[0]) if isinstance(found, tuple) else ""
