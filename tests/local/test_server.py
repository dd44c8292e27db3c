"""The routes of the local API, over a real Unix socket with the real client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import select
from pathlib import Path

import pytest

from deltad.client.messages import (
    ExportRequest,
    NextReply,
    PublishRequest,
    RegionReport,
    RegisterRequest,
    ReplicaReport,
    ReplicaState,
    RunReport,
    StateRequest,
)
from deltad.delta.encoding import sha256
from deltad.errors import ConflictError, DeltadError, LimitError, NotFoundError, ReplicaError, UsageError
from deltad.limits import Limits
from deltad.types import Digest, Version
from tests.kit.operations import RUN, LocalDaemon, root_for, serve_locally
from tests.kit.versions import Lineage

REPLICA = RegisterRequest("r0", RUN, "bf16", "10.0.0.1:8000")


async def raw(daemon: LocalDaemon, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read one reply: status, headers, body."""
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    writer.close()
    return int(head[0].split()[1]), headers, body


async def get(daemon: LocalDaemon, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    status, _, content = await raw(daemon, head.encode() + body)
    return status, content


async def report(daemon: LocalDaemon, state: ReplicaState, number: int) -> None:
    request = StateRequest(state, str(Version(1, number)), root_for(number))
    await daemon.ask(daemon.client.report_state, "r0", request)


# Versions.


async def test_a_pin_is_put_down_to_whoever_is_at_the_other_end_of_the_socket(daemon: LocalDaemon) -> None:
    daemon.add(1, 2)
    reply = await daemon.ask(daemon.client.pin, RUN, "v000001", "a baseline")
    assert reply.changed
    assert reply.pin is not None
    assert (reply.pin.why, reply.pin.by) == ("a baseline", f"{pwd.getpwuid(os.getuid()).pw_name} (uid {os.getuid()})")
    assert (await daemon.ask(daemon.client.version, RUN, "v000001")).pin == reply.pin
    gone = await daemon.ask(daemon.client.unpin, RUN, "v000001")
    assert (gone.pin, gone.changed) == (None, True)
    assert not (await daemon.ask(daemon.client.unpin, RUN, "v000001")).changed


async def test_a_pin_of_a_version_that_is_not_held_or_for_an_endless_reason_is_refused(daemon: LocalDaemon) -> None:
    daemon.add(1)
    with pytest.raises(NotFoundError, match="policy/v000009"):
        await daemon.ask(daemon.client.pin, RUN, "v000009")
    with pytest.raises(UsageError, match="at most 256 characters"):
        await daemon.ask(daemon.client.pin, RUN, "v000001", "x" * 257)
    assert (await daemon.ask(daemon.client.version, RUN, "v000001")).pin is None


async def test_a_version_that_was_let_go_is_said_to_be(daemon: LocalDaemon) -> None:
    lineage = Lineage()
    for _ in range(3):
        lineage.publish(anchor=True)
    lineage.fill(daemon.store)
    run = daemon.store.run(RUN)
    run.sift(lambda held: [held[0].record.version])
    with pytest.raises(NotFoundError, match="v000001: not held here; what lay there was let go by the retention"):
        await daemon.ask(daemon.client.version, RUN, "v000001")
    with pytest.raises(NotFoundError, match="v000009: not held here; see"):
        await daemon.ask(daemon.client.version, RUN, "v000009")


async def test_status_is_what_the_daemon_says_of_itself(daemon: LocalDaemon) -> None:
    assert await daemon.ask(daemon.client.status) == daemon.operations.status()


async def test_versions_are_listed_and_found_by_any_spelling(daemon: LocalDaemon) -> None:
    daemon.add(1, 2)
    versions = await daemon.ask(daemon.client.versions, RUN)
    assert [info.version for info in versions] == ["v000001", "v000002"]
    assert await daemon.ask(daemon.client.version, RUN, "2") == versions[1]
    assert await daemon.ask(daemon.client.version, RUN, Version(1, 2)) == versions[1]
    with pytest.raises(NotFoundError, match="policy/v000003"):
        await daemon.ask(daemon.client.version, RUN, "v000003")
    with pytest.raises(NotFoundError, match="run other"):
        await daemon.ask(daemon.client.versions, "other")


async def test_a_record_is_handed_out_as_its_publisher_wrote_it(daemon: LocalDaemon) -> None:
    published = Lineage(RUN).publish()
    published.commit_into(daemon.store)
    assert await daemon.ask(daemon.client.record_bytes, RUN, published.version) == published.data
    for run, version in ((RUN, "v000099"), ("other", "v000001")):
        with pytest.raises(NotFoundError, match=f"{run}/{version}"):
            await daemon.ask(daemon.client.record_bytes, run, version)


async def test_asking_for_runs_that_do_not_exist_leaves_nothing_behind(daemon: LocalDaemon) -> None:
    for place in range(20):
        with pytest.raises(NotFoundError):
            await daemon.ask(daemon.client.record_bytes, f"run-{place}", "v1")
    assert daemon.store._runs == {}
    assert list((daemon.store.path / "runs").iterdir()) == []


async def test_latest_answers_at_once_with_what_is_there(daemon: LocalDaemon) -> None:
    assert await daemon.ask(daemon.client.latest, RUN) is None
    daemon.add(1, 2)
    newest = await daemon.ask(daemon.client.latest, RUN)
    assert newest
    assert newest.version == "v000002"
    assert await daemon.ask(daemon.client.latest, RUN, after="v000001") == newest
    assert await daemon.ask(daemon.client.latest, RUN, after="v000002") is None


async def test_latest_waits_for_anything_newer(daemon: LocalDaemon) -> None:
    daemon.add(1)
    waiting = asyncio.create_task(daemon.ask(daemon.client.latest, RUN, after="v000001", wait=30.0))
    await daemon.announcements.someone_waits()
    daemon.announcements.announce()  # about something else
    daemon.add(2)
    found = await waiting
    assert found
    assert found.version == "v000002"


async def test_a_version_that_nobody_announced_is_found_by_the_next_poll(daemon: LocalDaemon) -> None:
    assert await daemon.ask(daemon.client.latest, RUN, wait=0.05) is None
    daemon.operations.add(1)  # durable, and the announcement is lost
    found = await daemon.ask(daemon.client.latest, RUN, wait=30.0)
    assert found
    assert found.version == "v000001"


async def test_a_run_may_appear_while_someone_waits_for_it(daemon: LocalDaemon) -> None:
    waiting = asyncio.create_task(daemon.ask(daemon.client.latest, "newborn", wait=30.0))
    await daemon.announcements.someone_waits()
    daemon.operations.held["newborn"] = []
    daemon.operations.add(1, run="newborn")
    daemon.announcements.announce()
    found = await waiting
    assert found
    assert found.run == "newborn"
    with pytest.raises(NotFoundError, match="run stillborn"):
        await daemon.ask(daemon.client.latest, "stillborn", wait=0.01)


async def test_publishing_the_same_twice_says_so(daemon: LocalDaemon) -> None:
    first = await daemon.ask(daemon.client.publish, RUN, PublishRequest("/checkpoints/step_7"))
    again = await daemon.ask(daemon.client.publish, RUN, PublishRequest("/elsewhere", number=7))
    assert (first.already, again.already) == (False, True)
    assert first.version.version == again.version.version == "v000007"


@pytest.mark.parametrize(
    "request_",
    [
        PublishRequest("step_7"),
        PublishRequest(""),
        PublishRequest("/a\0b_7"),
        PublishRequest("/" + "x" * 5000),
        PublishRequest("/step_7", number=-1),
        PublishRequest("/step_7", number=10**15),
        PublishRequest("/step_7", identity="x" * 257),
    ],
)
async def test_a_publish_that_cannot_be_meant_is_refused_before_the_daemon_sees_it(
    daemon: LocalDaemon, request_: PublishRequest
) -> None:
    with pytest.raises(UsageError):
        await daemon.ask(daemon.client.publish, RUN, request_)
    assert daemon.operations.held[RUN] == []


async def test_pull_export_and_verify_reach_the_daemon(daemon: LocalDaemon) -> None:
    daemon.add(1, 2)
    pulled = await daemon.ask(daemon.client.pull, RUN, 1.0)
    assert pulled
    assert pulled.version == "v000002"
    exported = await daemon.ask(daemon.client.export, RUN, ExportRequest("v000001", "/exports/here"))
    assert (exported.directory, exported.version, exported.root) == ("/exports/here", "v000001", root_for(1))
    checked = await daemon.ask(daemon.client.verify, RUN, "1")
    assert (checked.version, checked.match) == ("v000001", True)


async def test_an_export_of_the_daemons_own_is_only_for_a_registered_replica(daemon: LocalDaemon) -> None:
    daemon.add(1)
    with pytest.raises(NotFoundError, match="register it again"):
        await daemon.ask(daemon.client.export, RUN, ExportRequest(replica="r0"))
    with pytest.raises(UsageError):
        await daemon.ask(daemon.client.export, RUN, ExportRequest())
    with pytest.raises(UsageError, match="absolute"):
        await daemon.ask(daemon.client.export, RUN, ExportRequest(directory="here"))
    await daemon.ask(daemon.client.register_replica, REPLICA)
    assert (await daemon.ask(daemon.client.export, RUN, ExportRequest(replica="r0"))).root == root_for(1)


# Objects.


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (5 << 20) + 3])
async def test_an_object_of_any_size_arrives_whole(daemon: LocalDaemon, size: int) -> None:
    data = os.urandom(size)
    assert await daemon.ask(daemon.client.object, daemon.store.put(data)) == data
    assert await daemon.ask(daemon.client.object, sha256(data).hex()) == data


async def test_an_object_that_is_not_held_is_not_found(daemon: LocalDaemon) -> None:
    with pytest.raises(NotFoundError, match="not held here"):
        await daemon.ask(daemon.client.object, Digest(bytes(32)))


async def test_an_object_that_shrinks_while_it_is_sent_is_cut_off_and_never_looks_whole(daemon: LocalDaemon) -> None:
    digest = daemon.store.put(os.urandom(64 << 20))
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
    writer.write(f"GET /v1/objects/{digest.hex()} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    os.truncate(daemon.store.objects.extent(digest).path, 32 << 20)
    received = 0
    try:
        while piece := await reader.read(1 << 20):
            received += len(piece)
    except ConnectionResetError:
        pass
    assert received < 64 << 20
    writer.close()


async def test_a_caller_that_stops_reading_is_let_go(tmp_path: Path) -> None:
    async with serve_locally(tmp_path, progress_seconds=0.05) as daemon:
        digest = daemon.store.put(bytes(64 << 20))
        _, writer = await asyncio.open_unix_connection(str(daemon.socket), limit=1024)
        writer.write(f"GET /v1/objects/{digest.hex()} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        writer.transport.pause_reading()
        # The daemon hangs up by itself; only then can its end be seen without reading what it sent.
        assert await asyncio.to_thread(_hangs_up, writer)
        writer.transport.abort()
        assert await daemon.ask(daemon.client.status)


def _hangs_up(writer: asyncio.StreamWriter) -> bool:
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(60_000))


async def test_a_body_that_never_ends_is_refused(tmp_path: Path) -> None:
    async with serve_locally(tmp_path, progress_seconds=0.05) as daemon:
        head = f"POST /v1/runs/{RUN}/publish HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{"
        status, _, body = await raw(daemon, head.encode())
        assert status == 400
        assert json.loads(body)["error"] == "Usage"


async def test_a_body_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    async with serve_locally(tmp_path, limits=Limits(json_body_bytes=1000)) as daemon:
        with pytest.raises(LimitError, match="at most 1000 bytes"):
            await daemon.ask(daemon.client.publish, RUN, PublishRequest("/" + "x" * 1000))


# Replicas.


async def test_a_replica_registers_takes_versions_and_counts_once_it_is_verified(daemon: LocalDaemon) -> None:
    client = daemon.client
    await daemon.ask(client.register_replica, REPLICA)
    assert await daemon.ask(client.next, "r0") == NextReply()
    daemon.add(1)
    assert await daemon.ask(client.next, "r0") == NextReply("v000001", reload=True)
    await report(daemon, ReplicaState.VERIFIED, 1)
    assert (await daemon.ask(client.fleet, RUN, version="v000001")).verified == 1
    daemon.add(2)
    step = (await daemon.ask(client.next, "r0", after="v000001")).steps[0]
    assert (step.base, step.version, step.root) == ("v000001", "v000002", root_for(2))
    await report(daemon, ReplicaState.COMMITTED, 2)
    view = await daemon.ask(client.fleet, RUN)
    assert (view.version, view.verified, view.replicas) == ("v000002", 0, 1)
    await report(daemon, ReplicaState.VERIFIED, 2)
    assert (await daemon.ask(client.fleet, RUN)).verified == 1
    await daemon.ask(client.unregister_replica, "r0")
    assert (await daemon.ask(client.fleet, RUN)).replicas == 0
    assert daemon.operations.dropped == ["r0"]


async def test_next_waits_for_anything_after_what_is_served(daemon: LocalDaemon) -> None:
    daemon.add(1)
    await daemon.ask(daemon.client.register_replica, REPLICA)
    waiting = asyncio.create_task(daemon.ask(daemon.client.next, "r0", after="v000001", wait=30.0))
    await daemon.announcements.someone_waits()
    daemon.add(2)
    daemon.add(3)
    assert (await waiting).target in ("v000002", "v000003")
    assert (await daemon.ask(daemon.client.next, "r0", after="v000001")).target == "v000003"


async def test_a_replica_that_was_forgotten_is_told_to_register(daemon: LocalDaemon) -> None:
    for call in (
        lambda: daemon.client.next("r0"),
        lambda: daemon.client.report_state("r0", StateRequest(ReplicaState.READY)),
        lambda: daemon.client.unregister_replica("r0"),
    ):
        with pytest.raises(NotFoundError, match="register it again"):
            await daemon.ask(call)
    await daemon.ask(daemon.client.register_replica, REPLICA)
    waiting = asyncio.create_task(daemon.ask(daemon.client.next, "r0", wait=30.0))
    await daemon.announcements.someone_waits()
    await daemon.ask(daemon.client.unregister_replica, "r0")
    with pytest.raises(NotFoundError):
        await waiting


async def test_a_twin_is_refused_while_the_first_asks_and_takes_over_once_it_has_hung_up(daemon: LocalDaemon) -> None:
    daemon.add(1)
    first, twin = (RegisterRequest("r0", RUN, "bf16", f"10.0.0.1:800{i}", boot=f"boot-{i}") for i in (1, 2))
    await daemon.ask(daemon.client.register_replica, first)
    _, writer = await asyncio.open_unix_connection(str(daemon.socket))
    writer.write(b"GET /v1/replicas/r0/next?after=v000001&wait=60 HTTP/1.1\r\nHost: x\r\n\r\n")
    await daemon.announcements.someone_waits()
    with pytest.raises(ConflictError, match=r"found another one of that name, at 10\.0\.0\.1:8001"):
        await daemon.ask(daemon.client.register_replica, twin)
    writer.close()  # as the system does for a process that was killed
    async with asyncio.timeout(30):
        while daemon.fleet.registration("r0") != twin:
            with contextlib.suppress(ConflictError):
                await daemon.ask(daemon.client.register_replica, twin)


async def test_one_that_was_answered_and_works_has_not_hung_up(daemon: LocalDaemon) -> None:
    daemon.add(1)
    first, twin = (RegisterRequest("r0", RUN, "bf16", f"10.0.0.1:800{i}", boot=f"boot-{i}") for i in (1, 2))
    await daemon.ask(daemon.client.register_replica, first)
    assert (await daemon.ask(daemon.client.next, "r0")).target == "v000001"
    with pytest.raises(ConflictError):
        await daemon.ask(daemon.client.register_replica, twin)


async def test_an_open_poll_is_a_sign_of_life_again_and_again(tmp_path: Path) -> None:
    async with serve_locally(tmp_path, quiet_for=0.03) as daemon:
        daemon.add(1)
        await daemon.ask(daemon.client.register_replica, REPLICA)
        waiting = asyncio.create_task(daemon.ask(daemon.client.next, "r0", after="v000001", wait=60.0))
        while daemon.fleet.signs < 5:
            daemon.fleet.sign = asyncio.Event()
            await daemon.fleet.sign.wait()
        daemon.add(2)
        assert (await waiting).target == "v000002"


async def test_a_replica_that_hung_up_is_not_kept_alive_by_its_poll(tmp_path: Path) -> None:
    async with serve_locally(tmp_path, quiet_for=0.03) as daemon:
        await daemon.ask(daemon.client.register_replica, REPLICA)
        _, writer = await asyncio.open_unix_connection(str(daemon.socket))
        writer.write(b"GET /v1/replicas/r0/next?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n")
        await daemon.announcements.someone_waits()
        writer.close()
        state = ReplicaState.REGISTERED
        while state is not ReplicaState.UNKNOWN:
            view = await daemon.ask(daemon.client.fleet, RUN)
            [replica] = view.regions[0].report.runs[RUN].replicas
            state = replica.state


async def test_a_wrong_root_is_refused_and_does_not_count(daemon: LocalDaemon) -> None:
    daemon.add(1)
    await daemon.ask(daemon.client.register_replica, REPLICA)
    with pytest.raises(ReplicaError, match=root_for(9)):
        await daemon.ask(daemon.client.report_state, "r0", StateRequest(ReplicaState.VERIFIED, "v000001", root_for(9)))
    assert (await daemon.ask(daemon.client.fleet, RUN)).verified == 0


async def test_a_trainer_waits_until_enough_replicas_are_verified_here_and_below(daemon: LocalDaemon) -> None:
    daemon.add(1, 2)
    await daemon.ask(daemon.client.register_replica, REPLICA)
    waiting = asyncio.create_task(daemon.ask(daemon.client.fleet, RUN, version="v000002", verified=2, wait=30.0))
    sooner = asyncio.create_task(daemon.ask(daemon.client.fleet, RUN, version="v000002", verified=1, wait=30.0))
    await daemon.announcements.someone_waits(2)
    await report(daemon, ReplicaState.VERIFIED, 2)
    assert (await sooner).verified == 1
    below = ReplicaReport("r0", RUN, "bf16", ReplicaState.VERIFIED, "v000002", root_for(2))
    daemon.fleet.receive(RegionReport("b", "boot-b", 1, {RUN: RunReport("v000002", "", (below,))}), daemon.clock())
    assert not waiting.done()
    daemon.announcements.announce()
    view = await waiting
    assert (view.verified, view.replicas) == (2, 2)
    assert [region.report.daemon for region in view.regions] == ["a", "b"]


async def test_a_fleet_that_does_not_get_there_is_shown_as_it_is(daemon: LocalDaemon) -> None:
    daemon.add(1)
    view = await daemon.ask(daemon.client.fleet, RUN, verified=1, wait=0.05)
    assert (view.version, view.verified, view.replicas) == ("v000001", 0, 0)
    with pytest.raises(NotFoundError, match="run other"):
        await daemon.ask(daemon.client.fleet, "other", verified=1, wait=0.05)


async def test_draining_answers_every_poll_at_once(tmp_path: Path) -> None:
    async with serve_locally(tmp_path) as daemon:
        daemon.add(1)
        await daemon.ask(daemon.client.register_replica, REPLICA)
        polls = [
            asyncio.create_task(daemon.ask(daemon.client.latest, RUN, after="v000001", wait=60.0)),
            asyncio.create_task(daemon.ask(daemon.client.next, "r0", after="v000001", wait=60.0)),
            asyncio.create_task(daemon.ask(daemon.client.fleet, RUN, verified=1, wait=60.0)),
        ]
        await daemon.announcements.someone_waits(len(polls))
    latest, following, fleet = await asyncio.gather(*polls)
    assert latest is None
    assert following == NextReply()
    assert fleet.verified == 0


# Refusals.


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/", 404, "NotFound"),
        ("GET", "/v1/nothing", 404, "NotFound"),
        ("GET", "/v1/runs//latest", 404, "NotFound"),
        ("POST", "/v1/status", 405, "Usage"),
        ("HEAD", "/v1/status", 405, ""),
        ("PUT", f"/v1/runs/{RUN}/publish", 405, "Usage"),
        ("GET", "/v1/runs/..%2f..%2fetc%2fpasswd/latest", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/versions/newest", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/records/..%2flatest", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/edges/..%2flatest", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/edges/v000001", 404, "NotFound"),
        ("GET", "/v1/objects/..%2f..%2fFORMAT", 400, "Usage"),
        ("GET", f"/v1/objects/{'0' * 63}", 400, "Usage"),
        ("GET", f"/v1/objects/{'A' * 64}", 400, "Usage"),
        ("GET", f"/v1/objects/{'0' * 64}", 404, "NotFound"),
        ("GET", f"/v1/runs/{RUN}/latest?wait=-1", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/latest?wait=nan", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/latest?wait=1e3", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/latest?wiat=1", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/latest?wait=0&wait=0", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/latest?after=now", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/fleet?verified=-1", 400, "Usage"),
        ("GET", f"/v1/runs/{RUN}/fleet?verified=1.5", 400, "Usage"),
        ("GET", "/v1/status?pretty=1", 400, "Usage"),
        ("GET", "/v1/replicas/R%200/next", 400, "Usage"),
        ("DELETE", "/v1/replicas/%00", 400, "Usage"),
        ("POST", f"/v1/runs/{RUN}/publish", 400, "Usage"),
        ("POST", "/v1/replicas", 400, "Usage"),
    ],
)
async def test_every_refusal_has_its_status_and_says_what_is_wrong(
    daemon: LocalDaemon, method: str, path: str, status: int, kind: str
) -> None:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
    writer.write(head.encode())
    reply = await reader.read()
    writer.close()
    top, _, body = reply.partition(b"\r\n\r\n")
    assert int(top.split()[1]) == status
    if kind:
        assert json.loads(body)["error"] == kind
        assert json.loads(body)["message"]


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{", b'{"directory": 5}', b'{"directory": "\xff"}', b'{"x":' + b"[" * 99_999]
)
async def test_a_body_that_is_not_the_request_is_refused(daemon: LocalDaemon, body: bytes) -> None:
    status, reply = await get(daemon, f"/v1/runs/{RUN}/publish", "POST", body)
    assert status == 400
    assert json.loads(reply)["error"] == "Usage"


async def test_an_error_of_the_daemon_keeps_its_kind_status_and_words(daemon: LocalDaemon) -> None:
    daemon.operations.refusal = ConflictError("policy/v000001", expected="root aa", found="root bb")
    with pytest.raises(ConflictError, match="policy/v000001: expected root aa, found root bb"):
        await daemon.ask(daemon.client.publish, RUN, PublishRequest("/step_1"))
    daemon.operations.refusal = ConflictError("policy/v000001")
    assert (await get(daemon, "/v1/status"))[0] == 409


async def test_a_bug_is_a_500_that_tells_nothing_of_the_inside(daemon: LocalDaemon) -> None:
    daemon.operations.refusal = RuntimeError("secret inside")
    with pytest.raises(DeltadError, match="see the daemon's log") as caught:
        await daemon.ask(daemon.client.status)
    assert "secret" not in str(caught.value)
    daemon.operations.refusal = RuntimeError("secret inside")
    status, body = await get(daemon, "/v1/status")
    assert (status, json.loads(body)["error"]) == (500, "Internal")
