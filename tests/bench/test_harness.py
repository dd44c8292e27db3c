"""The bench harness: rows are those that were declared, and what is met is computed, never claimed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from bench import harness
from bench.__main__ import BENCHES, main
from bench.harness import Measurement, Result, Spec, judge, median_of, skipped

SPECS = (
    Spec(name="bytes", unit="B", direction="min", must=10, aim=5),
    Spec(name="speed", unit="MB/s", direction="max", must=100),
    Spec(name="note", unit="s", direction="min"),
)
MEASURED = (median_of("note", [2.0]), median_of("bytes", [9, 30, 4]), median_of("speed", [99.0, 99.5]))


def result() -> Result:
    return Result("sample", harness.this_machine(), "0123456789abcdef", judge(SPECS, MEASURED))


def test_rows_keep_the_declared_order_and_are_judged_by_their_direction() -> None:
    rows = judge(SPECS, MEASURED)
    assert [(row.name, row.value, row.met) for row in rows] == [
        ("bytes", 9, True),
        ("speed", 99.25, False),
        ("note", 2.0, None),
    ]
    assert rows[0].spread == (4, 30)
    assert rows[0].runs == 3


def test_a_value_that_is_no_number_meets_nothing() -> None:
    rows = judge(SPECS[:2], [Measurement(name="bytes", value=math.nan), Measurement(name="speed", value=math.nan)])
    assert [row.met for row in rows] == [False, False]


@pytest.mark.parametrize(
    "measured",
    [
        MEASURED[:2],
        (*MEASURED, MEASURED[0]),
        (*MEASURED, skipped("another", "why not")),
        (*MEASURED[:2], Measurement(name="speed")),
        (*MEASURED[:2], Measurement(name="speed", value=1.0, skipped="too slow")),
    ],
)
def test_a_row_that_is_missing_repeated_unknown_or_neither_measured_nor_skipped_is_refused(
    measured: tuple[Measurement, ...],
) -> None:
    with pytest.raises(ValueError, match="row"):
        judge(SPECS, measured)


def test_the_table_says_what_was_missed_and_why_something_was_skipped() -> None:
    rows = judge(SPECS, (skipped("note", "there was no time"), *MEASURED[1:]))
    shown = harness.table(Result("sample", harness.this_machine(), "c0ffee", rows)).splitlines()
    speed = next(line for line in shown if line.startswith("speed"))
    assert speed.split() == ["speed", "99.2", "MB/s", "99.0", "…", "99.5", "2", "≥", "100", "NO"]
    assert any(line.startswith("note") and "skipped" in line for line in shown)
    assert "    there was no time" in shown


def test_the_result_file_has_exactly_the_fields_that_are_promised(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sample.json"
    harness.write(result(), path)
    document = json.loads(path.read_bytes())
    assert set(document) == {"bench", "machine", "commit", "rows"}
    fields = {"name", "value", "unit", "must", "aim", "direction", "met", "spread", "runs", "skipped", "note"}
    assert [set(row) for row in document["rows"]] == [fields] * 3
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result()


def test_the_machine_and_the_commit_are_told() -> None:
    machine = harness.this_machine()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert harness.this_commit()


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_declares_rows_with_names_of_their_own(name: str) -> None:
    import importlib

    specs = importlib.import_module(f"bench.{name}").SPECS
    assert len({spec.name for spec in specs}) == len(specs) > 0


def test_an_unknown_bench_is_refused_with_the_names_of_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2
    assert "demo" in capsys.readouterr().err
