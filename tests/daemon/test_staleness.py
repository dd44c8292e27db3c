"""A daemon to which nothing new comes says that it is not ready, by its own clock, where that is asked for."""

from __future__ import annotations

import time
from pathlib import Path

from deltad.client.messages import PublishRequest
from deltad.daemon.staleness import Staleness
from deltad.types import parse_run
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import Daemon
from tests.kit.weights import ArrayWeights

ONE, TWO = parse_run("one"), parse_run("two")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_run_counts_from_its_last_version_or_from_the_start() -> None:
    clock = Clock()
    staleness = Staleness(60.0, clock)
    clock.now = 150.0
    staleness.came(ONE)
    clock.now = 165.0
    assert staleness.reasons([ONE, TWO]) == ["run two: no new version came for 1 min 5 s"]
    clock.now = 300.0
    assert len(staleness.reasons([ONE, TWO])) == 2
    staleness.came(TWO)
    assert staleness.reasons([TWO]) == []


def test_where_nothing_is_asked_for_a_run_may_rest() -> None:
    clock = Clock()
    staleness = Staleness(0.0, clock)
    clock.now = 1e9
    assert staleness.reasons([ONE]) == []


def test_a_publish_makes_a_daemon_ready_again(tmp_path: Path) -> None:
    sections = '[metrics]\nlisten = "127.0.0.1:0"\nstale_after = "2s"\n[[run]]\nid = "r"\n'
    daemon = Daemon(tmp_path / "a", "a", sections).start()
    try:
        deadline = time.monotonic() + 30
        while daemon.client.status().ready:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        [reason] = daemon.client.status().reasons
        assert reason.startswith("run r: no new version came for ")
        checkpoint = write_checkpoint(tmp_path / "step_1", ArrayWeights.random(MODEL))
        daemon.client.publish("r", PublishRequest(str(checkpoint)))
        assert daemon.client.status().ready
    finally:
        daemon.stop()
