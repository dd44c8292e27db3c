"""`python -m bench NAME [--quick] [--json PATH]`: measure, print a table, write the result.

`all` runs every bench; `readme [NAME ...] [--check]` makes the tables in README.md from the results.
Ends with 0 when everything was measured or skipped with a reason, whether or not each must was met: a row
that misses its must is a result. Ends with 1 when something that was to be measured failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench import harness, readme

BENCHES = ("codec", "demo", "gateway", "graph", "publish", "relay", "store", "trust", "window")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure, and print one table.")
    parser.add_argument(
        "name", choices=(*BENCHES, "all", "readme"), help="which bench, or all of them, one after the other"
    )
    parser.add_argument("tables", nargs="*", metavar="NAME", help="with `readme`: only these tables")
    parser.add_argument("--quick", action="store_true", help="within 50 s on two cores; leaves no result file")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the result here (with `all`: a directory)"
    )
    parser.add_argument("--check", action="store_true", help="with `readme`: only tell whether its tables are right")
    options = parser.parse_args(arguments)
    if options.name == "readme":
        return _readme(options.tables, check=options.check)
    if options.tables:
        parser.error(f"unrecognized arguments: {' '.join(options.tables)}")
    names = BENCHES if options.name == "all" else (options.name,)
    failed = False
    for name in names:
        try:
            result = run(name, quick=options.quick)
        except Exception:
            traceback.print_exc()
            failed = True
            continue
        print(harness.table(result), flush=True)
        if options.json is not None:
            harness.write(result, options.json / f"{name}.json" if options.name == "all" else options.json)
        if not options.quick:
            harness.write(result, harness.RESULTS / f"{name}.json")
    return 1 if failed else 0


def _readme(tables: Sequence[str], *, check: bool) -> int:
    try:
        readme.update(lambda name: importlib.import_module(f"bench.{name}").PATHS, tables, check=check)
    except readme.ReadmeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run(name: str, *, quick: bool) -> harness.Result:
    """Measure one bench. Raises whatever it raises."""
    module = importlib.import_module(f"bench.{name}")
    # The commit is that of the code which is measured, not of what it becomes meanwhile.
    commit = harness.this_commit(module.PATHS)
    rows = harness.judge(module.SPECS, module.measure(quick))
    return harness.Result(name, harness.this_machine(), commit, rows)


if __name__ == "__main__":
    sys.exit(main())
