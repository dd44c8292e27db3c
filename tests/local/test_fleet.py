"""The counting rules: who counts as verified, and how silence, replays and lies are taken (P33)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.client.messages import (
    PROVEN,
    RegionReport,
    RegisterRequest,
    ReplicaReport,
    ReplicaState,
    RunReport,
    Seconds,
    StateRequest,
    VersionInfo,
)
from deltad.errors import ConflictError, DeltadError, FormatError, LimitError, NotFoundError, ReplicaError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.local.fleet import REPORTED_VERSIONS, Fleet, Standing
from deltad.protocol.mode import Reader
from deltad.types import RunId, Version, parse_version
from tests.kit.operations import RUN, root_for, version_info

VERSIONS = [version_info(number) for number in (1, 2, 3, 5)]
STANDINGS = {RUN: Standing(VERSIONS)}


def v(number: int) -> Version:
    return Version(1, number)


def make_fleet(name: str = "a", boot: str = "boot-1") -> Fleet:
    return Fleet(name, boot, fresh_for=30.0, quiet_for=120.0)


def state(which: ReplicaState, number: int = 0, *, root: str | None = None) -> StateRequest:
    if not number:
        return StateRequest(which)
    return StateRequest(which, version=str(v(number)), root=root_for(number) if root is None else root)


def with_replica(fleet: Fleet, request: StateRequest | None = None, *, name: str = "r0", now: float = 0.0) -> Fleet:
    fleet.register(RegisterRequest(name, RUN, "bf16", "10.0.0.1:8000"), now)
    if request is not None:
        fleet.report_state(name, request, VERSIONS, now)
    return fleet


def verified(fleet: Fleet, number: int, now: float = 0.0, versions: Sequence[VersionInfo] = VERSIONS) -> int:
    view = fleet.view(RUN, versions, now, version=v(number))
    assert view.verified == len(serving(fleet, number, now, versions))
    return view.verified


def serving(fleet: Fleet, number: int, now: float = 0.0, versions: Sequence[VersionInfo] = VERSIONS) -> tuple[str, ...]:
    """The replicas that are shown as proven at version `number` or a newer one, as `daemon/replica`."""
    return tuple(
        f"{region.report.daemon}/{replica.replica}"
        for region in fleet.view(RUN, versions, now).regions
        for replica in region.report.runs[RUN].replicas
        if replica.state in PROVEN and replica.root and parse_version(replica.version) >= v(number)
    )


def only_replica(fleet: Fleet, now: float = 0.0, versions: Sequence[VersionInfo] = VERSIONS) -> ReplicaReport:
    [replica] = [
        replica for region in fleet.view(RUN, versions, now).regions for replica in region.report.runs[RUN].replicas
    ]
    return replica


def report_from(
    daemon: str = "b",
    *,
    boot: str = "boot-b",
    sequence: int = 1,
    below: tuple[RegionReport, ...] = (),
    number: int = 3,
    which: ReplicaState = ReplicaState.VERIFIED,
    root: str | None = None,
) -> RegionReport:
    replica = ReplicaReport(
        "r0", RUN, "bf16", which, version=str(v(number)), root=root_for(number) if root is None else root
    )
    return RegionReport(daemon, boot, sequence, {RUN: RunReport(str(v(number)), "", (replica,))}, below)


def test_a_living_replica_keeps_its_name_and_a_twin_is_told_where_it_lives() -> None:
    fleet = make_fleet()
    first = RegisterRequest("r0", RUN, "bf16", "http://10.0.0.1:8000", boot="one")
    twin = RegisterRequest("r0", RUN, "bf16", "http://10.0.0.2:8000", boot="two")
    fleet.register(first, 0.0)
    fleet.report_state("r0", state(ReplicaState.VERIFIED, 3), VERSIONS, 1.0)
    with pytest.raises(ConflictError, match=r"found another one of that name, at http://10\.0\.0\.1:8000"):
        fleet.register(twin, 2.0)
    assert serving(fleet, 3, 2.0) == ("a/r0",), "the first one is not touched"
    fleet.register(first, 3.0)
    fleet.register(twin, 3.0 + fleet.quiet_for + 1)
    assert fleet.registration("r0") == twin


@pytest.mark.parametrize("how", ["unregistered", "hung up", "same address"])
def test_a_restarted_replica_takes_its_name_over_at_once(how: str) -> None:
    fleet = make_fleet()
    fleet.register(RegisterRequest("r0", RUN, "bf16", "http://10.0.0.1:8000", boot="one"), 0.0)
    if how == "unregistered":
        fleet.unregister("r0")
    address = "http://10.0.0.1:8000" if how == "same address" else "http://10.0.0.1:8001"
    again = RegisterRequest("r0", RUN, "bf16", address, boot="two")
    fleet.register(again, 1.0, hung_up=how == "hung up")
    assert fleet.registration("r0") == again


def test_a_replica_that_read_its_version_back_counts_for_it_and_all_before() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    assert [verified(fleet, number) for number in (1, 2, 3, 4, 5)] == [1, 1, 1, 0, 0]
    assert serving(fleet, 3, 0.0) == ("a/r0",)


@pytest.mark.parametrize("which", ["registered", "committing", "committed", "rolled-back", "fenced"])
def test_no_state_but_verified_and_what_leaves_verified_weights_alone_counts(which: str) -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    fleet.report_state("r0", state(ReplicaState(which), 3), VERSIONS, 1.0)
    assert verified(fleet, 1, now=1.0) == 0
    assert only_replica(fleet, 1.0).state == which


@pytest.mark.parametrize("which", [ReplicaState.STAGING, ReplicaState.READY])
def test_staging_the_next_version_beside_verified_weights_keeps_them_verified(which: ReplicaState) -> None:
    fleet = with_replica(make_fleet(), state(which, 3))
    assert verified(fleet, 3) == 1
    fleet.report_state("r0", StateRequest(which, version=str(v(3))), VERSIONS, 1.0)
    assert verified(fleet, 3, now=1.0) == 0  # nothing was read back


def test_a_newer_epoch_serves_every_number_of_an_older_one() -> None:
    versions = [*VERSIONS, version_info(1, epoch=2)]
    fleet = with_replica(make_fleet())
    fleet.report_state("r0", StateRequest(ReplicaState.VERIFIED, "v000001@e2", root_for(1)), versions, 0.0)
    assert verified(fleet, 5, versions=versions) == 1
    assert only_replica(fleet, versions=versions).staleness == 0


def test_the_newest_version_is_meant_where_none_is_named() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    view = fleet.view(RUN, VERSIONS, 0.0)
    assert (view.version, view.verified, view.replicas) == ("v000005", 0, 1)
    empty = fleet.view(RUN, [], 0.0)
    assert (empty.version, empty.verified, empty.replicas) == ("", 0, 1)


def test_staleness_counts_the_versions_in_between_and_not_their_numbers() -> None:
    for number, behind in ((1, 3), (2, 2), (3, 1), (5, 0)):
        assert only_replica(with_replica(make_fleet(), state(ReplicaState.VERIFIED, number))).staleness == behind
    assert only_replica(with_replica(make_fleet())).staleness == 4


def test_staleness_counts_the_versions_that_were_passed_over_here() -> None:
    held = [msgspec.structs.replace(version_info(number), sequence=number) for number in (1, 33, 41)]
    for number, behind in ((1, 40), (33, 8), (41, 0)):
        fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, number))
        assert only_replica(fleet, versions=held).staleness == behind


def test_another_root_than_the_published_one_is_refused_and_takes_the_old_credit_away() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 2))
    assert verified(fleet, 2) == 1
    with pytest.raises(ReplicaError, match=root_for(3)) as caught:
        fleet.report_state("r0", state(ReplicaState.VERIFIED, 3, root=root_for(9)), VERSIONS, 1.0)
    assert root_for(9) in str(caught.value)
    assert verified(fleet, 1, now=1.0) == 0
    assert only_replica(fleet, 1.0).state is ReplicaState.UNKNOWN
    assert root_for(9) in only_replica(fleet, 1.0).error


def test_a_version_that_is_not_held_here_proves_nothing_until_it_is() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 7))
    assert verified(fleet, 1) == 0
    assert only_replica(fleet).state is ReplicaState.UNKNOWN
    assert "v000007 is not held" in only_replica(fleet).error
    assert verified(fleet, 7, versions=[*VERSIONS, version_info(7)]) == 1


def test_spellings_of_one_version_are_one_version() -> None:
    fleet = with_replica(make_fleet(), StateRequest(ReplicaState.VERIFIED, "3", root_for(3)))
    assert only_replica(fleet).version == "v000003"
    assert verified(fleet, 3) == 1
    with pytest.raises(ReplicaError):
        fleet.report_state("r0", StateRequest(ReplicaState.VERIFIED, "3", root_for(9)), VERSIONS, 0.0)


def test_a_silent_replica_becomes_unknown_and_any_sign_of_life_brings_its_last_word_back() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    assert verified(fleet, 3, now=120.0) == 1
    assert verified(fleet, 3, now=120.1) == 0
    assert only_replica(fleet, 120.1).state is ReplicaState.UNKNOWN
    fleet.heard("r0", 200.0)
    assert verified(fleet, 3, now=200.0) == 1


def test_a_replica_that_was_silent_for_very_long_is_forgotten_and_may_come_back() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    fleet.forget_silent(fleet.forget_after)
    assert fleet.is_registered("r0")
    fleet.forget_silent(fleet.forget_after + 1.0)
    assert not fleet.is_registered("r0")
    with_replica(fleet)
    assert fleet.is_registered("r0")


def test_registering_again_starts_anew() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    with_replica(fleet)
    assert verified(fleet, 1) == 0
    assert only_replica(fleet).state is ReplicaState.REGISTERED
    assert fleet.view(RUN, VERSIONS, 0.0).replicas == 1


def test_a_replica_that_left_is_gone_and_must_register_to_speak() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    assert fleet.is_registered("r0")
    fleet.unregister("r0")
    assert not fleet.is_registered("r0")
    assert fleet.view(RUN, VERSIONS, 0.0).replicas == 0
    for call in (
        lambda: fleet.unregister("r0"),
        lambda: fleet.registration("r0"),
        lambda: fleet.heard("r0", 0.0),
        lambda: fleet.report_state("r0", state(ReplicaState.READY), VERSIONS, 0.0),
    ):
        with pytest.raises(NotFoundError, match="register it again"):
            call()


@pytest.mark.parametrize(
    "request_",
    [
        StateRequest(ReplicaState.UNKNOWN),
        StateRequest(ReplicaState.VERIFIED),
        StateRequest(ReplicaState.VERIFIED, version="v000003"),
        StateRequest(ReplicaState.READY, root=root_for(3)),
        StateRequest(ReplicaState.READY, version="three"),
        StateRequest(ReplicaState.VERIFIED, version="v000003", root="00"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(request_: StateRequest) -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    with pytest.raises(UsageError):
        fleet.report_state("r0", request_, VERSIONS, 0.0)
    assert verified(fleet, 3) == 1


def test_registrations_are_checked_and_bounded() -> None:
    fleet = make_fleet()
    for bad in (
        RegisterRequest("R 0", RUN, "bf16"),
        RegisterRequest("r0", "../x", "bf16"),
        RegisterRequest("r0", RUN, ""),
        RegisterRequest("r0", RUN, "bf16", "x" * 501),
    ):
        with pytest.raises(UsageError):
            fleet.register(bad, 0.0)
    for place in range(4096):
        fleet.register(RegisterRequest(f"r{place}", RUN, "bf16"), 0.0)
    with pytest.raises(LimitError):
        fleet.register(RegisterRequest("one-more", RUN, "bf16"), 0.0)
    fleet.register(RegisterRequest("r0", RUN, "bf16"), 0.0)


def test_an_endless_error_text_is_cut() -> None:
    fleet = with_replica(make_fleet(), StateRequest(ReplicaState.FENCED, error="x" * 100_000))
    assert len(only_replica(fleet).error) == 500


def test_a_region_below_counts_while_its_reports_come_and_is_unknown_when_they_stop() -> None:
    fleet = make_fleet()
    assert fleet.receive(report_from(), 0.0)
    assert verified(fleet, 3, now=30.0) == 1
    assert verified(fleet, 3, now=30.1) == 0
    [own, below] = fleet.view(RUN, VERSIONS, 31.0).regions
    assert (own.report.daemon, own.age, own.fresh) == ("a", 0.0, True)
    assert (below.report.daemon, below.age, below.fresh) == ("b", 31.0, False)
    assert only_replica(fleet, 31.0).state is ReplicaState.UNKNOWN
    assert fleet.receive(report_from(sequence=2), 40.0)
    assert verified(fleet, 3, now=40.0) == 1


def test_a_replayed_report_keeps_nobody_alive() -> None:
    fleet = make_fleet()
    replay = report_from(sequence=5)
    assert fleet.receive(replay, 0.0)
    for now in range(1, 60):
        assert not fleet.receive(replay, float(now))
    assert verified(fleet, 3, now=59.0) == 0


def test_an_older_report_changes_nothing() -> None:
    fleet = make_fleet()
    fleet.receive(report_from(sequence=5, number=2), 0.0)
    assert not fleet.receive(report_from(sequence=4, number=5), 1.0)
    assert verified(fleet, 3, now=1.0) == 0
    assert verified(fleet, 2, now=1.0) == 1


def test_a_restarted_daemon_starts_its_count_anew_and_its_former_life_stays_over() -> None:
    fleet = make_fleet()
    fleet.receive(report_from(boot="one", sequence=90, number=2), 0.0)
    assert fleet.receive(report_from(boot="two", sequence=1, number=3), 1.0)
    assert verified(fleet, 3, now=1.0) == 1
    assert not fleet.receive(report_from(boot="one", sequence=91, number=5), 2.0)
    assert verified(fleet, 5, now=2.0) == 0


def test_a_clock_that_goes_back_makes_nothing_older_or_younger_than_new() -> None:
    fleet = make_fleet()
    fleet.receive(report_from(), 100.0)
    [_, below] = fleet.view(RUN, VERSIONS, 50.0).regions
    assert below.age == 0.0


def test_a_root_from_below_that_is_not_the_published_one_does_not_count() -> None:
    fleet = make_fleet()
    fleet.receive(report_from(root=root_for(9)), 0.0)
    assert verified(fleet, 1) == 0
    assert only_replica(fleet).state is ReplicaState.UNKNOWN


def test_a_daemon_with_our_own_name_is_refused() -> None:
    fleet = make_fleet()
    with pytest.raises(ConflictError, match="a name of its own"):
        fleet.receive(report_from("a"), 0.0)


def test_reports_pass_through_a_daemon_in_the_middle() -> None:
    top, middle, bottom = make_fleet("a"), make_fleet("b", "boot-b"), with_replica(make_fleet("c", "boot-c"))
    bottom.report_state("r0", state(ReplicaState.VERIFIED, 5), VERSIONS, 0.0)
    middle.receive(bottom.region_report(STANDINGS, 0.0), 0.0)
    with_replica(middle, state(ReplicaState.VERIFIED, 3))
    assert top.receive(middle.region_report(STANDINGS, 1.0), 1.0)
    assert serving(top, 3, 1.0) == ("b/r0", "c/r0")
    assert serving(top, 5, 1.0) == ("c/r0",)
    assert [region.report.daemon for region in top.regions(STANDINGS, 1.0)] == ["b", "c"]


def test_a_daemon_that_fell_silent_behind_another_ages_to_unknown_too() -> None:
    top, middle, bottom = make_fleet("a"), make_fleet("b", "boot-b"), with_replica(make_fleet("c", "boot-c"))
    bottom.report_state("r0", state(ReplicaState.VERIFIED, 5), VERSIONS, 0.0)
    middle.receive(bottom.region_report(STANDINGS, 0.0), 0.0)
    for now in range(0, 100, 10):
        top.receive(middle.region_report(STANDINGS, float(now)), float(now))
    assert verified(top, 5, now=95.0) == 0
    # And one that asks for the first time is told no older tale.
    newcomer = make_fleet("d", "boot-d")
    newcomer.receive(middle.region_report(STANDINGS, 100.0), 100.0)
    assert verified(newcomer, 5, now=100.0) == 0


def test_two_ways_to_one_daemon_count_it_once() -> None:
    top = make_fleet()
    inner = report_from("c", boot="boot-c")
    top.receive(report_from("b", below=(inner,)), 0.0)
    top.receive(report_from("d", boot="boot-d", below=(inner,)), 0.0)
    assert serving(top, 3, 0.0) == ("b/r0", "c/r0", "d/r0")


def test_daemons_that_pull_from_each_other_do_not_count_themselves_below() -> None:
    one, other = with_replica(make_fleet("a")), with_replica(make_fleet("b", "boot-b"))
    for now in range(3):
        other.receive(one.region_report(STANDINGS, float(now)), float(now))
        one.receive(other.region_report(STANDINGS, float(now)), float(now))
    assert one.view(RUN, VERSIONS, 3.0).replicas == 2
    assert [region.report.daemon for region in one.regions(STANDINGS, 3.0)] == ["b"]


def test_what_lies_deeper_than_a_report_may_go_is_not_believed() -> None:
    top = make_fleet()
    deep = report_from("c", boot="boot-c", below=(report_from("d", boot="boot-d"),))
    top.receive(report_from("b", below=(deep,)), 0.0)
    assert [region.report.daemon for region in top.regions(STANDINGS, 0.0)] == ["b", "c"]
    assert all(region.report.below == () for region in top.regions(STANDINGS, 0.0))


def test_an_endless_line_of_daemons_pushes_out_the_longest_silent() -> None:
    top = make_fleet()
    for place in range(1100):
        top.receive(report_from(f"d{place}"), float(place))
    names = {region.report.daemon for region in top.regions(STANDINGS, 1100.0)}
    assert len(names) == 1024
    assert "d1099" in names
    assert "d0" not in names


@pytest.mark.parametrize(
    "report",
    [
        RegionReport("../b", "boot", 1),
        RegionReport("b", "", 1),
        RegionReport("b", "boot", 1, {"RUN": RunReport()}),
        RegionReport("b", "boot", 1, {RUN: RunReport(latest="newest")}),
        RegionReport("b", "boot", 1, below=(RegionReport("C", "boot", 1),)),
        report_from(root=""),
        report_from(root="zz"),
        RegionReport(
            "b", "boot", 1, {RUN: RunReport(replicas=(ReplicaReport("r", RUN, "bf16", ReplicaState.READY, "x"),))}
        ),
        RegionReport("b", "boot", 1, {RUN: RunReport(replicas=(ReplicaReport("", RUN, "bf16", ReplicaState.READY),))}),
        RegionReport(
            "b",
            "boot",
            1,
            {RUN: RunReport(replicas=(ReplicaReport("r", RUN, "bf16", ReplicaState.READY, root=root_for(1)),))},
        ),
    ],
)
def test_a_malformed_report_is_refused_whole(report: RegionReport) -> None:
    top = make_fleet()
    with pytest.raises(FormatError):
        top.receive(report, 0.0)
    assert top.regions(STANDINGS, 0.0) == ()


def test_own_reports_are_numbered_and_say_what_this_daemon_holds_and_does() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    many = [version_info(number) for number in range(1, 30)]
    standings = {RUN: Standing(many, "encoding step_29"), RunId("quiet"): Standing()}
    first, second = fleet.region_report(standings, 0.0), fleet.region_report(standings, 0.0)
    assert (first.daemon, first.boot, second.sequence) == ("a", "boot-1", first.sequence + 1)
    run = first.runs[RUN]
    assert (run.latest, run.activity) == ("v000029", "encoding step_29")
    assert run.versions == tuple(many[-REPORTED_VERSIONS:])
    assert run.replicas[0].staleness == 26
    assert run.replicas[0].address == "10.0.0.1:8000"
    assert first.runs["quiet"] == RunReport()


def test_looking_at_the_own_region_uses_up_no_number() -> None:
    fleet = with_replica(make_fleet())
    assert fleet.region(STANDINGS, 0.0).sequence == fleet.region(STANDINGS, 0.0).sequence
    assert fleet.region(STANDINGS, 0.0).below == ()


def test_a_silent_replica_is_unknown_in_the_report_upstream_too() -> None:
    fleet = with_replica(make_fleet(), state(ReplicaState.VERIFIED, 3))
    report = fleet.region_report(STANDINGS, 500.0)
    assert report.runs[RUN].replicas[0].state is ReplicaState.UNKNOWN


def test_a_report_that_would_be_too_large_drops_descriptions_and_keeps_replicas() -> None:
    small = Fleet("a", "boot-1", limits=Limits(report_bytes=6000))
    with_replica(small, state(ReplicaState.VERIFIED, 3))
    many = [version_info(number) for number in range(1, 30)]
    inner = msgspec.structs.replace(report_from(), runs={RUN: RunReport(versions=tuple(many))})
    small.receive(inner, 0.0)
    report = small.region_report({RUN: Standing(many)}, 0.0)
    assert len(msgspec.json.encode(report)) <= 6000
    assert report.runs[RUN].versions == ()
    assert report.below[0].runs[RUN].versions == ()
    assert report.runs[RUN].replicas[0].state is ReplicaState.VERIFIED
    full = make_fleet().region_report({RUN: Standing(many)}, 0.0)
    assert len(msgspec.json.encode(full)) <= DEFAULT_LIMITS.report_bytes


REPORTS = st.builds(
    report_from,
    st.sampled_from(["b", "c"]),
    boot=st.sampled_from(["one", "two", "three"]),
    sequence=st.integers(0, 4),
    number=st.sampled_from([1, 2, 3, 5]),
    which=st.sampled_from([s for s in ReplicaState if s is not ReplicaState.UNKNOWN]),
)


@given(events=st.lists(st.tuples(REPORTS, st.floats(0, 50)), max_size=30), later=st.floats(0, 100))
def test_whatever_arrives_only_fresh_and_newest_words_count(
    events: list[tuple[RegionReport, float]], later: float
) -> None:
    fleet = make_fleet()
    now = 0.0
    newest: dict[str, tuple[RegionReport, float]] = {}
    lives: dict[str, list[str]] = {}
    for report, wait in events:
        now += wait
        known = newest.get(report.daemon)
        past = lives.setdefault(report.daemon, [])
        newer = (
            known is None
            or (report.boot == known[0].boot and report.sequence > known[0].sequence)
            or (report.boot != known[0].boot and report.boot not in past)
        )
        assert fleet.receive(report, now) == newer
        if newer:
            if report.boot not in past:
                past.append(report.boot)
            newest[report.daemon] = (report, now)
    now += later
    for number in (1, 2, 3, 5):
        expected = sum(
            replica.state in PROVEN and replica.version >= str(v(number)) and now - heard <= 30.0
            for report, heard in newest.values()
            for replica in report.runs[RUN].replicas
        )
        assert verified(fleet, number, now=now) == expected


@given(reports=st.lists(REPORTS, max_size=8))
def test_hearing_everything_twice_is_hearing_it_once(reports: list[RegionReport]) -> None:
    once, twice = make_fleet(), make_fleet()
    for report in reports:
        once.receive(report, 0.0)
        twice.receive(report, 0.0)
        assert not twice.receive(report, 1.0)
    assert once.regions(STANDINGS, 2.0) == twice.regions(STANDINGS, 2.0)


@given(
    st.builds(
        StateRequest,
        st.sampled_from(ReplicaState),
        version=st.one_of(st.sampled_from(["", "v000001", "v000003", "v9", "1@e2"]), st.text(max_size=8)),
        root=st.one_of(st.sampled_from(["", *(root_for(n) for n in (1, 3))]), st.text(max_size=8)),
        error=st.text(max_size=20),
        seconds=st.just(Seconds()),
    )
)
def test_no_word_of_a_replica_makes_it_verified_but_a_true_root(request_: StateRequest) -> None:
    fleet = with_replica(make_fleet())
    try:
        fleet.report_state("r0", request_, VERSIONS, 0.0)
    except DeltadError:
        assert verified(fleet, 0) == 0
        return
    true_roots = {info.version: info.root for info in VERSIONS}
    served = only_replica(fleet).version
    proven = request_.state in PROVEN and request_.root != "" and true_roots.get(served) == request_.root
    assert verified(fleet, 0) == int(proven)


def test_readers_are_the_regions_that_have_the_run_with_what_they_told_lately() -> None:
    fleet = make_fleet()
    far = msgspec.structs.replace(report_from("c"), pull_rate=1e6, coders=(0, 1))
    near = msgspec.structs.replace(report_from("b", below=(far,)), pull_rate=5e6, coders=(0, 1, 2))
    fleet.receive(near, 10.0)
    fleet.receive(RegionReport("d", "boot-d", 1, {"another": RunReport()}), 10.0)
    assert fleet.readers(RUN, 10.0) == (Reader("b", 5e6, (0, 1, 2)), Reader("c", 1e6, (0, 1)))
    silent = 10.0 + fleet.fresh_for + 1
    assert fleet.readers(RUN, silent) == (Reader("b", 0.0, (0, 1, 2)), Reader("c", 0.0, (0, 1)))
