"""The relay, measured over a long line: real TCP between two network namespaces, 400 Mbit/s and 100 ms.

The line is `tests.kit.wan`, with packets of 9000 bytes since each costs the box its share of a processor; the two
ends, the box and what they are compared with share this machine's processors. What is received is checked and not
stored. Ratios are of runs that took turns. Needs root; other programs that are missing are skipped rows.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Measurement, Spec, median_of, skipped
from bench.relay_end import CHUNK
from tests.kit.daemons import free_port
from tests.kit.wan import Line, Wan, missing

PATHS = ("deltad/relay", "deltad/protocol", "bench/relay.py", "bench/relay_end.py", "tests/kit/wan.py")

RATE, RTT, MTU = 50e6, 0.1, 9000
PORT, FILE_PORT, CUT_PORT = 7000, 7001, 7002
LEAST_CUTS = 8

GOODPUT = "goodput / capacity"
CURL = "the same / one curl stream"
CUT = "goodput / capacity, every connection cut after 8 to 32 MiB"
AGAIN = "fetched again per cut connection"
LOSS = {0.001: "at 0.1 % loss / aria2c with 16 connections", 0.01: "at 1 % loss / aria2c with 16 connections"}
CPU = "processor time / recv_into and sha256"

SPECS = (
    Spec(name=GOODPUT, unit="×", direction="max", must=0.85, aim=0.95),
    *(Spec(name=name, unit="×", direction="max", must=0.9, aim=1.05) for name in LOSS.values()),
    Spec(name=CUT, unit="×", direction="max", must=0.75, aim=0.9),
    Spec(name=CURL, unit="×", direction="max", must=1.6, aim=1.9),
    Spec(name=CPU, unit="×", direction="min", must=2.0, aim=1.4),
    Spec(name=AGAIN, unit="chunk", direction="min", must=1.0, aim=0.5),
)


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    received: int
    cpu: float


def measure(quick: bool) -> Iterator[Measurement]:
    size = (64 if quick else 256) << 20
    yield _processor(size, 3 if quick else 7)
    if why := missing():
        for spec in SPECS:
            if spec.name != CPU:
                yield skipped(spec.name, why)
        return
    with tempfile.TemporaryDirectory() as directory:
        yield from _far(Path(directory) / "far", size, 1 if quick else 3)
    for loss, name in LOSS.items():
        with tempfile.TemporaryDirectory() as directory:
            yield _lossy(name, loss, Path(directory) / "lossy", size // 4 if quick else size, 1 if quick else 5)


def _far(directory: Path, size: int, runs: int) -> Iterator[Measurement]:
    with Wan(Line(rtt=RTT, rate=RATE, mtu=MTU)) as wan:
        server = _serve(wan, directory, size, CUT_PORT)
        ours, curls = [], []
        for _ in range(runs):
            ours += _pulled(wan, directory, PORT)
            curls.append(_fetch_with(wan, ["curl", "-s", "-o", "/dev/null"]) if shutil.which("curl") else 0.0)
        note = f"{size >> 20} MiB, {8 * RATE / 1e6:.0f} Mbit/s, {1000 * RTT:.0f} ms, packets of {MTU} bytes"
        yield median_of(GOODPUT, [size / run.seconds / RATE for run in ours], note=f"{note}; connecting included")
        if all(curls):
            pairs = zip(ours, curls, strict=True)
            yield median_of(CURL, [curl / run.seconds for run, curl in pairs], note="turn by turn")
        else:
            yield skipped(CURL, "there is no curl")
        cut, cuts = [], []
        for _ in range(runs):
            cut += _pulled(wan, directory, CUT_PORT)
        server.kill()
        cuts = [line for line in server.stdout or () if line == "cut\n"]
        per_run = len(cuts) / runs
        enough = "" if per_run >= LEAST_CUTS else f", where {LEAST_CUTS} are wanted"
        yield median_of(CUT, [size / run.seconds / RATE for run in cut], note=f"{per_run:.1f} cuts a run{enough}")
        again = sum(run.received - size for run in cut) / CHUNK / max(1, len(cuts))
        yield Measurement(name=AGAIN, value=again, runs=len(cuts), note="a chunk goes on where it was cut")


def _lossy(name: str, loss: float, directory: Path, size: int, runs: int) -> Measurement:
    if shutil.which("aria2c") is None:
        return skipped(name, "there is no aria2c")
    with Wan(Line(rtt=RTT, rate=RATE, mtu=MTU, loss=loss, seed=1)) as wan:
        _serve(wan, directory, size)
        ours, theirs = [], []
        aria2 = ["aria2c", "-q", "-x16", "-s16", "-k1M", "--allow-overwrite=true", "--file-allocation=none"]
        for _ in range(runs):
            ours += [run.seconds for run in _pulled(wan, directory, PORT)]
            theirs.append(_fetch_with(wan, [*aria2, "-d", str(directory), "-o", "got"]))
    note = f"{size >> 20} MiB; {size / statistics.median(ours) / RATE:.2f} of the line's capacity; medians of both"
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    value = statistics.median(theirs) / statistics.median(ours)
    return Measurement(name=name, value=value, spread=(min(ratios), max(ratios)), runs=runs, note=note)


def _processor(size: int, runs: int) -> Measurement:
    """Over loopback: all that the reader's process takes, against all that the least one takes."""
    port, ratios = free_port(), []
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        # One below the other, so that neither takes the other's port.
        server = _start(_end("serve", directory, size, "127.0.0.1", port), None)
        sender = _start(_end("send", size, port + 3), None)
        try:
            for _ in range(runs):
                (least,) = _runs(_read(_end("receive", size, port + 3)))
                (ours,) = _runs(_read(_end("pull", directory, f"http://127.0.0.1:{port}", 1)))
                ratios.append(ours.cpu / least.cpu)
        finally:
            for process in (server, sender):
                process.kill()
                process.communicate()
    return median_of(CPU, ratios, note=f"{size >> 20} MiB over loopback, process time, checked in both")


def _read(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def _end(what: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "bench.relay_end", what, *map(str, arguments)]


def _serve(wan: Wan, directory: Path, size: int, *cut: int) -> subprocess.Popen[str]:
    directory.mkdir()
    return _start(_end("serve", directory, size, wan.address("a"), PORT, *cut), wan)


def _start(command: Sequence[str], wan: Wan | None) -> subprocess.Popen[str]:
    how: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = wan.popen("a", command, **how) if wan else subprocess.Popen(command, **how)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"{' '.join(command)} did not begin")
    return process


def _pulled(wan: Wan, directory: Path, port: int) -> list[_Run]:
    reader = wan.popen("b", _end("pull", directory, f"http://{wan.address('a')}:{port}", 1), cwd=ROOT, stdout=-1)
    said, _ = reader.communicate()
    if reader.returncode:
        raise RuntimeError(f"the reader ended with {reader.returncode}")
    return _runs(said)


def _runs(said: str | bytes) -> list[_Run]:
    return [_Run(*times) for times in json.loads(said)["times"]]


def _fetch_with(wan: Wan, command: Sequence[str]) -> float:
    """Seconds that another program takes for the same bytes in one file."""
    begun = time.monotonic()
    done = wan.popen("b", [*command, f"http://{wan.address('a')}:{FILE_PORT}/file"], cwd=ROOT).wait()
    if done:
        raise RuntimeError(f"{command[0]} ended with {done}")
    return time.monotonic() - begun
