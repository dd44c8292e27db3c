"""A replica at a real local API: from registration to verified, and what it does when things go wrong."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deltad.client.messages import ExportReply, ExportRequest, NextReply, ReplicaReport, ReplicaState
from deltad.delta.backend import Changes, Lanes, Mode
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.codec import sum_weights
from deltad.delta.digest import U64, pack_sums
from deltad.delta.encoding import sha256
from deltad.delta.layout import FileSpec, Layout, TensorSpec
from deltad.delta.manifest import State
from deltad.errors import NotFoundError, UnavailableError
from deltad.types import DType, RunId, Version, parse_version
from rollout_plugin.apply.export import Export
from rollout_plugin.engines import Sampling
from rollout_plugin.engines.transformers import load
from tests.kit.weights import ArrayWeights
from tests.rollout_plugin.conftest import Running, StartReplica
from tests.rollout_plugin.region import RUN, Held, Region, write_export

PROMPT = [72, 101, 108, 108, 111]


class FailingBackend(NumpyBackend):
    """Fails at the `failing` applications, counted from 1; a set may be filled while it is in use."""

    def __init__(self, failing: range) -> None:
        self.failing = failing
        self.applied = 0

    def apply(self, target: Lanes, changes: Changes, dtype: DType, seed: int) -> tuple[Lanes, U64]:
        self.applied += 1
        if self.applied in self.failing:
            raise MemoryError(f"application {self.applied}")
        return super().apply(target, changes, dtype, seed)


def fenced(report: ReplicaReport) -> bool:
    return report.state is ReplicaState.FENCED


def log_of(replica: Running, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in replica.log.getvalue().splitlines()]
    return [line for line in lines if line["event"] == event]


def states_of(replica: Running) -> list[object]:
    return [line["state"] for line in log_of(replica, "state")]


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
    clear = {"staged": "__init__", "committed": "copy_into"}[step]
    whole = getattr(Export, clear)

    def cleared_before(export: Export, *arguments: object) -> None:
        if len(region.exports) == 2:
            shutil.rmtree(region.exports[1], ignore_errors=True)
        whole(export, *arguments)

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


def forged(region: Region, after: Held) -> bytes:
    """A manifest of `after` that lists the chunks of another version."""
    before = region.history[region.history.index(after) - 1]
    other = Held(after.info, after.layout, before.weights.changed(0.01, seed=99), after.files)
    return region.put_delta(before, other, sums=pack_sums(sum_weights(after.layout, after.weights)))


def with_file(held: Held, name: str, data: bytes) -> tuple[Layout, ArrayWeights, dict[str, bytes]]:
    """A version's parts with other contents of one of its files."""
    files = {**held.files, name: data}
    specs = tuple(FileSpec(name, len(data), sha256(data)) for name, data in sorted(files.items()))
    return Layout(1, held.layout.tensors, specs), held.weights.copy(), files
