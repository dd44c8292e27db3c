"""`deltad plan graph` says what a daemon would do and why, or what a run would cost in a scenario."""

from __future__ import annotations

from tests.cli.host import Host
from tests.cli.terminal import Deltad
from tests.kit.versions import Lineage

SHORT = ("plan", "graph", "--simulate", "--days", 2, "--weights", "1GiB", "--anchor", "512MiB", "--delta", "40MiB")


def test_a_simulation_tells_what_was_pulled_and_why_what_was_decided(deltad: Deltad) -> None:
    ended = deltad(*SHORT)
    assert ended.code == 0
    assert "2 days with a version an hour: weights of 1.00 GiB, anchors of 512 MiB" in ended.out
    assert "48 versions, 6 regions:" in ended.out
    assert "saved" in ended.out
    assert any(
        line.split()[:6] == ["v000048", "fold", "v000046", "→", "v000048", "2"] for line in ended.out.splitlines()
    )
    assert "2 versions on the ladder; folds 2 deltas of 97.2 MiB" in ended.out


def test_as_json_it_has_the_same_numbers(deltad: Deltad) -> None:
    reply = deltad(*SHORT, "--json", "--readers", 2).reply
    assert reply["scenario"]["hours"] == 48
    assert 0 < reply["saved_share"] < 1
    assert sum(reply["pulled_bytes"].values()) < reply["snapshot_bytes"]
    assert reply["most_derived_bytes"] <= reply["scenario"]["disk"]
    assert {"version", "what", "why"} == set(reply["last_day"][0])


def test_coded_by_context_nothing_folds(deltad: Deltad) -> None:
    decided = deltad(*SHORT, "--json", "--by-context", "--work", "100GiB").reply["decided"]
    assert decided["Encode"] > decided.get("Fold", 0)


def test_what_cannot_be_simulated_is_refused(deltad: Deltad) -> None:
    deltad("plan", "graph", "policy", "--simulate").assert_refused(64, "either a run")
    deltad(*SHORT, "--disk", "12GB").assert_refused(64, "12GB", "a size such as '512MiB'")


async def test_a_daemon_says_what_it_would_make_why_and_what_has_to_wait(host: Host, lineage: Lineage) -> None:
    told = (await host.deltad("plan", "graph", "policy")).out
    assert "1.00 MiB a second; 3.00 MiB are left of it now" in told
    (fold,) = [line for line in told.splitlines() if "fold v000001" in line]
    assert fold.split()[-1] == "now"
    assert "2 versions on the ladder" in fold
    assert "no work is left" in told
    reply = (await host.deltad("plan", "graph", "--json")).reply
    assert [one["put_off"] for one in reply["decided"]] == ["", "no work is left"]
    (await host.deltad("plan", "graph", "nobody")).assert_refused(66, "nobody")
