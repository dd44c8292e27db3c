"""The operator's page and probes, over real HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from deltad.cli.output import plain
from deltad.client.messages import (
    RegionReport,
    RegionView,
    ReplicaReport,
    ReplicaState,
    RunReport,
    StatusView,
    UpstreamView,
)
from deltad.ops.health import health_app
from deltad.ops.metrics import Metrics
from deltad.ops.overview import status_blocks
from deltad.ops.page import PAGE_POLICY, render_page
from tests.cli.views import region, replica, status, version
from tests.kit.operations import RUN, status_view


@dataclass
class Operator:
    """What a probe can reach, and what the daemon says behind it."""

    url: str
    http: aiohttp.ClientSession
    metrics: Metrics
    reasons: list[str] = field(default_factory=list)
    status: StatusView = field(default_factory=status_view)

    async def get(self, path: str, **headers: str) -> tuple[int, aiohttp.typedefs.LooseHeaders, str]:
        async with self.http.get(self.url + path, headers=headers) as reply:
            return reply.status, reply.headers, await reply.text()


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    async with aiohttp.ClientSession() as http:
        operator = Operator("", http, Metrics.create("0.1.0"))
        app = health_app(operator.metrics, reasons=lambda: operator.reasons, status=lambda: operator.status)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        operator.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield operator
        await runner.cleanup()


class Page(HTMLParser):
    """What a browser would make of a page: its elements and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def busy_status(text: str = "transferring v000004") -> StatusView:
    replica = ReplicaReport("r0", RUN, "bf16", ReplicaState.VERIFIED, "v000003", "00", text, text, staleness=1)
    report = RegionReport("b", "boot-b", 4, {RUN: RunReport("v000004", text, (replica,))})
    return status_view(
        daemon=text[:64],
        ready=False,
        reasons=(text,),
        region=RegionReport("a", "boot-1", 9, {RUN: RunReport("v000004", text)}),
        upstreams=(UpstreamView("http://u:7700", False, text, 0.08, 12, 3.5, text),),
        regions=(RegionView(report, 2.0, True), RegionView(report, 90.0, False)),
    )


async def test_alive_says_alive_even_when_it_is_not_ready(operator: Operator) -> None:
    operator.reasons = ["store: full"]
    assert (await operator.get("/healthz"))[0] == 200


async def test_ready_is_the_absence_of_reasons(operator: Operator) -> None:
    status, _, body = await operator.get("/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "reasons": [], "doing": {}})
    operator.reasons = ["store: 3 bytes free", "upstream b: refused"]
    status, _, body = await operator.get("/readyz")
    assert (status, json.loads(body)) == (503, {"ready": False, "reasons": operator.reasons, "doing": {}})


async def test_the_ready_metric_says_what_readyz_says(operator: Operator) -> None:
    assert "\ndeltad_ready 1.0\n" in (await operator.get("/metrics"))[2]
    operator.reasons = ["store: full"]
    assert "\ndeltad_ready 0.0\n" in (await operator.get("/metrics"))[2]


async def test_metrics_come_in_the_format_that_the_scraper_asks_for(operator: Operator) -> None:
    status, headers, body = await operator.get("/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert 'deltad_build_info{version="0.1.0"} 1.0' in body
    _, headers, body = await operator.get("/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


async def test_status_json_is_the_whole_status(operator: Operator) -> None:
    operator.status = busy_status()
    _, headers, body = await operator.get("/status.json")
    assert headers["Content-Type"].startswith("application/json")
    assert msgspec.json.decode(body, type=StatusView) == operator.status


async def test_the_page_shows_the_state_and_may_load_nothing(operator: Operator) -> None:
    operator.status = busy_status()
    status, headers, body = await operator.get("/")
    assert status == 200
    assert headers["Content-Security-Policy"] == PAGE_POLICY
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in PAGE_POLICY
    assert "unsafe" not in PAGE_POLICY
    page = Page(body)
    assert not {"img", "link", "iframe", "form", "object"} & set(page.tags)
    assert {"http://u:7700", "v000004", "r0", "verified", "1 min 30 s ago"} <= set(page.text)


def test_the_page_says_what_the_status_command_says_word_for_word() -> None:
    info = version("v000003")
    good = replica("r1", ReplicaState.VERIFIED, info)
    upstream = UpstreamView("http://u:7700", True, "", 0.08, 3 << 20, 2e6)
    view = status(info, regions=(region("border-b", good),), upstreams=(upstream,))
    page = " ".join(Page(render_page(view)).text)
    words = [word for line in plain(status_blocks(view)).splitlines() for word in re.split(r"  +", line)]
    assert {"match", "1.00 MiB", "border-a, deltad 0.1.0, up 1 h 2 min"} <= set(words)
    assert [word for word in words if word.removesuffix(":") not in page] == []


def colours(style: str) -> dict[str, str]:
    return dict(re.findall(r"\.(\w+)\{color:(#[0-9a-f]{6})", style))


def contrast_with_white(colour: str) -> float:
    """As WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


def test_what_is_not_ready_has_a_colour_that_can_be_read() -> None:
    html = render_page(status_view(ready=False, reasons=("store: full",)))
    assert '<td class="bad">no: store: full</td>' in html
    found = colours(html)
    assert set(found) == {"good", "bad", "warn", "dim"}
    assert min(map(contrast_with_white, found.values())) >= 4.5


async def test_the_style_is_the_one_that_the_policy_names(operator: Operator) -> None:
    _, _, body = await operator.get("/")
    style = re.search(r"<style>(.*?)</style>", body, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in PAGE_POLICY


async def test_nothing_can_be_changed_from_here(operator: Operator) -> None:
    for path in ("/", "/healthz", "/readyz", "/metrics", "/status.json"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with operator.http.request(method, operator.url + path) as reply:
                assert reply.status == 405
    assert (await operator.get("/nothing"))[0] == 404


@given(text=st.text(max_size=40))
def test_no_text_of_a_peer_becomes_markup(text: str) -> None:
    plain, marked = Page(render_page(busy_status("x"))), Page(render_page(busy_status(f"<b>&{text}</td><script>")))
    assert marked.tags == plain.tags
