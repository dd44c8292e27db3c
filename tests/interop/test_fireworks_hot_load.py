"""The SDK of Fireworks drives a fleet of ours as it is, given another address: `DeploymentManager` and its waits."""

from __future__ import annotations

from typing import Any

from tests.interop.peers import needs_peers
from tests.interop.site import DEPLOYMENT, Site

pytestmark = needs_peers

PATH = "/hot_load/v1/models/hot_load"


def delta_on(identity: str, **how: str) -> dict[str, Any]:
    told = {"previous_snapshot_identity": identity, "compression_format": "arc_v2", "checksum_format": "alder32"}
    return {"incremental_snapshot_metadata": told | how}


def test_full_and_incremental_snapshots_are_loaded_and_waited_for_and_a_full_one_recovers(site: Site) -> None:
    site.start_replica()
    one, two, three = (site.next_state(name) for name in ("one", "two", "three"))
    site.upload(one, "step-1")
    site.upload(site.delta(one, two, "step-2", "step-1"), "step-2")
    damaged = site.delta(two, three, "step-3", "step-2")
    shard = next(damaged.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-30] ^= 0x55
    shard.write_bytes(bytes(data))
    site.upload(damaged, "step-3")
    site.upload(three, "step-3-full")
    ledger = {"path": f"/v1/accounts/lab/deployments/{DEPLOYMENT}/ledger"}
    found = site.fireworks(
        ("account", {}),
        ("hotload_and_wait", {"snapshot_identity": "step-1"}),
        ("hotload_and_wait", {"snapshot_identity": "step-2", "reset_prompt_cache": False, **delta_on("step-1")}),
        ("hotload_check_status", {}),
        ("hotload_and_wait", {"snapshot_identity": "step-3", **delta_on("step-2")}),
        ("hotload_check_status", {}),
        ("hotload_and_wait", {"snapshot_identity": "step-3-full"}),
        ("wait_for_hotload", {"expected_identity": "step-3-full"}),
        ("request", {"method": "GET", **ledger}),
        ("request", {"method": "DELETE", **ledger}),
        ("hotload", {"snapshot_identity": "step-2", **delta_on("step-3-full")}),
    )
    assert found[0] == "lab"
    assert [step["done"] for step in (found[1], found[2])] == [True, True], found
    (replica,) = found[3]["replicas"]
    assert (replica["current_snapshot_identity"], replica["readiness"]) == ("step-2", True)
    assert found[4]["done"] is False
    assert "target snapshot: step-3; stage=error" in found[4]["error"]
    (replica,) = found[5]["replicas"]
    assert (replica["current_snapshot_identity"], replica["loading_state"]["stage"]) == ("step-2", "error")
    assert "tensor 'model.layers" in replica["loading_state"]["error"], "the reason is there for a person"
    assert [step["done"] for step in (found[6], found[7])] == [True, True], found
    entries = found[8]["body"]["entries"]
    assert [(entry["identity"], entry["type"], entry["state"]) for entry in entries] == [
        ("step-3-full", "full", "completed"),
        ("step-3", "delta", "failed"),
        ("step-2", "delta", "completed"),
        ("step-1", "full", "completed"),
    ]
    assert entries[0]["replicas"][0]["ready"] > 0
    assert found[9]["status"] == 200
    assert found[10]["raised"] == "HTTPStatusError", "a ledger that was reset wants a full snapshot"
    info = site.daemon.client.versions("policy")[-1]
    assert info.identity == "step-3-full"
    site.report(lambda report: report.version == info.version and report.root == info.root)


def test_what_is_wrong_is_refused_and_nothing_is_loaded(site: Site) -> None:
    one = site.next_state("one")
    site.upload(one, "one")
    delta = site.delta(one, site.next_state("two"), "two", "one")
    site.upload(delta, "two")

    def post(headers: dict[str, str] | None = None, **body: object) -> tuple[str, dict[str, Any]]:
        return "request", {"method": "POST", "path": PATH, "json": body, "headers": headers or {}}

    elsewhere = {"x-fireworks-hot-load-source-url": "s3://elsewhere/snapshots"}
    other = {"fireworks-deployment": f"accounts/another/deployments/{DEPLOYMENT}"}
    found = site.fireworks(
        post(identity="nothing-there"),
        post(identity="two"),
        post(identity="one", **delta_on("zero")),
        post(identity="two", **delta_on("one")),
        post(identity="two", **delta_on("one", compression_format="gzip")),
        post(identity="two", **delta_on("one", checksum_format="crc32")),
        post(identity="one", reset_prompt_cache="sometimes"),
        post(identity="../one"),
        post(identity=7),
        post(elsewhere, identity="one"),
        post(other, identity="one"),
        ("request", {"method": "POST", "path": f"{PATH}/hint", "json": {"identity": "one", "files": ["absent"]}}),
        ("request", {"method": "POST", "path": f"{PATH}/hint", "json": {"identity": "one", "files": ["config.json"]}}),
        ("hotload_check_status", {}),
    )
    assert [step.get("status") for step in found[:-1]] == [
        *(400, 400, 400, 409, 400, 400, 400, 400, 400, 400, 403, 404, 200)
    ], found
    assert "files without it" in str(found[0]["body"]) or "nothing there" in str(found[0]["body"])
    assert "a delta on 'one', as its index says" in found[1]["body"]["error"]["message"]
    assert "a full snapshot first" in found[3]["body"]["error"]["message"]
    assert found[-1] == {"replicas": []}
    assert site.daemon.client.versions("policy") == ()


def test_the_replica_that_lags_is_told_first_and_a_second_load_is_refused_meanwhile(site: Site) -> None:
    site.start_replica("r1")
    one, two = site.next_state("one"), site.next_state("two")
    site.upload(one, "one")
    site.upload(two, "two")
    (first,) = site.fireworks(("hotload_and_wait", {"snapshot_identity": "one"}))
    assert first["done"] is True
    # A second replica that is known and never comes: nothing is done until it is.
    site.register("r0-behind")
    found = site.fireworks(
        ("hotload", {"snapshot_identity": "two"}),
        ("hotload", {"snapshot_identity": "two"}),
        ("request", {"method": "POST", "path": PATH, "json": {"identity": "one"}}),
        ("wait_for_hotload", {"expected_identity": "two", "timeout_seconds": 3}),
        ("hotload_check_status", {}),
    )
    assert found[0]["hot_load_id"] == found[1]["hot_load_id"], "asked for again, it is the same load"
    offered = site.daemon.client.next("r0-behind", wait=30)
    assert (offered.target, offered.cache) == ("v000001", "reset"), "the SDK resets prompt caches unless told otherwise"
    assert found[2]["status"] == 409
    assert "already in progress" in found[2]["body"]["error"]["message"]
    assert found[3]["done"] is False
    assert [(each["replica"], each["readiness"]) for each in found[4]["replicas"]] == [
        ("r0-behind", False),
        ("r1", True),
    ]
    site.daemon.client.unregister_replica("r0-behind")
    (ended,) = site.fireworks(("wait_for_hotload", {"expected_identity": "two"}))
    assert ended["done"] is True
