"""What an operator's tools ask over HTTP: alive, ready, metrics, and the status for eyes and scripts.

Serves views that others compute, and offers nothing that changes anything. Every word of a view that
reaches the page is escaped, and the page runs no script and loads nothing.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape

import msgspec
from aiohttp import hdrs, web
from prometheus_client.exposition import choose_encoder

from deltad.client.messages import RegionReport, StatusView
from deltad.ops.metrics import Metrics

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em}table{border-collapse:collapse;margin:0 0 1.5em}"
    "th,td{border:1px solid #888;padding:.2em .6em;text-align:left;vertical-align:top}caption{text-align:left;"
    "font-weight:bold;padding:.3em 0}"
)
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

PAGE_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    hdrs.CACHE_CONTROL: "no-store",
    "Content-Security-Policy": PAGE_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Readiness(msgspec.Struct, frozen=True):
    """The body of /readyz. Ready is the absence of reasons. `doing`: what each run does or waits for, in words;
    a refused checkpoint is told there, and does not make a daemon unready."""

    ready: bool
    reasons: tuple[str, ...] = ()
    doing: dict[str, str] = {}


def health_app(
    metrics: Metrics, *, reasons: Callable[[], Sequence[str]], status: Callable[[], StatusView]
) -> web.Application:
    """The application. `reasons` tells why the daemon is not ready, and nothing when it is."""

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
        return web.Response(text=render_page(status()), content_type="text/html", charset="utf-8")

    app = web.Application()
    app.on_response_prepare.append(_add_headers)
    app.add_routes(
        [
            web.get("/", page),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", exposition),
            web.get("/status.json", status_json),
        ]
    )
    return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def render_page(view: StatusView) -> str:
    """The status as one HTML page of plain tables; reloads itself every five seconds."""
    facts = [
        ("ready", "yes" if view.ready else "no: " + "; ".join(view.reasons)),
        ("version", view.version),
        ("backend", f"{view.backend}: {view.backend_reason}"),
        ("uptime", f"{view.uptime:.0f} s"),
        ("store", f"{view.store}, {view.store_bytes} bytes used, {view.free_bytes} bytes free"),
    ]
    links = [
        (link.url, "up" if link.up else f"down: {link.error}", link.activity, str(link.bytes_received))
        for link in view.upstreams
    ]
    regions = [(view.region, "here")]
    regions += [(r.report, f"{r.age:.0f} s ago" if r.fresh else f"silent for {r.age:.0f} s") for r in view.regions]
    runs = [
        (report.daemon, heard, run, held.latest, held.activity)
        for report, heard in regions
        for run, held in report.runs.items()
    ]
    tables = (
        _table("Daemon", ("fact", "value"), facts),
        _table("Upstreams", ("url", "state", "activity", "bytes received"), links),
        _table("Runs", ("daemon", "heard", "run", "latest", "activity"), runs),
        _table(
            "Replicas",
            ("daemon", "run", "replica", "state", "serves", "behind", "error"),
            [row for report, _ in regions for row in _replica_rows(report)],
        ),
    )
    name = escape(view.daemon)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>deltad {name}</title>'
        f'<meta http-equiv="refresh" content="5"><style>{_STYLE}</style></head>'
        f"<body><h1>deltad {name}</h1>{''.join(tables)}</body></html>\n"
    )


def _replica_rows(report: RegionReport) -> list[tuple[str, ...]]:
    return [
        (
            report.daemon,
            run,
            replica.replica,
            replica.state.value,
            replica.version,
            str(replica.staleness),
            replica.error,
        )
        for run, held in report.runs.items()
        for replica in held.replicas
    ]


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
