"""Whole checkpoints in a replica's mid-life, and daemons that come and go."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deltad.client.messages import ExportReply, ExportRequest, NextReply, ReplicaState
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import NotFoundError
from deltad.types import RunId, Version
from rollout_plugin.apply.export import Export
from rollout_plugin.engines import Sampling
from tests.kit.weights import ArrayWeights
from tests.rollout_plugin.conftest import StartReplica
from tests.rollout_plugin.region import RUN, Region
from tests.rollout_plugin.replicas import PROMPT, fenced, states_of, with_file

# Whole checkpoints in mid-life.


def test_a_reload_copies_a_whole_checkpoint_into_the_live_parameters(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    engine = replica.engine
    address = engine.model.model.norm.weight.data_ptr()
    region.offers = lambda reply: reply and NextReply(reply.target, reload=True)
    after = region.publish_changed(0.9)
    region.await_verified(after)
    assert replica.engine is engine
    assert engine.model.model.norm.weight.data_ptr() == address
    assert replica.root() == after.info.root
    assert engine.version == Version(1, 1)


def test_a_reload_from_a_damaged_export_is_noticed_before_generation_goes_on(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    region.offers = lambda reply: reply and NextReply(reply.target, reload=True)
    region.before_export = lambda: region.history[-1].weights.arrays[2].fill(0)
    region.publish_changed()
    assert "copy of v000001: expected root" in region.await_replica(fenced).error
    assert "committed" not in states_of(replica)[6:]


def test_a_version_of_another_layout_leaves_the_replica_where_it_is_and_it_says_why(
    region: Region, start_replica: StartReplica
) -> None:
    """P32: what cannot be staged was not written, so it stops nothing."""
    replica = start_replica()
    before = region.history[0]
    region.await_verified(before)
    extra = Layout(1, (*before.layout.tensors, TensorSpec("zz", "BF16", (4,))), before.layout.files)
    weights = ArrayWeights([*before.weights.copy().arrays, np.zeros(4, np.uint16)])
    region.publish(extra, weights, before.files)
    report = region.await_replica(lambda r: "restart the replica: it loads the new model" in r.error)
    assert (report.state, report.version, report.root) == (ReplicaState.VERIFIED, "v000000", before.info.root)
    assert replica.serving.view() == (Version(1, 0), True, None)
    assert replica.engine.generate(PROMPT, Sampling(max_new_tokens=4))


def test_a_version_with_another_model_config_is_passed_over_until_one_comes_that_fits(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    before = region.history[0]
    region.await_verified(before)
    region.publish(*with_file(before, "config.json", before.files["config.json"] + b" "))
    report = region.await_replica(lambda r: "config.json" in r.error)
    assert (report.state, report.version, report.root) == (ReplicaState.VERIFIED, "v000000", before.info.root)
    after = region.publish(before.layout, before.weights.changed(0.01, seed=3), before.files)
    assert region.await_verified(after).error == ""
    assert "fenced" not in states_of(replica)
    assert replica.root() == after.info.root


def test_a_version_without_a_model_config_is_passed_over_and_said_to_have_none(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    before = region.history[0]
    region.await_verified(before)
    files = {name: data for name, data in before.files.items() if name != "config.json"}
    specs = tuple(file for file in before.layout.files if file.name != "config.json")
    region.publish(Layout(1, before.layout.tensors, specs), before.weights.copy(), files)
    report = region.await_replica(lambda r: "config.json" in r.error)
    assert "found none; no engine can be built from it" in report.error
    assert "fenced" not in states_of(replica)


def test_an_export_that_is_damaged_is_not_served(region: Region, start_replica: StartReplica) -> None:
    first = region.history[0]
    honest = first.weights.arrays[3].copy()
    first.weights.arrays[3][5] ^= 4
    start_replica()
    assert "served weights of v000000" in region.await_replica(fenced).error
    first.weights.arrays[3][:] = honest
    region.await_verified(region.publish(first.layout, first.weights, first.files))


def test_a_reload_that_copies_another_root_is_not_repeated_until_another_version_comes(
    region: Region, start_replica: StartReplica
) -> None:
    start_replica()
    before = region.history[0]
    region.await_verified(before)
    offered = threading.Semaphore(0)

    def reload(reply: NextReply | None) -> NextReply | None:
        offered.release()
        return reply and NextReply(reply.target, reload=True)

    region.before_export = lambda: damaged.arrays[3].__setitem__(5, damaged.arrays[3][5] ^ 4)
    region.offers = lambda reply: None
    damaged = before.weights.changed(0.01, seed=3)
    region.publish(before.layout, damaged, before.files)
    region.offers = reload
    region.announce()
    assert "copy of v000001" in region.await_replica(fenced).error
    while offered.acquire(blocking=False):
        pass
    for _ in range(3):
        assert offered.acquire(timeout=60)
    assert len(region.exports) == 2
    region.before_export = lambda: None
    region.await_verified(region.publish(before.layout, before.weights.changed(0.01, seed=4), before.files))


# The daemon comes and goes.


def test_a_replica_that_starts_before_its_daemon_waits_for_it(region: Region, start_replica: StartReplica) -> None:
    region.kill()
    start_replica()
    region.start()
    region.await_verified(region.history[0])


def test_a_daemon_that_restarts_is_told_what_is_served_without_a_reload(
    region: Region, start_replica: StartReplica
) -> None:
    start_replica()
    region.await_verified(region.history[0])
    for seed in range(2):
        region.kill()
        region.start()
        region.await_verified(region.history[-1])
        region.await_verified(region.publish_changed(seed=seed))
    assert len(region.exports) == 1


def test_a_daemon_killed_while_an_export_is_made_only_delays(region: Region, start_replica: StartReplica) -> None:
    asked = threading.Event()
    region.before_export = asked.set
    start_replica()
    assert asked.wait(60)
    region.kill()
    region.start()
    region.await_verified(region.history[0])


@pytest.mark.parametrize("lost", ["", "config.json", "generation_config.json", "model.safetensors"])
def test_an_export_that_vanishes_during_the_first_load_is_asked_for_again(
    region: Region, start_replica: StartReplica, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A daemon that starts clears its exports, one of them perhaps under a replica that loads it."""
    fetch = region.export

    async def export(run: RunId, request: ExportRequest) -> ExportReply:
        reply = await fetch(run, request)
        if len(region.exports) == 1:
            shutil.rmtree(reply.directory) if not lost else (Path(reply.directory) / lost).unlink()
        return reply

    monkeypatch.setattr(region, "export", export)
    replica = start_replica()
    assert region.await_verified(region.history[0]).error == ""
    assert len(region.exports) == 2
    assert "fenced" not in states_of(replica)


@pytest.mark.parametrize("step", ["staged", "committed"])
def test_an_export_that_vanishes_during_a_reload_is_asked_for_again(
    region: Region, start_replica: StartReplica, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    clear = {"staged": "__init__", "committed": "tensors"}[step]
    whole = getattr(Export, clear)

    def cleared_before(export: Export, *arguments: object) -> object:
        if len(region.exports) == 2:
            shutil.rmtree(region.exports[1], ignore_errors=True)
        return whole(export, *arguments)

    monkeypatch.setattr(Export, clear, cleared_before)
    region.offers = lambda reply: reply and NextReply(reply.target, reload=True)
    after = region.publish_changed()
    assert region.await_verified(after).error == ""
    assert len(region.exports) == 3
    assert ("fenced" in states_of(replica)) is (step == "committed")


def test_a_daemon_killed_while_a_delta_is_staged_only_delays(region: Region, start_replica: StartReplica) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    offered = threading.Event()

    def offer(reply: NextReply | None) -> NextReply | None:
        if reply is not None and not offered.is_set():
            offered.set()
            missing = reply.steps[0]
            return NextReply(reply.target, (msgspec.structs.replace(missing, manifest="00" * 32),))
        return reply

    region.offers = offer
    after = region.publish_changed()
    assert offered.wait(60)
    region.kill()
    region.start()
    region.await_verified(after)
    assert replica.root() == after.info.root


def test_a_daemon_that_is_gone_stops_no_generation(region: Region, start_replica: StartReplica) -> None:
    """P34, the other way round: the plugin goes on without its daemon."""
    replica = start_replica()
    region.await_verified(region.history[0])
    region.kill()
    assert replica.engine.generate(PROMPT, Sampling(max_new_tokens=4))
    region.start()
    region.await_verified(region.history[0])


def test_a_replica_that_leaves_unregisters_and_does_not_come_back(region: Region, start_replica: StartReplica) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    replica.stop()
    with pytest.raises(NotFoundError):
        region.client.next("r1")
    assert region.client.fleet(RUN).replicas == 0
