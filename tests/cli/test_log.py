"""What `deltad log` says of a run's versions."""

from __future__ import annotations

from deltad.cli.output import plain
from deltad.cli.versions import forks, log_table, version_facts
from tests.cli.views import version

ANCHOR = version("v000001", kind="anchor", reason="first version", density=1.0, delta_bytes=256 << 20)
LINE = [ANCHOR, version("v000002", parent="v000001"), version("v000003", parent="v000002", identity="warm")]
FORKED = [*LINE, version("v000002@e2", parent="v000001"), version("v000003@e2", parent="v000002@e2")]


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


def test_the_log_shows_each_version_with_its_cost_and_who_published_it() -> None:
    text = plain([log_table("policy", FORKED[::-1], forks(FORKED))])
    lines = text.splitlines()
    assert lines[0] == "run policy:"
    assert [line.split()[0] for line in lines[2:]] == [info.version for info in FORKED[::-1]]
    assert "epoch 2 opens here" in next(line for line in lines if "v000002@e2" in line)
    for word in ("delta", "0.31 %", "1.00 MiB", "0.39 %", "trainer-1", "identity warm"):
        assert word in next(line for line in lines if line.split()[0] == "v000003")
    assert "first version" in lines[-1]
    assert "100 %" in lines[-1]


def test_the_log_tells_how_each_version_is_coded_and_why() -> None:
    coded = version("v000002", coder="mid", coder_reason="rollout-1 pulls at 6.0 MB/s")
    text = plain([log_table("policy", [coded], {})])
    assert "  mid  " in text
    assert text.rstrip().endswith("rollout-1 pulls at 6.0 MB/s")
    assert "coder      mid (rollout-1 pulls at 6.0 MB/s)" in plain([version_facts(coded)])
    assert "coder      context\n" in plain([version_facts(version("v000002", coder="context"))])
    assert "coder" not in plain([version_facts(version("v000002"))])


def test_a_version_in_words_names_what_it_is_based_on() -> None:
    text = plain([version_facts(LINE[1])])
    assert "delta on v000001" in text
    assert "3 of 1,000 elements, 0.31 %" in text
    assert "1.00 MiB in 1 chunk, 0.39 % of the full 256 MiB" in text
    assert LINE[1].root in text
    assert "anchor (first version)" in plain([version_facts(ANCHOR)])
