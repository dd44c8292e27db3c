"""What a daemon says of its watched directories, and what a refused checkpoint costs: itself, and nobody else."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest

from deltad.client.messages import PublishRequest
from deltad.delta.layout import Layout, TensorSpec
from deltad.ops.health import Readiness
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

WAIT = 60.0
WEIGHTS = ArrayWeights.random(MODEL)
OTHER = Layout(0, (TensorSpec("another", "BF16", (4, 4)),), MODEL.files)


class Watching:
    """A daemon with one watch, and the trainer's directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self.checkpoints = home / "checkpoints"
        self.daemon = Daemon(
            home / "d",
            "d",
            f'[metrics]\nlisten = "127.0.0.1:{self.port}"\n[[run]]\nid = "r"\n[[watch]]\nrun = "r"\n'
            f'directory = "{self.checkpoints}"\nquiet = "100ms"\nrescan = "300ms"\n',
        )

    def write(self, number: int, *, below: str = "checkpoints") -> Path:
        return write_checkpoint(self.home / below / f"step_{number}", WEIGHTS.changed(0.05, seed=number))

    def arrived(self, number: int, after: str = "") -> None:
        info = self.daemon.client.latest("r", after=after, wait=WAIT)
        assert info is not None, self.daemon.log
        assert info.version.startswith(f"v{number:06d}")

    def activity(self) -> str:
        return self.daemon.client.status().region.runs["r"].activity

    def says(self, right: Callable[[str], bool]) -> str:
        """What the run does, once it is `right`. A status can only be asked for again and again."""
        deadline = time.monotonic() + WAIT
        while not right(said := self.activity()):
            assert time.monotonic() < deadline, (said, self.daemon.log)
            time.sleep(0.05)
        return said

    def refused(self) -> float:
        """How many checkpoints were refused for a conflict, as a scrape sees it."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        found = [line for line in lines if line.startswith("deltad_checkpoints_refused_total{") and "Conflict" in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def readiness(self) -> Readiness:
        with urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=30) as reply:
            return msgspec.json.decode(reply.read(), type=Readiness)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    watching = Watching(tmp_path)
    watching.checkpoints.mkdir()
    yield watching
    if watching.daemon.process is not None:
        watching.daemon.process.kill()
        watching.daemon.process.wait()


def test_a_refused_checkpoint_is_told_in_words_until_a_newer_version_is_published(watching: Watching) -> None:
    watching.daemon.start()
    watching.write(1)
    watching.arrived(1)
    bad = watching.checkpoints / "step_2"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes(b"")
    said = watching.says(bool)
    assert said.startswith(f"refused {bad / 'model.safetensors'}: ")
    write_checkpoint(watching.checkpoints / "step_3", ArrayWeights.random(OTHER), layout=OTHER)
    said = watching.says(lambda said: said.startswith("refused") and "step_3" in said)
    assert "expected the model of r/v000001" in said
    assert "step_2" not in said, "the newest one is told"
    readiness = watching.readiness()
    assert readiness.ready, "a bad checkpoint costs only itself"
    assert readiness.doing == {"r": said}
    watching.write(4)
    watching.arrived(4, after="v000001")
    assert watching.says(lambda said: not said.startswith("encoding")) == ""


def test_a_stray_directory_that_was_refused_stops_no_number_below_its_own(watching: Watching) -> None:
    watching.daemon.start()
    watching.write(8)
    watching.arrived(8)
    write_checkpoint(watching.checkpoints / "step_55", ArrayWeights.random(OTHER), layout=OTHER)
    watching.says(lambda said: said.startswith("refused") and "step_55" in said)
    watching.write(9)
    watching.arrived(9, after="v000008")


def test_a_new_epoch_that_is_opened_by_hand_is_where_the_watch_goes_on(watching: Watching) -> None:
    watching.daemon.start()
    for number, after in ((50, ""), (51, "v000050")):
        watching.write(number)
        watching.arrived(number, after)
    watching.daemon.client.publish(
        "r", PublishRequest(directory=str(watching.write(9, below="checkpoints/stage")), number=9, new_epoch=True)
    )
    watching.write(11)
    watching.arrived(11, after="v000009@e2")


def test_a_directory_that_does_not_exist_is_said_in_the_status_and_warned_of_once(watching: Watching) -> None:
    watching.checkpoints.rmdir()
    watching.daemon.start()
    watching.says(lambda said: said == f"waits for directory {watching.checkpoints} to appear")
    watching.write(1)
    watching.arrived(1)
    assert watching.says(lambda said: not said.startswith("encoding")) == ""
    assert watching.daemon.log.count("directory_missing") == 1


def test_a_trainer_that_was_replaced_writes_no_version_into_the_epoch_of_the_one_after_it(watching: Watching) -> None:
    """P4: its directory is refused, aloud and counted, and still after a restart."""
    watching.daemon.start()
    watching.write(1)
    watching.arrived(1)
    watching.write(2)
    watching.arrived(2, after="v000001")
    resumed = write_checkpoint(watching.home / "elsewhere" / "step_2", WEIGHTS.changed(0.05, seed=20))
    client = watching.daemon.client
    reply = client.publish("r", PublishRequest(str(resumed), resume_from="v000001"))
    assert reply.version.version == "v000002@e2"

    watching.write(3)
    said = watching.says(lambda said: "another trainer has opened the run since" in said)
    assert "expected a publisher of epoch 2, which is at v000002@e2, found one of epoch 1" in said
    assert watching.refused() == 1
    watching.daemon.stop()
    watching.daemon.start()
    watching.write(4)
    watching.says(lambda said: "another trainer has opened the run since" in said)
    assert [info.version for info in client.versions("r")] == ["v000001", "v000002", "v000002@e2"]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_trainer_that_resumed_goes_on_in_the_epoch_that_one_of_its_checkpoints_opened(
    watching: Watching, restarts: bool
) -> None:
    watching.daemon.start()
    for number in (1, 2):
        watching.write(number)
        watching.arrived(number, after=f"v{number - 1:06}")
    resumed = watching.write(3, below="checkpoints/kept")
    reply = watching.daemon.client.publish("r", PublishRequest(str(resumed), resume_from="v000001"))
    assert reply.version.version == "v000003@e2"
    if restarts:
        watching.daemon.stop()
        watching.daemon.start()
    watching.write(4)
    watching.arrived(4, after="v000003@e2")
    newest = watching.daemon.client.latest("r")
    assert newest is not None
    assert newest.version == "v000004@e2"


def test_a_watch_that_opens_epochs_by_itself_goes_on_in_them(watching: Watching) -> None:
    config = watching.daemon.config
    config.write_text(config.read_text().replace('quiet = "100ms"', 'quiet = "100ms"\non_conflict = "new_epoch"'))
    watching.daemon.start()
    for number in (1, 2):
        watching.write(number)
        watching.arrived(number, after=f"v{number - 1:06}")
    shutil.rmtree(watching.checkpoints / "step_2")
    write_checkpoint(watching.checkpoints / "step_2", WEIGHTS.changed(0.05, seed=99))
    watching.arrived(2, after="v000002")
    watching.write(3)
    watching.arrived(3, after="v000002@e2")
