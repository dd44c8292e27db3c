"""The hot-load API of CoreWeave's dedicated inference, as its client `cwtrain` speaks it.

    POST /v1alpha1/inference/hotLoads            begin; the id that the client chose makes it idempotent
    GET  /v1alpha1/inference/hotLoads[/ID[/replicas]]
    POST /v1alpha1/inference/hotLoads/ID:cancel
    GET  /v1alpha1/inference/deployments[/ID]

Protobuf in JSON: fields in camel case, enums by name or number, times as RFC 3339. A refusal is `{code, message}` with
the status name of gRPC that the client maps to its own error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web

from deltad.client.messages import Cache
from deltad.errors import (
    CheckpointError,
    ConflictError,
    DeltadError,
    DeniedError,
    FormatError,
    IntegrityError,
    NotFoundError,
    PreconditionError,
    UsageError,
)
from deltad.hotload.ledger import Load, LoadState, ReplicaLoad, ReplicaStatus, check_identity
from deltad.hotload.loading import HotLoads
from deltad.hotload.requests import Deployments, Handler, Route, json_response, read_body
from deltad.protocol.access import Principal, Right

PREFIX = "/v1alpha1/inference"

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_MOST_PER_PAGE = 1000
_TYPES = ("UNSPECIFIED", "FULL", "INCREMENTAL")
_COMPRESSIONS = ("UNSPECIFIED", "ZSTD")
_CHECKSUMS = ("UNSPECIFIED", "ADLER32")
_CACHES = ("UNSPECIFIED", "RESET_ALL", "PRESERVE")
_CACHE_POLICIES: Mapping[str, Cache] = {"UNSPECIFIED": "", "RESET_ALL": "reset", "PRESERVE": "keep"}
_STATES = {
    LoadState.PENDING: "HOT_LOAD_STATE_PENDING",
    LoadState.IN_PROGRESS: "HOT_LOAD_STATE_IN_PROGRESS",
    LoadState.COMPLETED: "HOT_LOAD_STATE_COMPLETED",
    LoadState.FAILED: "HOT_LOAD_STATE_FAILED",
    LoadState.CANCELED: "HOT_LOAD_STATE_CANCELED",
}
_REPLICA_STATES = {
    ReplicaLoad.PENDING: "PENDING_UPDATE",
    ReplicaLoad.UPDATING: "UPDATING",
    ReplicaLoad.READY: "READY",
    ReplicaLoad.ERROR: "ERROR",
}
_CODES: tuple[tuple[type[DeltadError], str, int], ...] = (
    (PreconditionError, "failed_precondition", 412),
    (UsageError, "invalid_argument", 400),
    (NotFoundError, "not_found", 404),
    (DeniedError, "permission_denied", 403),
    # `already_exists` would send the client to fetch what it has not made.
    (ConflictError, "failed_precondition", 412),
    (CheckpointError, "failed_precondition", 412),
    (FormatError, "failed_precondition", 412),
    (IntegrityError, "failed_precondition", 412),
)


class _Incremental(msgspec.Struct, frozen=True, rename="camel"):
    previous_snapshot_identity: str = ""
    compression_format: str | int = 0
    checksum_format: str | int = 0


class CreateHotLoad(msgspec.Struct, frozen=True, rename="camel"):
    """The body of a POST."""

    deployment_id: str
    hot_load_id: str
    identity: str
    type: str | int = 0
    incremental_snapshot_metadata: _Incremental | None = None
    prompt_cache_policy: str | int = 0


class CoreWeave:
    """The face. It decides nothing."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    def routes(self) -> list[Route]:
        get, post = hdrs.METH_GET, hdrs.METH_POST
        return [
            Route(post, f"{PREFIX}/hotLoads", _answered(self._create), Right.PUBLISH),
            Route(get, f"{PREFIX}/hotLoads", _answered(self._list), Right.READ),
            Route(get, f"{PREFIX}/hotLoads/{{load}}", _answered(self._get), Right.READ),
            Route(get, f"{PREFIX}/hotLoads/{{load}}/replicas", _answered(self._replicas), Right.READ),
            Route(post, f"{PREFIX}/hotLoads/{{load}}:cancel", _answered(self._cancel), Right.PUBLISH),
            Route(get, f"{PREFIX}/deployments", _answered(self._list_deployments), Right.READ),
            Route(get, f"{PREFIX}/deployments/{{deployment}}", _answered(self._deployment), Right.READ),
        ]

    async def _create(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        body = await read_body(request, CreateHotLoad)
        loads = self._deployments.find(body.deployment_id, caller, Right.PUBLISH)
        if not _ID.fullmatch(body.hot_load_id):
            raise UsageError(f"hotLoadId {body.hot_load_id[:80]!r}", expected="a UUID")
        identity = check_identity(body.identity)
        kind = _enum(body.type, "SNAPSHOT_TYPE_", _TYPES, "type")
        told = body.incremental_snapshot_metadata
        if kind == "UNSPECIFIED" or (kind == "INCREMENTAL") != (told is not None):
            raise UsageError(
                "type",
                expected="SNAPSHOT_TYPE_FULL, or SNAPSHOT_TYPE_INCREMENTAL with incrementalSnapshotMetadata",
                found=f"{kind} {'with' if told else 'without'} it",
            )
        base = None
        if told is not None:
            _enum(told.compression_format, "COMPRESSION_FORMAT_", _COMPRESSIONS, "compressionFormat")
            _enum(told.checksum_format, "CHECKSUM_FORMAT_", _CHECKSUMS, "checksumFormat")
            base = check_identity(told.previous_snapshot_identity)
        cache = _enum(body.prompt_cache_policy, "PROMPT_CACHE_POLICY_", _CACHES, "promptCachePolicy")
        load = await loads.begin(body.hot_load_id, identity, base, cache=_CACHE_POLICIES[cache], by=caller.name)
        return json_response({"hotLoad": _hot_load(loads, load)})

    async def _get(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads, load = self._find(request, caller, Right.READ)
        return json_response({"hotLoad": _hot_load(loads, load)})

    async def _list(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        parent = request.query.get("parentDeploymentId", "")
        there = [self._deployments.find(parent, caller, Right.READ)] if parent else self._deployments.seen_by(caller)
        found = [(loads, load) for loads in there for load in reversed(loads.ledger.loads)]
        found.sort(key=lambda each: each[1].created, reverse=True)
        page, token = _page(request, len(found))
        return json_response(
            {"hotLoads": [_hot_load(*each) for each in found[page]], **({"nextPageToken": token} if token else {})}
        )

    async def _replicas(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads, load = self._find(request, caller, Right.READ)
        found = loads.replicas(load)
        page, token = _page(request, len(found))
        told = [_replica(status, load) for status in found[page]]
        return json_response({"replicas": told, **({"nextPageToken": token} if token else {})})

    async def _cancel(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads, load = self._find(request, caller, Right.PUBLISH)
        return json_response({"hotLoad": _hot_load(loads, await loads.cancel(load.id, caller.name))})

    async def _list_deployments(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        return json_response({"items": [_deployment(loads) for loads in self._deployments.seen_by(caller)]})

    async def _deployment(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads = self._deployments.find(request.match_info["deployment"], caller, Right.READ)
        return json_response({"deployment": _deployment(loads)})

    def _find(self, request: web.Request, caller: Principal, right: Right) -> tuple[HotLoads, Load]:
        load_id = request.match_info["load"]
        loads = self._deployments.of_load(load_id, caller, right)
        load = loads.ledger.find(load_id)
        if load is None:
            raise NotFoundError(f"hot load {load_id[:120]!r}", found="none of that id")
        return loads, load


def _answered(handler: Handler) -> Handler:
    """Refusals in the words of that API."""

    async def answer(request: web.Request, caller: Principal) -> web.StreamResponse:
        try:
            return await handler(request, caller)
        except DeltadError as error:
            code, status = next(
                ((code, status) for kind, code, status in _CODES if isinstance(error, kind)), ("unavailable", 503)
            )
            return json_response({"code": code, "message": str(error)}, status)

    return answer


def _enum(value: str | int, prefix: str, names: tuple[str, ...], field: str) -> str:
    """The name of an enum's value, which comes by name, with or without its prefix, or by number."""
    name: str | None = None
    if isinstance(value, int):
        name = names[value] if 0 <= value < len(names) else None
    elif value.upper().removeprefix(prefix) in names:
        name = value.upper().removeprefix(prefix)
    if name is None:
        raise UsageError(field, expected=" or ".join(prefix + each for each in names[1:]), found=repr(value)[:80])
    return name


def _page(request: web.Request, count: int) -> tuple[slice, str]:
    """The part of a list that is asked for, and the token of the next one. Raises UsageError."""
    size, start = request.query.get("maxPageSize", ""), request.query.get("pageToken", "")
    for name, text in (("maxPageSize", size), ("pageToken", start)):
        if text and not (text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(name, expected="a number", found=repr(text[:40]))
    first = int(start or 0)
    last = first + max(1, min(int(size or 0) or 100, _MOST_PER_PAGE))
    return slice(first, last), str(last) if last < count else ""


def _hot_load(loads: HotLoads, load: Load) -> Mapping[str, Any]:
    spec: dict[str, Any] = {
        "id": load.id,
        "deploymentId": loads.deployment,
        "identity": load.identity,
        "type": f"SNAPSHOT_TYPE_{'INCREMENTAL' if load.base else 'FULL'}",
        "promptCachePolicy": "PROMPT_CACHE_POLICY_"
        + next(name for name, policy in _CACHE_POLICIES.items() if policy == load.cache),
        "snapshotChain": [_reference(each) for each in loads.ledger.chain(load)],
    }
    if load.base:
        spec["incrementalSnapshotMetadata"] = {
            "previousSnapshotIdentity": load.base,
            "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
            "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
        }
    status: dict[str, Any] = {
        "state": _STATES[load.state],
        "createdAt": _time(load.created),
        "updatedAt": _time(load.updated),
        "conditions": [],
    }
    if load.finished:
        status["canceledAt" if load.state is LoadState.CANCELED else "finishedAt"] = _time(load.finished)
    if load.reason:
        status["conditions"] = [
            {
                "type": "Completed",
                "status": "STATUS_FALSE",
                "reason": "Canceled" if load.state is LoadState.CANCELED else "Failed",
                "message": load.reason,
                "lastUpdateTime": _time(load.updated),
            }
        ]
    return {"spec": spec, "status": status}


def _reference(load: Load) -> Mapping[str, Any]:
    kind = {"identity": load.identity, "hotLoadId": load.id}
    if not load.base:
        return {**kind, "type": "SNAPSHOT_TYPE_FULL"}
    return {
        **kind,
        "type": "SNAPSHOT_TYPE_INCREMENTAL",
        "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
        "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
    }


def _replica(status: ReplicaStatus, load: Load) -> Mapping[str, Any]:
    return {
        "name": status.replica,
        "zone": status.region,
        "state": _REPLICA_STATES[status.state],
        "currentSnapshotIdentity": status.identity,
        "errorReason": status.error,
        "startedAt": _time(load.created),
        "updatedAt": _time(load.updated),
    }


def _deployment(loads: HotLoads) -> Mapping[str, Any]:
    url = urlsplit(loads.bucket.url)
    return {
        "spec": {
            "id": loads.deployment,
            "name": loads.run,
            "hotLoad": {
                "bucket": url.netloc,
                "pathPrefix": url.path.strip("/"),
                "transitionMode": "TRANSITION_MODE_ASYNC",
            },
        },
        "status": {"status": "STATUS_READY"},
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
