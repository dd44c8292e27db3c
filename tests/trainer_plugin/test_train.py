"""The whole loop on one machine: a trainer, a daemon, and a replica that samples for it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deltad.client.messages import ReplicaReport, ReplicaState
from tests.rollout_plugin.conftest import Running, StartReplica
from tests.rollout_plugin.region import Region, running
from trainer_plugin.rl import events
from trainer_plugin.rl.options import parse_options
from trainer_plugin.rl.train import proves, train

Say = dict[str, Any]


class Lines(io.StringIO):
    """The trainer's standard output; tells a watcher each line as it comes."""

    def __init__(self, watch: Callable[[Say], None]) -> None:
        super().__init__()
        self.said: list[Say] = []
        self._watch = watch

    def write(self, text: str) -> int:
        if text.strip():
            self.said.append(json.loads(text))
            self._watch(self.said[-1])
        return len(text)

    def of(self, event: str) -> list[Say]:
        return [line for line in self.said if line["event"] == event]


def publisher(region: Region) -> Callable[[Say], None]:
    """What a watching daemon does: publishes each checkpoint once it is complete."""

    def watch(line: Say) -> None:
        if line["event"] == "checkpoint_written":
            region.publish_checkpoint(Path(line["path"]))

    return watch


@pytest.fixture
def region(tmp_path: Path) -> Any:
    """A region that holds nothing yet."""
    with running(tmp_path / "region") as region:
        yield region


def run_trainer(lines: Lines, region: Region, replica: Running, tiny: Path, home: Path, *more: str) -> int:
    options = parse_options(
        [
            *("--model", str(tiny), "--checkpoints", str(home / "checkpoints"), "--socket", str(region.socket)),
            *("--run", "policy", "--rollouts", replica.url, "--task", "tokens", "--max-new-tokens", "8", *more),
        ]
    )
    return train(options, lines)


def test_every_version_is_verified_far_away_and_samples_the_next_step_there(
    region: Region, start_replica: StartReplica, tiny: Path, tmp_path: Path
) -> None:
    replica = start_replica()
    lines = Lines(publisher(region))
    progress = tmp_path / "progress.jsonl"
    more = ("--steps", "3", "--lr", "1e-3", "--evaluate", "4", "--progress-file", str(progress))
    assert run_trainer(lines, region, replica, tiny, tmp_path, *more) == 0

    order = [line["event"] for line in lines.said if line["event"] != "waiting"]
    step = ["step_started", "rollouts", "trained", "checkpoint_written", "version_verified"]
    assert order == [
        *("started", "checkpoint_written", "version_verified", "evaluation"),
        *(step * 3),
        *("evaluation", "finished"),
    ]
    verified = lines.of("version_verified")
    assert [line["version"] for line in verified] == [f"v{i:06d}" for i in range(4)]
    assert [line["root_served"] for line in verified] == [held.info.root for held in region.history]
    assert all(line["logprob_gap"] < 0.02 for line in verified)
    assert verified[0]["logprob_shift"] == 0.0
    assert all(line["logprob_shift"] > 0.0 for line in verified[1:])
    assert [line["versions"] for line in lines.of("rollouts")] == [["v000000"], ["v000001"], ["v000002"]]
    assert [line["total"] for line in lines.of("rollouts")] == [8, 16, 24]
    (finished,) = lines.of("finished")
    assert (finished["rollouts_from_remote"], finished["rollouts_from_local"]) == (24, 0)
    assert [line["when"] for line in lines.of("evaluation")] == ["before", "after"]
    assert [json.loads(line) for line in progress.read_text().splitlines()] == lines.said
    for line in lines.said:
        assert msgspec.convert(line, events.Line).time > 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]


def test_the_reward_rises_when_the_policy_learns(
    region: Region, start_replica: StartReplica, tiny: Path, tmp_path: Path
) -> None:
    lines = Lines(publisher(region))
    more = ("--steps", "12", "--lr", "1e-2", "--samples", "16", "--evaluate", "8")
    assert run_trainer(lines, region, start_replica(), tiny, tmp_path, *more) == 0
    before, after = lines.of("evaluation")
    rewards = [line["reward_mean"] for line in lines.of("rollouts")]
    assert rewards[-1] > rewards[0] + 0.15
    assert after["reward_mean"] > before["reward_mean"]


def test_equal_seeds_make_equal_versions(
    region: Region, start_replica: StartReplica, tiny: Path, tmp_path: Path
) -> None:
    replica = start_replica()
    lines = Lines(publisher(region))
    run_trainer(lines, region, replica, tiny, tmp_path / "one", "--steps", "2", "--lr", "1e-3", "--seed", "5")
    roots = [held.info.root for held in region.history]
    with running(tmp_path / "again") as again:
        second = Lines(publisher(again))
        other = start_replica("r2", at=again)
        run_trainer(second, again, other, tiny, tmp_path / "two", "--steps", "2", "--lr", "1e-3", "--seed", "5")
        assert [held.info.root for held in again.history] == roots
        other.stop()


def test_a_trainer_outlives_its_daemon_being_killed_and_started_again(
    region: Region, start_replica: StartReplica, tiny: Path, tmp_path: Path
) -> None:
    replica = start_replica()
    publish = publisher(region)

    def watch(line: Say) -> None:
        if line["event"] == "checkpoint_written" and line["number"] == 1:
            region.kill()
        publish(line)
        if line["event"] == "waiting" and line["what"] == "daemon":
            restart()

    restarted = threading.Lock()

    def restart() -> None:
        if restarted.acquire(blocking=False):
            region.start()

    lines = Lines(watch)
    assert run_trainer(lines, region, replica, tiny, tmp_path, "--steps", "2", "--lr", "1e-3") == 0
    assert "daemon" in {line["what"] for line in lines.of("waiting")}
    assert len(lines.of("version_verified")) == 3


def test_a_version_that_never_arrives_ends_the_run_with_69_and_says_what_was_seen(
    region: Region, start_replica: StartReplica, tiny: Path, tmp_path: Path
) -> None:
    replica = start_replica()
    lines = Lines(lambda line: None)
    assert run_trainer(lines, region, replica, tiny, tmp_path, "--steps", "1", "--patience", "0") == 69
    assert lines.said[-1]["event"] == "failed"
    assert "v000000: expected verified on a replica, found r1: registered" in lines.said[-1]["error"]


def test_checkpoints_of_another_run_are_not_mixed_with_new_ones(
    region: Region, start_replica: StartReplica, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)
    lines = Lines(lambda line: None)
    assert run_trainer(lines, region, start_replica(), tiny, tmp_path) == 64
    assert [line["event"] for line in lines.said] == ["failed"]


@pytest.mark.parametrize(
    ("state", "version", "root", "answer"),
    [
        (ReplicaState.VERIFIED, "v000002", "ab", True),
        (ReplicaState.VERIFIED, "v000003", "ab", True),
        (ReplicaState.STAGING, "v000002", "ab", True),
        (ReplicaState.READY, "v000002", "ab", True),
        (ReplicaState.VERIFIED, "v000001", "ab", False),
        (ReplicaState.COMMITTED, "v000002", "", False),
        (ReplicaState.STAGING, "v000002", "", False),
        (ReplicaState.COMMITTING, "v000002", "ab", False),
        (ReplicaState.FENCED, "", "", False),
        (ReplicaState.UNKNOWN, "v000002", "ab", False),
    ],
)
def test_only_weights_that_were_read_back_and_not_touched_since_prove_a_version(
    state: ReplicaState, version: str, root: str, answer: bool
) -> None:
    report = ReplicaReport("r1", "policy", "bf16", state, version=version, root=root)
    assert proves(report, "v000002") is answer
