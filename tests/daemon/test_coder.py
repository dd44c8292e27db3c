"""How a daemon's versions are coded: as configured, or as the regions below pull and read, and said so."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec
import pytest

from deltad.client.messages import PublishRequest, RegionReport, RunReport, VersionInfo
from deltad.delta.coding import Coder
from deltad.delta.manifest import decode_manifest
from deltad.delta.record import decode_record
from deltad.protocol.mode import MODES
from deltad.types import RunId, parse_digest, parse_version
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import TOKEN, Daemon, free_port
from tests.kit.regions import READ
from tests.kit.weights import ArrayWeights

RUN = RunId("r")


def publish(daemon: Daemon, home: Path, number: int) -> VersionInfo:
    """The version of checkpoint `number`, of which some weights differ from those of every other."""
    weights = ArrayWeights.random(MODEL).changed(0.05, seed=number)
    directory = write_checkpoint(home / f"step_{number}", weights)
    return daemon.client.publish("r", PublishRequest(directory=str(directory))).version


def report(port: int, region: RegionReport) -> None:
    """Say to a daemon's relay what a daemon below says."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/relay/report"
    with urlopen(Request(url, msgspec.json.encode(region), headers), timeout=30) as reply:
        assert reply.status == 200


def coders_of(daemon: Daemon, info: VersionInfo) -> tuple[int, ...]:
    record = decode_record(daemon.client.record_bytes("r", parse_version(info.version)))
    return decode_manifest(daemon.client.object(parse_digest(record.variants[0].edges[0].manifest.hex()))).coders


def test_the_regions_below_decide_how_a_version_is_coded_and_every_face_says_so(tmp_path: Path) -> None:
    port, metrics = free_port(), free_port() + 1
    sections = (
        f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n'
        f'[metrics]\nlisten = "127.0.0.1:{metrics}"\n[[run]]\nid = "r"\n[backend]\nthreads = 1\n'
    )
    daemon = Daemon(tmp_path / "a", "a", sections).start()
    try:
        runs = {"r": RunReport()}
        told = [
            (None, "dense", "no region below has told what it pulls at"),
            (RegionReport("far", "b1", 1, runs, (), 7e6, READ), "mid", "far pulls at 7.0 MB/s"),
            (RegionReport("far", "b1", 2, runs, (), 5e8, READ), "blind", "far pulls at 500.0 MB/s"),
            (RegionReport("old", "b2", 1, runs, (), 1e6, (0, 1, 3)), "blind", "old does not read coder 2 (context)"),
        ]
        anchor = publish(daemon, tmp_path, 0)
        assert (anchor.kind, anchor.coder_reason) == ("anchor", "")
        assert Coder.CONTEXT not in coders_of(daemon, anchor)
        for number, (region, coder, reason) in enumerate(told, 1):
            if region is not None:
                report(port, region)
            info = publish(daemon, tmp_path, number)
            assert (info.coder, info.coder_reason) == (coder, reason)
            assert (Coder.CONTEXT in coders_of(daemon, info)) == (coder != "blind")
            (line,) = [line for line in daemon.log.splitlines() if "version_published" in line and info.version in line]
            assert (json.loads(line)["coder"], json.loads(line)["coder_reason"]) == (coder, reason)
        shown = daemon.client.status().region.runs["r"].versions
        assert [info.coder for info in shown] == [anchor.coder, "dense", "mid", "blind", "blind"]
        with urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        assert 'deltad_versions_coded_total{coder="blind",run="r"} 2.0' in lines
        assert daemon.client.verify("r", "v000004").match
    finally:
        daemon.stop()


@pytest.mark.parametrize("mode", MODES)
def test_a_configured_coder_is_used_and_every_version_is_rebuilt_bit_for_bit(tmp_path: Path, mode: str) -> None:
    daemon = Daemon(tmp_path / "a", "a", f'[[run]]\nid = "r"\ncoder = "{mode}"\n').start()
    try:
        for number in range(3):
            info = publish(daemon, tmp_path, number)
        assert (info.coder, info.coder_reason) == (mode, "as configured")
        assert (Coder.CONTEXT in coders_of(daemon, info)) == (mode != "blind")
        assert daemon.client.verify("r", info.version).match
        daemon.stop()
        daemon.start()
        assert daemon.client.version("r", info.version).coder == mode, "it is remembered"
    finally:
        daemon.stop()
