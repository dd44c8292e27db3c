"""A real daemon that keeps its run in an S3 bucket, and one in another region that has no link but the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from deltad.client.messages import ExportRequest
from tests.kit.buckets import KEY_ID, NAME, SECRET, S3Server
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.weights import ArrayWeights

WAIT = 60.0


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def daemons(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Daemon, Daemon]]:
    """A, which has its credentials from a file, and B, which has them from its environment."""
    home = tmp_path / "a"
    home.mkdir()
    credentials = home / "s3"
    credentials.write_text("# of the origin\n" + "\n".join(f"{k}='{v}'" for k, v in s3.settings().items()))
    credentials.chmod(0o600)
    port = free_port()
    metrics = '[metrics]\nlisten = "127.0.0.1:{}"\n'
    a = Daemon(
        home,
        "a",
        f'[[run]]\nid = "r"\n[[watch]]\nrun = "r"\ndirectory = "{tmp_path}/steps"\nquiet = "100ms"\nrescan = "300ms"\n'
        f'[[bucket]]\nurl = "s3://{NAME}/prod"\npublish = ["*"]\ncredentials_file = "s3"\n' + metrics.format(port),
    )
    b = Daemon(
        tmp_path / "b",
        "b",
        f'[[bucket]]\nurl = "s3://{NAME}/prod"\npull = ["*"]\npoll = "100ms"\n' + metrics.format(port + 1),
    )
    a.start()
    for name, value in s3.settings().items():
        monkeypatch.setenv(name, value)
    b.start()
    yield a, b
    for daemon in (a, b):
        assert daemon.process is not None
        daemon.process.kill()
        daemon.process.wait()


def told_by(daemon: Daemon) -> str:
    """Everything that a daemon says: its log, its status, its metrics, and its page."""
    listen = next(line for line in daemon.config.read_text().splitlines() if line.startswith("listen"))
    port = listen.rpartition(":")[2].strip('"')
    pages = []
    for path in ("/metrics", "/status.json", "/"):
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            pages.append(reply.read().decode())
    return "\n".join([daemon.log, str(daemon.client.status()), *pages])


def test_a_region_follows_a_run_through_a_bucket_alone(
    daemons: tuple[Daemon, Daemon], tmp_path: Path, s3: S3Server
) -> None:
    a, b = daemons
    weights = ArrayWeights.random(MODEL)
    for number in range(3):
        weights = weights.changed(0.02, seed=number) if number else weights
        write_checkpoint(tmp_path / "steps" / f"step_{number:06d}", weights)
        after = f"v{number - 1:06d}" if number else ""
        there = b.client.latest("r", after=after, wait=WAIT)
        assert there is not None, a.log + b.log
        assert there.root == a.client.version("r", there.version).root
        assert b.client.verify("r", there.version).match
    directory = tmp_path / "export"
    b.client.export("r", ExportRequest(version="v000002", directory=str(directory)))
    assert read_checkpoint(directory).equals(weights)
    status = b.client.status()
    assert status.ready, status.reasons
    assert status.upstreams[0].url == f"s3://{NAME}/prod"
    told = told_by(a) + told_by(b)
    assert f'deltad_bucket_sent_bytes_total{{bucket="s3://{NAME}/prod"}}' in told
    for secret in (KEY_ID, SECRET):
        assert secret not in told
        assert not any(secret.encode() in path.read_bytes() for path in b.home.rglob("*") if path.is_file())
    assert a.stop() == 0
    assert b.stop() == 0


def test_a_bucket_that_is_gone_is_named_and_both_sides_go_on_when_it_is_back(
    daemons: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    a, b = daemons
    a.kill()
    away = a.config.read_text()
    a.config.write_text(away.replace(f"s3://{NAME}/", "s3://nowhere/"))
    a.start()
    weights = ArrayWeights.random(MODEL)
    write_checkpoint(tmp_path / "steps" / "step_000000", weights)
    assert a.client.latest("r", wait=WAIT) is not None
    while not (reasons := [r for r in a.client.status().reasons if r.startswith("bucket ")]):
        assert a.client.latest("r", after="v000000", wait=0.2) is None
    assert "s3://nowhere/prod: expected a bucket of that name, found none" in reasons[0]
    a.kill()
    a.config.write_text(away)
    a.start()
    assert b.client.latest("r", wait=WAIT) is not None
