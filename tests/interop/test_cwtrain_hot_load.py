"""cwtrain, the client of CoreWeave's hot loads, drives a fleet of ours as it is, given another address."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from deltad.client.messages import ExportRequest
from tests.interop.peers import needs_peers, run_peer
from tests.interop.site import DEPLOYMENT, HERE, Site
from tests.kit.checkpoints import read_checkpoint

pytestmark = needs_peers

CLI = HERE.parents[1] / ".venv-peers" / "bin" / "cwtrain"


def served(site: Site, identity: str) -> str:
    """The root that the replica read back of the version of an identity, held against the published one."""
    info = next(info for info in site.daemon.client.versions("policy") if info.identity == identity)
    report = site.report(lambda report: report.version == info.version and report.root == info.root)
    return report.version


def test_full_and_delta_snapshots_are_published_until_every_replica_has_read_them_back(site: Site) -> None:
    site.start_replica()
    one, two = site.next_state("one"), site.next_state("two")
    delta = site.delta(one, two, "000002", "000001")
    steps = site.cwtrain(
        ("deployment", {}),
        ("publish", {"checkpoint": one, "identity": "weight_v000001"}),
        (
            "publish",
            {"checkpoint": delta, "identity": "weight_v000002", "previous_identity": "weight_v000001"},
        ),
    )
    assert steps[0] == {"ready": True, "bucket": "policies"}
    for found, identity, chain in zip(
        steps[1:],
        ("weight_v000001", "weight_v000002"),
        (["weight_v000001"], ["weight_v000001", "weight_v000002"]),
        strict=True,
    ):
        assert found["state"] == "COMPLETED", found
        assert found["replicas"] == [{"name": "r1", "state": "READY", "identity": identity}]
        assert (found["chain"], found["current"]) == (chain, identity)
    assert served(site, "weight_v000002") == "v000002"
    versions = site.daemon.client.versions("policy")
    assert [(info.identity, info.kind) for info in versions] == [
        ("weight_v000001", "anchor"),
        ("weight_v000002", "delta"),
    ]
    info = versions[-1]
    with_token = {**site.environment()}
    listed = json.loads(
        run_peer(CLI, "--base-url", site.url, "hotload", "list", "--deployment", DEPLOYMENT, env=with_token)
    )
    assert [load["spec"]["identity"] for load in listed] == ["weight_v000002", "weight_v000001"], "newest first"
    status = json.loads(run_peer(CLI, "--base-url", site.url, "hotload", "status", steps[2]["id"], env=with_token))
    assert status["hot_load"]["status"]["state"] == "COMPLETED"
    assert status["replicas"][0]["state"] == "READY"
    check = json.loads(
        run_peer(CLI, "--base-url", site.url, "hotload", "check", "--deployment", DEPLOYMENT, env=with_token)
    )
    assert (check["result"], check["uri"]) == ("ok", f"s3://policies/{site.prefix}/")
    three = site.next_state("three")
    published = json.loads(
        run_peer(
            CLI,
            "--base-url",
            site.url,
            "hotload",
            "publish",
            "--deployment",
            DEPLOYMENT,
            "--checkpoint",
            three,
            "--identity",
            "three",
            "--reset-prompt-cache",
            env=with_token,
        )
    )
    assert (published["status"]["state"], published["spec"]["prompt_cache_policy"]) == ("COMPLETED", "RESET_ALL")
    assert served(site, "three") > info.version


def test_what_cannot_be_loaded_is_refused_in_errors_that_the_client_knows(site: Site, tmp_path: Path) -> None:
    site.start_replica()
    one, two = site.next_state("one"), site.next_state("two")
    delta = site.delta(one, two, "000002", "000001")
    damaged = site.delta(one, site.next_state("three"), "000003", "000001")
    shard = next(damaged.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-30] ^= 0x55
    shard.write_bytes(bytes(data))
    post = {"method": "POST", "path": "/v1alpha1/inference/hotLoads", "retry": False}
    body = {"deploymentId": DEPLOYMENT, "hotLoadId": "a-b-c", "identity": "one", "type": "SNAPSHOT_TYPE_FULL"}
    delta_body = {**body, "type": 2, "incrementalSnapshotMetadata": {"previousSnapshotIdentity": "one"}}
    wrong = {"previousSnapshotIdentity": "one", "checksumFormat": "CHECKSUM_FORMAT_CRC32"}
    gzip = {"previousSnapshotIdentity": "one", "compressionFormat": "COMPRESSION_FORMAT_GZIP"}
    found = site.cwtrain(
        ("trigger", {"identity": "nothing-there"}),
        ("publish", {"checkpoint": delta, "identity": "two", "previous_identity": "one"}),
        ("publish", {"checkpoint": one, "identity": "one"}),
        ("publish", {"checkpoint": damaged, "identity": "bad", "previous_identity": "one"}),
        ("trigger", {"identity": "two"}),
        ("trigger", {"identity": "one", "previous_identity": "two"}),
        ("request", {**post, "json": {**body, "deploymentId": "no-such"}}),
        ("request", {**post, "json": {**body, "identity": "initial"}}),
        ("request", {**post, "json": {**body, "identity": "a/b"}}),
        ("request", {**post, "json": {**body, "type": "SNAPSHOT_TYPE_HALF"}}),
        ("request", {**post, "json": {**delta_body, "incrementalSnapshotMetadata": wrong}}),
        ("request", {**post, "json": {**delta_body, "incrementalSnapshotMetadata": gzip}}),
        ("request", {**post, "json": {"identity": "one"}}),
        ("request", {"method": "GET", "path": "/v1alpha1/inference/hotLoads/unknown"}),
        ("publish", {"checkpoint": delta, "identity": "two", "previous_identity": "one"}),
    )
    errors = [step.get("error") for step in found]
    assert errors == [
        "FailedPreconditionError",
        "FailedPreconditionError",
        None,
        "HotLoadFailedError",
        "InvalidArgumentError",
        "InvalidArgumentError",
        "PermissionDeniedError",  # the token is bound to a run, and hears of nothing else
        "InvalidArgumentError",
        "InvalidArgumentError",
        "InvalidArgumentError",
        "InvalidArgumentError",
        "InvalidArgumentError",
        "InvalidArgumentError",
        "PermissionDeniedError",
        None,
    ], found
    assert "a full snapshot first" in found[1]["message"]
    assert found[-1]["state"] == "COMPLETED"
    assert found[-1]["chain"] == ["one", "two"], "a load that failed is no link of the chain"
    assert [info.identity for info in site.daemon.client.versions("policy")] == ["one", "two"]
    served(site, "two")


def test_a_load_waits_for_the_one_before_is_canceled_asked_for_twice_and_outlives_a_kill(site: Site) -> None:
    one, two = site.next_state("one"), site.next_state("two")
    # No replica: what is begun stays under way.
    again = {"identity": "one", "hot_load_id": "11111111-1111-4111-8111-111111111111", "wait_for_active": False}
    found = site.cwtrain(
        ("upload", {"checkpoint": one, "identity": "one"}),
        ("trigger", again),
        ("trigger", again),
        ("upload", {"checkpoint": two, "identity": "two"}),
        ("trigger", {"identity": "two", "wait_for_active": False}),
        ("request", {"method": "POST", "path": f"/v1alpha1/inference/hotLoads/{again['hot_load_id']}:cancel"}),
        ("trigger", {"identity": "two", "wait_for_active": False}),
    )
    assert "error" not in found[1], found
    assert found[1]["id"] == found[2]["id"] == again["hot_load_id"]
    assert found[4]["error"] == "HotLoadInProgressError"
    assert found[5]["hotLoad"]["status"]["state"] == "HOT_LOAD_STATE_CANCELED"
    assert "error" not in found[6], found[6]
    assert found[6]["state"] in {"PENDING", "IN_PROGRESS"}
    # A daemon that is killed meanwhile goes on with it.
    site.daemon.kill()
    site.daemon.start()
    site.start_replica()
    (ended,) = site.cwtrain(("wait", {"hot_load_id": found[6]["id"]}))
    assert ended["state"] == "COMPLETED"
    served(site, "two")


def test_its_hook_for_slime_and_miles_publishes_their_directories_and_cuts_the_chain(site: Site) -> None:
    site.start_replica()
    states = [site.next_state(name) for name in ("hf", "one", "two", "three")]
    disk = site.home / "deltas"
    disk.mkdir()
    versions = []
    for number, (old, new) in enumerate(pairwise(states), 1):
        versions.append(disk / f"weight_v{number:06d}")
        site.delta(old, new, f"{number:06d}", f"{number - 1:06d}").rename(versions[-1])
    settings = {
        "COREWEAVE_API_URL": site.url,
        "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": DEPLOYMENT,
        "CWTRAIN_HOTLOAD_RUN_ID": "run-7",
        "CWTRAIN_HOTLOAD_FULL_EVERY": "3",
        "CWTRAIN_HOTLOAD_VERIFY": "1",
        "CWTRAIN_HOTLOAD_PROMPT_CACHE_POLICY": "reset_all",
    }
    run_peer(HERE / "slime_hook.py", states[0], disk, *versions, env={**site.environment(), **settings})
    (loads,) = site.cwtrain(("request", {"method": "GET", "path": "/v1alpha1/inference/hotLoads"}))
    told = [(load["spec"]["identity"], load["spec"]["type"], load["status"]["state"]) for load in loads["hotLoads"]]
    assert told == [
        ("run-7-v000003", "SNAPSHOT_TYPE_FULL", "HOT_LOAD_STATE_COMPLETED"),
        ("run-7-v000002", "SNAPSHOT_TYPE_INCREMENTAL", "HOT_LOAD_STATE_COMPLETED"),
        ("run-7-v000001", "SNAPSHOT_TYPE_INCREMENTAL", "HOT_LOAD_STATE_COMPLETED"),
        ("run-7-v000000", "SNAPSHOT_TYPE_FULL", "HOT_LOAD_STATE_COMPLETED"),
    ]
    assert served(site, "run-7-v000003") == "v000003"
    whole = site.home / "whole"
    site.daemon.client.export("policy", ExportRequest(version="v000003", directory=str(whole)))
    assert read_checkpoint(whole).equals(site.state)
