"""Two real daemons, one trainer's directory: versions cross whatever is killed, pruned or refused on the way."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from deltad.client.messages import ExportRequest, PublishRequest, UpstreamView, VersionInfo
from deltad.delta import FORMAT
from deltad.delta.layout import Layout, TensorSpec
from deltad.errors import UnavailableError
from deltad.store.store import Store
from deltad.types import Version, parse_run
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

WAIT = 60.0


def watching(directory: Path, pattern: str = "step_{number}") -> str:
    """The sections of a daemon that publishes what appears in a directory."""
    return (
        f'[[run]]\nid = "r"\n[[watch]]\nrun = "r"\ndirectory = "{directory}"\npattern = "{pattern}"\n'
        'quiet = "100ms"\nrescan = "300ms"\n'
    )


class Regions:
    """A trainer's directory with daemon A beside it, and daemon B that pulls from A."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self.checkpoints = home / "checkpoints"
        self.weights = {0: ArrayWeights.random(MODEL)}
        self.a = Daemon(home / "a", "a", self._sections_a())
        self.b = Daemon(home / "b", "b", self._sections_b())

    def _sections_a(self) -> str:
        relay = f'[relay]\nlisten = "127.0.0.1:{self.port}"\ntoken_file = "token"\n'
        return relay + watching(self.checkpoints)

    def _sections_b(self) -> str:
        return f'[[upstream]]\nurl = "http://127.0.0.1:{self.port}"\ntoken_file = "token"\n'

    def step(self, number: int) -> Path:
        """The trainer writes the checkpoint of one step."""
        if number:
            self.weights[number] = self.weights[number - 1].changed(0.02, seed=number)
        return write_checkpoint(self.checkpoints / f"step_{number:06d}", self.weights[number])

    def arrived(self, daemon: Daemon, number: int) -> VersionInfo:
        """Version `number` once `daemon` holds it, however often it is killed meanwhile."""
        after = f"v{number - 1:06d}" if number else ""
        info = daemon.client.latest("r", after=after, wait=WAIT)
        assert info is not None, daemon.log
        return daemon.client.version("r", f"v{number:06d}")

    def check_export(self, daemon: Daemon, number: int) -> None:
        """What `daemon` exports is what the trainer wrote, bit for bit."""
        directory = self.home / f"export-{daemon.name}-{number}"
        daemon.client.export("r", ExportRequest(version=f"v{number:06d}", directory=str(directory)))
        assert read_checkpoint(directory).equals(self.weights[number])


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    regions = Regions(tmp_path)
    yield regions
    for daemon in (regions.a, regions.b):
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def test_every_checkpoint_arrives_in_the_other_region_bit_for_bit(regions: Regions) -> None:
    regions.a.start()
    regions.b.start()
    for number in range(4):
        regions.step(number)
        there = regions.arrived(regions.b, number)
        here = regions.a.client.version("r", there.version)
        assert there.root == here.root
        assert there.pulled_bytes >= there.delta_bytes > 0
        regions.check_export(regions.b, number)
        assert regions.b.client.verify("r", there.version).match
    assert regions.a.stop() == 0
    assert regions.b.stop() == 0


def test_the_bytes_that_crossed_are_counted_on_both_sides(regions: Regions) -> None:
    ports = {"a": free_port(), "b": 0}
    for daemon in (regions.a, regions.b):
        ports[daemon.name] = ports["a"] + (daemon is regions.b) + 1
        with daemon.config.open("a") as config:
            config.write(f'[metrics]\nlisten = "127.0.0.1:{ports[daemon.name]}"\n')
    regions.a.start()
    regions.b.start()
    regions.step(0)
    pulled = regions.arrived(regions.b, 0).pulled_bytes
    sent = metric(ports["a"], "deltad_relay_sent_bytes_total")
    received = metric(ports["b"], "deltad_relay_received_bytes_total")
    assert 0 < sent <= pulled <= received
    assert metric(ports["b"], "deltad_latest_version_number") == 0


def metric(port: int, name: str) -> float:
    """The value of a metric that has one sample."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith((name + " ", name + "{"))]
    return float(line.rsplit(" ", 1)[1])


def test_a_daemon_that_was_away_catches_up_and_the_trainer_may_prune_meanwhile(regions: Regions) -> None:
    regions.a.start()
    for number in range(6):
        directory = regions.step(number)
        regions.arrived(regions.a, number)
        shutil.rmtree(directory)
    regions.b.start()
    regions.arrived(regions.b, 5)
    assert [info.version for info in regions.b.client.versions("r")] == [f"v{n:06d}" for n in range(6)]
    for number in (0, 5):
        regions.check_export(regions.b, number)


@pytest.mark.parametrize("seed", range(1, 9) if os.environ.get("DELTAD_TEST_FULL") == "1" else [1, 2])
def test_killing_both_daemons_at_random_loses_nothing(regions: Regions, seed: int) -> None:
    rng = random.Random(seed)
    regions.a.start()
    regions.b.start()
    for number in range(8):
        regions.step(number)
        victim = rng.choice([regions.a, regions.b])
        # Somewhere between seeing the checkpoint and having pulled it.
        with contextlib.suppress(UnavailableError):
            victim.client.latest("r", after=f"v{number - 1:06d}" if number else "", wait=rng.random() * 0.6)
        victim.kill()
        victim.start()
        regions.arrived(regions.a, number)
        regions.arrived(regions.b, number)
    for daemon in (regions.a, regions.b):
        for number in (0, 3, 7):
            regions.check_export(daemon, number)
        assert daemon.stop() == 0


def test_a_bad_checkpoint_costs_only_itself(regions: Regions) -> None:
    regions.a.start()
    regions.step(0)
    regions.arrived(regions.a, 0)
    bad = regions.step(1)
    (file,) = bad.glob("*.safetensors")
    shutil.copytree(bad, regions.checkpoints / "tmp-2")
    file.write_bytes(file.read_bytes()[:-1])
    regions.weights[2] = regions.weights[1]
    regions.step(2)
    info = regions.arrived(regions.a, 2)
    assert info.parent == "v000000"
    assert file.name in regions.a.log
    assert "checkpoint_refused" in regions.a.log


def test_a_wrong_token_is_one_clear_line_and_nothing_is_pulled(regions: Regions) -> None:
    regions.b.token.write_text("another-token")
    regions.a.start()
    regions.step(0)
    regions.arrived(regions.a, 0)
    regions.b.start()
    view = first_error(regions.b)
    assert not view.up
    assert "token" in view.error
    assert regions.b.client.status().region.runs == {}
    assert len([line for line in regions.b.log.splitlines() if view.error in line]) == 1


def first_error(daemon: Daemon) -> UpstreamView:
    """What an upstream's first failure looks like. A status can only be asked for again and again."""
    deadline = time.monotonic() + WAIT
    while True:
        (view,) = daemon.client.status().upstreams
        if view.error:
            return view
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_publish_that_is_under_way_when_the_daemon_is_told_to_stop_ends_well(tmp_path: Path) -> None:
    layout = Layout(FORMAT, (TensorSpec("w", "BF16", (20_000, 1000)),), MODEL.files)
    weights = ArrayWeights.random(layout)
    checkpoints = tmp_path / "checkpoints"
    sections = (
        f'[[run]]\nid = "r"\n[[watch]]\nrun = "r"\ndirectory = "{checkpoints}"\nquiet = "100ms"\nrescan = "300ms"\n'
    )
    daemon = Daemon(tmp_path / "d", "d", sections).start()
    write_checkpoint(checkpoints / "step_0", weights, layout=layout)
    while "encoding" not in daemon.client.status().region.runs["r"].activity:
        pass
    assert daemon.stop() == 0
    store = Store.open(tmp_path / "d" / "store")
    assert store.run(parse_run("r")).latest().version == Version(1, 0)


def test_a_manual_publish_does_not_cost_a_counted_watch_its_next_checkpoint(tmp_path: Path) -> None:
    weights = ArrayWeights.random(MODEL)
    live = tmp_path / "live"
    daemon = Daemon(tmp_path / "d", "d", watching(live, "."))
    write_checkpoint(live, weights)
    daemon.start()
    try:
        assert daemon.client.latest("r", wait=WAIT) is not None
        by_hand = write_checkpoint(tmp_path / "by-hand", weights.changed(0.02, seed=1))
        daemon.client.publish("r", PublishRequest(directory=str(by_hand), number=50))
        overwrite(live, weights.changed(0.02, seed=2), tmp_path / "new")
        info = daemon.client.latest("r", after="v000050", wait=WAIT)
        assert info is not None, daemon.log
        assert info.version == "v000051"
    finally:
        assert daemon.stop() == 0


def test_a_second_daemon_on_the_same_store_exits_and_names_the_first(regions: Regions) -> None:
    regions.b.start()
    again = subprocess.run(
        [sys.executable, "-m", "deltad", "serve", "--config", str(regions.b.config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert again.returncode == 75
    assert str(regions.b.process.pid) in again.stderr
    assert regions.b.client.status().daemon == "b"


def test_a_store_of_another_format_stops_the_start_by_name(regions: Regions) -> None:
    regions.b.start()
    assert regions.b.stop() == 0
    (regions.b.home / "store" / "FORMAT").write_text("deltad store 9\n")
    again = subprocess.run(
        [sys.executable, "-m", "deltad", "serve", "--config", str(regions.b.config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert again.returncode == 65
    assert "deltad store 9" in again.stderr


def test_one_directory_that_is_overwritten_each_time_gives_one_version_a_write(tmp_path: Path) -> None:
    weights = ArrayWeights.random(MODEL)
    live = tmp_path / "live"
    daemon = Daemon(tmp_path / "d", "d", watching(live, "."))
    write_checkpoint(live, weights)
    daemon.start()
    try:
        assert daemon.client.latest("r", wait=WAIT) is not None
        for number in range(2, 5):
            weights = weights.changed(0.05, seed=number)
            overwrite(live, weights, tmp_path / f"new-{number}")
            info = daemon.client.latest("r", after=f"v{number - 1:06d}", wait=WAIT)
            assert info is not None, daemon.log
            assert (info.version, info.kind) == (f"v{number:06d}", "delta")
            directory = tmp_path / f"export-{number}"
            daemon.client.export("r", ExportRequest(version=info.version, directory=str(directory)))
            assert read_checkpoint(directory).equals(weights)
        daemon.kill()
        daemon.start()
        weights = weights.changed(0.05, seed=9)
        overwrite(live, weights, tmp_path / "new-9")
        info = daemon.client.latest("r", after="v000004", wait=WAIT)
        assert info is not None
        assert info.version == "v000005"
        assert info.changed > 0, "what was published before the restart was not published again"
    finally:
        assert daemon.stop() == 0


def overwrite(live: Path, weights: ArrayWeights, scratch: Path) -> None:
    """As `save_pretrained` does it: the same file, truncated and written anew."""
    write_checkpoint(scratch, weights)
    for file in scratch.iterdir():
        (live / file.name).write_bytes(file.read_bytes())
