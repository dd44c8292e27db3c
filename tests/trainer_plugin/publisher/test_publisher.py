"""Ranks hand over what changed of their own shards, and a real daemon makes one version of it, or none."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from deltad.client.messages import RegisterRequest, ReplicaState, StateRequest
from deltad.delta.codec import sum_weights
from deltad.delta.digest import root_of
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights
from tests.trainer_plugin.publisher.conftest import LAYOUT, RUN, Ranks
from trainer_plugin.publisher import Held, Outcome
from trainer_plugin.publisher.shards import held_array


def root(weights: ArrayWeights) -> str:
    return root_of(LAYOUT, sum_weights(LAYOUT, weights)).hex()


def versions_of(outcomes: list[Outcome]) -> set[str]:
    return {outcome.version.version if outcome.version else outcome.reason for outcome in outcomes}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_together_make_one_version_a_step_bit_for_bit(daemon: Daemon, tmp_path: Path, world: int) -> None:
    ranks = Ranks(daemon, world)
    weights = ArrayWeights.bell(LAYOUT)
    for number in range(4):
        outcomes = ranks.publish(number, weights)
        assert versions_of(outcomes) == {f"v{number:06d}"}
        assert [outcome.whole for outcome in outcomes] == [number == 0] * world
        assert outcomes[0].version is not None
        assert outcomes[0].version.root == root(weights)
        assert ranks.weights_of(f"v{number:06d}", tmp_path / f"export-{number}").equals(weights)
        weights = weights.changed(0.02, seed=number)
    kinds = [info.kind for info in daemon.client.versions(RUN)]
    assert kinds == ["anchor", "delta", "delta", "delta"]
    assert all(publisher.counters.published == 4 for publisher in ranks.publishers)


def test_what_all_ranks_hold_alike_is_handed_over_by_one(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 3)
    weights = ArrayWeights.bell(LAYOUT)
    ranks.publish(0, weights)
    changed = weights.copy()
    changed.arrays[2] = changed.arrays[2] ^ np.uint32(1)  # norm.weight, which every rank has
    outcomes = ranks.publish(1, changed)
    assert sorted(outcome.chunk_bytes > 0 for outcome in outcomes) == [False, False, True]
    assert outcomes[0].version is not None
    assert outcomes[0].version.root == root(changed)


def test_a_step_without_changes_is_an_empty_version(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 2)
    weights = ArrayWeights.bell(LAYOUT)
    ranks.publish(0, weights)
    outcomes = ranks.publish(1, weights)
    assert versions_of(outcomes) == {"v000001"}
    assert all(outcome.chunk_bytes == 0 for outcome in outcomes)


def test_a_step_that_a_rank_leaves_out_makes_no_version_and_the_next_one_is_a_delta_on_the_one_before(
    daemon: Daemon,
) -> None:
    ranks = Ranks(daemon, 2)
    first = ArrayWeights.bell(LAYOUT)
    ranks.publish(0, first)
    second, third = first.changed(0.05, seed=1), first.changed(0.05, seed=2)
    (alone,) = ranks.begin(1, second, range(1))  # rank 1 leaves this step out
    begun = ranks.publishers[1].publish(2, ranks.shards(third, 1))
    given_up = alone.wait(60)
    assert given_up.version is None
    assert "step 2" in given_up.reason, "which came first, or while it waited"
    assert not begun.done, "rank 1 waits for rank 0"
    outcomes = [ranks.publishers[0].publish(2, ranks.shards(third, 0)).wait(60), begun.wait(60)]
    assert versions_of(outcomes) == {"v000002"}
    assert [info.version for info in daemon.client.versions(RUN)] == ["v000000", "v000002"]
    version = outcomes[0].version
    assert version is not None
    assert (version.kind, version.parent, version.root) == ("delta", "v000000", root(third))


def test_ranks_that_compare_with_different_versions_make_none_and_go_whole_next(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 2)
    weights = ArrayWeights.bell(LAYOUT)
    ranks.publish(0, weights)
    ranks.publishers[0]._copy = None  # as after a crash of this rank alone
    outcomes = ranks.publish(1, weights.changed(0.05))
    assert {outcome.version for outcome in outcomes} == {None}
    assert any("hand over this step whole" in outcome.reason for outcome in outcomes), outcomes
    last = weights.changed(0.05, seed=4)
    outcomes = ranks.publish(2, last)
    assert [outcome.whole for outcome in outcomes] == [True, True], outcomes
    assert outcomes[0].version is not None
    assert outcomes[0].version.root == root(last)


def test_ranks_that_leave_elements_out_or_contradict_each_other_are_refused_by_name(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 2)
    weights = ArrayWeights.bell(LAYOUT)
    handles = [
        ranks.publishers[0].publish(0, ranks.shards(weights, 0)),
        ranks.publishers[1].publish(
            0, [shard for shard in ranks.shards(weights, 1) if "experts" not in shard.spec.name]
        ),
    ]
    reasons = [handle.wait(60).reason for handle in handles]
    assert any("'experts.weight'" in reason and "ranks that hold all 240 elements" in reason for reason in reasons)
    assert (handles[0].fleet().run, handles[0].fleet().version) == (RUN, ""), "the fleet as it stands"
    assert "'experts.weight'" in daemon.client.status().region.runs[RUN].activity
    assert versions_of(ranks.publish(0, weights)) == {"v000000"}, "who mends it joins anew"


def test_another_layout_than_at_the_first_publish_is_an_error_that_names_the_tensors(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 1)
    weights = ArrayWeights.bell(LAYOUT)
    ranks.publish(0, weights)
    shards = ranks.shards(weights, 0)
    lora = held_array("lora.weight", "BF16", np.zeros((2, 2), np.uint16))
    outcome = ranks.publishers[0].publish(1, [*shards, lora]).wait(60)
    assert "'lora.weight'" in outcome.reason
    assert versions_of(ranks.publish(2, weights)) == {"v000002"}


def test_a_daemon_that_starts_again_is_joined_again_and_the_next_version_is_a_delta(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 2)
    weights = ArrayWeights.bell(LAYOUT)
    ranks.publish(0, weights)
    daemon.kill()
    lost = ranks.publish(1, weights.changed(0.05, seed=1))
    assert all(outcome.version is None for outcome in lost)
    assert ranks.publishers[0].counters.skipped == {"Unavailable": 1}
    daemon.start()
    ranks.publish(2, weights.changed(0.05, seed=2))  # finds that its session is gone
    last = weights.changed(0.05, seed=3)
    outcomes = ranks.publish(3, last)
    assert versions_of(outcomes) == {"v000003"}
    assert outcomes[0].version is not None
    assert (outcomes[0].version.kind, outcomes[0].version.root) == ("delta", root(last))


def test_a_trainer_that_starts_again_finds_its_place_by_its_weights(daemon: Daemon) -> None:
    weights = ArrayWeights.bell(LAYOUT)
    after = weights.changed(0.03)
    before = Ranks(daemon, 2)
    before.publish(0, weights)
    before.publish(1, after)
    restarted = Ranks(daemon, 2, session="again")
    found = restarted.publish(1, after)
    assert [outcome.already for outcome in found] == [True, True]
    outcomes = restarted.publish(2, after.changed(0.03, seed=5))
    assert versions_of(outcomes) == {"v000002"}
    assert not outcomes[0].whole
    refused = restarted.publish(1, weights)
    assert all("new epoch" in outcome.reason or "resume" in outcome.reason for outcome in refused)


def test_a_trainer_that_resumes_from_an_older_version_opens_an_epoch_and_the_old_one_is_refused(
    daemon: Daemon, tmp_path: Path
) -> None:
    weights = ArrayWeights.bell(LAYOUT)
    old = Ranks(daemon, 2)
    for number in range(3):
        old.publish(number, weights.changed(0.01 * number, seed=number))
    resumed = Ranks(daemon, 2, session="resumed", resume_from="v000001")
    branch = weights.changed(0.01, seed=1).changed(0.01, seed=9)
    outcomes = resumed.publish(2, branch)
    assert versions_of(outcomes) == {"v000002@e2"}
    assert outcomes[0].version is not None
    assert outcomes[0].version.parent == "v000001"
    assert versions_of(resumed.publish(3, branch.changed(0.01))) == {"v000003@e2"}
    refused = old.publish(3, weights)
    assert all(outcome.version is None for outcome in refused)
    assert all("epoch" in outcome.reason for outcome in old.publish(4, weights))
    activity = daemon.client.status().region.runs[RUN].activity
    assert "refused run policy: expected a publisher of epoch 2" in activity
    again = Ranks(daemon, 2, session="again", resume_from="v000002")
    outcomes = again.publish(3, branch.changed(0.01, seed=3))
    assert outcomes[0].version is not None
    assert (outcomes[0].version.version, outcomes[0].version.parent) == ("v000003@e3", "v000002@e2")
    assert daemon.client.status().region.runs[RUN].activity == ""
    assert resumed.weights_of("v000002@e2", tmp_path / "export").equals(branch)


def test_a_trainer_may_wait_for_a_share_of_the_fleet_and_is_told_when_there_is_none(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 1)
    publisher = ranks.publishers[0]
    assert not publisher.wait_for(timeout=0.1)
    outcome = ranks.publish(0, ArrayWeights.bell(LAYOUT))[0]
    assert outcome.version is not None
    assert not publisher.wait_for(timeout=0.1)
    for name in ("r1", "r2"):
        daemon.client.register_replica(RegisterRequest(name, RUN, "bf16"))
    assert not publisher.wait_for(verified=0.5, timeout=0.1)
    serves = StateRequest(ReplicaState.VERIFIED, outcome.version.version, outcome.version.root)
    daemon.client.report_state("r1", serves)
    assert publisher.wait_for(verified=0.5, timeout=60)
    assert not publisher.wait_for(verified=1.0, timeout=0.1)


class Slow:
    """A shard whose reader waits until it is let go on."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.asked, self.may = threading.Event(), threading.Event()
        whole = held_array("embed.weight", "BF16", array)
        self.held = Held(whole.spec, self._read)

    def _read(self, start: int, count: int) -> np.ndarray:
        if count < self.array.size or self.asked.is_set():
            return self.array.reshape(-1)[start : start + count]
        self.asked.set()
        self.may.wait(60)
        return self.array.reshape(-1)[start : start + count]


def test_the_fence_waits_until_live_weights_have_been_read(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 1)
    publisher = ranks.publishers[0]
    slow = Slow(np.arange(64 * 24, dtype=np.uint16).reshape(64, 24))
    handle = publisher.publish(0, [slow.held])
    assert slow.asked.wait(60)
    passed = threading.Event()
    waiter = threading.Thread(target=lambda: (publisher.fence(), passed.set()))
    waiter.start()
    assert not passed.is_set()
    slow.may.set()
    waiter.join(60)
    slow.array[:] = 0  # the optimizer's step
    outcome = handle.wait(60)
    assert outcome.version is not None
    assert publisher.counters.waits == 1
    publisher.fence()
    assert publisher.counters.waits == 1, "nothing is left to wait for"


def test_a_step_that_comes_while_another_is_on_its_way_is_skipped_and_counted(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 1)
    publisher = ranks.publishers[0]
    slow = Slow(np.arange(64 * 24, dtype=np.uint16).reshape(64, 24))
    first = publisher.publish(0, [slow.held])
    assert slow.asked.wait(60)
    second = publisher.publish(1, [slow.held])
    assert second.wait(0).reason == "the step before is still on its way"
    slow.may.set()
    assert first.wait(60).version is not None
    assert publisher.counters.skipped == {"busy": 1}


def test_the_daemon_is_told_once_of_the_steps_that_were_skipped(tmp_path: Path) -> None:
    page = f"127.0.0.1:{free_port()}"
    daemon = Daemon(tmp_path / "a", "a", f'[[run]]\nid = "{RUN}"\n[metrics]\nlisten = "{page}"\n').start()
    try:
        ranks = Ranks(daemon, 1)
        ranks.publishers[0].counters.skipped.update({"busy": 2, "Unavailable": 1})
        weights = ArrayWeights.bell(LAYOUT)
        for number in range(3):
            assert versions_of(ranks.publish(number, weights.changed(0.1, seed=number))) == {f"v{number:06d}"}
        with urlopen(f"http://{page}/metrics", timeout=10) as reply:
            told = [line for line in reply.read().decode().splitlines() if "publishes_skipped_total{" in line]
        assert sorted(told) == [
            'deltad_publishes_skipped_total{reason="Unavailable",run="policy"} 1.0',
            'deltad_publishes_skipped_total{reason="busy",run="policy"} 2.0',
        ]
    finally:
        daemon.stop()


def test_a_step_whose_weights_are_not_read_in_time_is_given_up_if_that_is_asked_for(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 1, on_late="abandon")
    publisher = ranks.publishers[0]
    slow = Slow(np.arange(64 * 24, dtype=np.uint16).reshape(64, 24))
    handle = publisher.publish(0, [slow.held])
    assert slow.asked.wait(60)
    fence = threading.Thread(target=publisher.fence)
    fence.start()
    slow.may.set()
    fence.join(60)
    outcome = handle.wait(60)
    assert outcome.version is None or publisher.counters.skipped == {}, "it may have been read a moment before"
    assert publisher.publish(1, [slow.held]).wait(60).version is not None


def test_what_is_not_read_in_time_is_copied_if_that_is_asked_for(daemon: Daemon, tmp_path: Path) -> None:
    ranks = Ranks(daemon, 1, on_late="copy")
    publisher = ranks.publishers[0]
    slow = Slow(np.arange(64 * 24, dtype=np.uint16).reshape(64, 24))
    slow.may.set()
    publisher.publish(0, [slow.held]).wait(60)
    slow.array[3] += 1
    expected = slow.array.copy()
    slow.asked.clear()
    slow.may.clear()
    handle = publisher.publish(1, [slow.held])
    assert slow.asked.wait(60)
    fence = threading.Thread(target=publisher.fence)
    fence.start()
    slow.may.set()
    fence.join(60)
    slow.array[:] = 0  # the optimizer's step
    outcome = handle.wait(60)
    assert outcome.version is not None, outcome.reason
    (lanes,) = ranks.weights_of("v000001", tmp_path / "export").arrays
    assert np.array_equal(lanes, expected.reshape(-1))


def test_a_daemon_that_hangs_keeps_no_fence_and_no_next_step_waiting(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 2)
    weights = ArrayWeights.bell(LAYOUT)
    ranks.publish(0, weights)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    handles = ranks.begin(1, weights.changed(0.05, seed=1))
    for publisher in ranks.publishers:
        publisher.fence()
    for later in ranks.begin(2, weights):
        assert later.wait(0).reason == "the step before is still on its way"
    assert not any(handle.done for handle in handles)
    daemon.process.send_signal(signal.SIGCONT)
    assert versions_of([handle.wait(60) for handle in handles]) == {"v000001"}
