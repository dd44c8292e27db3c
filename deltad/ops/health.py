"""What an operator's tools ask over HTTP: alive, ready, metrics, and the status for eyes and scripts.

Serves views that others compute, and offers nothing that changes anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import hdrs, web
from prometheus_client.exposition import choose_encoder

from deltad.client.messages import StatusView, VersionInfo
from deltad.ops.history import Event, History
from deltad.ops.metrics import Metrics
from deltad.ops.page import PAGE_POLICY, render_page, render_run

_HEADERS = {
    hdrs.CACHE_CONTROL: "no-store",
    "Content-Security-Policy": PAGE_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_RUN_VERSIONS = 200


class Readiness(msgspec.Struct, frozen=True):
    """The body of /readyz. Ready is the absence of reasons. `doing`: what each run does or waits for, in words;
    a refused checkpoint is told there, and does not make a daemon unready."""

    ready: bool
    reasons: tuple[str, ...] = ()
    doing: dict[str, str] = {}


def health_app(
    metrics: Metrics,
    *,
    reasons: Callable[[], Sequence[str]],
    status: Callable[[], StatusView],
    versions: Callable[[str], Sequence[VersionInfo]] = lambda run: (),
    history: History | None = None,
    events: Sequence[Event] = (),
) -> web.Application:
    """The application. `reasons` tells why the daemon is not ready, and nothing when it is; `versions` are those of a
    run in ascending order; `history` and `events` may grow meanwhile."""
    past = history or History()

    async def healthz(request: web.Request) -> web.StreamResponse:
        return web.Response(text="alive\n")

    async def readyz(request: web.Request) -> web.StreamResponse:
        found = tuple(reasons())
        doing = {run: held.activity for run, held in status().region.runs.items() if held.activity}
        body = msgspec.json.encode(Readiness(not found, found, doing))
        return web.Response(body=body, status=503 if found else 200, content_type="application/json")

    async def exposition(request: web.Request) -> web.StreamResponse:
        metrics.ready.set(not reasons())
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        body = await asyncio.to_thread(encode, metrics.registry)
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def status_json(request: web.Request) -> web.StreamResponse:
        return web.Response(body=msgspec.json.encode(status()), content_type="application/json")

    async def page(request: web.Request) -> web.StreamResponse:
        text = render_page(status(), past.samples, tuple(events))
        return web.Response(text=text, content_type="text/html", charset="utf-8")

    async def run_page(request: web.Request) -> web.StreamResponse:
        view, run = status(), request.match_info["run"]
        if run not in view.region.runs:
            raise web.HTTPNotFound(text="no such run here\n")
        text = render_run(view, run, versions(run)[-_RUN_VERSIONS:])
        return web.Response(text=text, content_type="text/html", charset="utf-8")

    app = web.Application()
    app.on_response_prepare.append(_add_headers)
    app.add_routes(
        [
            web.get("/", page),
            web.get("/runs/{run}", run_page),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", exposition),
            web.get("/status.json", status_json),
        ]
    )
    return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
