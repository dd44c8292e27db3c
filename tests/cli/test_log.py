"""What `deltad log` says of a run's versions."""

from __future__ import annotations

import msgspec
import pytest

from deltad.cli.lineage import ASCII, BOXES, Strokes, draw, forks, log_lines
from deltad.cli.output import plain
from deltad.cli.versions import version_facts
from deltad.client.messages import Target, TargetsReply, VersionInfo
from tests.cli.views import version

ANCHOR = version("v000001", kind="anchor", reason="first version", density=1.0, delta_bytes=256 << 20)
LINE = [ANCHOR, version("v000002", parent="v000001"), version("v000003", parent="v000002", identity="warm")]
FORKED = [*LINE, version("v000002@e2", parent="v000001"), version("v000003@e2", parent="v000002@e2")]


def test_an_epoch_that_opened_before_the_first_of_its_versions_held_here_does_not_open_here() -> None:
    late = version("v000005@e2", parent="v000004@e2")
    said = "epoch 2 opened with versions that are not held here; goes on from v000004@e2"
    assert forks([*LINE, late]) == {"v000005@e2": said}


def test_a_line_without_forks_has_no_notes_of_forks() -> None:
    assert forks(LINE) == {}
    assert forks([]) == {}


def test_a_new_epoch_names_where_it_forks_and_what_it_leaves_behind() -> None:
    assert forks(FORKED) == {"v000002@e2": "epoch 2 opens here, from v000001, leaving 2 versions behind"}


def test_a_new_epoch_that_goes_on_from_the_newest_leaves_nothing_behind() -> None:
    assert forks([*LINE, version("v000004@e2", parent="v000003")]) == {"v000004@e2": "epoch 2 opens here, from v000003"}


def test_a_new_epoch_from_another_run_or_from_nothing_leaves_all_behind() -> None:
    assert (
        "from other/v000007, leaving 3 versions"
        in forks([*LINE, version("v000001@e2", parent="other/v000007")])["v000001@e2"]
    )
    assert "from nothing, leaving 3 versions" in forks([*LINE, version("v000001@e2")])["v000001@e2"]


def test_a_version_that_skips_its_neighbour_or_whose_parent_is_gone_says_where_it_comes_from() -> None:
    skipping = [*LINE, version("v000004", parent="v000002")]
    assert forks(skipping) == {"v000004": "goes on from v000002"}
    assert forks(LINE[1:]) == {"v000002": "goes on from v000001, which is not held here"}
    assert forks([version("v000001", parent="other/v000007")]) == {"v000001": "forks other/v000007"}


# The drawing.


def drawing(versions: list[VersionInfo], strokes: Strokes = ASCII) -> list[str]:
    """The graph alone, with the name of each version beside it."""
    newest_first = versions[::-1]
    lines = []
    for info, one in zip(
        newest_first, draw([(info.version, info.parent) for info in newest_first], strokes), strict=True
    ):
        lines += [f"{one.row} {info.version}", *([one.meeting] if one.meeting else [])]
    return lines


def test_a_line_is_drawn_as_one() -> None:
    assert drawing(LINE) == ["* v000003", "* v000002", "* v000001"]
    assert drawing([]) == []


def test_a_fork_is_drawn_as_two_lines_that_meet_at_the_parent() -> None:
    assert drawing(FORKED) == [
        "* v000003@e2",
        "* v000002@e2",
        "| * v000003",
        "| * v000002",
        "|/",
        "* v000001",
    ]
    assert drawing(FORKED, BOXES)[2:5] == ["│ ● v000003", "│ ● v000002", "├─╯"]


def test_lines_that_cross_others_on_the_way_to_their_parent_do_so_in_one_row() -> None:
    tangled = [
        version("v000001", kind="anchor"),
        version("v000002", parent="v000001"),
        version("v000003", parent="v000002"),
        version("v000002@e2", parent="v000001"),
        version("v000003@e2", parent="v000002"),
        version("v000004@e3", parent="v000003"),
        version("v000005@e3", parent="v000001"),
    ]
    assert drawing(tangled) == [
        "* v000005@e3",
        "| * v000004@e3",
        "| | * v000003@e2",
        "| | | * v000002@e2",
        "|_|_|/",
        "| * | v000003",
        "| |/",
        "| * v000002",
        "|/",
        "* v000001",
    ]
    assert drawing(tangled, BOXES)[4:7] == ["├─┼─┼─╯", "│ ● │ v000003", "│ ├─╯"]


def test_a_parent_that_is_not_there_ends_its_line_and_its_lane_is_used_again() -> None:
    versions = [
        version("v000004", parent="v000003"),
        version("v000005", parent="v000004"),
        version("v000001@e2", parent="other/v000007"),
        version("v000002@e2", parent="v000001@e2"),
    ]
    assert drawing(versions) == ["* v000002@e2", "* v000001@e2", "* v000005", "* v000004"]


# The whole log.


def log(
    versions: list[VersionInfo], targets: TargetsReply | None = None, *, limit: int | None = None, width: int = 80
) -> list[str]:
    found = targets or TargetsReply("policy")
    lines = log_lines("policy", versions, found, limit=limit, strokes=ASCII, width=width)
    return ["".join(cell.text for cell in line).rstrip() for line in lines]


def test_the_log_shows_each_version_with_its_cost_and_who_published_it() -> None:
    lines = log(FORKED)
    assert lines[0] == "run policy: follows the newest version, v000003@e2"
    rows = [line for line in lines if line.lstrip("| ").startswith("*")]
    assert [row.lstrip("*| ").split()[0] for row in rows] == [info.version for info in FORKED[::-1]]
    below = {row.lstrip("*| ").split()[0]: lines[lines.index(row) + 1 :] for row in rows}
    assert below["v000003@e2"][0].split() == ["|", "latest"]
    assert "epoch 2 opens here" in below["v000002@e2"][0]
    for word in ("delta", "0.31 %", "1.00 MiB", "0.39 %"):
        assert word in next(row for row in rows if " v000003 " in row)
    assert below["v000003"][0] == "| |    identity warm; from trainer-1"
    assert "first version" in lines[-1]
    assert "100 %" in rows[-1]


def test_the_log_shows_the_newest_alone_where_that_is_asked_for() -> None:
    assert [line for line in log(LINE, limit=1) if line.startswith("*")] == [log(LINE)[1]]


def test_the_log_of_a_run_without_versions_says_so() -> None:
    assert log([]) == ["run policy: no versions yet"]


def test_the_log_tells_how_each_version_is_coded_and_why() -> None:
    coded = version("v000002", coder="mid", coder_reason="rollout-1 pulls at 6.0 MB/s")
    assert log([coded])[3] == "     coder mid (rollout-1 pulls at 6.0 MB/s); from trainer-1"
    assert "coder      mid (rollout-1 pulls at 6.0 MB/s)" in plain([version_facts(coded)])
    assert "coder      context\n" in plain([version_facts(version("v000002", coder="context"))])
    assert "coder" not in plain([version_facts(version("v000002"))])


HELD = Target("v000002", "", "ana (uid 1000)", "reward fell", 1_700_000_000.0, "a", 3)


def test_the_log_marks_what_is_held_and_tells_who_moved_the_target() -> None:
    b = Target("v000001", "b", "root (uid 0)", "", 1_700_000_100.0, "a", 4)
    released = Target("", "", "root (uid 0)", "over", 1_600_000_000.0, "a", 2)
    lines = log(LINE, TargetsReply("policy", HELD, (HELD, b), (released, HELD, b)), width=200)
    assert lines[0].startswith("run policy: held at v000002 by ana (uid 1000) at a since 2023-11-14 ")
    assert lines[0].endswith(": reward fell; latest is v000003")
    (row,) = (at for at, line in enumerate(lines) if line.startswith("*  v000002"))
    assert lines[row + 1].endswith("target: all fleets are held here by ana (uid 1000)")
    (row,) = (at for at, line in enumerate(lines) if line.startswith("*  v000001"))
    assert lines[row + 1].endswith("target: the fleet of b is held here by root (uid 0)")
    moves = lines[lines.index("who moved the target, newest first:") + 1 :]
    assert [move.split("  ")[-1] for move in moves] == [
        "the fleet of b is held at v000001 by root (uid 0) at a",
        "all fleets are held at v000002 by ana (uid 1000) at a: reward fell",
        "all fleets are released by root (uid 0) at a: over",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_log_stays_within_the_columns_that_there_are(width: int) -> None:
    long = version("v000004@e2", parent="v000003@e2", coder="dense", coder_reason="because " * 40, identity="x" * 200)
    reason = msgspec.structs.replace(HELD, why="words " * 30)
    lines = log([*FORKED, long], TargetsReply("policy", reason, (reason,), (reason,)), width=width)
    assert all(len(line) <= max(width, 80) for line in lines)


def test_a_version_in_words_names_what_it_is_based_on() -> None:
    text = plain([version_facts(LINE[1])])
    assert "delta on v000001" in text
    assert "3 of 1,000 elements, 0.31 %" in text
    assert "1.00 MiB in 1 chunk, 0.39 % of the full 256 MiB" in text
    assert LINE[1].root in text
    assert "anchor (first version)" in plain([version_facts(ANCHOR)])
