"""The report: its shape, and that it claims a match only for what was seen to be equal."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable

import msgspec
import pytest

from deltad.client.messages import ReplicaReport, ReplicaState, Seconds, VersionInfo
from deltad.demo.report import LOGPROB_TOLERANCE, DemoReport, Ledger, LinkReport, TrainerLine, parse_line

STEPS = 2
ROOTS = {f"v{number:06d}": f"{number:02d}" * 32 for number in range(STEPS + 1)}

Facts = list[Callable[[Ledger], None]]


def info(version: str, *, root: str = "", pulled: int = 0, seconds: Seconds | None = None) -> VersionInfo:
    first = version == "v000000"
    return VersionInfo(
        run="policy",
        version=version,
        parent="",
        identity="",
        source="",
        variant="bf16",
        kind="anchor" if first else "delta",
        reason="",
        root=root or ROOTS[version],
        layout="00" * 32,
        density=1.0 if first else 0.003,
        elements=1000,
        changed=3,
        full_bytes=2000,
        delta_bytes=40,
        chunks=1,
        created=0.0,
        pulled_bytes=pulled,
        seconds=seconds or Seconds(),
    )


def replica(version: str, *, root: str = "", state: ReplicaState = ReplicaState.VERIFIED) -> ReplicaReport:
    return ReplicaReport(
        replica="replica-1",
        run="policy",
        variant="bf16",
        state=state,
        version=version,
        root=root or ROOTS[version],
        seconds=Seconds(stage=4.0, pause=0.5, verify=6.0),
    )


def line(event: str, **fields: object) -> TrainerLine:
    parsed = parse_line(msgspec.json.encode({"event": event, **fields}))
    assert parsed is not None
    return parsed


def verified(version: str, *, gap: float = 0.01, shift: float | None = None, root: str = "") -> TrainerLine:
    return line(
        "version_verified",
        number=int(version[1:]),
        version=version,
        replica="replica-1",
        root_served=root or ROOTS[version],
        end_to_end=7.0,
        logprob_gap=gap,
        logprob_shift=(0.0 if version == "v000000" else 0.2) if shift is None else shift,
    )


def facts_of_a_good_run() -> Facts:
    facts: Facts = [lambda ledger: ledger.trainer(line("started", model="tiny", parameters=1000, steps=STEPS))]
    for version in ROOTS:
        facts += [
            lambda ledger, v=version: ledger.published([info(v, seconds=Seconds(settle=1.0, encode=2.0))]),  # type: ignore[misc]
            lambda ledger, v=version: ledger.pulled([info(v, pulled=60, seconds=Seconds(transfer=3.0))]),  # type: ignore[misc]
            lambda ledger, v=version: ledger.served(replica(v)),  # type: ignore[misc]
            lambda ledger, v=version: ledger.trainer(verified(v)),  # type: ignore[misc]
        ]
    for step, version in enumerate(list(ROOTS)[:-1], start=1):
        facts.append(
            lambda ledger, s=step, v=version: ledger.trainer(  # type: ignore[misc]
                line("rollouts", step=s, versions=[v], samples=8, total=8 * s, reward_mean=s / 4)
            )
        )
    facts.append(lambda ledger: ledger.trainer(line("finished", versions=3, rollouts_from_remote=16)))
    return facts


def ledger_of(facts: Facts) -> Ledger:
    ledger = Ledger(STEPS)
    for fact in facts:
        fact(ledger)
    return ledger


def report_of(ledger: Ledger) -> DemoReport:
    return ledger.report(LinkReport(rtt_ms=80.0, mbit_s=50.0))


def test_the_report_has_exactly_the_fields_that_are_promised() -> None:
    ledger = ledger_of(facts_of_a_good_run())
    assert ledger.complete()
    assert ledger.complaints() == []
    document = json.loads(msgspec.json.encode(report_of(ledger)))
    versions = document.pop("versions")
    assert document == {
        "model": "tiny",
        "parameters": 1000,
        "link": {"rtt_ms": 80.0, "mbit_s": 50.0},
        "all_match": True,
        "rollouts_from_remote": 16,
    }
    assert [version["version"] for version in versions] == list(ROOTS)
    assert versions[1] == {
        "version": "v000001",
        "density": 0.003,
        "full_bytes": 2000,
        "delta_bytes": 60,
        "percent_of_full": 3.0,
        "seconds": {
            "settle": 1.0,
            "encode": 2.0,
            "transfer": 3.0,
            "stage": 4.0,
            "pause": 0.5,
            "verify": 6.0,
            "end_to_end": 7.0,
        },
        "root_published": ROOTS["v000001"],
        "root_served": ROOTS["v000001"],
        "match": True,
        "reward_mean": 0.5,
        "logprob_gap": 0.01,
    }
    assert versions[-1]["reward_mean"] is None


def test_facts_may_come_in_any_order_and_any_number_of_times() -> None:
    facts = facts_of_a_good_run()
    expected = report_of(ledger_of(facts))
    rng = random.Random(7)
    for _ in range(50):
        again = facts + rng.sample(facts, len(facts) // 2)
        rng.shuffle(again)
        assert report_of(ledger_of(again)) == expected


def test_no_single_fact_may_be_missing_for_a_match() -> None:
    """But for what is only told, not proved: the model's name, the bytes pulled and the rewards."""
    facts = facts_of_a_good_run()
    proofs = [fact for number, fact in enumerate(facts) if 1 <= number <= 4 * len(ROOTS) and (number - 1) % 4 in (0, 3)]
    for missing in proofs:
        ledger = ledger_of([fact for fact in facts if fact is not missing])
        assert not report_of(ledger).all_match
        assert ledger.complaints()


@pytest.mark.parametrize(
    ("fact", "complaint"),
    [
        (lambda ledger: ledger.published([info("v000001", root="ff" * 32)]), "published root ff"),
        (lambda ledger: ledger.served(replica("v000001", root="ff" * 32)), "served root ff"),
        (lambda ledger: ledger.trainer(verified("v000001", root="ff" * 32)), "v000001: published root"),
        (lambda ledger: ledger.trainer(verified("v000001", gap=2 * LOGPROB_TOLERANCE)), "v000001: log-probs differ"),
        (lambda ledger: ledger.trainer(verified("v000001", gap=float("nan"))), "v000001: log-probs differ"),
        (lambda ledger: ledger.trainer(verified("v000002", shift=0.0)), "v000002: log-probs are those of the first"),
        (lambda ledger: ledger.published([info("v000000", root="ff" * 32)]), "v000000: published root ff"),
    ],
)
def test_one_bad_fact_about_one_version_is_named_and_spoils_the_run(
    fact: Callable[[Ledger], None], complaint: str
) -> None:
    ledger = ledger_of([*facts_of_a_good_run(), fact])
    assert not report_of(ledger).all_match
    assert any(complaint in text for text in ledger.complaints())


def test_an_empty_delta_may_leave_the_log_probs_of_the_first_version() -> None:
    same = ROOTS["v000000"]
    ledger = ledger_of(facts_of_a_good_run())
    ledger.published([info("v000001", root=same)])
    ledger.served(replica("v000001", root=same))
    ledger.trainer(verified("v000001", root=same, shift=0.0))
    assert ledger.complaints() == []


def test_a_version_that_was_published_and_never_served_spoils_the_run() -> None:
    ledger = Ledger(STEPS - 1)
    for fact in facts_of_a_good_run():
        fact(ledger)
    assert ledger.complaints() == []
    ledger.published([msgspec.structs.replace(info("v000002"), version="v000003")])
    assert ledger.complaints() == [f"v000003: published root {ROOTS['v000002']}, served root not read back"]


def test_rollouts_that_never_came_from_the_replica_spoil_the_run() -> None:
    facts = facts_of_a_good_run()
    ledger = ledger_of(facts[: 4 * len(ROOTS) + 1])
    assert ledger.complaints() == ["no rollout came from the remote replica"]


def test_only_what_was_verified_counts_as_served() -> None:
    for state in set(ReplicaState) - {ReplicaState.VERIFIED}:
        ledger = ledger_of([lambda ledger, s=state: ledger.served(replica("v000001", state=s))])  # type: ignore[misc]
        assert ledger.versions == {}


def test_what_a_replica_says_again_without_its_seconds_does_not_take_them_away() -> None:
    ledger = ledger_of(facts_of_a_good_run())
    ledger.served(msgspec.structs.replace(replica("v000001"), seconds=Seconds()))
    assert report_of(ledger).versions[1].seconds.stage == 4.0


@pytest.mark.parametrize("text", [b"", b"Loading weights: 100%\n", b"{}", b'{"event": 3}', b"[1]", b"\xff\n"])
def test_a_line_that_is_no_event_is_passed_over(text: bytes) -> None:
    assert parse_line(text) is None


def test_events_and_fields_that_are_not_known_yet_are_passed_over() -> None:
    ledger = ledger_of(facts_of_a_good_run())
    before = report_of(ledger)
    for event, extra in itertools.product(("resumed", "waiting"), ({}, {"mood": [1, 2]})):
        ledger.trainer(line(event, **extra))
    assert report_of(ledger) == before
