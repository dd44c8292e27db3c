"""The tables in README.md, made from the result files of full runs and from nothing else.

    python -m bench readme [NAME ...] [--check]

With names only their tables are looked at. The table of a bench stands between `<!-- bench NAME -->` and
`<!-- end of bench NAME -->`. A result that is older than the code it measures fails the command, and so does
`--check` where the README has other tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from bench import harness
from bench.harness import Result, Row

README = harness.ROOT / "README.md"

_TABLE = re.compile(r"<!-- bench (\w+) -->\n.*?<!-- end of bench \1 -->", re.DOTALL)


class ReadmeError(Exception):
    """A table cannot be made, or is not what the results say."""


def fill(
    text: str,
    results: Path,
    paths_of: Callable[[str], Sequence[str]],
    root: Path = harness.ROOT,
    names: Collection[str] = (),
) -> str:
    """`text` with every marked table, or only those of `names`, made anew.

    Raises ReadmeError with every reason why one cannot be, and for a name that has no table.
    """
    marked = {found[1] for found in _TABLE.finditer(text)}
    reasons = [f"bench {name}: it has no table in the README" for name in names if name not in marked]

    def table(found: re.Match[str]) -> str:
        name = found[1]
        if names and name not in names:
            return found[0]
        try:
            result = harness.read(results / f"{name}.json")
        except FileNotFoundError:
            reasons.append(f"bench {name}: there is no result; run: python -m bench {name}")
            return found[0]
        if why := harness.staleness(result.commit, paths_of(name), root):
            reasons.append(f"bench {name}: {why}; run: python -m bench {name}")
        return f"<!-- bench {name} -->\n{markdown(result)}\n<!-- end of bench {name} -->"

    filled = _TABLE.sub(table, text)
    if reasons:
        raise ReadmeError("\n".join(reasons))
    return filled


def update(
    paths_of: Callable[[str], Sequence[str]], names: Collection[str] = (), *, check: bool, readme: Path = README
) -> None:
    """Fill README.md, or with `check` only compare. Raises ReadmeError."""
    text = readme.read_text(encoding="utf-8")
    filled = fill(text, harness.RESULTS, paths_of, names=names)
    if filled == text:
        return
    if check:
        raise ReadmeError("README.md: its tables are not those of bench/results; run: python -m bench readme")
    readme.write_text(filled, encoding="utf-8")


def markdown(result: Result) -> str:
    """The result as a Markdown table, with the machine and the commit below it."""
    lines = ["| what | measured | spread | must | aim | |", "|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result.rows]
    machine = result.machine
    where = f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}, {machine.python}"
    lines += ["", f"Measured on {where}, at commit {result.commit[:12]}, by `python -m bench {result.bench}`."]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    _, value, spread, _, must, aim, _ = (cell.replace("|", "\\|") for cell in harness.cells(row))
    remark = row.note or row.skipped
    if row.met is False:
        remark = f"**missed** {remark}".rstrip()
    return (row.name.replace("|", "\\|"), value, spread, must, aim, remark.replace("|", "\\|"))
