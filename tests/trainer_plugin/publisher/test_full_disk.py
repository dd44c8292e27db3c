"""A full disk under the daemon: steps are skipped, the reason is counted, and the next is a delta again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deltad.limits import DEFAULT_LIMITS
from tests.kit.daemons import Daemon
from tests.kit.weights import ArrayWeights
from tests.trainer_plugin.publisher.conftest import LAYOUT, RUN, Ranks

RESERVE = DEFAULT_LIMITS.disk_reserve_bytes
ROOM = 2 * RESERVE


def test_a_full_disk_skips_steps_with_the_reason_and_the_next_is_a_delta_again(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "trainer-host", f'[[run]]\nid = "{RUN}"\n')
    store = daemon.home / "store"
    store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={RESERVE + ROOM}", "tmpfs", str(store)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted, which takes root: {mounted.stderr.strip()}")
    try:
        daemon.start()
        ranks = Ranks(daemon, 2)
        weights = ArrayWeights.bell(LAYOUT)
        ranks.publish(0, weights)
        ballast = store / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, ROOM)
        full = ranks.publish(1, weights.changed(0.05, seed=1))
        assert [outcome.version for outcome in full] == [None, None]
        assert all(f"reserve of {RESERVE}" in outcome.reason for outcome in full)
        assert all(publisher.counters.skipped == {"StoreFull": 1} for publisher in ranks.publishers)
        ballast.unlink()
        after = ranks.publish(2, weights.changed(0.05, seed=2))
        assert [outcome.whole for outcome in after] == [False, False]
        version = after[0].version
        assert version is not None, after[0].reason
        assert (version.kind, version.parent) == ("delta", "v000000")
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()
        subprocess.run(["umount", str(store)], check=True)
