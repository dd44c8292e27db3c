"""The synchronous client of a daemon's local API: one method per route.

For plugins inside a trainer or an inference engine, and for the command line: standard library and
msgspec only, no event loop. Invariant: what a method returns was checked (its struct, its size, for
an object its SHA-256), and whatever goes wrong is one of `deltad.errors`. Each call opens its own
connection, so a client may be shared by threads and outlives restarts of the daemon.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from deltad.client.handover import HandOverReply, JoinReply, JoinRequest
from deltad.client.messages import (
    CollectReply,
    CollectRequest,
    DerivedEdgesReply,
    DerivedEdgeView,
    ErrorReply,
    ExportReply,
    ExportRequest,
    FleetView,
    LatestReply,
    NextReply,
    PinReply,
    PinRequest,
    PlanReply,
    PublishReply,
    PublishRequest,
    PullRequest,
    RegisterRequest,
    StateRequest,
    StatusView,
    TargetReply,
    TargetRequest,
    TargetsReply,
    VerifyReply,
    VerifyRequest,
    VersionInfo,
    VersionsReply,
)
from deltad.delta.encoding import sha256
from deltad.errors import DeltadError, IntegrityError, LimitError, PeerError, UnavailableError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.types import Digest, Version

if TYPE_CHECKING:
    import ssl

Reply = TypeVar("Reply", bound=msgspec.Struct)

WORK_SECONDS = 3600.0
"""How long publishing, exporting and verifying may take by default: they read or write a whole model."""

_REPLY_BYTES = 64 << 20


class Nothing(msgspec.Struct, frozen=True):
    """The empty body of a reply that says only that it was done."""


class Client:
    """Talks to the daemon that listens on a Unix socket, or over TLS at `https://host:port`. Opening one sends nothing.

    All methods raise UnavailableError when no daemon answers in time, UsageError, NotFoundError and the
    other errors of `deltad.errors` as the daemon raised them, and PeerError for a reply that is none.
    Runs, versions and replicas are given as text or as the types of `deltad.types`.
    """

    def __init__(
        self,
        address: Path | str,
        *,
        timeout: float = 10.0,
        limits: Limits = DEFAULT_LIMITS,
        token: Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout`: seconds that the daemon may be silent beyond what a call itself asks it to wait.

        For an https address: `token` gives the bearer token as it stands now, if there is one, and `tls` says whom to
        trust and what to show; without it the authorities that the host trusts count.
        """
        self._remote = address.rstrip("/") if isinstance(address, str) and address.startswith("https://") else ""
        self._path: Path | str = self._remote or Path(address)
        self._token = token
        self._tls = tls
        self._timeout = timeout
        self._limits = limits

    def status(self) -> StatusView:
        """The daemon, its store, its links and every region that it knows of."""
        return self._get(StatusView, "/v1/status")

    def versions(self, run: str) -> tuple[VersionInfo, ...]:
        """All versions that are held, in ascending order."""
        return self._get(VersionsReply, f"/v1/runs/{quote(run, safe='')}/versions").versions

    def version(self, run: str, version: Version | str) -> VersionInfo:
        """One version."""
        return self._get(VersionInfo, f"/v1/runs/{quote(run, safe='')}/versions/{quote(str(version), safe='')}")

    def record_bytes(self, run: str, version: Version | str) -> bytes:
        """The version record, verbatim as its publisher wrote it."""
        path = f"/v1/runs/{quote(run, safe='')}/records/{quote(str(version), safe='')}"
        return self._exchange("GET", path, limit=self._limits.record_bytes)

    def derived_edges(self, run: str, version: Version | str) -> tuple[DerivedEdgeView, ...]:
        """The edges to a version that its record does not name."""
        path = f"/v1/runs/{quote(run, safe='')}/edges/{quote(str(version), safe='')}"
        return self._get(DerivedEdgesReply, path).edges

    def latest(self, run: str, *, after: Version | str = "", wait: float = 0.0) -> VersionInfo | None:
        """The newest durable version; with `after` only one that is newer, waited for up to `wait` seconds."""
        query = _query(after=str(after), wait=wait)
        return self._get(LatestReply, f"/v1/runs/{quote(run, safe='')}/latest{query}", wait=wait).version

    def publish(self, run: str, request: PublishRequest, *, timeout: float = WORK_SECONDS) -> PublishReply:
        """Publish a checkpoint directory of the daemon's host; answers once the version is durable there."""
        return self._post(PublishReply, f"/v1/runs/{quote(run, safe='')}/publish", request, wait=timeout)

    def join(self, run: str, request: JoinRequest) -> JoinReply:
        """Join the ranks that publish a run from memory; answers once all have joined."""
        path = f"/v1/runs/{quote(run, safe='')}/ranks"
        return self._decoded(JoinReply, self._send("POST", path, msgspec.msgpack.encode(request), wait=request.wait))

    def hand_over(self, run: str, body: Iterable[bytes], *, timeout: float = WORK_SECONDS) -> HandOverReply:
        """Hand over a rank's share of a step, as `deltad.client.handover.body` makes it.

        Answers once the version that all ranks make is durable. An error that `body` raises breaks the request off,
        and is raised.
        """
        path = f"/v1/runs/{quote(run, safe='')}/steps"
        return self._decoded(HandOverReply, self._send("POST", path, body, wait=timeout))

    def pull(self, run: str, wait: float = 60.0) -> VersionInfo | None:
        """Pull now what the upstreams have, for up to `wait` seconds; the newest version after that."""
        path = f"/v1/runs/{quote(run, safe='')}/pull"
        return self._post(LatestReply, path, PullRequest(wait), wait=wait).version

    def export(self, run: str, request: ExportRequest, *, timeout: float = WORK_SECONDS) -> ExportReply:
        """Write a version as a loadable checkpoint on the daemon's host."""
        return self._post(ExportReply, f"/v1/runs/{quote(run, safe='')}/export", request, wait=timeout)

    def verify(self, run: str, version: Version | str = "", *, timeout: float = WORK_SECONDS) -> VerifyReply:
        """Rebuild a version (the newest, if empty) from what is stored and compare its root."""
        request = VerifyRequest(str(version))
        return self._post(VerifyReply, f"/v1/runs/{quote(run, safe='')}/verify", request, wait=timeout)

    def pin(self, run: str, version: Version | str, why: str = "") -> PinReply:
        """Keep a version whatever the retention says, until it is unpinned; durable when this returns."""
        return self._post(PinReply, _pin_path(run, version), PinRequest(why))

    def unpin(self, run: str, version: Version | str) -> PinReply:
        """Leave a version to the retention again."""
        return self._json(PinReply, "DELETE", _pin_path(run, version))

    def move_target(self, run: str, request: TargetRequest) -> TargetReply:
        """Hold a fleet at a version, bring it back to one, or let it follow the newest again; durable on return."""
        return self._post(TargetReply, f"/v1/runs/{quote(run, safe='')}/target", request)

    def plan(self, run: str, *, timeout: float = WORK_SECONDS) -> PlanReply:
        """What the daemon would fold, cut and drop in the run's version graph now, and why."""
        return self._get(PlanReply, f"/v1/runs/{quote(run, safe='')}/plan", wait=timeout)

    def targets(self, run: str) -> TargetsReply:
        """Where the fleets are held, as far as the daemon knows, and who moved them lately."""
        return self._get(TargetsReply, f"/v1/runs/{quote(run, safe='')}/target")

    def collect(self, *, dry_run: bool = False, timeout: float = WORK_SECONDS) -> CollectReply:
        """Let the daemon remove what nobody needs; with `dry_run` it only says what that would be, and why."""
        return self._post(CollectReply, "/v1/collect", CollectRequest(dry_run), wait=timeout)

    def fleet(self, run: str, *, version: Version | str = "", verified: int = 0, wait: float = 0.0) -> FleetView:
        """The run's replicas, here and in regions below.

        Waits up to `wait` seconds until `verified` of them serve `version` or a newer one (the version that they
        are held at or the newest, if empty), as read back by themselves; answers with what is known then.
        """
        query = _query(version=str(version), verified=verified, wait=wait)
        return self._get(FleetView, f"/v1/runs/{quote(run, safe='')}/fleet{query}", wait=wait)

    def object(self, digest: Digest | str) -> bytes:
        """An object's bytes, compared with its SHA-256 (raw bytes or hex). Raises IntegrityError."""
        name = digest if isinstance(digest, str) else digest.hex()
        data = self._exchange("GET", f"/v1/objects/{quote(name, safe='')}", limit=self._limits.object_bytes)
        if (found := sha256(data).hex()) != name:
            raise IntegrityError(f"object from {self._path}", expected=f"SHA-256 {name}", found=found)
        return data

    def register_replica(self, request: RegisterRequest) -> None:
        """Announce a replica. Raises ConflictError where another one of that name lives; see `RegisterRequest`."""
        self._post(Nothing, "/v1/replicas", request)

    def next(self, replica: str, *, after: Version | str = "", wait: float = 0.0) -> NextReply:
        """What the replica should do now, given that it serves `after`; waits up to `wait` seconds for anything.

        Raises NotFoundError for a replica that is not registered: register it again.
        """
        query = _query(after=str(after), wait=wait)
        return self._get(NextReply, f"/v1/replicas/{quote(replica, safe='')}/next{query}", wait=wait)

    def report_state(self, replica: str, request: StateRequest) -> None:
        """Report a replica's state. Raises NotFoundError for one that is not registered."""
        self._post(Nothing, f"/v1/replicas/{quote(replica, safe='')}/state", request)

    def unregister_replica(self, replica: str) -> None:
        """Say that a replica is gone. Raises NotFoundError for one that is not registered."""
        self._json(Nothing, "DELETE", f"/v1/replicas/{quote(replica, safe='')}")

    def _get(self, kind: type[Reply], path: str, *, wait: float = 0.0) -> Reply:
        return self._json(kind, "GET", path, wait=wait)

    def _post(self, kind: type[Reply], path: str, request: msgspec.Struct, *, wait: float = 0.0) -> Reply:
        return self._json(kind, "POST", path, body=msgspec.json.encode(request), wait=wait)

    def _json(
        self, kind: type[Reply], method: str, path: str, *, body: bytes | None = None, wait: float = 0.0
    ) -> Reply:
        return self._decoded(kind, self._exchange(method, path, body=body, wait=wait, limit=_REPLY_BYTES))

    def _decoded(self, kind: type[Reply], data: bytes) -> Reply:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._not_a_reply(f"{error}", expected=kind.__name__) from None

    def _exchange(self, method: str, path: str, *, limit: int, body: bytes | None = None, wait: float = 0.0) -> bytes:
        """One request on a connection of its own. `wait`: seconds that the daemon was asked to take."""
        return self._send(method, path, body, wait=wait, limit=limit, content="application/json")

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        *,
        wait: float,
        limit: int = _REPLY_BYTES,
        content: str = "application/octet-stream",
    ) -> bytes:
        connection = self._connection(self._timeout + max(wait, 0.0))
        headers = {"Connection": "close"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token()}"
        if body is not None:
            headers["Content-Type"] = content
        chunked = body is not None and not isinstance(body, bytes)
        if chunked:
            headers["Transfer-Encoding"] = "chunked"
        try:
            # A daemon that refuses may close before it has read all; its answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, body=body, headers=headers, encode_chunked=chunked)
            with connection.getresponse() as response:
                data = self._read(response, limit)
        except TimeoutError:
            raise UnavailableError(
                f"daemon at {self._path}",
                expected=f"an answer within {self._timeout + max(wait, 0.0):g} s",
                found="none",
                hint="is it overloaded or stopped? see its log",
            ) from None
        except (http.client.IncompleteRead, OSError) as error:
            raise self._unavailable(error) from None
        except http.client.HTTPException as error:
            raise self._not_a_reply(type(error).__name__) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise self._refusal(response.status, data)
        if response.status != 200:
            raise self._not_a_reply(f"status {response.status}")
        return data

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if not self._remote:
            return _UnixConnection(Path(self._path), timeout)
        parts = urlsplit(self._remote)
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout, context=self._tls)

    def _read(self, response: http.client.HTTPResponse, limit: int) -> bytes:
        # A daemon always says how long its reply is; without that, a cut could look like the end.
        if response.length is None:
            raise self._not_a_reply("a reply without its length")
        if response.length > limit:
            raise LimitError(
                f"reply of {self._path}", expected=f"at most {limit} bytes", found=f"{response.length} bytes"
            )
        return response.read()

    def _refusal(self, status: int, data: bytes) -> DeltadError:
        try:
            reply = msgspec.json.decode(data, type=ErrorReply)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._not_a_reply(f"status {status}")
        return rebuild_error(reply)

    def _unavailable(self, error: Exception) -> UnavailableError:
        words = (error.strerror or str(error)) if isinstance(error, OSError) else "the connection was cut"
        return UnavailableError(f"daemon at {self._path}", found=words, hint="is `deltad serve` running?")

    def _not_a_reply(self, found: str, *, expected: str = "a reply of deltad") -> PeerError:
        return PeerError(
            f"daemon at {self._path}", expected=expected, found=found, hint="is it another program or version?"
        )


def rebuild_error(reply: ErrorReply) -> DeltadError:
    """The error that a daemon raised, as the same class; one that this build does not know is a DeltadError."""
    kind = _KINDS.get(reply.error, DeltadError)
    error = kind(reply.message)
    if kind is DeltadError:
        # Shadow the facts of the class: the daemon knows better than the base class does.
        error.retryable = reply.retryable
        error.exit_code = reply.exit_code
    return error


def _all_kinds(base: type[DeltadError]) -> dict[str, type[DeltadError]]:
    kinds = {base.__name__.removesuffix("Error"): base}
    for kind in base.__subclasses__():
        kinds |= _all_kinds(kind)
    return kinds


_KINDS = _all_kinds(DeltadError)


def _pin_path(run: str, version: Version | str) -> str:
    return f"/v1/runs/{quote(run, safe='')}/versions/{quote(str(version), safe='')}/pin"


def _query(**parameters: Any) -> str:
    """The parameters that say something, as a query with its question mark."""
    said = {name: f"{v:.3f}" if isinstance(v, float) else v for name, v in parameters.items() if v}
    return f"?{urlencode(said)}" if said else ""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("deltad", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(str(self._path))
        except BaseException:
            connection.close()
            raise
        self.sock = connection
