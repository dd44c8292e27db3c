"""Progress: each thing that happened is one plain line, once; a terminal gets a table; nothing is obeyed."""

from __future__ import annotations

import io
from pathlib import Path

from deltad.client.messages import ReplicaState
from deltad.demo.observe import LinkMeter, RegionSight, Sight, describe
from deltad.demo.progress import LiveProgress, PlainProgress, make_progress, show_report, size, stage
from deltad.demo.report import Facts, Ledger, TrainerLine
from tests.demo.test_report import facts_of_a_good_run, info, ledger_of, replica, report_of, verified


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sight_of(*written: str) -> Sight:
    return Sight(RegionSight("region-1"), RegionSight("region-2"), written=list(written))


def test_off_a_terminal_every_stage_of_every_version_is_one_line_and_is_said_once() -> None:
    stream = io.StringIO()
    progress = make_progress(stream)
    assert isinstance(progress, PlainProgress)
    ledger = Ledger(2)
    sight = sight_of("v000000", "v000001", "v000002")
    for fact in facts_of_a_good_run():
        fact(ledger)
        progress.show(sight, ledger)
        progress.show(sight, ledger)
    progress.close()
    lines = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert len(lines) == len(set(lines))
    said = [line for line in lines if line.startswith("v000001 ")]
    assert [line.split()[1] for line in said] == ["written", "published", "pulled", "live", "verified", "sampled"]
    assert "\x1b" not in stream.getvalue()


def test_a_root_that_differs_is_said_aloud() -> None:
    stream = io.StringIO()
    ledger = ledger_of([lambda ledger: ledger.published([info("v000001")])])
    ledger.served(replica("v000001", root="ff" * 32))
    PlainProgress(stream).show(sight_of(), ledger)
    assert "IS NOT THE PUBLISHED ROOT" in stream.getvalue()


def test_a_terminal_gets_a_table_with_the_stage_of_every_version() -> None:
    stream = Terminal()
    progress = make_progress(stream)
    assert isinstance(progress, LiveProgress)
    ledger = ledger_of(facts_of_a_good_run())
    ledger.published([info("v000002")])
    sight = sight_of("v000000", "v000001", "v000002")
    sight.replica = replica("v000001")
    progress.show(sight, ledger)
    progress.say("daemon-a is started again")
    progress.close()
    shown = stream.getvalue()
    for text in ("v000002", "verified", "serves v000001", "daemon-a is started again"):
        assert text in shown


def test_the_stage_of_a_version_follows_what_is_known_of_it() -> None:
    sight = sight_of("v000001")
    facts = Facts()
    stages = [stage("v000001", facts, sight)]
    facts.published = info("v000001")
    stages.append(stage("v000001", facts, sight))
    facts.pulled = info("v000001", pulled=60)
    sight.replica = replica("v000000", state=ReplicaState.STAGING)
    stages.append(stage("v000001", facts, sight))
    facts.served = replica("v000001")
    stages.append(stage("v000001", facts, sight))
    facts.served = replica("v000001", root="ff" * 32)
    stages.append(stage("v000001", facts, sight))
    assert stages == ["publishing", "transferring", "staging", "verified", "ROOT DIFFERS"]


def test_the_final_table_has_a_row_for_each_version_and_ends_with_the_verdict() -> None:
    for stream in (io.StringIO(), Terminal()):
        ledger = ledger_of(facts_of_a_good_run())
        show_report(report_of(ledger), ledger.complaints(), stream, Path("/r.json"))
        shown = stream.getvalue()
        assert all(version in shown for version in ledger.versions)
        assert shown.endswith("rollouts from the remote replica: 16\nreport: /r.json\nall_match: true\n")


def test_the_final_table_says_why_there_is_no_match() -> None:
    stream = io.StringIO()
    ledger = ledger_of(facts_of_a_good_run())
    ledger.trainer(verified("v000002", gap=1.0))
    show_report(report_of(ledger), ledger.complaints(), stream, Path("/r.json"))
    assert stream.getvalue().endswith("\nall_match: false\n")
    assert "v000002: log-probs differ from the trainer's by 1" in stream.getvalue()


def test_what_other_programs_say_is_shown_and_not_obeyed() -> None:
    hostile = "\x1b[2J[bold]tiny\n\u202e"
    for stream in (io.StringIO(), Terminal()):
        progress = make_progress(stream)
        sight = sight_of()
        sight.trainer = hostile
        progress.show(sight, Ledger(2))
        progress.say(hostile)
        progress.close()
        assert "\x1b[2J" not in stream.getvalue()
        assert "\u202e" not in stream.getvalue()
        assert "[bold]tiny" in stream.getvalue()


def test_the_links_rate_is_that_of_the_last_second() -> None:
    meter = LinkMeter()
    assert meter.read(0.0, 0) == 0.0
    assert meter.read(0.5, 500) == 1000.0
    assert meter.read(1.0, 1000) == 1000.0
    assert meter.read(2.0, 1000) == 0.0
    assert meter.read(3.0, 10) == 0.0  # the link was started again


def test_every_event_that_tells_what_the_trainer_does_is_described() -> None:
    assert describe(TrainerLine("step_started", step=3, version="v000002")) == (
        "step 3: samples from v000002 on the replica"
    )
    assert describe(TrainerLine("an event of a later build")) == ""


def test_sizes_are_short() -> None:
    assert [size(count) for count in (0, 999, 1000, 400_000, 5e6, 3e11)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "391 KiB",
        "4.77 MiB",
        "279 GiB",
    ]
