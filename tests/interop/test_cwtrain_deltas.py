"""Disk-deltas between deltad and cwtrain, both ways, by cwtrain's own code."""

from __future__ import annotations

import os
from pathlib import Path

from deltad.client.messages import DiskDeltaRequest, ExportRequest
from tests.interop.peers import needs_peers, run_peer
from tests.kit.checkpoints import MODEL, read_checkpoint, write_checkpoint
from tests.kit.daemons import Daemon
from tests.kit.weights import ArrayWeights

SCRIPT = Path(__file__).with_name("cwtrain_deltas.py")
STATES = [ArrayWeights.bell(MODEL)]
for seed in (1, 2):
    STATES.append(STATES[-1].changed(0.02, seed=seed))


@needs_peers
def test_what_cwtrain_wrote_becomes_versions_and_what_is_exported_its_mirror_applies(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    full = [write_checkpoint(tmp_path / f"full-{i}", state) for i, state in enumerate(STATES)]
    daemon = Daemon(
        tmp_path / "d",
        "d",
        f'[[run]]\nid = "r"\n[[watch]]\nrun = "r"\ndirectory = "{trainer}"\n'
        'pattern = "weight_v{number}"\nquiet = "100ms"\nrescan = "300ms"\n',
    ).start()
    try:
        write_checkpoint(trainer / "weight_v000000", STATES[0])
        for i in (1, 2):
            assert daemon.client.latest("r", after=f"v{i - 2:06d}" if i > 1 else "", wait=60) is not None, daemon.log
            made = tmp_path / f"made-{i}"
            run_peer(SCRIPT, "write", full[i - 1], full[i], made, f"{i:06d}", f"{i - 1:06d}")
            os.rename(made, trainer / f"weight_v{i:06d}")
        newest = daemon.client.latest("r", after="v000001", wait=60)
        assert newest is not None, daemon.log
        assert newest.version == "v000002"
        whole = tmp_path / "whole"
        daemon.client.export("r", ExportRequest(version="v000002", directory=str(whole)))
        assert read_checkpoint(whole).equals(STATES[2])
        for i in (1, 2):
            daemon.client.export(
                "r",
                ExportRequest(version=f"v{i:06d}", directory=str(tmp_path / f"out-{i}"), disk_delta=DiskDeltaRequest()),
            )
        said = run_peer(
            SCRIPT, "apply", full[0], tmp_path / "mirror", tmp_path / "mirrored", tmp_path / "out-1", tmp_path / "out-2"
        )
        assert said.split() == [str(len(MODEL.tensors))] * 2
        assert read_checkpoint(tmp_path / "mirrored").equals(STATES[2])
    finally:
        daemon.stop()
