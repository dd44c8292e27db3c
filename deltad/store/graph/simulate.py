"""A year of a run, hour by hour: what the policy does to a graph, and what its readers then pull. Pure, seeded.

Every hour a version is published, the policy plans and is obeyed, and readers that are there pull: some are gone for
hours or weeks, some join late, and at times all are rolled back. Sizes follow the law that the policy estimates by
(`GROWTH`), with noise of their own; nothing here has seen a weight.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from deltad.delta.coding import Coder
from deltad.delta.manifest import EdgeKind
from deltad.store.graph.actions import Action, Budget, CutAnchor, Drop, Encode, Fold, Reader
from deltad.store.graph.edge import Edge, Path
from deltad.store.graph.policy import estimate, plan
from deltad.store.graph.versions import VersionGraph
from deltad.types import Digest, RunId, Version, VersionId

_MANIFEST = 1000
_JITTER = 0.15
_SAVED_UP = 24


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. Chances are per hour; `away` is the mean number of hours that a reader is gone for.

    `state` are the bytes of the weights, `anchor` and `delta` those of their edges. `disk` and `work` bound derived
    edges as in `Budget`, `work` by the hour. `keep` is how many versions are kept. `context` is the share of deltas
    that do not fold without weights.
    """

    hours: int = 365 * 24
    readers: int = 6
    state: int = 14_000_000_000
    anchor: int = 10_000_000_000
    delta: int = 80_000_000
    disk: int = 60_000_000_000
    work: int = 4_000_000_000
    keep: int = 1000
    leaving: float = 0.02
    away: float = 40.0
    joining: float = 0.01
    rolling_back: float = 0.002
    context: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of it. Bytes, but where another unit is named.

    `pulled` is by kind of edge, `snapshots` what full copies would have taken, `made` how often what was decided.
    `work` is what was read to make derived edges, `granted` what might have been. `again` counts the anchors that were
    pulled by readers that held a version; `last` is what was decided in the last day.
    """

    scenario: Scenario
    pulls: int = 0
    pulled: dict[str, int] = field(default_factory=dict)
    snapshots: int = 0
    made: dict[str, int] = field(default_factory=dict)
    work: int = 0
    granted: int = 0
    stored: int = 0
    stored_edges: int = 0
    most_derived: int = 0
    most_hops: int = 0
    most_lag: int = 0
    most_catch_up: int = 0
    joins: int = 0
    most_join: int = 0
    most_join_hops: int = 0
    again: int = 0
    last: list[tuple[int, Action]] = field(default_factory=list)

    @property
    def saved(self) -> float:
        """The share of bytes that were not pulled, against full copies."""
        return 1 - sum(self.pulled.values()) / self.snapshots if self.snapshots else 0.0


def simulate(scenario: Scenario) -> Outcome:
    """Run it. A year takes about a minute."""
    return _World(scenario).run()


@dataclass(slots=True)
class _Region:
    name: str
    held: VersionId | None = None
    away: int = 0


class _World:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = random.Random(scenario.seed)  # noqa: S311 - a simulation, no secret
        self._graph = VersionGraph("bf16")
        self._line: list[tuple[int, VersionId]] = []
        self._regions = [_Region(f"region-{i}") for i in range(scenario.readers)]
        self._singles: dict[VersionId, int] = {}
        self._serial = 0
        self._allowance = 0
        self._held_back = 0
        self._outcome = Outcome(scenario)

    def run(self) -> Outcome:
        for hour in range(1, self._scenario.hours + 1):
            self._publish(hour)
            self._forget()
            self._churn()
            self._obey(hour)
            self._pull()
        edges = list(self._graph.edges())
        self._outcome.stored_edges = len(edges)
        self._outcome.stored = sum(edge.bytes for edge in edges)
        return self._outcome

    def _publish(self, hour: int) -> None:
        version = VersionId(RunId("policy"), Version(1, hour))
        if not self._line:
            self._add(EdgeKind.ANCHOR, None, version, self._scenario.anchor, derived=False)
        else:
            delta = round(self._scenario.delta * self._rng.lognormvariate(0, _JITTER))
            self._singles[version] = delta
            coder = Coder.CONTEXT if self._rng.random() < self._scenario.context else Coder.BLIND
            self._add(EdgeKind.DELTA, self._line[-1][1], version, delta, coder=coder, derived=False)
        self._line.append((hour, version))

    def _forget(self) -> None:
        """Let go of versions that are not kept, as far as what is kept does not need them to be rebuilt."""
        beyond = self._line[: -self._scenario.keep]
        anchored = [
            i
            for i, (_, version) in enumerate(self._line[: len(beyond) + 1])
            if any(edge.base is None for edge in self._graph.edges_to(version))
        ]
        if anchored and anchored[-1]:
            for _, version in self._line[: anchored[-1]]:
                self._graph.remove_version(version)
            del self._line[: anchored[-1]]

    def _churn(self) -> None:
        rng, scenario = self._rng, self._scenario
        for region in self._regions:
            if region.away:
                region.away -= 1
            elif rng.random() < scenario.leaving:
                region.away = 1 + round(rng.expovariate(1 / scenario.away))
            if region.held is not None and rng.random() < scenario.joining / len(self._regions):
                region.held = None
        self._held_back = max(self._held_back - 1, 0)
        if not self._held_back and rng.random() < scenario.rolling_back:
            self._held_back = 1 + round(rng.expovariate(1 / 4))

    def _target(self) -> VersionId:
        """The newest version; or while the fleet is rolled back, one that is a little older."""
        return self._line[-1 - 2 * self._held_back if 2 * self._held_back < len(self._line) else 0][1]

    def _present(self) -> list[_Region]:
        return [region for region in self._regions if not region.away]

    def _obey(self, hour: int) -> None:
        scenario, outcome = self._scenario, self._outcome
        # What is not used is not saved up for ever.
        self._allowance = min(self._allowance + scenario.work, _SAVED_UP * scenario.work)
        readers = [Reader(region.name, region.held, self._target()) for region in self._present()]
        planned = plan(
            self._graph, self._line, readers, Budget(scenario.disk, self._allowance, scenario.state, scenario.anchor)
        )
        self._allowance -= planned.work
        outcome.work += planned.work
        outcome.granted += scenario.work
        for action in planned.actions:
            self._do(action)
            name = type(action).__name__
            outcome.made[name] = outcome.made.get(name, 0) + 1
            if hour > scenario.hours - 24:
                outcome.last.append((hour, action))
        derived = sum(edge.bytes for edge in self._graph.edges() if edge.derived)
        outcome.most_derived = max(outcome.most_derived, derived)

    def _do(self, action: Action) -> None:
        match action:
            case Drop(edge):
                self._graph.remove(edge.manifest)
            case CutAnchor(version):
                self._add(EdgeKind.ANCHOR, None, version, self._scenario.anchor)
            case Fold(base, target, parts):
                self._add(EdgeKind.SKIP_DELTA, base, target, estimate([part.bytes for part in parts]))
            case Encode(base, target):
                self._add(EdgeKind.SKIP_DELTA, base, target, self._between(base, target))

    def _between(self, base: VersionId, target: VersionId) -> int:
        """The bytes of a delta between any two versions."""
        low, high = sorted((base.version.number, target.version.number))
        return estimate([self._singles[VersionId(base.run, Version(1, n))] for n in range(low + 1, high + 1)])

    def _pull(self) -> None:
        outcome, target = self._outcome, self._target()
        for region in self._present():
            if region.held == target:
                continue
            starts = set() if region.held is None else {region.held}
            path = self._graph.path(target, starts, backwards=True)
            outcome.pulls += 1
            outcome.snapshots += self._scenario.anchor
            for hop in path.hops:
                kind = str(hop.edge.kind)
                outcome.pulled[kind] = outcome.pulled.get(kind, 0) + hop.edge.bytes
            self._note(region, target, path)
            region.held = target

    def _note(self, region: _Region, target: VersionId, path: Path) -> None:
        outcome = self._outcome
        if path.start is None:
            outcome.joins += 1
            outcome.again += region.held is not None
            outcome.most_join = max(outcome.most_join, path.bytes)
            outcome.most_join_hops = max(outcome.most_join_hops, len(path.hops))
            return
        lag = abs(target.version.number - path.start.version.number)
        outcome.most_hops = max(outcome.most_hops, len(path.hops))
        outcome.most_lag = max(outcome.most_lag, lag)
        outcome.most_catch_up = max(outcome.most_catch_up, path.bytes)

    def _add(
        self,
        kind: EdgeKind,
        base: VersionId | None,
        target: VersionId,
        size: int,
        *,
        coder: Coder = Coder.BLIND,
        derived: bool = True,
    ) -> None:
        self._serial += 1
        manifest = Digest(self._serial.to_bytes(32, "big"))
        self._graph.add(Edge(kind, base, target, manifest, _MANIFEST, size + _MANIFEST, (int(coder),), derived))
