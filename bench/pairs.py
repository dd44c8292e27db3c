"""Pairs of checkpoints to measure with: which there are, where they lie, and the command that makes them.

    python -m bench.pairs list                  what there is, what is made, and the density of each pair
    python -m bench.pairs make [RUN …]          make these runs, or all, into the cache (`--tiny`: of a tiny model)
    python -m bench.pairs slice                 cut the kept slice in bench/data from the cache

A run is one training (or one simulation) and leaves some of its states; a pair is two states of one run. A state
is one flat file of 16-bit patterns: all tensors in ascending order of name, as `table.json` beside it tells them.
The invariant: a run's directory appears whole or not at all, and what is there is never made again.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
Kind = Literal["grid", "off-grid", "restart", "simulated"]

TABLE = "table.json"


@dataclass(frozen=True, slots=True)
class Run:
    """A training or a simulation, and the steps whose states it leaves.

    `kind` says where it starts: at the quantised model as it is shipped (grid), after a phase of text that takes
    the weights off its grid (off-grid), at that phase's weights rounded to bf16 (restart), or simulated.
    `warm`: the optimiser's moments come from the phase of text. `density`: what a simulation aims at, a share.
    """

    name: str
    kind: Kind
    learning_rate: float
    kept: tuple[int, ...]
    seed: int
    warm: bool = False
    density: float = 0.0

    @property
    def steps(self) -> int:
        return self.kept[-1]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two states of one run. Only pairs of neighbouring steps count as single steps."""

    name: str
    run: Run
    old: int
    new: int

    @property
    def single(self) -> bool:
        return self.new == self.old + 1


GRID = Run("grid", "grid", 1e-6, (0, 2, 3, 5, 6), seed=1)
FRESH = Run("off-grid-fresh-1e-6", "off-grid", 1e-6, (0, 3, 4, 7, 8), seed=2)
WARM = Run("off-grid-warm-1e-6", "off-grid", 1e-6, (0, 3, 4), seed=3, warm=True)
FRESH_3 = Run("off-grid-fresh-3e-6", "off-grid", 3e-6, (0, 3, 4), seed=4)
WARM_3 = Run("off-grid-warm-3e-6", "off-grid", 3e-6, (0, 3, 4), seed=5, warm=True)
RESTART = Run("restart-1e-6", "restart", 1e-6, (0, 5, 6), seed=6)
SIMULATED = tuple(
    Run(f"simulated-{percent}", "simulated", rate, (0, 1), seed=7, density=float(percent) / 100)
    # The rates were found by bisection, so that the shares of changed weights are the ones in the names.
    for percent, rate in (("0.5", 3.73e-7), ("1", 8.28e-7), ("2", 1.87e-6))
)
RUNS = (GRID, FRESH, WARM, FRESH_3, WARM_3, RESTART, *SIMULATED)

PAIRS = (
    Pair("grid, step 3", GRID, 2, 3),
    Pair("grid, step 6", GRID, 5, 6),
    Pair("off-grid 1e-6, fresh Adam, step 4", FRESH, 3, 4),
    Pair("off-grid 1e-6, fresh Adam, step 8", FRESH, 7, 8),
    Pair("off-grid 1e-6, warm Adam, step 4", WARM, 3, 4),
    Pair("off-grid 3e-6, fresh Adam, step 4", FRESH_3, 3, 4),
    Pair("off-grid 3e-6, warm Adam, step 4", WARM_3, 3, 4),
    Pair("off-grid 1e-6, fresh Adam, 8 steps", FRESH, 0, 8),
    Pair("restart 1e-6, step 6", RESTART, 5, 6),
    *(Pair(f"simulated, {100 * run.density:g} %", run, 0, 1) for run in SIMULATED),
)


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a state: its name and shape. Its lanes follow those of the tensor before it."""

    name: str
    shape: tuple[int, ...]

    @property
    def lanes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What lies beside the states of a run. `log` has one line a step."""

    run: str
    command: str
    versions: dict[str, str]
    kept: tuple[int, ...]
    tensors: tuple[Extent, ...]
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class States:
    """The two states of a pair, as flat arrays, and the tensors that they consist of."""

    pair: Pair
    tensors: tuple[Extent, ...]
    old: Bits
    new: Bits

    @property
    def density(self) -> float:
        """The share of weights whose bits changed."""
        return int(np.count_nonzero(self.old != self.new)) / self.old.size


def cache(*, tiny: bool = False) -> Path:
    """Where runs are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "deltad" / "pairs" / ("tiny" if tiny else "smollm2")


def command(run: Run, *, tiny: bool = False) -> str:
    """The command that makes a run."""
    return f"python -m bench.pairs make {run.name}{' --tiny' if tiny else ''}"


def made(run: Run, *, tiny: bool = False) -> bool:
    """Whether all states of this run are in the cache."""
    return (cache(tiny=tiny) / run.name / TABLE).exists()


def read_table(run: Run, *, tiny: bool = False) -> Table:
    """The table of a run that was made. Raises FileNotFoundError, with the command, for one that was not."""
    path = cache(tiny=tiny) / run.name / TABLE
    if not path.exists():
        raise FileNotFoundError(f"run {run.name}: expected in {path.parent}; make it: {command(run, tiny=tiny)}")
    return msgspec.json.decode(path.read_bytes(), type=Table)


def state(run: Run, step: int, *, tiny: bool = False) -> Bits:
    """A state as a read-only map of its file. Raises FileNotFoundError like `read_table`."""
    table = read_table(run, tiny=tiny)
    return np.memmap(cache(tiny=tiny) / table.run / _file(step), np.uint16, "r")


def load(pair: Pair, *, tiny: bool = False) -> States:
    """Both states of a pair, mapped. Raises FileNotFoundError like `read_table`."""
    old, new = (state(pair.run, step, tiny=tiny) for step in (pair.old, pair.new))
    return States(pair, read_table(pair.run, tiny=tiny).tensors, old, new)


class Keeper:
    """Takes the states of one run as they come, into a directory that nobody sees before `appearing` ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: tuple[Extent, ...] = ()
        self.log: list[str] = []

    def keep(self, step: int, tensors: Iterable[tuple[str, Bits]]) -> None:
        """Write one state; tensors of any shape, in ascending order of name."""
        extents = []
        with (self.directory / _file(step)).open("wb") as file:
            for name, bits in tensors:
                extents.append(Extent(name, bits.shape))
                file.write(np.ascontiguousarray(bits).data)
        if sorted(extents, key=lambda extent: extent.name) != extents or (
            self.tensors and self.tensors != tuple(extents)
        ):
            raise ValueError(f"step {step}: expected the tensors of the other steps, in ascending order of name")
        self.tensors = tuple(extents)

    def say(self, line: str) -> None:
        """A line of the log, also printed."""
        print(line, flush=True)
        self.log.append(line)


@contextmanager
def appearing(run: Run, versions: Mapping[str, str], *, tiny: bool = False) -> Iterator[Keeper]:
    """A keeper for a run; its directory takes its name at the end, or goes away."""
    directory = cache(tiny=tiny) / run.name
    making = directory.with_name(f".{run.name}.{os.getpid()}")
    making.mkdir(parents=True)
    try:
        keeper = Keeper(making)
        yield keeper
        table = Table(
            run=run.name,
            command=command(run, tiny=tiny),
            versions=dict(versions),
            kept=run.kept,
            tensors=keeper.tensors,
            log=tuple(keeper.log),
        )
        (making / TABLE).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))
        making.rename(directory)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _file(step: int) -> str:
    return f"step_{step:06d}.u16"


def make(runs: Sequence[Run], *, tiny: bool = False) -> None:
    """Make what is not there yet. Training SmolLM2 takes minutes a step on one core."""
    for run in runs:
        if made(run, tiny=tiny):
            print(f"{run.name}: is there")
        elif run.kind == "simulated":
            from bench.simulated import simulate

            simulate(run, tiny=tiny)
        else:
            from bench.training import train

            train(run, tiny=tiny)


def _list(*, tiny: bool) -> None:
    for pair in PAIRS:
        if made(pair.run, tiny=tiny):
            states = load(pair, tiny=tiny)
            print(f"{pair.name:36} {100 * states.density:7.4f} % of {states.old.size} changed")
        else:
            print(f"{pair.name:36} not made: {command(pair.run, tiny=tiny)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m bench.pairs`."""
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description="Checkpoint pairs to measure with.")
    parser.add_argument("what", choices=("list", "make", "slice"))
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(run.name for run in RUNS)}")
    parser.add_argument("--tiny", action="store_true", help="of a random model of 0.1 M parameters")
    options = parser.parse_args(arguments)
    known = {run.name: run for run in RUNS}
    if unknown := [name for name in options.runs if name not in known]:
        parser.error(f"run {unknown[0]!r}: expected one of {', '.join(known)}")
    actions: dict[str, Callable[[], None]] = {
        "list": lambda: _list(tiny=options.tiny),
        "make": lambda: make([known[name] for name in options.runs] or RUNS, tiny=options.tiny),
        "slice": _slice,
    }
    actions[options.what]()
    return 0


def _slice() -> None:
    from bench.slices import cut

    cut()


if __name__ == "__main__":
    # The modules that make runs import this one by its name, and there must not be two of it.
    sys.exit(importlib.import_module("bench.pairs").main())
