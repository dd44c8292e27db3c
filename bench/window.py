"""A window of fifty versions, measured: the bytes that a region pulls, against fifty full snapshots.

Every state is published by the product's own origin into a store, and what a region pulls of a version is counted as
the product counts it: record, manifest, pages and chunks. A full run takes 50 consecutive steps of the demo's trainer
from the cache (`python -m bench.chain` makes them). A quick run replays one kept step on a slice of 3.6 M weights: the
density of a real step, at other places each time; its frames are smaller, and so its deltas a little worse.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import chain, slices
from bench.harness import Measurement, Spec, skipped
from bench.pairs import PAIRS, Bits, Extent, Pair, States, load, made
from bench.subject import write_checkpoint
from deltad.client.messages import RegisterRequest, VersionInfo
from deltad.config import load_config
from deltad.daemon.deriving import Deriving
from deltad.daemon.origin import Origin
from deltad.daemon.versions import Versions
from deltad.delta.backend import choose
from deltad.local.fleet import Fleet
from deltad.ops.metrics import Metrics
from deltad.store.path import Path as EdgePath
from deltad.store.store import Store
from deltad.types import RunId, Variant

PATHS = (
    "deltad",
    *(f"bench/{name}" for name in ("chain.py", "data", "pairs.py", "simulated.py", "slices.py", "subject.py")),
    "bench/training.py",
    "bench/window.py",
)

HELD = "50 steps of the trainer, base held: saved"
JOINED = "the same with the first anchor: saved"
SIMULATED = "50 steps, simulated, 98 % unchanged: saved"
SIMULATED_JOINED = "the same simulated, with its anchor: saved"
LEADING = "the leading system's schedule: saved"
SHARE = "bytes / the leading system's"
EDGES = "newcomer at version 50: edges"
BYTES = "newcomer at version 50: of all weights"
SKIP = "its skip delta / the deltas it replaces"

SPECS = (
    Spec(name=HELD, unit="%", direction="max", must=99.6, aim=99.8),
    Spec(name=JOINED, unit="%", direction="max"),
    Spec(name=SIMULATED, unit="%", direction="max", must=98.9),
    Spec(name=SIMULATED_JOINED, unit="%", direction="max"),
    Spec(name=LEADING, unit="%", direction="max"),
    Spec(name=SHARE, unit="×", direction="min"),
    Spec(name=EDGES, unit="", direction="min", must=2),
    Spec(name=BYTES, unit="%", direction="min"),
    Spec(name=SKIP, unit="×", direction="min"),
)

LEADING_DELTA = 0.0198
"""The leading system's published mean delta, of all weights."""
LEADING_PERIOD = 25
"""And of so many versions its schedule sends one whole."""

_RUN, _VARIANT = RunId("window"), Variant("bf16")
_STEP = next(pair for pair in PAIRS if pair.name == "grid, step 6")
_UNCHANGED = next(pair for pair in PAIRS if pair.run.density == 0.02)
_CONFIG = '[daemon]\nname = "window"\nderive_rate = "1024GiB"\n'
_ROUNDS = 8
_LONG = 3600.0


@dataclass(frozen=True, slots=True)
class Window:
    """What became of some states: the versions as they were published, and the cheapest way of a newcomer."""

    infos: Sequence[VersionInfo]
    way: EdgePath
    way_bytes: int
    skip_bytes: int

    @property
    def full(self) -> int:
        return self.infos[-1].full_bytes

    @property
    def anchor(self) -> int:
        return self.infos[0].delta_bytes

    @property
    def deltas(self) -> int:
        return sum(info.delta_bytes for info in self.infos[1:])


def measure(quick: bool) -> Iterator[Measurement]:
    """One measurement for each row."""
    leading = leading_share(chain.STEPS)
    note = f"computed: one whole in {LEADING_PERIOD}, the others {100 * LEADING_DELTA:g} %, as published"
    yield Measurement(name=LEADING, value=100 * (1 - leading / chain.STEPS), runs=1, note=note)
    yield from _simulated(quick=quick)
    if not quick and not chain.is_made():
        reason = f"needs the chain; make it: {chain.COMMAND}"
        yield from (skipped(name, reason) for name in (HELD, JOINED, SHARE, EDGES, BYTES, SKIP))
        return
    if quick:
        pair = slices.load(_STEP)
        window = pass_through(pair.tensors, chain.replayed(pair, chain.STEPS))
        note = f"{_STEP.name} on a slice, replayed at other places"
    else:
        window = pass_through(chain.tensors(), chain.states())
        note = f"{chain.STEPS} consecutive steps of SmolLM2-135M at 1e-6, from the model as it is shipped"
    density = sum(info.density for info in window.infos[1:]) / chain.STEPS
    note += f"; {100 * density:.3f} % of the weights change in a step"
    yield from _saved((HELD, JOINED), window.anchor, window.deltas, window.full, note)
    said = "theirs as published, of another model and another trainer; ours with the base held"
    yield Measurement(name=SHARE, value=window.deltas / (leading * window.full), runs=1, note=said)
    way = " and ".join(hop.edge.kind for hop in window.way.hops)
    yield Measurement(name=EDGES, value=len(window.way.hops), runs=1, note=f"by the background's work: {way}")
    yield Measurement(name=BYTES, value=100 * window.way_bytes / window.full, runs=1)
    yield Measurement(
        name=SKIP, value=window.skip_bytes / window.deltas, runs=1, note="blind, where they are by context"
    )


def leading_share(steps: int) -> float:
    """What the leading system sends in so many steps, in full snapshots."""
    whole = steps // LEADING_PERIOD
    return whole + (steps - whole) * LEADING_DELTA


def pass_through(tensors: tuple[Extent, ...], states: Iterable[Bits]) -> Window:
    """Publish every state as the next version of a run, and let a daemon's background work serve a newcomer."""
    with tempfile.TemporaryDirectory(prefix="deltad-window-") as home:
        return asyncio.run(_pass_through(tensors, states, Path(home)))


async def _pass_through(tensors: tuple[Extent, ...], states: Iterable[Bits], home: Path) -> Window:
    store = Store.open(home / "store")
    try:
        versions = Versions(store, _RUN, choose(), daemon="bench")
        origin = Origin(store, _RUN, _VARIANT, choose(), mirror=versions.mirror(_VARIANT))
        for number, bits in enumerate(states):
            shutil.rmtree(home / "step", ignore_errors=True)
            write_checkpoint(tensors, bits, home / "step")
            origin.publish(home / "step", number)
        infos = versions.all()
        await _serve_newcomer(versions, store, home)
        newest = versions.records.records()[-1]
        way = versions.records.path(newest, _VARIANT)
        sizes = [versions.records.edge(hop.edge, hop.record.id).bytes for hop in way.hops]
        return Window(infos, way, sum(sizes), sum(sizes[1:]))
    finally:
        store.close()


async def _serve_newcomer(versions: Versions, store: Store, home: Path) -> None:
    """Let the background work do what it does where a replica has come that holds nothing."""
    (home / "deltad.toml").write_text(_CONFIG)
    fleet = Fleet("window", "boot", quiet_for=_ROUNDS * _LONG)
    fleet.register(RegisterRequest("newcomer", _RUN, _VARIANT), 0.0)
    deriving = Deriving(store, load_config(home / "deltad.toml"), Metrics.create("bench"))
    infos = versions.all()
    for round_ in range(_ROUNDS):
        now = round_ * _LONG
        await deriving.look(versions, fleet.view(_RUN, infos, now), now)


def _simulated(*, quick: bool) -> Iterator[Measurement]:
    if not quick and not made(_UNCHANGED.run):
        reason = f"needs the pair; make it: python -m bench.pairs make {_UNCHANGED.run.name}"
        yield from (skipped(name, reason) for name in (SIMULATED, SIMULATED_JOINED))
        return
    pair = _load(_UNCHANGED, quick=quick)
    first, second = pass_through(pair.tensors, [pair.old, pair.new]).infos
    note = f"50 times the delta of {_UNCHANGED.name}, {100 * second.density:.2f} % changed"
    note += ", a slice" if quick else ""
    size = first.delta_bytes, chain.STEPS * second.delta_bytes
    yield from _saved((SIMULATED, SIMULATED_JOINED), *size, first.full_bytes, note)


def _load(pair: Pair, *, quick: bool) -> States:
    return slices.load(pair) if quick else load(pair)


def _saved(names: tuple[str, str], anchor: int, deltas: int, full: int, note: str) -> Iterator[Measurement]:
    """What was saved of 50 full snapshots by who holds the base, and by who pulls the first anchor too."""
    whole = chain.STEPS * full
    yield Measurement(name=names[0], value=100 * (1 - deltas / whole), runs=1, note=note)
    note = f"the anchor takes {100 * anchor / full:.1f} % of all weights"
    yield Measurement(name=names[1], value=100 * (1 - (anchor + deltas) / whole), runs=1, note=note)
