"""A result speaks of the code it measured, and of no other: not of what was changed since, nor beside a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import harness, readme
from bench.harness import Measurement, Result, Spec, judge
from bench.readme import ReadmeError, fill

SPECS = (
    Spec(name="bytes", unit="×", direction="min", must=0.5, aim=0.4),
    Spec(name="rate", unit="×", direction="max", must=2),
    Spec(name="peer", unit="×", direction="max"),
)
MEASURED = (
    Measurement(name="bytes", value=0.45, spread=(0.4, 0.5), runs=7, note="seven pairs"),
    Measurement(name="rate", value=1.5, spread=(1.4, 1.6), runs=7, note="the machine | was busy"),
    Measurement(name="peer", skipped="it cannot be had"),
)
BEFORE, AFTER = "<!-- bench codec -->\n", "\n<!-- end of bench codec -->"
TEXT = f"# Title\n\n{BEFORE}what stood here{AFTER}\n\nthe end\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit: measured code, other code, and results."""
    root = tmp_path / "repository"
    for name in ("code/a.py", "other/b.py", "bench/results/old.json"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")


def result(commit: str) -> Result:
    return Result("codec", harness.this_machine(), commit, judge(SPECS, MEASURED))


def test_a_result_holds_while_the_measured_code_stays_as_it_was(repository: Path) -> None:
    measured_at = harness.this_commit(["code"], repository)
    assert harness.staleness(measured_at, ["code"], repository) == ""
    (repository / "other/b.py").write_text("2\n")
    (repository / "bench/results/old.json").write_text("2\n")
    commit(repository)
    assert harness.staleness(measured_at, ["code", "bench"], repository) == ""


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("name", ["a.py", "new.py"])
def test_a_result_is_stale_once_the_measured_code_differs(repository: Path, name: str, committed: bool) -> None:
    measured_at = harness.this_commit(["code"], repository)
    (repository / "code" / name).write_text("2\n")
    if committed:
        commit(repository)
    assert f"code/{name} changed since" in harness.staleness(measured_at, ["code"], repository)


def test_code_that_was_changed_back_is_the_code_that_was_measured(repository: Path) -> None:
    measured_at = harness.this_commit(["code"], repository)
    for text in ("2\n", "1\n"):
        (repository / "code/a.py").write_text(text)
        commit(repository)
    assert harness.staleness(measured_at, ["code"], repository) == ""


@pytest.mark.parametrize("name", ["a.py", "new.py"])
def test_what_was_measured_beside_a_commit_is_never_fresh(repository: Path, name: str) -> None:
    (repository / "code" / name).write_text("2\n")
    measured_at = harness.this_commit(["code"], repository)
    assert measured_at.endswith("+changes")
    assert "changes" in harness.staleness(measured_at, ["code"], repository)
    assert not harness.this_commit(["other"], repository).endswith("+changes")


@pytest.mark.parametrize("measured_at", ["unknown", "0" * 40])
def test_a_commit_that_git_does_not_know_is_stale(repository: Path, measured_at: str) -> None:
    assert "git does not know" in harness.staleness(measured_at, ["code"], repository)


def test_the_readme_gets_the_table_of_a_fresh_result(repository: Path, tmp_path: Path) -> None:
    harness.write(result(harness.this_commit(["code"], repository)), tmp_path / "codec.json")
    filled = fill(TEXT, tmp_path, lambda name: ["code"], repository)
    assert filled.startswith("# Title\n\n" + BEFORE)
    assert filled.endswith(AFTER + "\n\nthe end\n")
    lines = filled.splitlines()
    assert "| bytes | 0.450 × | 0.400 … 0.500 | ≤ 0.500 | ≤ 0.400 | seven pairs |" in lines
    assert "| rate | 1.50 × | 1.40 … 1.60 | ≥ 2.00 |  | **missed** the machine \\| was busy |" in lines
    assert "| peer | skipped |  |  |  | it cannot be had |" in lines
    assert fill(filled, tmp_path, lambda name: ["code"], repository) == filled


def test_the_readme_is_not_filled_from_a_stale_result(repository: Path, tmp_path: Path) -> None:
    harness.write(result(harness.this_commit(["code"], repository)), tmp_path / "codec.json")
    (repository / "code/a.py").write_text("2\n")
    with pytest.raises(ReadmeError, match=r"bench codec: code/a\.py changed .*; run: python -m bench codec"):
        fill(TEXT, tmp_path, lambda name: ["code"], repository)


def test_the_readme_is_not_filled_without_a_result(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ReadmeError, match="there is no result"):
        fill(TEXT, tmp_path, lambda name: ["code"], repository)


def test_a_table_is_filled_alone_where_others_are_stale(repository: Path, tmp_path: Path) -> None:
    harness.write(result(harness.this_commit(["code"], repository)), tmp_path / "codec.json")
    both = TEXT + "<!-- bench demo -->\nas it was\n<!-- end of bench demo -->\n"
    filled = fill(both, tmp_path, lambda name: ["code"], repository, names=["codec"])
    assert "| bytes | 0.450 × |" in filled
    assert "as it was" in filled
    with pytest.raises(ReadmeError, match="bench other: it has no table"):
        fill(both, tmp_path, lambda name: ["code"], repository, names=["codec", "other"])


def test_a_readme_without_marks_needs_no_result(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("nothing was measured\n")
    readme.update(lambda name: ["code"], check=True, readme=path)
    readme.update(lambda name: ["code"], check=False, readme=path)
    assert path.read_text() == "nothing was measured\n"
