"""The status page in a real browser: what an operator sees in every state, and that nothing there can do harm."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from deltad.client.messages import (
    RegionReport,
    ReplicaState,
    RunReport,
    ScrubView,
    Seconds,
    StatusView,
    UpstreamView,
    VersionInfo,
)
from deltad.ops.health import health_app
from deltad.ops.history import Event, Events, History, behind
from deltad.ops.metrics import Metrics
from tests.cli.views import region, replica, status, version
from tests.kit.browser import Browser

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u202e'
EVENTS = (
    Event(1_700_000_000.0, "info", "version published: run policy, version v000007"),
    Event(1_700_000_100.0, "warning", "mirror not advanced: run policy, error disk"),
)


def lineage(count: int = 8) -> tuple[VersionInfo, ...]:
    """An anchor and deltas, a skip delta, and a second epoch that goes on from an older version."""
    found = [version("v000001", kind="anchor", sequence=1, delta_bytes=180 << 20, density=1.0)]
    for number in range(2, count):
        before = f"v{number - 1:06d}"
        found.append(version(f"v{number:06d}", parent=before, base=before, sequence=number))
    found[4] = msgspec.structs.replace(found[4], base="v000002")
    found.append(version(f"v{count - 2:06d}@e2", parent="v000004", base="v000004", sequence=count))
    return tuple(found)


def healthy() -> StatusView:
    versions = lineage()
    newest = versions[-1]
    replicas = [replica(f"r{i}", ReplicaState.VERIFIED, newest, seconds=Seconds(pause=0.012)) for i in range(3)]
    below = region("border-b", *replicas, latest=newest.version)
    return status(*versions, regions=(below,))


def transferring() -> StatusView:
    view = healthy()
    words = "pulling v000007@e2: 120 of 300 objects, 12.0 MB/s"
    run = msgspec.structs.replace(view.region.runs["policy"], activity=words)
    upstream = UpstreamView("https://far:7700", True, words, 0.09, 512 << 20, 12e6)
    return msgspec.structs.replace(
        view, region=msgspec.structs.replace(view.region, runs={"policy": run}), upstreams=(upstream,)
    )


def stale() -> StatusView:
    view = healthy()
    slow = replica("r9", ReplicaState.UNKNOWN, view.region.runs["policy"].versions[1], staleness=6)
    return msgspec.structs.replace(
        view,
        ready=False,
        reasons=("upstream https://far:7700: no route to host",),
        upstreams=(UpstreamView("https://far:7700", False, "waits 30 s", 0.0, 0, 0.0, "no route to host"),),
        regions=(*view.regions, region("border-c", slow, latest="v000002", age=400.0, fresh=False)),
    )


def alarm() -> StatusView:
    view = healthy()
    wrong = replica("r7", ReplicaState.UNKNOWN, view.region.runs["policy"].versions[-1], root="ee" * 32)
    return msgspec.structs.replace(
        view,
        ready=False,
        reasons=("scrub: 1 object is damaged",),
        regions=(*view.regions, region("border-c", wrong, latest=view.region.runs["policy"].latest)),
        scrub=ScrubView(damaged=1),
    )


def twenty() -> StatusView:
    view = healthy()
    newest = view.region.runs["policy"].versions[-1]
    replicas = [replica(f"r{i}", ReplicaState.STAGING, newest) for i in range(20)]
    peers = (region(f"border-{i:02d}", each, latest="v000005") for i, each in enumerate(replicas))
    return msgspec.structs.replace(view, regions=tuple(peers))


def hostile() -> StatusView:
    view = healthy()
    info = msgspec.structs.replace(view.region.runs["policy"].versions[-1], coder=HOSTILE, kind=HOSTILE, reason=HOSTILE)
    run = RunReport(info.version, HOSTILE, (replica("r0", ReplicaState.READY, info, error=HOSTILE),), (info,))
    return msgspec.structs.replace(
        view,
        daemon=HOSTILE,
        reasons=(HOSTILE,),
        ready=False,
        region=RegionReport(HOSTILE, HOSTILE, 1, {"policy": run, HOSTILE: run}),
        upstreams=(UpstreamView(HOSTILE, True, HOSTILE, 0.1, 1, 1.0, HOSTILE, HOSTILE),),
    )


STATES: dict[str, Callable[[], StatusView]] = {
    "fresh": lambda: msgspec.structs.replace(status(), region=RegionReport("border-a", "boot-1", 1, {})),
    "healthy": healthy,
    "transferring": transferring,
    "stale": stale,
    "alarm": alarm,
    "twenty": twenty,
    "hostile": hostile,
}
SAYS = {
    "fresh": ["No run is declared or held here yet.", "none registered"],
    "healthy": ["freshness", "border-b", "3 of 3", "match", "Lineage of", "mirror not advanced"],
    "transferring": ["120 of 300 objects", "at 11.4 MiB/s"],
    "stale": ["no route to host", "v000002 served and not at target", "unknown"],
    "alarm": ["integrity alarm: 1 replica of policy", "damaged and not healed: 1 stored object", "WRONG"],
    "twenty": ["border-00", "border-19", "1 staging"],
    "hostile": ["alert(1)"],
}


class Desk:
    """The operator's page of a daemon whose status the test sets."""

    def __init__(self) -> None:
        self.view = healthy()
        self.url = ""
        self.history = History()
        self.asked: list[str] = []
        self.first = asyncio.Event()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    app = health_app(
        Metrics.create("0.1.0"),
        reasons=lambda: desk.view.reasons,
        status=lambda: desk.view,
        versions=lambda run: desk.view.region.runs[run].versions,
        history=desk.history,
        events=EVENTS,
    )

    @web.middleware
    async def note(request: web.Request, handler: Callable[..., object]) -> web.StreamResponse:
        desk.asked.append(request.path)
        reply = await handler(request)  # type: ignore[misc]
        desk.first.set()
        return reply  # type: ignore[no-any-return]

    app.middlewares.append(note)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    desk.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield desk
    await runner.cleanup()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(tmp_path_factory.mktemp("chromium"))


class Elements(HTMLParser):
    """The elements of a document, their attributes, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def text_of(document: str) -> str:
    """What is to be read on a page, by a browser's own account of it."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", document, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


@pytest.mark.parametrize("state", STATES)
async def test_every_state_says_what_an_operator_has_to_know(
    state: str, desk: Desk, browser: Browser, tmp_path: Path
) -> None:
    desk.view = STATES[state]()
    for moment in range(30):
        desk.history.note(desk.view, moment * 10.0)
    document = await asyncio.to_thread(browser.document, desk.url)
    for words in SAYS[state]:
        assert words in text_of(document)
    kept = os.environ.get("DELTAD_TEST_PICTURES")
    picture = Path(kept) / f"{state}.png" if kept else tmp_path / "page.png"
    path, console = await asyncio.to_thread(browser.picture, desk.url, picture)
    assert console == "", "nothing is refused by the page's own policy, and no script fails"
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert set(desk.asked) <= {"/", "/favicon.ico"}, "nothing is loaded"


@pytest.mark.parametrize("path", ["/", "/runs/policy"])
async def test_no_text_of_a_peer_becomes_an_element_or_a_script(path: str, desk: Desk, browser: Browser) -> None:
    desk.view = hostile()
    document = await asyncio.to_thread(browser.document, desk.url + path)
    elements = Elements()
    elements.feed(document)
    assert elements.names.count("script") == 1
    assert "img" not in elements.names
    assert not [name for name in elements.attributes if name.startswith("on")]
    assert not [address for address in elements.links if not re.fullmatch(r"/(runs/[\w%.()-]+)?", address)]
    assert "\u202e" not in document, "nor does it turn the writing around"


async def test_the_script_brings_the_page_up_to_date_without_loading_it_again(desk: Desk, browser: Browser) -> None:
    document = asyncio.create_task(asyncio.to_thread(browser.document, desk.url, budget=12_000))
    await desk.first.wait()
    desk.view = transferring()
    assert "120 of 300 objects" in text_of(await document)
    assert desk.asked.count("/") >= 2


async def test_a_run_has_a_page_of_its_own(desk: Desk, browser: Browser, tmp_path: Path) -> None:
    document = await asyncio.to_thread(browser.document, f"{desk.url}/runs/policy")
    text = text_of(document)
    for words in ("changed elements", "bytes, by delta", "time up to here", "v000001", "v000006@e2"):
        assert words in text
    assert document.count('<circle class="dot"') == 3 * len(lineage()) - 2, "an anchor is no delta"
    kept = os.environ.get("DELTAD_TEST_PICTURES")
    _, console = await asyncio.to_thread(
        browser.picture, f"{desk.url}/runs/policy", (Path(kept) if kept else tmp_path) / "run.png"
    )
    assert console == ""
    missing = await asyncio.to_thread(browser.document, f"{desk.url}/runs/{HOSTILE.replace('/', '')}")
    assert "no such run here" in missing


def test_how_far_a_region_is_behind_is_told_by_its_store_and_its_slowest_replica() -> None:
    view = stale()
    regions = [*healthy().regions, *view.regions[-1:]]
    own = region("border-a", latest="v000006@e2")
    own = msgspec.structs.replace(own, report=view.region)
    assert behind([own, *regions]) == {
        ("border-a", "policy"): 0,
        ("border-b", "policy"): 0,
        ("border-c", "policy"): 6,
    }


def test_samples_are_taken_each_ten_seconds_and_go_with_their_region() -> None:
    history = History()
    for moment in range(25):
        history.note(healthy(), float(moment))
    assert len(history.samples["border-b", "policy"]) == 3
    history.note(status(), 30.0)
    assert set(history.samples) == {("border-a", "policy")}


def test_events_are_what_is_amiss_and_what_an_operator_wants_to_see() -> None:
    events = Events()
    said = [
        (logging.INFO, {"event": "version_published", "run": "r", "version": "v000001", "level": "info"}),
        (logging.INFO, {"event": "request", "path": "/"}),
        (logging.WARNING, {"event": "mirror_not_advanced", "error": "x" * 900}),
        (logging.ERROR, "a library's own words"),
    ]
    for level, words in said:
        events.emit(logging.LogRecord("x", level, "", 0, words, (), None))
    assert [event.level for event in events.last] == ["info", "warning", "error"]
    assert events.last[0].words == "version published: run r, version v000001"
    assert len(events.last[1].words) == 500
