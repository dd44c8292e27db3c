"""No route answers without the right identity and scope, and a refusal does not say what exists (P39).

One table of all routes and all principals, over the real servers. Who is missing from a route's line is refused.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from deltad.client.messages import RegionReport, RunReport
from deltad.daemon.hotloads import routes as hot_load_routes
from deltad.hotload.ledger import Ledger, Load
from deltad.hotload.loading import HotLoads
from deltad.local.binding import bind_unix_socket, may_connect
from deltad.local.fleet import Fleet
from deltad.local.server import LocalServer
from deltad.protocol.access import Doorkeeper, Principal, Right
from deltad.relay.server import RelayServer
from deltad.relay.wire import SEAL, seal
from deltad.store.announce import Announcements
from deltad.store.bucket.obstore import ObstoreBucket
from deltad.store.disk import DISK
from deltad.store.store import Store
from deltad.types import RunId
from tests.hotload.site import Daemon as HotLoadDaemon
from tests.kit.operations import RUN, MemoryOperations
from tests.kit.versions import Lineage

PRINCIPALS = {
    "reader": Principal("reader", frozenset({Right.READ})),
    "reader of policy": Principal("reader of policy", frozenset({Right.READ}), (RUN,)),
    "reader of other": Principal("reader of other", frozenset({Right.READ}), ("other",)),
    "publisher": Principal("publisher", frozenset({Right.PUBLISH}), (RUN,)),
    "controller": Principal("controller", frozenset({Right.CONTROL}), (RUN,)),
    "administrator of policy": Principal("administrator of policy", frozenset({Right.ADMINISTER}), (RUN,)),
    "administrator": Principal("administrator", frozenset({Right.ADMINISTER})),
}
STRANGERS: dict[str, dict[str, str]] = {
    "nobody": {},
    "wrong token": {"Authorization": "Bearer of-no-one"},
    "half a token": {"Authorization": "Bearer token of administ"},
    "basic": {"Authorization": "Basic token of administrator"},
    "token in the query": {},
}
ROOT = {"administrator"}
ADMINISTERS = ROOT | {"administrator of policy"}
READS_POLICY = ADMINISTERS | {"reader", "reader of policy"}
READS = READS_POLICY | {"reader of other"}
DIGEST = "0" * 64

RELAY: list[tuple[str, str, set[str]]] = [
    ("GET", "/v1/relay/hello", READS),
    ("GET", "/v1/relay/runs", READS),
    ("GET", "/v1/relay/runs/policy/latest", READS_POLICY),
    ("GET", "/v1/relay/runs/policy/target", READS_POLICY),
    ("GET", "/v1/relay/runs/policy/heartbeat", READS_POLICY),
    ("GET", "/v1/relay/runs/policy/records", READS_POLICY),
    ("GET", "/v1/relay/runs/policy/records/1.1", READS_POLICY),
    ("GET", "/v1/relay/runs/policy/edges", READS_POLICY),
    ("GET", f"/v1/relay/objects/{DIGEST}", READS),
    ("POST", "/v1/relay/report", READS),
]
INFERENCE = "/v1alpha1/inference"
HOT_LOADS: list[tuple[str, str, set[str]]] = [
    ("POST", f"{INFERENCE}/hotLoads", ADMINISTERS | {"publisher"}),
    ("GET", f"{INFERENCE}/hotLoads", READS),
    ("GET", f"{INFERENCE}/hotLoads/h1", READS_POLICY),
    ("GET", f"{INFERENCE}/hotLoads/h1/replicas", READS_POLICY),
    ("POST", f"{INFERENCE}/hotLoads/h1:cancel", ADMINISTERS | {"publisher"}),
    ("GET", f"{INFERENCE}/deployments", READS),
    ("GET", f"{INFERENCE}/deployments/d", READS_POLICY),
    ("POST", "/hot_load/v1/models/hot_load", ADMINISTERS | {"publisher"}),
    ("GET", "/hot_load/v1/models/hot_load", READS_POLICY),
    ("POST", "/hot_load/v1/models/hot_load/hint", ADMINISTERS | {"publisher"}),
    ("GET", "/v1/accounts", READS),
    ("GET", "/v1/accounts/lab/deployments/d", READS_POLICY),
    ("GET", "/v1/accounts/lab/deployments/d/ledger", READS_POLICY),
    ("DELETE", "/v1/accounts/lab/deployments/d/ledger", ADMINISTERS | {"publisher"}),
]
LOCAL: list[tuple[str, str, set[str]]] = [
    ("GET", "/v1/status", ROOT | {"reader"}),
    ("GET", "/v1/runs/policy/versions", READS_POLICY),
    ("GET", "/v1/runs/policy/versions/v1", READS_POLICY),
    ("POST", "/v1/runs/policy/versions/v1/pin", ADMINISTERS | {"controller"}),
    ("DELETE", "/v1/runs/policy/versions/v1/pin", ADMINISTERS | {"controller"}),
    ("GET", "/v1/runs/policy/records/v1", READS_POLICY),
    ("GET", "/v1/runs/policy/edges/v1", READS_POLICY),
    ("GET", "/v1/runs/policy/latest", READS_POLICY),
    ("POST", "/v1/runs/policy/publish", ADMINISTERS | {"publisher"}),
    ("POST", "/v1/runs/policy/ranks", ADMINISTERS | {"publisher"}),
    ("POST", "/v1/runs/policy/steps", ADMINISTERS | {"publisher"}),
    ("POST", "/v1/runs/policy/pull", ADMINISTERS | {"controller"}),
    ("POST", "/v1/runs/policy/export", ADMINISTERS),
    ("POST", "/v1/runs/policy/verify", ADMINISTERS | {"controller"}),
    ("GET", "/v1/runs/policy/target", READS_POLICY),
    ("POST", "/v1/runs/policy/target", ADMINISTERS | {"controller"}),
    ("GET", "/v1/runs/policy/plan", READS_POLICY),
    ("POST", "/v1/collect", ROOT),
    ("GET", "/v1/runs/policy/fleet", READS_POLICY),
    ("GET", f"/v1/objects/{DIGEST}", READS),
    ("POST", "/v1/replicas", READS_POLICY),
    ("GET", "/v1/replicas/r0/next", READS_POLICY),
    ("POST", "/v1/replicas/r0/state", READS_POLICY),
    ("DELETE", "/v1/replicas/r0", READS_POLICY),
    *HOT_LOADS,
]
BODIES = {
    "/v1/runs/policy/publish": {"directory": "/step_2"},
    "/v1/runs/policy/pull": {"wait": 0},
    "/v1/runs/policy/export": {"directory": "/away"},
    "/v1/runs/policy/target": {"act": "hold"},
    "/v1/replicas": {"replica": "r0", "run": "policy", "variant": "bf16"},
    "/v1/replicas/r0/state": {"state": "staging"},
    f"{INFERENCE}/hotLoads": {"deploymentId": "d", "hotLoadId": "h2", "identity": "i", "type": 1},
    "/v1/relay/report": {"daemon": "below", "boot": "b", "sequence": 1},
}


class Served:
    """Both servers in clear on one port, so that a token is all that counts, and the local one on a socket too."""

    def __init__(self, home: Path) -> None:
        self.store = Store.open(home / "store")
        Lineage(RUN, tensors=1).publish().commit_into(self.store)
        self.operations = MemoryOperations(RUN, RunId("other"))
        self.operations.add(1)
        self.fleet = Fleet("a", "boot-1")
        self.reports: list[RegionReport] = []
        door = Doorkeeper(lambda: ((f"token of {name}", who) for name, who in PRINCIPALS.items()))
        announcements = Announcements()
        (home / "ledger.json").write_bytes(msgspec.json.encode(Ledger((Load("h1", "one", "", {}, 1.0, 1.0),))))
        loads = HotLoads(
            "d",
            RUN,
            ObstoreBucket("memory:///"),
            HotLoadDaemon(),
            ledger=home / "ledger.json",
            scratch=home,
            files=DISK,
            timeout=60.0,
            account="lab",
        )
        faces = hot_load_routes([loads])
        self.local = LocalServer(self.store, self.operations, self.fleet, announcements, door=door, faces=faces).app()
        self.relay = RelayServer(
            self.store, daemon="a", boot="b", door=door, announcements=announcements, on_report=self.reports.append
        ).app()
        self.socket = home / "deltad.sock"
        self.urls: dict[str, str] = {}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    runners = []
    for name, app in (("local", served.local), ("relay", served.relay)):
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        if name == "local":
            await web.SockSite(runner, bind_unix_socket(served.socket)).start()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        port = next(address for address in runner.addresses if isinstance(address, tuple))[1]
        served.urls[name] = f"http://127.0.0.1:{port}"
    yield served
    for runner in runners:
        await runner.cleanup()
    served.store.close()


async def ask(
    session: aiohttp.ClientSession, method: str, url: str, headers: dict[str, str], path: str
) -> tuple[int, bytes]:
    body = json.dumps(BODIES.get(path, {})).encode() if method == "POST" else None
    sealed = {SEAL: seal(body)} if body is not None else {}
    if path.startswith("/hot_load"):
        sealed["fireworks-deployment"] = "accounts/lab/deployments/d"
    async with session.request(method, url, data=body, headers={**headers, **sealed}) as response:
        return response.status, await response.read()


def routes(app: web.Application) -> set[tuple[str, str]]:
    filled = {"run": RUN, "version": "v1", "digest": DIGEST, "replica": "r0"}
    filled |= {"account": "lab", "load": "h1", "deployment": "d"}
    found = set()
    for route in app.router.routes():
        assert route.resource is not None
        version = "1.1" if "/relay/" in route.resource.canonical else "v1"
        if route.method != "HEAD":
            found.add((route.method, route.resource.canonical.format(**{**filled, "version": version})))
    return found


@pytest.mark.parametrize("name", ["relay", "local"])
async def test_every_route_answers_those_who_may_and_nobody_else(served: Served, name: str) -> None:
    table = {"relay": RELAY, "local": LOCAL}[name]
    app = {"relay": served.relay, "local": served.local}[name]
    assert routes(app) == {(method, path) for method, path, _ in table}, "the table has every route"
    async with aiohttp.ClientSession() as session:
        for method, path, may in table:
            for who in PRINCIPALS:
                if path.startswith("/v1/replicas/") and not served.fleet.is_registered("r0"):
                    body = json.dumps(BODIES["/v1/replicas"]).encode()
                    headers = {"Authorization": "Bearer token of administrator"}
                    await session.post(served.urls[name] + "/v1/replicas", data=body, headers=headers)
                headers = {"Authorization": f"Bearer token of {who}"}
                status, _ = await ask(session, method, served.urls[name] + path, headers, path)
                assert status < 500
                assert (status not in (401, 403)) == (who in may), (method, path, who, status)
            for who, headers in STRANGERS.items():
                query = "?access_token=token%20of%20administrator" if who == "token in the query" else ""
                status, _ = await ask(session, method, served.urls[name] + path + query, headers, path)
                assert status == 401, (method, path, who)


@pytest.mark.parametrize("name", ["relay", "local"])
async def test_a_refusal_is_the_same_for_what_exists_and_what_does_not(served: Served, name: str) -> None:
    headers = {"Authorization": "Bearer token of reader of other"}
    prefix = {"relay": "/v1/relay", "local": "/v1"}[name]
    there = [f"{prefix}/runs/policy/latest", *(["/v1/replicas/r0/next"] if name == "local" else [])]
    absent = [path.replace("policy", "no-such-run").replace("r0", "no-such-replica") for path in there]
    async with aiohttp.ClientSession() as session:
        admin = {"Authorization": "Bearer token of administrator"}
        await ask(session, "POST", served.urls["local"] + "/v1/replicas", admin, "/v1/replicas")
        said = {await ask(session, "GET", served.urls[name] + path, headers, path) for path in (*there, *absent)}
        assert len(said) == 1
        assert next(iter(said))[0] == 403
        strange = {
            await ask(session, "GET", served.urls[name] + path, {}, path) for path in (*there, *absent, "/", "/v1/x")
        }
        assert len(strange) == 1, "a stranger does not even hear which routes there are"
        assert next(iter(strange))[0] == 401


async def test_whoever_is_bound_to_runs_sees_no_other_in_a_list_and_reports_on_no_other(served: Served) -> None:
    async with aiohttp.ClientSession() as session:
        url = served.urls["relay"] + "/v1/relay/runs"
        for who, runs in (("reader of policy", [RUN]), ("reader of other", [])):
            _, data = await ask(session, "GET", url, {"Authorization": f"Bearer token of {who}"}, "")
            assert msgspec.json.decode(data)["runs"] == runs
        said = {run: RunReport("", "", ()) for run in (RUN, "other")}
        report = RegionReport("below", "b", 1, said, (RegionReport("deeper", "b", 1, said),))
        body = msgspec.json.encode(report)
        headers = {"Authorization": "Bearer token of reader of policy", SEAL: seal(body)}
        async with session.post(served.urls["relay"] + "/v1/relay/report", data=body, headers=headers) as response:
            assert response.status == 200
    (taken,) = served.reports
    assert [list(each.runs) for each in (taken, *taken.below)] == [[RUN], [RUN]]


async def test_over_the_unix_socket_the_daemons_own_user_needs_no_token(served: Served) -> None:
    connector = aiohttp.UnixConnector(str(served.socket))
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://x/v1/status") as response:
        assert response.status == 200


def test_over_the_unix_socket_the_kernel_says_who_may(tmp_path: Path) -> None:
    with (
        bind_unix_socket(tmp_path / "s") as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller,
    ):
        caller.connect(str(tmp_path / "s"))
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert may_connect(accepted)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_user_is_refused_unless_in_the_group_that_is_named() -> None:
    groups = os.getgroups()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller,
    ):
        listener.bind(f"\0deltad-test-{os.getpid()}")
        listener.listen()
        try:
            os.setgroups([4242])
            os.seteuid(65534)
            caller.connect(listener.getsockname())
        finally:
            os.seteuid(0)
            os.setgroups(groups)
        accepted, _ = listener.accept()
        with accepted:
            assert not may_connect(accepted)
            assert not may_connect(accepted, 4243)
            assert may_connect(accepted, 4242)


async def test_a_key_of_a_hot_load_client_is_a_token_and_a_wrong_token_is_wrong_whatever_the_key(
    served: Served,
) -> None:
    right, wrong = "token of administrator", "of-no-one"
    cases = [
        ({"X-Api-Key": right}, 200),
        ({"X-Api-Key": wrong}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": right, "Authorization": f"Bearer {wrong}"}, 401),
        ({"X-Api-Key": wrong, "Authorization": f"Bearer {right}"}, 200),
    ]
    async with aiohttp.ClientSession() as session:
        for headers, status in cases:
            assert (await ask(session, "GET", served.urls["local"] + "/v1/status", headers, ""))[0] == status, headers
        relay = served.urls["relay"] + "/v1/relay/runs"
        assert (await ask(session, "GET", relay, {"X-Api-Key": right}, ""))[0] == 401, "at the local API alone"
