"""The hot-load API of Fireworks, as its SDK's `DeploymentManager` speaks it.

    POST   /hot_load/v1/models/hot_load                    load a snapshot; headers name the deployment
    GET    /hot_load/v1/models/hot_load                    how far each replica is, the one that lags most first
    POST   /hot_load/v1/models/hot_load/hint               whether files that are about to be loaded are there
    GET, DELETE /v1/accounts/A/deployments/D/ledger        what was loaded; forgetting it
    GET    /v1/accounts, /v1/accounts/A/deployments/D      what the client asks before

That client looks at the first replica alone, so the order decides when it takes a load for done: once all are. A load
that went wrong is told as an error of the snapshot that was asked for, which is what that client ends at.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web

from deltad.checkpoint.disk_delta.checksums import Checksum
from deltad.client.messages import Cache
from deltad.errors import (
    ConflictError,
    DeltadError,
    DeniedError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UsageError,
)
from deltad.hotload.ledger import Ledger, Load, LoadState, ReplicaLoad, ReplicaStatus, check_identity
from deltad.hotload.loading import HotLoads
from deltad.hotload.requests import Deployments, Handler, Route, json_response, read_body
from deltad.protocol.access import Principal, Right

PATH = "/hot_load/v1/models/hot_load"

_DEPLOYMENT = "fireworks-deployment"
_SOURCE = "x-fireworks-hot-load-source-url"
_COMPRESSIONS = ("", "zstd", "arc_v2")
"""Names that are taken. What counts is the layout of the files themselves: theirs is private, and not read here."""
_CACHE_POLICIES: Mapping[bool | str, Cache] = {
    True: "reset",
    False: "keep",
    "all": "reset",
    "none": "keep",
    "new_session": "new-requests-only",
}
_ORDER = (ReplicaLoad.ERROR, ReplicaLoad.PENDING, ReplicaLoad.UPDATING, ReplicaLoad.READY)
_STAGES = {
    ReplicaLoad.ERROR: "error",
    ReplicaLoad.PENDING: "pending",
    ReplicaLoad.UPDATING: "loading",
    ReplicaLoad.READY: "ready",
}
_HINTED_FILES = 256


class _Incremental(msgspec.Struct, frozen=True):
    previous_snapshot_identity: str
    compression_format: str = ""
    checksum_format: str = ""


class HotLoadSignal(msgspec.Struct, frozen=True):
    """The body of a POST."""

    identity: str
    reset_prompt_cache: bool | str | None = None
    incremental_snapshot_metadata: _Incremental | None = None


class Hint(msgspec.Struct, frozen=True):
    """Files of a snapshot that was not announced yet."""

    identity: str
    files: tuple[str, ...] = ()


class Fireworks:
    """The face. It decides nothing but the order of replicas."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    def routes(self) -> list[Route]:
        get, post, delete = hdrs.METH_GET, hdrs.METH_POST, hdrs.METH_DELETE
        one = "/v1/accounts/{account}/deployments/{deployment}"
        return [
            Route(post, PATH, _answered(self._load), Right.PUBLISH),
            Route(get, PATH, _answered(self._status), Right.READ),
            Route(post, f"{PATH}/hint", _answered(self._hint), Right.PUBLISH),
            Route(get, "/v1/accounts", _answered(self._accounts), Right.READ),
            Route(get, one, _answered(self._deployment), Right.READ),
            Route(get, f"{one}/ledger", _answered(self._ledger), Right.READ),
            Route(delete, f"{one}/ledger", _answered(self._forget), Right.PUBLISH),
        ]

    async def _load(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads = self._named(request, caller, Right.PUBLISH)
        body = await read_body(request, HotLoadSignal)
        identity = check_identity(body.identity)
        source = request.headers.get(_SOURCE, "").rstrip("/")
        if source not in ("", loads.bucket.url, f"{loads.bucket.url}/{identity}"):
            raise UsageError(
                f"{_SOURCE} {source[:200]!r}",
                expected=f"{loads.bucket.url}, where this deployment's snapshots are",
                found="another place",
            )
        base = None if (told := body.incremental_snapshot_metadata) is None else _base(told)
        if (wanted := body.reset_prompt_cache) is not None and wanted not in _CACHE_POLICIES:
            expected = "a boolean, all, none or new_session"
            raise UsageError("reset_prompt_cache", expected=expected, found=repr(wanted)[:80])
        cache: Cache = "" if wanted is None else _CACHE_POLICIES[wanted]
        active = loads.ledger.active
        if active is None or (active.identity, active.base) != (identity, base or ""):
            active = await loads.begin(f"fw-{uuid.uuid4()}", identity, base, cache=cache, by=caller.name)
        return json_response({"identity": active.identity, "hot_load_id": active.id, "state": active.state})

    async def _status(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        return json_response({"replicas": replicas_of(self._named(request, caller, Right.READ))})

    async def _hint(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads = self._named(request, caller, Right.PUBLISH)
        body = await read_body(request, Hint)
        identity = check_identity(body.identity)
        if len(body.files) > _HINTED_FILES or any(not name or "/" in name or len(name) > 255 for name in body.files):
            raise UsageError("files", expected=f"at most {_HINTED_FILES} names of files directly below the identity")
        found = [await loads.bucket.head(f"{identity}/{name}") for name in body.files]
        sizes = {name: each.size for name, each in zip(body.files, found, strict=True)}
        return json_response({"identity": identity, "files": sizes})

    async def _accounts(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        names = sorted({f"accounts/{loads.account}" for loads in self._deployments.seen_by(caller)})
        return json_response({"accounts": [{"name": name} for name in names]})

    async def _deployment(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads = self._in_path(request, caller, Right.READ)
        return json_response(
            {
                "name": f"accounts/{loads.account}/deployments/{loads.deployment}",
                "state": "READY",
                "enableHotLoad": True,
                "hotLoadBucketUrl": loads.bucket.url,
                "hotLoadTransitionType": "ASYNC",
            }
        )

    async def _ledger(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        loads = self._in_path(request, caller, Right.READ)
        return json_response({"entries": [_entry(loads, load) for load in reversed(loads.ledger.loads)]})

    async def _forget(self, request: web.Request, caller: Principal) -> web.StreamResponse:
        await self._in_path(request, caller, Right.PUBLISH).forget()
        return json_response({})

    def _named(self, request: web.Request, caller: Principal, right: Right) -> HotLoads:
        """The deployment in the headers."""
        name = request.headers.get(_DEPLOYMENT, "")
        match name.split("/"):
            case ["accounts", account, "deployments", deployment]:
                return self._find(account, deployment, caller, right)
        raise UsageError(f"header {_DEPLOYMENT}", expected="accounts/ACCOUNT/deployments/ID", found=repr(name)[:160])

    def _in_path(self, request: web.Request, caller: Principal, right: Right) -> HotLoads:
        return self._find(request.match_info["account"], request.match_info["deployment"], caller, right)

    def _find(self, account: str, deployment: str, caller: Principal, right: Right) -> HotLoads:
        loads = self._deployments.find(deployment, caller, right)
        if loads.account != account:
            return self._deployments.find("", caller, right)  # refused as what is not there
        return loads


def replicas_of(loads: HotLoads) -> list[Mapping[str, Any]]:
    """Every replica, the one that lags most first."""
    last = _last(loads.ledger)
    fleet = loads.fleet(last.version if last is not None else "")
    failed = last is not None and last.state is LoadState.FAILED
    worst_first = sorted(fleet, key=lambda status: _ORDER.index(status.state))
    told = [_replica(status, last, failed=failed) for status in worst_first]
    if failed and not told:
        told = [_replica(ReplicaStatus("", "", ReplicaLoad.ERROR), last, failed=True)]
    return told


def _last(ledger: Ledger) -> Load | None:
    """The load that the fleet is on the way to, or has come to. One that was canceled led nowhere."""
    return next((load for load in reversed(ledger.loads) if load.state is not LoadState.CANCELED), None)


def _replica(status: ReplicaStatus, load: Load | None, *, failed: bool) -> Mapping[str, Any]:
    there = load is not None and status.state is ReplicaLoad.READY
    stage = "error" if failed and not there else _STAGES[status.state]
    if load is None and status.identity:
        stage = "ready"
    loading: dict[str, str] = {"stage": stage}
    if load is not None:
        loading["target_snapshot_identity"] = load.identity
        if stage == "error":
            loading["error"] = status.error or load.reason
    return {
        "replica": status.replica,
        "region": status.region,
        "current_snapshot_identity": status.identity,
        # Nothing is ready for the snapshot that was asked for but what has read it back.
        "readiness": there or (load is None and bool(status.identity)),
        "loading_state": loading,
        "loaded_adapters": [],
    }


def _base(told: _Incremental) -> str:
    if told.compression_format not in _COMPRESSIONS:
        raise UsageError(
            f"compression_format {told.compression_format[:40]!r}",
            expected=" or ".join(filter(None, _COMPRESSIONS)),
            found="one that is not known",
        )
    if told.checksum_format and Checksum.named(told.checksum_format) is None:
        raise UsageError(f"checksum_format {told.checksum_format[:40]!r}", expected=" or ".join(Checksum))
    return check_identity(told.previous_snapshot_identity)


def _entry(loads: HotLoads, load: Load) -> Mapping[str, Any]:
    replicas: Sequence[ReplicaStatus] = loads.replicas(load)
    return {
        "identity": load.identity,
        "type": "delta" if load.base else "full",
        "previous_snapshot_identity": load.base,
        "hot_load_id": load.id,
        "state": load.state,
        "version": load.version,
        "created": load.created,
        "finished": load.finished,
        "error": load.reason,
        "replicas": [
            {"replica": each.replica, "region": each.region, "ready": each.ready_at, "error": each.error}
            for each in replicas
        ],
    }


def _answered(handler: Handler) -> Handler:
    """Refusals in the words of that API: 409 for what another time may be, 400 for what never is."""

    async def answer(request: web.Request, caller: Principal) -> web.StreamResponse:
        try:
            return await handler(request, caller)
        except DeltadError as error:
            return json_response({"error": {"code": error.kind, "message": str(error)}}, _status_of(error))

    return answer


def _status_of(error: DeltadError) -> int:
    if isinstance(error, DeniedError):
        return error.http_status
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, ConflictError):
        return 409
    return 503 if isinstance(error, (StoreError, UnavailableError)) else 400
