"""A real Prometheus reads two real daemons: every query of the dashboard gives what it is there for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from deltad.client.messages import PublishRequest, RegisterRequest, ReplicaState, Seconds, StateRequest
from deltad.ops.dashboard import queries
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.daemons import Daemon, free_port
from tests.kit.prometheus import ALERTS, RECORDS, Prometheus, asked
from tests.kit.weights import ArrayWeights


class Site:
    """A trainer's daemon, one that pulls from it and has a replica, and what watches both."""

    def __init__(self, home: Path) -> None:
        self.home = home
        port = free_port()
        self.pages = [f"127.0.0.1:{port + 1}", f"127.0.0.1:{port + 2}"]
        relay = f'[relay]\nlisten = "127.0.0.1:{port}"\ntoken_file = "token"\n[[run]]\nid = "r"\n'
        upstream = f'[[upstream]]\nurl = "http://127.0.0.1:{port}"\ntoken_file = "token"\n'
        self.a = Daemon(home / "a", "a", f'{relay}[metrics]\nlisten = "{self.pages[0]}"\n')
        self.b = Daemon(home / "b", "b", f'{upstream}[metrics]\nlisten = "{self.pages[1]}"\n')
        self.prometheus = Prometheus(home / "prometheus", port + 3, self.pages)
        self.weights = ArrayWeights.random(MODEL)

    def publish(self, number: int) -> None:
        """The next version, pulled in the other region and reported by its replica."""
        self.weights = self.weights.changed(0.02, seed=number)
        directory = write_checkpoint(self.home / f"step_{number}", self.weights)
        self.a.client.publish("r", PublishRequest(str(directory)))
        info = self.b.client.latest("r", after=f"v{number - 1:06d}" if number else "", wait=30.0)
        assert info is not None, self.b.log
        if not number:
            self.b.client.register_replica(RegisterRequest("r0", "r", "bf16"))
        took = Seconds(stage=0.2, pause=0.01 + 0.01 * number, verify=0.1 + 0.01 * number)
        self.b.client.report_state("r0", StateRequest(ReplicaState.VERIFIED, info.version, info.root, seconds=took))

    def exposed(self) -> set[str]:
        """Every metric that one of them has a series of."""
        lines = [line for place in range(2) for line in self.exposition(place)]
        return set().union(*(asked(line) for line in lines if line[0] != "#"))

    def exposition(self, place: int) -> list[str]:
        with urlopen(f"http://{self.pages[place]}/metrics", timeout=10) as reply:
            return reply.read().decode().splitlines()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        site.a.start()
        site.b.start()
        site.prometheus.start()
        site.publish(0)
        assert site.prometheus.comes('deltad_versions_pulled_total{run="r"} == 1')
        for number in range(1, 4):
            site.publish(number)
        assert site.prometheus.comes('deltad_versions_pulled_total{run="r"} == 4')
        yield site
    finally:
        site.prometheus.stop()
        for daemon in (site.a, site.b):
            if daemon.process is not None:
                daemon.stop()


def test_every_query_of_the_dashboard_is_understood_and_gives_what_is_measured(site: Site) -> None:
    exposed = site.exposed()
    assert {"deltad_pause_seconds", "deltad_elements_changed_total", "deltad_replica_versions_behind"} <= exposed
    recorded = {name: asked(rule["expr"]) for name, rule in RECORDS.items()}
    empty = []
    for query in queries():
        names = asked(query).union(*(recorded[name] for name in re.findall(r"deltad:\w+:\w+", query)))
        found = site.prometheus.comes(query) if names <= exposed and "> 0" not in query else site.prometheus.ask(query)
        if names <= exposed and not found and "> 0" not in query:
            empty.append(query)
    assert empty == []


def test_figures_that_are_known_come_out(site: Site) -> None:
    ask = site.prometheus.ask
    assert [float(one["value"][1]) for one in ask('deltad_latest_version_number{run="r"}')] == [3.0, 3.0]
    [behind] = [one for one in ask("deltad_replica_versions_behind") if one["metric"]["instance"] == site.pages[1]]
    assert (behind["metric"]["daemon"], behind["metric"]["replica"], behind["value"][1]) == ("b", "r0", "0")
    [density] = site.prometheus.comes(f'deltad:density:ratio{{instance="{site.pages[1]}"}} > 0')
    assert 0.005 < float(density["value"][1]) < 0.05, "each version changed about two per cent"
    [pauses] = ask("deltad_pause_seconds_count")
    assert pauses["value"][1] == "4"


def test_every_rule_is_evaluated_and_nothing_is_amiss_here(site: Site) -> None:
    with urlopen(f"{site.prometheus.url}/api/v1/rules", timeout=10) as reply:
        rules = [rule for group in json.load(reply)["data"]["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {*ALERTS, *RECORDS}
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
    firing = {rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"}
    assert firing == set()


def test_a_replica_that_leaves_takes_its_series_along(site: Site) -> None:
    site.b.client.unregister_replica("r0")
    name = "deltad_replica_versions_behind"
    assert site.prometheus.comes(f'absent({name}{{instance="{site.pages[1]}"}})')
    assert not [line for line in site.exposition(1) if line.startswith(name)]
