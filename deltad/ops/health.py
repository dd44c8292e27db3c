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

from deltad.client.messages import StatusView
from deltad.ops.blocks import Block, Cell, Facts, Line, Table, Tone
from deltad.ops.metrics import Metrics
from deltad.ops.overview import status_blocks

_TONES = {Tone.PLAIN: "", Tone.GOOD: "good", Tone.BAD: "bad", Tone.WARN: "warn", Tone.DIM: "dim"}
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em;color:#1b1b1b;background:#fff}"
    "table{border-collapse:collapse;margin:0 0 1.5em}"
    "th,td{border:1px solid #888;padding:.2em .6em;text-align:left;vertical-align:top}"
    "caption{text-align:left;font-weight:bold;padding:.3em 0}"
    ".right{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
    # All at least 4.5 to 1 on white; what a colour means is in the words too.
    ".good{color:#17692c}.bad{color:#b3161b;font-weight:bold}.warn{color:#855400}.dim{color:#595959}"
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
    """The status as one HTML page of the tables of `deltad status`; reloads itself every five seconds."""
    name = escape(view.daemon)
    body = "".join(_drawn(block) for block in status_blocks(view))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>deltad {name}</title>'
        f'<meta http-equiv="refresh" content="5"><style>{_STYLE}</style></head>'
        f"<body><h1>deltad {name}</h1>{body}</body></html>\n"
    )


def _drawn(block: Block) -> str:
    match block:
        case Line(text):
            return f"<p>{_cell(text, 'span')}</p>"
        case Facts(title, facts):
            head = ""
            rows = [f'<th scope="row">{escape(name)}</th>{_cell(value)}' for name, value in facts]
        case Table(title, columns, cells, empty):
            if not cells:
                return f"<p><b>{escape(title)}</b>: {_cell(Cell(empty, Tone.DIM), 'span')}</p>"
            heads = "".join(f'<th scope="col"{_class(right=c.right)}>{escape(c.name)}</th>' for c in columns)
            head = f"<thead><tr>{heads}</tr></thead>"
            rows = [
                "".join(_cell(cell, right=column.right) for cell, column in zip(row, columns, strict=True))
                for row in cells
            ]
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    return f"<table>{caption}{head}<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _cell(cell: Cell | str, tag: str = "td", *, right: bool = False) -> str:
    text, tone = (cell.text, cell.tone) if isinstance(cell, Cell) else (cell, Tone.PLAIN)
    return f"<{tag}{_class(tone, right=right)}>{escape(text)}</{tag}>"


def _class(tone: Tone = Tone.PLAIN, *, right: bool = False) -> str:
    names = " ".join(filter(None, (_TONES[tone], "right" if right else "")))
    return f' class="{names}"' if names else ""
