"""No bytes in a path, header, query or body of the hot-load APIs give a 5xx, or begin a load (P40)."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from deltad.daemon.hotloads import routes
from deltad.hotload.requests import Handler
from deltad.local.requests import answer_errors
from deltad.protocol.access import EVERYTHING, Principal
from tests.hotload.site import Site

INFERENCE, HOT_LOAD = "/v1alpha1/inference", "/hot_load/v1/models/hot_load"
WORDS = st.one_of(
    st.sampled_from(["d", "one", "..", ".", "initial", "x" * 200, "", "%00", "..%2f..%2fetc%2fpasswd", "1e9"]),
    st.text(max_size=8).map(lambda text: quote(text, safe="")),
)
ENUMS = st.one_of(
    st.sampled_from(["SNAPSHOT_TYPE_FULL", "full", "INCREMENTAL", "zstd", "arc_v2", "RESET_ALL", True, None]),
    st.integers(-3, 9),
    st.text(max_size=6),
)
NAMES = st.one_of(st.sampled_from(["d", "one", "initial", "a/b", "..", "\0"]), st.text(max_size=8), st.integers())
METADATA = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from(
            [
                *("previousSnapshotIdentity", "compressionFormat", "checksumFormat"),
                *("previous_snapshot_identity", "compression_format", "checksum_format"),
            ]
        ),
        st.one_of(ENUMS, NAMES),
    ),
)
BODIES = st.one_of(
    st.binary(max_size=40),
    st.fixed_dictionaries(
        {},
        optional={
            "deploymentId": NAMES,
            "hotLoadId": NAMES,
            "identity": NAMES,
            "type": ENUMS,
            "promptCachePolicy": ENUMS,
            "reset_prompt_cache": ENUMS,
            "incrementalSnapshotMetadata": METADATA,
            "incremental_snapshot_metadata": METADATA,
            "files": st.one_of(st.lists(NAMES, max_size=3), NAMES),
        },
    ).map(lambda body: json.dumps(body).encode()),
)
PATHS = st.one_of(
    st.sampled_from([f"{INFERENCE}/hotLoads", f"{INFERENCE}/deployments", HOT_LOAD, f"{HOT_LOAD}/hint"]),
    st.builds(f"{INFERENCE}/hotLoads/{{}}{{}}".format, WORDS, st.sampled_from(["", "/replicas", ":cancel"])),
    st.builds(f"{INFERENCE}/deployments/{{}}".format, WORDS),
    st.builds("/v1/accounts/{}/deployments/{}{}".format, WORDS, WORDS, st.sampled_from(["", "/ledger"])),
)
QUERIES = st.dictionaries(
    st.sampled_from(["pageToken", "maxPageSize", "parentDeploymentId", "x"]), WORDS, max_size=2
).map(lambda query: "&".join(f"{name}={value}" for name, value in query.items()))
HEADERS = st.dictionaries(
    st.sampled_from(["fireworks-deployment", "x-fireworks-hot-load-source-url", "fireworks-model"]),
    st.sampled_from(["accounts/deltad/deployments/d", "accounts/x/deployments/d", "d", "memory:///", "é", "a" * 300]),
)


class Question(NamedTuple):
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


QUESTIONS = st.builds(Question, st.sampled_from(["GET", "POST", "DELETE"]), PATHS, QUERIES, HEADERS, BODIES)


def asked_by(caller: Principal, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request, caller)

    return answer


async def ask(questions: list[Question], home: Path) -> None:
    site = Site(home)
    app = web.Application(middlewares=[answer_errors], client_max_size=1 << 20)
    caller = Principal("anybody", EVERYTHING)
    for method, path, handler, _ in routes([site.loads]):
        app.router.add_route(method, path, asked_by(caller, handler))
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        for question in questions:
            url = URL(f"{server.make_url('/')}{question.path.lstrip('/')}?{question.query}", encoded=True)
            async with session.request(question.method, url, data=question.body, headers=question.headers) as reply:
                assert reply.status < 500, (question, await reply.text())
    assert site.loads.ledger.loads == ()
    assert site.daemon.published == []
    await site.stop()


@settings(deadline=None, max_examples=60)
@given(st.lists(QUESTIONS, min_size=1, max_size=25))
def test_whatever_is_asked_is_refused_or_answered(questions: list[Question]) -> None:
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(ask(questions, Path(home)))
