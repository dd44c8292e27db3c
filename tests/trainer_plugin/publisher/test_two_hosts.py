"""Ranks on two hosts, each with its own daemon, in namespaces of their own with a line between: one version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.delta.codec import sum_weights
from deltad.delta.digest import root_of
from tests.kit import wan
from tests.kit.authority import Authority
from tests.kit.daemons import Daemon
from tests.kit.wan import Line, Wan
from tests.kit.weights import ArrayWeights
from tests.trainer_plugin.publisher.conftest import LAYOUT, RUN, Ranks

PORT = 7702
TOKEN = "a-token-of-ranks-that-publish"


class Hosts:
    """Two hosts; the first one's daemon leads."""

    def __init__(self, home: Path, line: Wan) -> None:
        authority = Authority(home / "authority")
        own = authority.issue("trainer-1")
        token = home / "ranks.token"
        token.touch(0o600)
        token.write_text(TOKEN)
        self.lead = Daemon(
            home / "a",
            "trainer-1",
            f'''
[[run]]
id = "{RUN}"
[local]
listen = "{line.address("a")}:{PORT}"
certificate = "{own.certificate}"
key = "{own.key}"
[[token]]
file = "{token}"
scope = "publish"
runs = ["{RUN}"]
''',
            within=["ip", "netns", "exec", line.namespace("a")],
        )
        self.other = Daemon(
            home / "b",
            "trainer-2",
            f'''
[[lead]]
run = "{RUN}"
url = "https://{line.address("a")}:{PORT}"
token_file = "{token}"
ca = "{authority.certificate}"
name = "trainer-1"
''',
            within=["ip", "netns", "exec", line.namespace("b")],
        )


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := wan.missing():
        pytest.skip(reason)
    with Wan(Line(rtt=0.02, rate=20e6)) as line:
        found = Hosts(tmp_path, line)
        found.lead.start()
        found.other.start()
        yield found
        for daemon in (found.lead, found.other):
            if daemon.process is not None:
                daemon.kill()


def test_four_ranks_on_two_hosts_make_one_version_a_step(hosts: Hosts, tmp_path: Path) -> None:
    ranks = Ranks(hosts.lead, 4, hosts=(hosts.lead, hosts.other))
    weights = ArrayWeights.bell(LAYOUT)
    for number in range(3):
        outcomes = ranks.publish(number, weights)
        assert {outcome.version.root if outcome.version else outcome.reason for outcome in outcomes} == {
            root_of(LAYOUT, sum_weights(LAYOUT, weights)).hex()
        }
        weights = weights.changed(0.05, seed=number)
    assert [info.kind for info in hosts.lead.client.versions(RUN)] == ["anchor", "delta", "delta"]
    hosts.other.kill()
    lost = ranks.begin(3, weights)
    assert {handle.wait(60).version for handle in lost[2:]} == {None}
    hosts.other.start()
    again = ranks.begin(4, weights, range(2, 4))
    assert {handle.wait(60).version for handle in lost[:2]} == {None}, "their step was left behind"
    again += ranks.begin(4, weights, range(2))
    outcomes = [handle.wait(60) for handle in again]
    assert {outcome.version.root if outcome.version else outcome.reason for outcome in outcomes} == {
        root_of(LAYOUT, sum_weights(LAYOUT, weights)).hex()
    }
    assert ranks.weights_of("v000004", tmp_path / "export").equals(weights)
