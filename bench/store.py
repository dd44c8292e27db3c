"""The store, measured: what reaches the disk for a delta, what a publish adds to its encoding, how fast the mirror
advances, and what thousands of versions cost.

Weights are simulated (`bench.simulated.steps`), and about 0.4 % of them change with every version.
What reaches the disk is `write_bytes` of /proc/self/io: pages that this process made dirty, whole pages of 4 KiB,
the store's own files and nothing else. A quick run has fewer of
everything: then what is the same for every version, such as syncs and whole pages, counts for more than it does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import long_run
from bench.codec import fast_backend
from bench.frames import backend
from bench.harness import ROOT, Measurement, Spec, median_of, skipped
from bench.long_run import Unsynced
from bench.pairs import Bits, Extent
from bench.simulated import steps, tensors
from bench.subject import write_checkpoint
from bench.timing import RUNS, WALL, seconds
from deltad.checkpoint import open_checkpoint
from deltad.daemon.origin import Origin
from deltad.delta.backend import Backend
from deltad.delta.codec import EdgeEncoder
from deltad.delta.record import VersionRecord
from deltad.delta.threads import default_threads
from deltad.protocol.mode import UNMEASURED, ModeChoice
from deltad.store.disk import DISK, FileSystem
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant

PATHS = (
    "deltad/checkpoint",
    "deltad/daemon/origin.py",
    "deltad/delta",
    "deltad/limits.py",
    "deltad/store",
    *(f"bench/{name}.py" for name in ("long_run", "memory", "simulated", "store", "subject", "timing")),
)

RUN, VARIANT = RunId("bench"), Variant("bf16")
LEARNING_RATE = 3.45e-7
"""Found by trying: about 0.4 % of the weights change."""
BLIND = ModeChoice("blind", "as the row says")
HOPS = 8

SPECS = (
    Spec(name="disk bytes per version / delta bytes", unit="×", direction="min", must=3, aim=2),
    Spec(name="of these, the publish alone", unit="×", direction="min"),
    Spec(name="of these, the mirror", unit="×", direction="min"),
    Spec(name="publish / encode of the same delta", unit="×", direction="min", must=1.1),
    Spec(name="mirror advance over 8 blind deltas / copying the files", unit="×", direction="max", must=0.5),
    Spec(name="opening a store with 10,000 versions", unit="s", direction="min", must=2),
    Spec(name="memory for 10,000 versions", unit="MiB", direction="min", must=64),
    Spec(name="collection over 10,000 versions", unit="s", direction="min", must=5),
    Spec(name="reading a manifest of 200,000 tensors", unit="s", direction="min", must=1),
    Spec(name="memory for that", unit="MiB", direction="min", must=256),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: weights, versions that are published, and versions of the long run."""

    extents: tuple[Extent, ...]
    published: int
    versions: int


FULL, QUICK = Size(tensors(layers=3), 20, 10_000), Size(tensors(part=2), RUNS, 2_000)


def measure(quick: bool) -> Iterator[Measurement]:
    """All rows."""
    size = QUICK if quick else FULL
    coder = fast_backend()[0] or backend("numpy")
    with tempfile.TemporaryDirectory(prefix="deltad-bench-") as home:
        yield from _publish_rows(Path(home), size, coder)
        yield _advance_row(Path(home), size, coder)
    yield from _long_rows(size)


class Trainer:
    """Writes checkpoints and publishes them; keeps the last two."""

    def __init__(self, home: Path, size: Size, coder: Backend, files: FileSystem = DISK) -> None:
        self.home = home
        self.store = Store.open(home / "store", files=files)
        self.run = self.store.run(RUN)
        self.mirror = Mirror(self.store, self.run, VARIANT, coder, threads=default_threads())
        self.origin = Origin(self.store, RUN, VARIANT, coder, mirror=self.mirror, threads=default_threads())
        self._extents = size.extents
        self._states: Iterator[Bits] = steps(sum(extent.lanes for extent in size.extents), LEARNING_RATE)
        self._number = -1

    def write(self) -> Path:
        """The next checkpoint."""
        self._number += 1
        shutil.rmtree(self.checkpoint(self._number - 2), ignore_errors=True)
        write_checkpoint(self._extents, next(self._states), self.checkpoint(self._number))
        os.sync()  # the trainer's writes are not what is timed
        return self.checkpoint(self._number)

    def checkpoint(self, number: int) -> Path:
        return self.home / "checkpoints" / f"step_{number}"

    def publish(self, coding: ModeChoice = UNMEASURED) -> None:
        self.origin.publish(self.checkpoint(self._number), self._number, coding=coding)

    def encode(self, coder: Backend, before: VersionRecord) -> Digest:
        """Encode the delta from `before`, the last checkpoint but one, to the last; keep nothing. Returns its root."""
        with (
            open_checkpoint(self.checkpoint(self._number - 1)) as base,
            open_checkpoint(self.checkpoint(self._number)) as target,
        ):
            sums = self.mirror.sums(before)
            mode = UNMEASURED.mode
            threads = default_threads()
            encoder = EdgeEncoder(target.layout, target, coder, base=base, base_sums=sums, mode=mode, threads=threads)
            for _ in encoder.chunks():
                pass
        return encoder.root


@dataclass(slots=True)
class _Published:
    """What some publishes took: seconds of them and of the encoding alone; bytes written, and of the deltas."""

    ratios: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    delta: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    """What the mirror's rule counts: manifest and chunks."""
    density: list[float] = field(default_factory=list)


def _publish_rows(home: Path, size: Size, coder: Backend) -> Iterator[Measurement]:
    trainer = Trainer(home / "published", size, coder)
    trainer.write()
    trainer.publish()
    trainer.mirror.advance(trainer.run.records()[-1])
    found = _Published()
    for _ in range(size.published):
        trainer.write()
        base = trainer.run.records()[-1]
        roots: list[Digest] = []

        def encode(base: VersionRecord = base, roots: list[Digest] = roots) -> None:
            roots.append(trainer.encode(coder, base))

        first = seconds(encode, WALL)
        before = written_bytes()
        took = seconds(trainer.publish, WALL)
        found.written.append(written_bytes() - before)
        trainer.origin.tidy()
        # Once before and once after, so that neither gains from what the other has left in caches.
        found.ratios.append(2 * took / (first + seconds(encode, WALL)))
        if set(roots) != {trainer.run.records()[-1].variant(VARIANT).root}:
            raise ValueError("what was encoded is not what was published")
        _note(trainer, found)
    newest = trainer.run.records()[-1]
    before = written_bytes()
    trainer.mirror.advance(newest)
    advance = written_bytes() - before
    weights = trainer.mirror.layout(newest).weight_bytes
    trainer.store.close()
    counted = _is_counted(home)
    yield from _disk_rows(found, advance if counted else 0, weights)
    how = f"{weights / 1e6:.0f} MB, context {UNMEASURED.mode}, {default_threads()} threads"
    note = f"{how}; files are read in both, and the encoding is timed before and after"
    yield median_of(SPECS[3].name, found.ratios, note=note)


def _note(trainer: Trainer, found: _Published) -> None:
    record = trainer.run.records()[-1]
    (edge,) = record.variant(VARIANT).edges
    manifest = trainer.run.read_manifest(edge)
    found.tail.append(edge.size + manifest.chunk_bytes)
    pages = sum(page.size for page in manifest.pages)
    found.delta.append(found.tail[-1] + pages + len(record.encode()))
    found.density.append(manifest.density)


def _disk_rows(found: _Published, advance: int, weights: int) -> Iterator[Measurement]:
    names = [spec.name for spec in SPECS[:3]]
    if not advance:
        reason = "temporary files are on a file system whose writes the kernel does not count, such as one in memory"
        yield from (skipped(name, reason) for name in names)
        return
    # As `Mirror.is_due` says: once the deltas take as much as the weights.
    between = math.ceil(weights / statistics.mean(found.tail))
    delta = statistics.mean(found.delta)
    published = [written / size for written, size in zip(found.written, found.delta, strict=True)]
    mirror = advance / between / delta
    density = 100 * statistics.mean(found.density)
    note = (
        f"{len(published)} versions, {density:.2f} % changed, {delta / 1e3:.0f} kB a delta; /proc/self/io write_bytes"
    )
    yield median_of(names[0], [ratio + mirror for ratio in published], note=note)
    yield median_of(names[1], published, note="whole pages, so that small objects count for more than they are")
    note = f"one advance writes {advance / 1e6:.0f} MB, and the next comes after {between} versions"
    yield Measurement(name=names[2], value=mirror, runs=1, note=note)


def _advance_row(home: Path, size: Size, coder: Backend) -> Measurement:
    trainer = Trainer(home / "advanced", size, coder, Unsynced())
    for _ in range(HOPS + 1):
        trainer.write()
        trainer.publish(BLIND)
    first, *_, newest = trainer.run.records()
    generation = trainer.mirror.advance(first)
    saved, copy = home / "saved", home / "copy"
    shutil.copytree(generation, saved, copy_function=os.link)

    def again() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(generation.parent)
        shutil.copytree(saved, generation, copy_function=os.link)

    ratios = []
    for _ in range(2 * RUNS + 1):
        again()
        took = seconds(partial(shutil.copytree, saved, copy), WALL)
        ratios.append(took / seconds(partial(_advance, trainer.mirror, newest), WALL))
    trainer.store.close()
    note = f"{trainer.mirror.layout(newest).weight_bytes / 1e6:.0f} MB in page cache, neither synced; "
    return median_of(SPECS[4].name, ratios[1:], note=f"{note}the advance with {default_threads()} threads, and summed")


def _advance(mirror: Mirror, record: VersionRecord) -> None:
    mirror.advance(record)


def _long_rows(size: Size) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory(prefix="deltad-bench-") as home:
        long, wide = Path(home) / "long", Path(home) / "wide"
        for path, versions, count in ((long, size.versions, 291), (wide, 2, 200_000)):
            path.mkdir()
            manifest = long_run.fill(path / "store", versions, count)
        opened = [_alone("open", long) for _ in range(3)]
        note = f"{size.versions:,} versions of 291 tensors"
        yield median_of(SPECS[5].name, [found["seconds"] for found in opened], note=f"{note}; {_cpu(opened)}")
        above = [found["above"] / 2**20 for found in opened]
        yield median_of(SPECS[6].name, above, note="resident above an empty store, at the most")
        collected = [_alone("collect", _copied(long)) for _ in range(3)]
        note = f"{note}, of which a tenth is let go; {_cpu(collected)}"
        yield median_of(SPECS[7].name, [found["seconds"] for found in collected], note=note)
        read = [_alone("read", wide) for _ in range(3)]
        note = f"{manifest / 1e6:.1f} MB and its layout, checked against its root; {_cpu(read)}"
        yield median_of(SPECS[8].name, [found["seconds"] for found in read], note=note)
        yield median_of(SPECS[9].name, [found["above"] / 2**20 for found in read], note="resident above, at the most")


def _cpu(found: Sequence[dict[str, float]]) -> str:
    return f"{statistics.median(one['cpu'] for one in found):.2g} s of a processor"


def _copied(home: Path) -> Path:
    copy = home.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(home, copy)
    os.sync()
    return copy


def _alone(what: str, home: Path) -> dict[str, float]:
    """Do it in a process that does nothing else."""
    command = [sys.executable, "-m", "bench.long_run", what, str(home)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def written_bytes() -> int:
    """What this process has sent to block devices, as the kernel counts: a page when it becomes dirty."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def _is_counted(home: Path) -> bool:
    before = written_bytes()
    (home / "probe").write_bytes(bytes(1 << 20))
    return written_bytes() - before >= 1 << 20
