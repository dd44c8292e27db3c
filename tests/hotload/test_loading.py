"""Loads carried out: completed by verified replicas alone, and whatever goes wrong changes nothing else (P33)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from deltad.client.messages import ReplicaState
from deltad.errors import CheckpointError, DeltadError, NotFoundError, PreconditionError, UsageError
from deltad.hotload.ledger import Ledger, Load, LoadState, ReplicaLoad
from tests.hotload.site import BROKEN, Site, report
from tests.kit.disk_deltas import INDEX

OK, STAGING, COMMITTED = ReplicaState.VERIFIED, ReplicaState.STAGING, ReplicaState.COMMITTED


async def test_a_load_is_completed_once_all_replicas_have_read_it_back_and_not_before(site: Site) -> None:
    site.daemon.say("r1", OK, "v000000")
    site.daemon.say("r2", STAGING, "v000000")
    await site.upload("a")
    load = await site.loads.begin("1", "a", None, cache="reset")
    await site.until_published(1)
    assert site.daemon.published == [("a", "", "reset")]
    site.daemon.say("r1", OK, "v000001")
    for state, seen in (
        (COMMITTED, ReplicaLoad.UPDATING),
        (ReplicaState.COMMITTING, ReplicaLoad.UPDATING),
        (ReplicaState.UNKNOWN, ReplicaLoad.PENDING),
        (ReplicaState.REGISTERED, ReplicaLoad.PENDING),
        (ReplicaState.FENCED, ReplicaLoad.ERROR),
    ):
        site.daemon.reports["r2"] = report("r2", state, "v000001")  # unannounced: it is looked at here
        assert [each.state for each in site.loads.fleet("v000001")] == [ReplicaLoad.READY, seen]
    site.daemon.say("r2", OK, "v000001", root="")
    assert [each.state for each in site.loads.fleet("v000001")] == [ReplicaLoad.READY, ReplicaLoad.PENDING]
    assert site.loads.ledger.active is not None, "a version without a root that was read back proves nothing"
    site.daemon.say("r2", OK, "v000001")
    ended = await site.ended(load)
    assert (ended.state, ended.version, ended.reason) == (LoadState.COMPLETED, "v000001", "")
    assert [(each.state, each.identity) for each in ended.replicas] == [(ReplicaLoad.READY, "a")] * 2
    site.daemon.say("r2", ReplicaState.FENCED)
    assert site.loads.replicas(ended) == ended.replicas, "an end is told as it was"


async def test_without_a_replica_nothing_is_completed(tmp_path: Path) -> None:
    site = Site(tmp_path, timeout=0.3)
    await site.upload("a")
    ended = await site.ended(await site.loads.begin("1", "a", None))
    assert (ended.state, ended.version) == (LoadState.FAILED, "v000001")
    assert ended.reason == "not all replicas were verified within 0.3 s"
    await site.stop()


async def test_a_replica_that_cannot_take_it_fails_the_load_once_the_others_are_through(site: Site) -> None:
    site.daemon.say("r1", ReplicaState.ROLLED_BACK, "v000000", error="device is full")
    site.daemon.say("r2", STAGING, "v000000")
    await site.upload("a")
    load = await site.loads.begin("1", "a", None)
    await site.until_published(1)
    assert site.loads.ledger.active is not None
    assert [each.state for each in site.loads.replicas(load)] == [ReplicaLoad.ERROR, ReplicaLoad.UPDATING]
    site.daemon.say("r2", OK, "v000001")
    ended = await site.ended(load)
    assert (ended.state, ended.reason) == (LoadState.FAILED, "r1: device is full")


async def completed(site: Site, number: int, base: int | None = None) -> None:
    identity = f"step-{number}"
    await site.upload(identity, "" if base is None else f"step-{base}")
    load = await site.loads.begin(f"id-{number}", identity, None if base is None else f"step-{base}")
    await site.until_published(len(site.loads.ledger.loads))
    site.daemon.say("r1", OK, f"v{len(site.daemon.published):06d}")
    assert (await site.ended(load)).state is LoadState.COMPLETED


async def test_a_delta_is_published_on_the_version_of_its_base(site: Site) -> None:
    await completed(site, 1)
    await completed(site, 2, 1)
    assert site.daemon.published == [("step-1", "", ""), ("step-2", "v000001", "")]


async def test_an_earlier_snapshot_is_served_again_without_another_version(site: Site) -> None:
    await completed(site, 1)
    await completed(site, 2)
    load = await site.loads.begin("back", "step-1", None)
    await site.until_published(3)
    assert site.daemon.led[-1] == "v000001"
    site.daemon.say("r1", OK, "v000001")
    assert (await site.ended(load)).state is LoadState.COMPLETED
    assert len(site.daemon.published) == 2
    await site.upload("step-3", "step-2")
    with pytest.raises(PreconditionError, match="a delta on 'step-1', which is served"):
        await site.loads.begin("3", "step-3", "step-2")


async def test_what_cannot_be_published_fails_the_load_and_the_next_one_goes_its_way(site: Site) -> None:
    await completed(site, 1)
    site.daemon.refusal = BROKEN
    await site.upload("bad")
    ended = await site.ended(await site.loads.begin("2", "bad", None))
    assert (ended.state, ended.version, ended.reason) == (LoadState.FAILED, "", str(BROKEN))
    site.daemon.refusal = None
    assert site.daemon.led == ["v000001"], "the fleet was led nowhere"
    await site.upload("step-3", "step-1")
    load = await site.loads.begin("3", "step-3", "step-1")
    await site.until_published(2)
    site.daemon.say("r1", OK, "v000002")
    assert (await site.ended(load)).state is LoadState.COMPLETED


async def test_a_restart_goes_on_with_what_was_begun(site: Site) -> None:
    site.daemon.say("r1", OK, "v000000")
    await site.upload("a")
    load = await site.loads.begin("1", "a", None)
    await site.until_published(1)
    await site.restart()
    assert site.loads.ledger.active is not None
    await site.until_published(2)
    site.daemon.say("r1", OK, "v000001")
    assert (await site.ended(load)).state is LoadState.COMPLETED
    assert site.daemon.published == [("a", "", "")], "it was published once"


async def test_a_load_that_is_canceled_leads_the_fleet_back_to_what_is_served(site: Site) -> None:
    await completed(site, 1)
    await site.upload("b")
    await site.loads.begin("2", "b", None)
    await site.until_published(2)
    canceled = await site.loads.cancel("2", "alice")
    assert (canceled.state, canceled.reason) == (LoadState.CANCELED, "canceled by alice")
    assert site.daemon.led == ["v000001", "v000002", "v000001"]
    with pytest.raises(PreconditionError, match="one that has ended"):
        await site.loads.cancel("2", "alice")


async def test_what_is_canceled_while_it_is_published_is_waited_for_and_led_back(site: Site) -> None:
    await completed(site, 1)
    site.daemon.may_publish.clear()
    await site.upload("b")
    await site.loads.begin("2", "b", None)
    canceling = asyncio.create_task(site.loads.cancel("2", "alice"))
    await asyncio.sleep(0.05)
    site.daemon.may_publish.set()
    canceled = await canceling
    assert canceled.state is LoadState.CANCELED
    if canceled.version:
        assert site.daemon.led[-1] == "v000001"


BAD = {
    "nothing is there": ("nothing", None, CheckpointError, "found nothing there"),
    "the index is not there yet": ("early", None, CheckpointError, "files without it"),
    "a shard is missing": ("lacking", None, CheckpointError, "every file that its index names"),
    "a delta that is called full": ("delta", None, UsageError, "found a delta on 'step-1', as its index says"),
    "a full one that is called a delta": ("full", "step-1", UsageError, "found a full snapshot, as its index says"),
    "a delta on another base by its own word": ("other", "step-1", UsageError, "found one on 'step-0' by its index"),
    "an adapter": ("adapter", None, CheckpointError, "adapters are not loaded here yet"),
}


@pytest.mark.parametrize("what", BAD)
async def test_it_is_refused_before_anything_is_begun(what: str, site: Site) -> None:
    identity, base, kind, reason = BAD[what]
    await completed(site, 1)
    await site.upload("delta", "step-1")
    await site.upload("other", "step-0")
    await site.upload("full")
    await site.bucket.put("early/model-00001-of-00002.safetensors", b"x")
    index = json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}})
    await site.bucket.put(f"lacking/{INDEX}", index.encode())
    await site.bucket.put("adapter/adapter_model.safetensors", b"x")
    before = site.loads.ledger
    with pytest.raises(kind, match=reason):
        await site.loads.begin("2", identity, base)
    assert site.loads.ledger is before
    assert len(site.daemon.published) == 1


async def test_while_an_operator_holds_the_fleet_nothing_is_loaded(site: Site) -> None:
    site.daemon.held = PreconditionError("the fleet", found="it held at v000001 by bob")
    await site.upload("a")
    with pytest.raises(PreconditionError, match="held at v000001 by bob"):
        await site.loads.begin("1", "a", None)
    assert site.loads.ledger.loads == ()


async def test_a_snapshot_that_changed_since_it_was_announced_is_refused(site: Site) -> None:
    await site.upload("a")
    announced = Load("1", "a", "", {"model.safetensors": (9, "tag")}, 1.0, 1.0)
    (site.home / "ledger.json").write_bytes(msgspec.json.encode(Ledger((announced,))))
    await site.restart()
    ended = await site.ended(announced)
    assert (ended.state, site.daemon.published) == (LoadState.FAILED, [])
    assert "the files that were announced, found others" in ended.reason


async def test_a_damaged_ledger_is_named_and_not_guessed_at(site: Site) -> None:
    (site.home / "ledger.json").write_bytes(b"{")
    with pytest.raises(DeltadError, match=r"ledger\.json"):
        site.open()


async def test_what_was_fetched_is_gone_after_every_end(site: Site) -> None:
    await completed(site, 1)
    site.daemon.refusal = NotFoundError("x")
    await site.upload("b")
    await site.ended(await site.loads.begin("2", "b", None))
    assert list((site.home / "scratch").iterdir()) == []
