"""What every bench shares: what a row is, how it is judged, and where results go.

A bench is a module with `SPECS` (its rows: names, units, musts; the same for a quick run) and
`measure(quick)`, which yields one `Measurement` for each of them; and `PATHS`, the files and folders that its
figures depend on. The invariant: a result has exactly the declared rows, and whether one is met is computed
here, from the value, never stated by the bench; and a result tells the commit of the very code it measured.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A row as it is declared. `direction` says which way is better: `min` (less) or `max` (more)."""

    name: str
    unit: str
    direction: Literal["min", "max"]
    must: float | None = None
    aim: float | None = None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A row as it was measured; `skipped` holds the reason where it was not.

    `spread`: the lowest and highest value, or the interval that the note names. `runs`: how many values.
    """

    name: str
    value: float | None = None
    spread: tuple[float, float] | None = None
    runs: int = 0
    skipped: str = ""
    note: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the result. `met` is None where nothing was measured or nothing is demanded."""

    name: str
    value: float | None
    unit: str
    must: float | None
    aim: float | None
    direction: Literal["min", "max"]
    met: bool | None
    spread: tuple[float, float] | None
    runs: int
    skipped: str
    note: str


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str


class Result(msgspec.Struct, frozen=True):
    """What a bench leaves behind."""

    bench: str
    machine: Machine
    commit: str
    rows: tuple[Row, ...]


def median_of(name: str, values: Sequence[float], *, note: str = "") -> Measurement:
    """The median of some values, with the lowest and highest as spread. Needs at least one value."""
    return Measurement(
        name=name, value=statistics.median(values), spread=(min(values), max(values)), runs=len(values), note=note
    )


def skipped(name: str, reason: str) -> Measurement:
    """A row that was not measured, and why."""
    return Measurement(name=name, skipped=reason)


def judge(specs: Sequence[Spec], measurements: Iterable[Measurement]) -> tuple[Row, ...]:
    """The rows in the declared order. Raises ValueError unless each was measured or skipped exactly once."""
    found: dict[str, Measurement] = {}
    for measurement in measurements:
        if measurement.name in found or measurement.name not in {spec.name for spec in specs}:
            raise ValueError(f"row {measurement.name!r}: expected each declared row once")
        found[measurement.name] = measurement
    if missing := [spec.name for spec in specs if spec.name not in found]:
        raise ValueError(f"rows {missing}: declared, and neither measured nor skipped")
    return tuple(_row(spec, found[spec.name]) for spec in specs)


def _row(spec: Spec, measured: Measurement) -> Row:
    if (measured.value is None) is not bool(measured.skipped):
        raise ValueError(f"row {spec.name!r}: expected either a value or a reason for having none")
    met = None
    if measured.value is not None and spec.must is not None:
        # A NaN meets nothing.
        met = measured.value <= spec.must if spec.direction == "min" else measured.value >= spec.must
    return Row(
        name=spec.name,
        value=measured.value,
        unit=spec.unit,
        must=spec.must,
        aim=spec.aim,
        direction=spec.direction,
        met=met,
        spread=measured.spread,
        runs=measured.runs,
        skipped=measured.skipped,
        note=measured.note,
    )


def table(result: Result) -> str:
    """The result as aligned text, notes and reasons below the rows they belong to."""
    heads = ("row", "value", "spread", "runs", "must", "aim", "met")
    grid = [heads] + [cells(row) for row in result.rows]
    widths = [max(len(line[i]) for line in grid) for i in range(len(heads))]
    machine = result.machine
    lines = [
        f"bench {result.bench} at {result.commit[:12]}",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}, {machine.python}",
    ]
    for line, row in zip(grid, (None, *result.rows), strict=True):
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join((first.strip().ljust(widths[0]), *rest)).rstrip())
        if row is not None and (text := row.note or row.skipped):
            lines.append(f"    {text}")
    return "\n".join(lines)


def cells(row: Row) -> tuple[str, ...]:
    """Name, value, spread, runs, must, aim and met, as people read them."""
    sign = "≤" if row.direction == "min" else "≥"
    return (
        row.name,
        "skipped" if row.value is None else f"{_number(row.value)} {row.unit}".rstrip(),
        "" if row.spread is None else " … ".join(_number(end) for end in row.spread),
        str(row.runs or ""),
        "" if row.must is None else f"{sign} {_number(row.must)}",
        "" if row.aim is None else f"{sign} {_number(row.aim)}",
        {True: "yes", False: "NO", None: ""}[row.met],
    )


def _number(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def this_machine() -> Machine:
    """This machine, as far as /proc and the platform module know it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(memory / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=f"Python {platform.python_version()}",
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def this_commit(paths: Sequence[str] = (".",), root: Path = ROOT) -> str:
    """The commit that is checked out; with `+changes` if `paths` differ from it; `unknown` without git."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *paths, ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def staleness(commit: str, paths: Sequence[str], root: Path = ROOT) -> str:
    """Why a result that was measured at `commit` does not speak of `paths` as they are now; empty if it does."""
    head, _, changes = commit.partition("+")
    if changes:
        return f"it was measured with changes that commit {head[:12]} does not have"
    try:
        changed = _git(root, "diff", "--name-only", head, "--", *paths, ":!bench/results").splitlines()
        changed += _git(
            root, "ls-files", "--others", "--exclude-standard", "--", *paths, ":!bench/results"
        ).splitlines()
    except OSError:
        return "git is missing, so nobody can tell what was measured"
    except subprocess.CalledProcessError as error:
        return f"git does not know what was measured: {error.stderr.strip()}"
    if not changed:
        return ""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{changed[0]}{more} changed since commit {head[:12]}, at which it was measured"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(result: Result, path: Path) -> None:
    """Write the result as JSON, replacing the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    temporary.replace(path)


def read(path: Path) -> Result:
    """A result that `write` wrote. Raises FileNotFoundError or msgspec.ValidationError."""
    return msgspec.json.decode(path.read_bytes(), type=Result)
