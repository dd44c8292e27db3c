"""A version that ranks hand over from their shards is, root for root, the one of the same weights gathered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.daemons import Daemon, free_port
from tests.trainer_plugin.publisher.meshes import CASES


def run_ranks(world: int, *arguments: str) -> str:
    """Run the ranks to their end; what rank 0 printed."""
    port = str(free_port())
    ranks = []
    for rank in range(world):
        places = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.trainer_plugin.publisher.meshes", *arguments],
                env={**os.environ, **places, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors[-3000:] for _, errors in outputs)
    return outputs[0][0]


@pytest.mark.parametrize("world", [2, 4])
def test_whatever_the_mesh_the_version_is_that_of_the_gathered_weights(tmp_path: Path, world: int) -> None:
    sections = "".join(f'[[run]]\nid = "{case}-{world}"\n' for case in CASES)
    daemon = Daemon(tmp_path, "trainer-host", sections).start()
    try:
        lines = run_ranks(world, str(daemon.home / "deltad.sock")).splitlines()
    finally:
        daemon.stop()
    found = {case["case"]: case["versions"] for case in map(json.loads, lines)}
    assert tuple(found) == CASES
    for case, versions in found.items():
        assert [version[1] for version in versions] == ["anchor", "delta", "delta"], case
        for name, _, root, gathered in versions:
            assert root == gathered, f"{case} {name}"
