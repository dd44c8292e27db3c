"""Publishing from the memory of a trainer's ranks, measured: what it takes of them, and against saving a checkpoint.

Real gloo ranks, FSDP2, a real daemon in a process of its own, all on one machine. What ranks do at once they are
timed at together, the copy that they are compared with included.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Measurement, Spec, median_of
from bench.publish_rank import DENSITY, MEMORY, WATCHED

PATHS = ("deltad", "trainer_plugin/publisher", "bench/publish.py", "bench/publish_rank.py", "bench/memory.py")

WORLDS = (2, 4)
_MIB = 1 << 20


def _name(what: str, world: int) -> str:
    return f"{what}, {world} ranks"


INSIDE = "in publish and at the fence / memcpy of the shard"
BESIDE = "a step beside a publish / without"
BYTES = "bytes handed over / bytes of the delta"
FASTER = "saved as a checkpoint and published / from memory, end to end"
EXTRA = "memory beyond a copy of the shard"

SPECS = tuple(
    Spec(name=_name(name, world), unit=unit, direction=direction, must=must)  # type: ignore[arg-type]
    for world in WORLDS
    for name, unit, direction, must in (
        (INSIDE, "×", "min", 1.5),
        (BESIDE, "×", "min", None),
        (BYTES, "×", "min", 1.05),
        (FASTER, "×", "max", 5.0),
        (EXTRA, "MiB", "min", 64.0),
    )
)


def measure(quick: bool) -> Iterator[Measurement]:
    """One measurement for each row."""
    layers, width, steps = (4, 1024, 2) if quick else (20, 4096, 5)
    for world in WORLDS:
        with tempfile.TemporaryDirectory(prefix="deltad-publish-") as home:
            yield from _rows(world, run_ranks(world, layers, width, steps, Path(home)), layers, width)


def _rows(world: int, ranks: Sequence[Mapping[str, Any]], layers: int, width: int) -> Iterator[Measurement]:
    steps = range(len(ranks[0]["inside"]))
    weights = f"{layers * width * width / 1e6:.0f} M weights in bf16, {100 * DENSITY:g} % changed a step"

    def slowest(what: str, step: int) -> float:
        return max(rank[what][step] for rank in ranks)

    inside = [slowest("inside", i) / slowest("memcpy", i) for i in steps]
    yield median_of(
        _name(INSIDE, world), inside, note=f"{weights}; coded blind; the fence follows at once; the slowest rank"
    )
    beside = [slowest("beside", i) / slowest("alone", i) for i in steps]
    yield median_of(_name(BESIDE, world), beside, note="forward and backward of one row, with as many ranks as cores")
    handed = sum(sum(rank["handed"]) for rank in ranks)
    gathered = statistics.median(ranks[0]["saved_deltas"])
    share = handed / len(steps) / gathered
    note = "the delta of as many changes that was made from gathered checkpoints"
    yield Measurement(name=_name(BYTES, world), value=share, runs=len(steps), note=note)
    faster = [saved / slowest("durable", i) for i, saved in enumerate(ranks[0]["saved"])]
    note = "gathered to rank 0 and saved by safetensors; the daemon is told at once, so nothing waits to settle"
    yield median_of(_name(FASTER, world), faster, note=note)
    extra = [rank["extra"] / _MIB for rank in ranks]
    note = f"of {ranks[0]['shard'] / _MIB:.0f} MiB a shard; the largest rank, first version included"
    yield Measurement(name=_name(EXTRA, world), value=max(extra), spread=(min(extra), max(extra)), runs=1, note=note)


def run_ranks(world: int, layers: int, width: int, steps: int, home: Path) -> list[dict[str, Any]]:
    """What every rank took. Raises RuntimeError with what was said if the daemon or a rank fails."""
    daemon = _start_daemon(home)
    try:
        return _run_ranks(world, [str(layers), str(width), str(steps)], home)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        shutil.rmtree(home / "store", ignore_errors=True)


def _start_daemon(home: Path) -> subprocess.Popen[bytes]:
    runs = "".join(f'[[run]]\nid = "{run}"\ncoder = "blind"\n' for run in (MEMORY, WATCHED, "resident"))
    (home / "deltad.toml").write_text(
        f'[daemon]\nname = "bench"\nstore = "store"\nsocket = "deltad.sock"\nderive_rate = "0B"\n{runs}'
        '[scrub]\nevery = "0s"\n'
    )
    notify = str(home / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, (home / "log").open("ab") as log:
        manager.bind(notify)
        manager.settimeout(60)
        daemon = subprocess.Popen(
            [sys.executable, "-m", "deltad", "serve", "--config", str(home / "deltad.toml")],
            env={**os.environ, "NOTIFY_SOCKET": notify},
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
        try:
            manager.recv(1024)
        except TimeoutError:
            daemon.kill()
            raise RuntimeError(f"the daemon is not ready after 60 s: {(home / 'log').read_text()[-2000:]}") from None
    return daemon


def _run_ranks(world: int, sizes: Sequence[str], home: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(world):
        places = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "bench.publish_rank", str(home / "deltad.sock"), *sizes, str(home / "saved")]
        ranks.append(
            subprocess.Popen(
                command,
                env={**os.environ, **places, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(said[-2000:] for _, said in outputs))
    found: list[dict[str, Any]] = json.loads(outputs[0][0])
    return found
