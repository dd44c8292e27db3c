"""The rows of `bench/gpu_check.py`, and its report in the shape of `bench.harness`, by the standard library alone:
the machine that a GPU is in need not have what the other benches need.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = ("deltad/delta", "bench/gpu_check.py", "bench/gpu_rows.py")
"""What the figures depend on."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A row as it is declared; more is better in all of them."""

    name: str
    unit: str = ""
    must: float | None = None
    aim: float | None = None


DECLARED = (
    Declared("frames equal to the reference"),
    Declared("copy within the GPU, read and written", "GB/s"),
    Declared("copy from pinned host memory to the GPU", "GB/s"),
    Declared("copy from the GPU to pinned host memory", "GB/s"),
    Declared("encode blind, lanes on the GPU / (copy / 2)", must=0.5, aim=0.8),
    Declared("decode and apply blind, lanes on the GPU", "GB/s"),
    Declared("encode fast, lanes on the GPU / (copy / 2)"),
    Declared("decode and apply fast, lanes on the GPU", "GB/s"),
    Declared("encode dense, lanes on the GPU / (copy / 2)"),
    Declared("decode and apply dense, lanes on the GPU", "GB/s"),
    Declared("digest, lanes on the GPU / (copy / 2)"),
    Declared("encode blind, lanes of the host / (host to GPU / 2)"),
    Declared("encode fast, lanes of the host / (host to GPU / 2)"),
    Declared("digest, lanes of the host / host to GPU"),
)


class Rows:
    """What was measured so far. After `latest` on the clock of `time.perf_counter`, rows are skipped."""

    def __init__(self, latest: float) -> None:
        self._latest = latest
        self._found: dict[str, tuple[list[float], str]] = {}

    def late(self) -> bool:
        """Whether nothing new is to be begun."""
        return time.perf_counter() > self._latest

    def add(self, name: str, values: Sequence[float], *, note: str = "") -> None:
        """The values of a declared row; none if it was too late for it."""
        if name not in {row.name for row in DECLARED}:
            raise ValueError(f"row {name!r} is not declared")
        self._found[name] = list(values), note

    def listed(self) -> list[dict[str, object]]:
        """All declared rows, as `bench.harness.Row` holds them."""
        return [self._row(declared) for declared in DECLARED]

    def _row(self, declared: Declared) -> dict[str, object]:
        values, note = self._found.get(declared.name, ([], ""))
        value = statistics.median(values) if values else None
        return {
            "name": declared.name,
            "value": value,
            "unit": declared.unit,
            "must": declared.must,
            "aim": declared.aim,
            "direction": "max",
            "met": None if value is None or declared.must is None else value >= declared.must,
            "spread": [min(values), max(values)] if values else None,
            "runs": len(values),
            "skipped": "" if values else "the time was up",
            "note": note,
        }


def report(rows: Rows, path: Path, device: str, note: str) -> str:
    """Write the result to `path`, and give the table."""
    listed = rows.listed()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "cpu": f"{device}, {note}",
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"Python {platform.python_version()}",
    }
    result = {"bench": "gpu", "machine": machine, "commit": _commit(), "rows": listed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return "\n".join([f"{device}, {note}", *(_line(row) for row in listed)])


def _line(row: dict[str, object]) -> str:
    shown = "skipped: " + str(row["skipped"]) if row["value"] is None else f"{row['value']:.3f} {row['unit']}"
    spread = "" if row["spread"] is None else "{:.3f} … {:.3f}".format(*row["spread"])  # type: ignore[misc]
    must = "" if row["must"] is None else f"≥ {row['must']}: {'yes' if row['met'] else 'NO'}"
    line = f"{row['name']:<56} {shown:>16}  {spread:<22} {must}".rstrip()
    return f"{line}\n    {row['note']}" if row["note"] else line


def _commit() -> str:
    """The commit that is checked out, with `+changes` if what the figures depend on differs; else `unknown`."""
    try:
        found = [
            subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", *PATHS))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found[0]}+changes" if found[1] else found[0]
