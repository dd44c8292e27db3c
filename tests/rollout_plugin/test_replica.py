"""A replica at a real local API: from registration to verified, and what it does when a delta goes wrong."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deltad.client.messages import NextReply, ReplicaState
from deltad.delta.backend import Mode
from deltad.delta.encoding import sha256
from deltad.delta.manifest import State
from deltad.errors import UnavailableError
from deltad.types import Version, parse_version
from rollout_plugin.engines.transformers import load
from tests.rollout_plugin.conftest import StartReplica
from tests.rollout_plugin.region import Region, write_export
from tests.rollout_plugin.replicas import PROMPT, FailingBackend, forged, log_of, states_of, with_file

# The straight way.


def test_a_newcomer_loads_an_export_and_is_verified_by_the_root_it_read_back(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    report = region.await_verified(region.history[0])
    assert report.root == replica.root() == region.history[0].info.root
    assert report.address == replica.url
    assert report.seconds.stage > 0
    assert states_of(replica) == ["registered", "staging", "ready", "committing", "committed", "verified"]


def test_ten_versions_in_place_leave_the_same_bits_as_a_fresh_load(
    region: Region, start_replica: StartReplica, tmp_path: Path
) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    addresses = {name: p.data_ptr() for name, p in replica.engine.model.named_parameters()}
    for seed in range(10):
        report = region.await_verified(region.publish_changed(seed=seed))
        assert report.seconds.pause > 0
        assert report.seconds.verify > 0
    newest = region.history[-1]
    write_export(newest, tmp_path / "fresh" / "export")
    fresh = load(tmp_path / "fresh" / "export", newest.layout, Version(1, 10))
    for i, spec in enumerate(newest.layout.tensors):
        assert np.array_equal(replica.engine.live.whole(i), fresh.live.whole(i)), spec.name
    assert replica.engine.logprobs(PROMPT) == fresh.logprobs(PROMPT)
    assert {name: p.data_ptr() for name, p in replica.engine.model.named_parameters()} == addresses
    assert len(region.exports) == 1


def test_what_whoever_publishes_says_of_caches_reaches_the_commit(region: Region, start_replica: StartReplica) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    region.await_verified(region.publish_changed(seed=1))
    assert replica.engine.resets == 0
    region.offers = lambda reply: None if reply is None else msgspec.structs.replace(reply, cache="reset")
    region.await_verified(region.publish_changed(seed=2))
    assert replica.engine.resets == 1
    region.offers = lambda reply: None if reply is None else msgspec.structs.replace(reply, cache="keep")
    region.await_verified(region.publish_changed(seed=3))
    assert replica.engine.resets == 1


def test_the_export_that_a_replica_loaded_keeps_its_bytes_while_versions_pass(
    region: Region, start_replica: StartReplica
) -> None:
    start_replica()
    region.await_verified(region.history[0])
    (path,) = region.exports[0].glob("*.safetensors")
    before = sha256(path.read_bytes())
    region.await_verified(region.publish_changed())
    assert sha256(path.read_bytes()) == before


def test_a_replica_that_fell_behind_takes_several_deltas_in_one_pause(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    region.offers = lambda reply: None
    for seed in range(3):
        region.publish_changed(seed=seed)
    region.offers = lambda reply: reply
    region.announce()
    region.await_verified(region.history[3])
    assert states_of(replica).count("committing") == 2


@pytest.mark.parametrize("modes", [("dense", "dense", "dense"), ("blind", "mid", "fast"), ("fast", "blind", "dense")])
def test_a_replica_that_is_three_versions_by_context_behind_goes_there_in_one_commit(
    region: Region, start_replica: StartReplica, modes: tuple[Mode, ...]
) -> None:
    """Each is read beside what is served with the ones before on top; they change the same lanes."""
    replica = start_replica()
    region.await_verified(region.history[0])
    region.offers = lambda reply: None
    for region.mode in modes:
        region.publish_changed(density=0.05, seed=1)
    region.offers = lambda reply: reply
    region.announce()
    region.await_verified(region.history[3])
    assert replica.root() == region.history[3].info.root
    assert states_of(replica).count("committing") == 2


def test_an_empty_delta_makes_a_version_like_any_other(region: Region, start_replica: StartReplica) -> None:
    start_replica()
    before = region.history[0]
    region.await_verified(before)
    same = region.publish(before.layout, before.weights.copy(), before.files)
    assert region.await_verified(same).root == before.info.root


def test_another_tokenizer_needs_no_reload(region: Region, start_replica: StartReplica) -> None:
    replica = start_replica()
    before = region.history[0]
    region.await_verified(before)
    after = region.publish(*with_file(before, "tokenizer.json", b"{}"))
    region.await_verified(after)
    assert len(region.exports) == 1
    assert "fenced" not in states_of(replica)


def test_a_lost_notification_only_delays(region: Region, start_replica: StartReplica) -> None:
    """P35: nobody is woken, and the next poll asks for anything after what is served."""
    start_replica()
    region.await_verified(region.history[0])
    region.announce = lambda: None  # type: ignore[method-assign]
    region.await_verified(region.publish_changed())


# What is refused before a byte is touched.


def test_a_delta_on_another_base_is_refused_before_a_byte_is_touched(
    region: Region, start_replica: StartReplica
) -> None:
    """P28, by the daemon's offer."""
    replica = start_replica()
    region.await_verified(region.history[0])
    region.offers = lambda reply: None
    region.publish_changed(seed=1)
    skipping = region.publish_changed(seed=2)
    wrong = NextReply(skipping.info.version, (region.step(skipping),))
    region.offers = lambda reply: wrong if reply else None
    region.announce()
    report = region.await_replica(lambda r: "expected to start from v000000" in r.error)
    assert (report.state, report.version) == (ReplicaState.VERIFIED, "v000000")
    assert replica.root() == region.history[0].info.root
    region.offers = lambda reply: reply
    region.await_verified(skipping)


def test_a_manifest_on_another_base_than_its_offer_says_is_refused_before_a_byte_is_touched(
    region: Region, start_replica: StartReplica
) -> None:
    """P28, by the manifest itself."""
    replica = start_replica()
    region.await_verified(region.history[0])
    region.offers = lambda reply: None
    first, second = region.publish_changed(seed=1), region.publish_changed(seed=2)
    honest, first.manifest = first.manifest, second.manifest
    region.offers = lambda reply: reply and NextReply(first.info.version, reply.steps[:1])
    region.announce()
    report = region.await_replica(lambda r: "base root" in r.error)
    assert (report.state, report.version) == (ReplicaState.VERIFIED, "v000000")
    assert replica.root() == region.history[0].info.root
    first.manifest = honest
    region.await_verified(first)


def test_a_wrong_base_in_the_middle_of_a_chain_is_refused_before_a_byte_is_touched(
    region: Region, start_replica: StartReplica
) -> None:
    """P28: the second of three deltas by context was made for other weights than the first leads to."""
    replica = start_replica()
    region.await_verified(region.history[0])
    region.offers = lambda reply: None
    region.mode = "dense"
    first, second, third = (region.publish_changed(seed=seed) for seed in range(3))
    base = State(parse_version(first.info.version), bytes(32))
    honest, second.manifest = second.manifest, region.put_delta(first, second, base=base)
    region.offers = lambda reply: reply
    region.announce()
    report = region.await_replica(lambda r: "base root" in r.error)
    assert f"v000001 → v000002: expected base root {first.info.root}" in report.error
    assert (report.state, report.version) == (ReplicaState.VERIFIED, "v000000")
    assert replica.root() == region.history[0].info.root
    assert states_of(replica).count("committing") == 1
    second.manifest = honest
    region.await_verified(third)


# Commits that fail.


def test_a_commit_that_fails_is_rolled_back_and_the_version_before_is_verified_again(
    region: Region, start_replica: StartReplica
) -> None:
    """P32: the chunks are those of another version than the manifest's sums say."""
    replica = start_replica()
    region.await_verified(region.history[0])
    region.offers = lambda reply: None
    after = region.publish_changed(seed=1)
    honest, after.manifest = after.manifest, forged(region, after)
    region.offers = lambda reply: reply
    region.announce()
    report = region.await_replica(lambda r: r.state is ReplicaState.VERIFIED and "sum in its manifest" in r.error)
    assert (report.version, report.root) == ("v000000", region.history[0].info.root)
    assert "rolled-back" in states_of(replica)
    assert replica.root() == region.history[0].info.root
    after.manifest = honest
    assert region.await_verified(after).error == ""


def test_a_replica_whose_commit_fails_half_way_never_serves_a_mix_and_the_others_go_on(
    region: Region, start_replica: StartReplica
) -> None:
    """P32, with a fault in the middle of the writes."""
    backend = FailingBackend(range(3, 4))
    faulty = start_replica("r1", backend=backend)
    start_replica("r2")
    region.await_verified(region.history[0], "r1")
    region.await_verified(region.history[0], "r2")
    after = region.publish_changed()
    region.await_verified(after, "r2")
    region.await_verified(after, "r1")  # at the second try
    assert states_of(faulty).count("rolled-back") == 1
    (rolled_back,) = [line for line in log_of(faulty, "state") if line["state"] == "rolled-back"]
    assert rolled_back["version"] == "v000000"
    assert "MemoryError: application 3" in str(rolled_back["error"])
    assert backend.applied > 5  # two writes, a failure, two undone, and all of them again


def test_a_commit_that_cannot_be_undone_fences_and_a_whole_checkpoint_heals(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica(backend=FailingBackend(range(3, 1000)))
    region.await_verified(region.history[0])
    hold_healing = threading.Event()
    region.before_export = lambda: hold_healing.wait(60) and None
    after = region.publish_changed()
    report = region.await_replica(lambda r: "could not be undone" in r.error)
    assert (report.version, report.root) == ("", "")
    with pytest.raises(UnavailableError, match="fenced"):
        replica.serving.engine()
    hold_healing.set()
    region.await_verified(after)
    assert replica.root() == after.info.root


def test_weights_that_changed_by_themselves_are_found_by_the_read_back(
    region: Region, start_replica: StartReplica
) -> None:
    """P30: a bit flips in a lane that the delta does not touch; the sums that follow the writes cannot see it."""
    replica = start_replica()
    before = region.history[0]
    region.await_verified(before)
    hold_healing = threading.Event()
    region.before_export = lambda: hold_healing.wait(60) and None
    after = before.weights.copy()
    after.arrays[0][0] ^= 1
    replica.engine.live.whole(1)[7] ^= 1
    held = region.publish(before.layout, after, before.files)
    report = region.await_replica(lambda r: "served weights of v000001" in r.error)
    assert (report.version, report.root) == ("", "")
    with pytest.raises(UnavailableError, match="served weights of v000001"):
        replica.serving.engine()
    hold_healing.set()
    region.await_verified(held)
    assert replica.root() == held.info.root


def test_weights_damaged_where_a_delta_by_context_is_read_beside_them_are_fenced_and_heal(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    region.mode = "mid"
    for i, spec in enumerate(replica.engine.live.layout.tensors):
        if not spec.alias_of:
            # From the largest pattern up and from zero down, a step comes out far away.
            replica.engine.live.whole(i)[0::2], replica.engine.live.whole(i)[1::2] = 0x7FFF, 0x0000
    hold_healing = threading.Event()
    region.before_export = lambda: hold_healing.wait(60) and None
    held = region.publish_changed()
    report = region.await_replica(lambda r: "no longer the version served" in r.error)
    assert (report.version, report.root) == ("", "")
    hold_healing.set()
    region.await_verified(held)
    assert replica.root() == held.info.root


def test_an_engine_that_replaced_a_parameter_is_fenced_and_nothing_is_written(
    region: Region, start_replica: StartReplica
) -> None:
    replica = start_replica()
    region.await_verified(region.history[0])
    engine = replica.engine
    parameter = engine.model.model.norm.weight
    parameter.data = parameter.data.clone()
    region.publish_changed()
    report = region.await_replica(lambda r: "the engine replaced its weights" in r.error)
    assert report.root == ""
