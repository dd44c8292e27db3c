"""Daemons of different builds exchange versions: one of the build that fixed format 1, and today's, each way."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

import deltad
from deltad.client.messages import ExportRequest, PublishRequest
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

FIRST = "006dcc4ad797"
"""The commit with which format 1 was whole: since then its vectors have only been added to. Earlier builds wrote raw
frames otherwise."""
ROOT = Path(deltad.__file__).parents[1]


@pytest.fixture(scope="module")
def first_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it was then, from the history of this very checkout."""
    packed = subprocess.run(
        ["git", "-C", ROOT, "archive", FIRST, "deltad", "tests/vectors/frames"], check=False, capture_output=True
    )
    if packed.returncode:
        pytest.skip(f"this checkout has no history with commit {FIRST}: {packed.stderr.decode().strip()[:200]}")
    build = tmp_path_factory.mktemp("first")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(build, filter="data")
    return build


class Region(Daemon):
    """A daemon of another build, whose package lies in `build`; of today's without one."""

    def __init__(self, home: Path, name: str, sections: str, build: Path | None) -> None:
        super().__init__(home, name, sections + '[backend]\nkind = "numpy"\n')
        self.build = build
        if build is not None:
            self.environment["PYTHONPATH"] = str(build)

    def command(self, *words: str) -> list[str]:
        python, *rest = super().command(*words)
        return [python, *(["-P"] if self.build else []), *rest]


@pytest.fixture
def started() -> Iterator[list[Daemon]]:
    daemons: list[Daemon] = []
    yield daemons
    for daemon in daemons:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()


def publish(daemon: Daemon, home: Path, number: int, weights: ArrayWeights) -> None:
    daemon.client.publish("r", PublishRequest(str(write_checkpoint(home / f"step_{number}", weights))))


def check(daemon: Daemon, home: Path, number: int, weights: ArrayWeights) -> None:
    """`daemon` comes to hold the version, and exports it bit for bit."""
    latest = daemon.client.latest("r", after=f"v{number - 1:06d}" if number else "", wait=60.0)
    assert latest is not None, daemon.log
    assert latest.version == f"v{number:06d}"
    directory = home / f"export-{daemon.name}-{number}"
    daemon.client.export("r", ExportRequest(version=latest.version, directory=str(directory)))
    assert read_checkpoint(directory).equals(weights)


def test_since_that_build_no_vector_of_a_frame_has_changed(first_build: Path) -> None:
    then = {path.name: path.read_bytes() for path in (first_build / "tests/vectors/frames").iterdir()}
    assert len(then) > 10
    now = ROOT / "tests/vectors/frames"
    assert [name for name, content in then.items() if (now / name).read_bytes() != content] == []


@pytest.mark.parametrize("publisher", ["first", "today"])
def test_versions_cross_between_the_first_build_of_format_1_and_todays(
    publisher: str, first_build: Path, tmp_path: Path, started: list[Daemon]
) -> None:
    port = free_port()
    relay = f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n[[run]]\nid = "r"\n'
    upstream = f'[[upstream]]\nurl = "http://127.0.0.1:{port}"\ntoken_file = "token"\n'
    builds = (first_build, None) if publisher == "first" else (None, first_build)
    a = Region(tmp_path / "a", "a", relay, builds[0])
    b = Region(tmp_path / "b", "b", upstream, builds[1])
    started += [a, b]
    a.start()
    b.start()
    weights = ArrayWeights.random(MODEL)
    for number in range(4):
        weights = weights.changed(0.02, seed=number)
        publish(a, tmp_path, number, weights)
        check(b, tmp_path, number, weights)
    assert a.client.version("r", "v000003").kind == "delta"
    assert a.client.fleet("r").regions[-1].report.daemon == "b", "and reports come back"


def test_a_store_of_the_first_build_is_opened_by_todays_and_the_run_goes_on(
    first_build: Path, tmp_path: Path, started: list[Daemon]
) -> None:
    declared = '[[run]]\nid = "r"\n'
    old = Region(tmp_path / "a", "a", declared, first_build)
    started.append(old)
    old.start()
    weights = ArrayWeights.random(MODEL)
    for number in range(3):
        weights = weights.changed(0.02, seed=number)
        publish(old, tmp_path, number, weights)
    assert old.stop() == 0
    new = Region(tmp_path / "a", "a", declared, None)
    started.append(new)
    new.start()
    check(new, tmp_path, 2, weights)
    weights = weights.changed(0.02, seed=9)
    publish(new, tmp_path, 3, weights)
    check(new, tmp_path, 3, weights)
    assert new.client.version("r", "v000003").kind == "delta"
    assert new.client.verify("r", "v000001").match


def test_a_rolling_restart_of_three_regions_under_load_loses_nothing(
    first_build: Path, tmp_path: Path, started: list[Daemon]
) -> None:
    ports = [free_port(), free_port() + 1]
    middle = f'[[upstream]]\nurl = "http://127.0.0.1:{ports[0]}"\ntoken_file = "token"\n'
    last = f'[[upstream]]\nurl = "http://127.0.0.1:{ports[1]}"\ntoken_file = "token"\n'
    listens = [f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n' for port in ports]
    sections = [listens[0] + '[[run]]\nid = "r"\n', listens[1] + middle, last]
    fleet: list[Daemon] = [Region(tmp_path / n, n, s, first_build) for n, s in zip("abc", sections, strict=True)]
    started += fleet
    for daemon in fleet:
        daemon.start()
    weights = {-1: ArrayWeights.random(MODEL)}
    number = 0
    for place in (2, 1, 0):  # those that read a format first, those that write it last
        for _ in range(2):
            weights[number] = weights[number - 1].changed(0.02, seed=number)
            publish(fleet[0], tmp_path, number, weights[number])
            number += 1
        assert fleet[place].stop() == 0
        name = "abc"[place]
        fleet[place] = Region(tmp_path / name, name, sections[place], None).start()
        started.append(fleet[place])
    weights[number] = weights[number - 1].changed(0.02, seed=number)
    publish(fleet[0], tmp_path, number, weights[number])
    for daemon in fleet:
        while (latest := daemon.client.latest("r", after=f"v{number - 1:06d}", wait=60.0)) is not None:
            if latest.version == f"v{number:06d}":
                break
        assert latest is not None, daemon.log
        for version in daemon.client.versions("r"):
            assert daemon.client.verify("r", version.version).match
            kept = int(version.version[1:])
            directory = tmp_path / f"kept-{daemon.name}-{kept}"
            daemon.client.export("r", ExportRequest(version=version.version, directory=str(directory)))
            assert read_checkpoint(directory).equals(weights[kept])
    assert [int(v.version[1:]) for v in fleet[0].client.versions("r")] == list(range(number + 1)), "published is kept"
