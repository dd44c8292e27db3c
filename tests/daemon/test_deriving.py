"""What the policy decides is done in the background: one thing at a time, within the budget, in nobody's way."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

import deltad
from deltad.client.messages import FleetView, RegionReport, RegisterRequest, ReplicaReport, ReplicaState, RunReport
from deltad.config import load_config
from deltad.daemon.deriving import LOOK_SECONDS, REST_SECONDS, Deriving, by_policy
from deltad.daemon.node import Node
from deltad.daemon.versions import Versions
from deltad.delta.backend import choose
from deltad.delta.manifest import EdgeKind
from deltad.delta.record import VersionRecord
from deltad.local.fleet import Fleet
from deltad.ops.metrics import Metrics
from deltad.store.graph import Action, Budget, CutAnchor, Drop, Encode, Fold, Plan, PutOff, Reader, VersionGraph
from deltad.store.store import Store
from deltad.types import Digest, Version, VersionId
from tests.kit.versions import Lineage

CONFIG = """
[daemon]
name = "a"
derive_rate = "1KiB"

[backend]
kind = "numba"

[[run]]
id = "policy"
"""
VARIANT = "bf16"


@dataclass
class Asked:
    """A planner that notes what it is asked, and answers with the actions that a test gives it."""

    actions: list[Action] = field(default_factory=list)
    work: int = 0
    readers: Sequence[Reader] = ()
    budgets: list[Budget] = field(default_factory=list)
    put_off: tuple[PutOff, ...] = ()
    niceness: int = 0

    def __call__(
        self,
        graph: VersionGraph,
        newest: VersionRecord,
        records: Sequence[VersionRecord],
        readers: Sequence[Reader],
        budget: Budget,
    ) -> Plan:
        self.readers = readers
        self.budgets.append(budget)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        works = (self.work, *[0] * len(self.actions))[: len(self.actions)]
        return Plan(tuple(self.actions), works, self.put_off)


class Host:
    """A store with nine versions, and what works at it in the background."""

    def __init__(self, home: Path) -> None:
        self.lineage = Lineage(tensors=1)
        for _ in range(9):
            self.lineage.publish()
        (home / "deltad.toml").write_text(CONFIG)
        self.config = load_config(home / "deltad.toml")
        self.store = Store.open(home / "store")
        self.lineage.fill(self.store)
        self.metrics = Metrics.create(deltad.__version__)
        self.versions = Versions(self.store, self.lineage.versions[0].run, choose(), daemon="a")
        self.fleet = Fleet("a", "boot-1")
        self.asked = Asked()
        self.deriving = Deriving(self.store, self.config, self.metrics, planner=self.asked)

    async def look(self, now: float, deriving: Deriving | None = None) -> None:
        await (deriving or self.deriving).look(self.versions, self.view(now), now)

    def view(self, now: float = 0.0) -> FleetView:
        return self.fleet.view(self.versions.run, self.versions.all(), now)

    def fold(self, base: int, target: int) -> Fold:
        return Fold(self.name(base), self.name(target), (), "somebody lags")

    def name(self, number: int) -> VersionId:
        return self.versions.records.record(Version(1, number)).id

    def derived(self) -> list[tuple[EdgeKind, int, int]]:
        """Kind, base and target of all derived edges; the base of an anchor is 0."""
        return [
            (edge.kind, edge.base.number if edge.base else 0, edge.target.number)
            for edge in self.versions.records.derived()
        ]

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"deltad_{name}", {"run": "policy", **labels})


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_what_is_decided_is_done_and_counted_in_a_thread_that_yields_to_all_others(host: Host) -> None:
    host.asked.actions = [
        host.fold(1, 5),
        Encode(host.name(5), host.name(9), "no parts fold"),
        CutAnchor(host.name(9), "joining has grown"),
    ]
    await host.look(0.0)
    assert host.derived() == [(EdgeKind.SKIP_DELTA, 1, 5), (EdgeKind.SKIP_DELTA, 5, 9), (EdgeKind.ANCHOR, 0, 9)]
    assert host.asked.niceness == 19
    assert host.value("edges_made_total", kind="skip-delta") == 2
    assert host.value("edges_made_total", kind="anchor") == 1
    assert host.value("edges_made_bytes_total") == sum(e.total_bytes for e in host.versions.records.derived())
    assert host.value("edge_make_seconds_count") == 3
    assert not host.deriving.busy
    ref = host.versions.records.derived()[0].ref
    edge = host.versions.records.edge(ref, host.name(5))
    host.asked.actions = [Drop(edge, "nobody is on the way over it any more")]
    await host.look(1.0)
    assert host.derived() == [(EdgeKind.SKIP_DELTA, 5, 9), (EdgeKind.ANCHOR, 0, 9)]
    assert host.value("edges_dropped_total") == 1


async def test_what_was_read_beyond_the_budget_is_owed_and_nothing_is_planned_until_it_is_paid(host: Host) -> None:
    host.asked.work = 100 << 10
    host.asked.actions = [host.fold(1, 3)]
    host.asked.put_off = (PutOff(host.fold(1, 2), "all that may be read for now is spoken for"),)
    await host.look(0.0)
    assert [budget.work for budget in host.asked.budgets] == [5 << 10]
    await host.look(90.0)
    assert len(host.asked.budgets) == 1
    await host.look(100.0)
    assert [budget.work for budget in host.asked.budgets] == [5 << 10, 5 << 10]


async def test_what_rests_after_a_failure_is_not_paid_for_again(host: Host) -> None:
    manifest = host.versions.records.read_manifest(host.versions.records.record(Version(1, 2)).variants[0].edges[0])
    host.store.objects.remove([Digest(manifest.pages[0].digest)], lambda digest: False)
    host.asked.actions, host.asked.work = [host.fold(1, 3)], 6 << 10
    for at in (0.0, 5.0, 10.0):
        await host.look(at)
    assert [budget.work for budget in host.asked.budgets] == [5 << 10, 4 << 10, 9 << 10], "1 KiB a second is earned"


async def test_where_nothing_was_left_to_do_nothing_is_planned_until_something_changes(host: Host) -> None:
    await host.look(0.0)
    await host.look(100.0)
    assert len(host.asked.budgets) == 1
    host.fleet.register(RegisterRequest("r1", "policy", VARIANT, "boot"), 100.0)
    await host.look(200.0)
    assert len(host.asked.budgets) == 2


async def test_an_edge_that_cannot_be_made_is_counted_and_rests_while_the_others_are_made(host: Host) -> None:
    manifest = host.versions.records.read_manifest(host.versions.records.record(Version(1, 2)).variants[0].edges[0])
    host.store.objects.remove([Digest(manifest.pages[0].digest)], lambda digest: False)
    bad, good = host.fold(1, 3), host.fold(4, 6)
    host.asked.actions = [bad, good]
    await host.look(0.0)
    assert host.derived() == [(EdgeKind.SKIP_DELTA, 4, 6)]
    assert host.value("edges_refused_total", reason="NotFound") == 1
    await host.look(REST_SECONDS / 2)
    assert host.value("edges_refused_total", reason="NotFound") == 1, "it rests"
    await host.look(2 * REST_SECONDS)
    assert host.value("edges_refused_total", reason="NotFound") == 2, "and is tried again"


async def test_the_policy_is_told_who_holds_what_here_and_below(host: Host) -> None:
    def replica(name: str, version: str) -> ReplicaReport:
        return ReplicaReport(name, "policy", VARIANT, ReplicaState.COMMITTED, version=version)

    host.fleet.register(RegisterRequest("r1", "policy", VARIANT, "boot"), 0.0)
    below = RunReport("v000003", replicas=(replica("b1", "v000002"), replica("b2", "v000002")))
    host.fleet.receive(RegionReport("b", "boot-b", 1, {"policy": below}), 0.0)
    await host.look(0.0)
    found = {(reader.name, reader.held and reader.held.version.number, reader.count) for reader in host.asked.readers}
    assert found == {("a replica", None, 1), ("2 replicas", 2, 2), ("a region", 3, 1)}
    assert {reader.target for reader in host.asked.readers} == {host.name(9)}
    await host.look(1000.0)
    assert [reader.held for reader in host.asked.readers] == [None], "the region was not heard of any more"


async def test_by_the_policy_of_the_graph_a_laggard_is_a_few_edges_behind(host: Host) -> None:
    newest = host.versions.records.record(Version(1, 9))
    deriving = Deriving(host.store, host.config, host.metrics, planner=by_policy)
    assert len(host.versions.records.path(newest, VARIANT, [Version(1, 1)]).hops) == 8
    for now in range(0, 40_000, 4000):
        await host.look(float(now), deriving)
    assert len(host.versions.records.path(newest, VARIANT, [Version(1, 1)]).hops) <= 3
    assert all(kind is EdgeKind.SKIP_DELTA for kind, _, _ in host.derived())


async def test_what_is_dropped_makes_room_before_anything_is_made(host: Host) -> None:
    host.asked.actions = [host.fold(1, 5)]
    await host.look(0.0)
    old = host.versions.records.edge(host.versions.records.derived()[0].ref, host.name(5))
    host.asked.actions = [host.fold(2, 6), Drop(old, "nobody is on the way over it any more")]
    with structlog.testing.capture_logs() as entries:
        await host.look(1.0)
    assert [entry["event"] for entry in entries] == ["edge_dropped", "edge_made"]


async def test_after_long_work_it_is_decided_anew(host: Host) -> None:
    times = itertools.chain([0.0, 0.0], itertools.repeat(LOOK_SECONDS + 1))
    deriving = Deriving(host.store, host.config, host.metrics, planner=host.asked, clock=lambda: next(times))
    host.asked.actions = [host.fold(1, 5), host.fold(2, 6)]
    await host.look(0.0, deriving)
    assert host.derived() == [(EdgeKind.SKIP_DELTA, 1, 5)]
    await host.look(1.0, deriving)
    assert len(host.asked.budgets) == 2, "what was not begun is decided on again"
    assert len(host.derived()) == 2


async def test_a_daemon_looks_after_all_of_its_runs(host: Host) -> None:
    node = Node(host.config, host.store)
    await node.chores.derive_now()
    assert {kind for kind, _, _ in host.derived()} == {EdgeKind.SKIP_DELTA}


async def test_what_would_be_done_is_told_without_doing_or_spending_anything(host: Host) -> None:
    host.asked.actions = [Fold(host.name(1), host.name(3), (), "for the ladder")]
    host.asked.put_off = (PutOff(CutAnchor(host.name(9), "joining takes too much"), "no work is left"),)
    host.asked.work = 1 << 40
    before = host.versions.records.derived()
    for _ in range(2):
        told = await host.deriving.explain(host.versions, host.view())
        assert [(one.what, one.why, one.put_off) for one in told.decided] == [
            ("fold v000001 → v000003", "for the ladder", ""),
            ("cut an anchor of v000009", "joining takes too much", "no work is left"),
        ]
        assert (told.making, told.rate, told.saved) == ("", 1024, 5 * 1024)
    assert host.versions.records.derived() == before
