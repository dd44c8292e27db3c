"""The version graph, measured: how long planning takes over 100,000 versions, and what it saves somebody who lags.

Planning is timed in the CPU time of one thread, over a graph that is in memory: a run with a ladder of skip deltas and
an anchor every thousand versions. What a laggard pulls is measured with real deltas (`bench.lag`).
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench import lag
from bench.codec import fast_backend
from bench.harness import Measurement, Spec, skipped
from bench.timing import RUNS, seconds
from deltad.delta.coding import Coder
from deltad.delta.manifest import EdgeKind
from deltad.errors import NotFoundError
from deltad.store.graph import Budget, Edge, Reader, VersionGraph, plan
from deltad.store.graph.policy import GROWTH
from deltad.types import Digest, RunId, Version, VersionId

PATHS = (
    "deltad/store/graph",
    "deltad/delta",
    "deltad/limits.py",
    *(f"bench/{name}" for name in ("graph.py", "lag.py", "simulated.py", "subject.py", "timing.py")),
)

VERSIONS = 100_000
PART, QUICK_PART = 11, 44
"""Of a simulated layer's rows: 4.1 M weights, and a quarter of that."""

_SINGLE, _ANCHOR = 80_000_000, 10_000_000_000
_ANCHOR_EVERY = 1000
_QUESTIONS = (
    "newcomer",
    "one behind",
    "100 behind",
    "50,000 behind",
    "rolled back by 100",
    "rolled back by 50,000",
    "edges lacking, 1,000 behind",
    "unreachable",
)


def _ms(name: str, must: float | None = None) -> Spec:
    return Spec(name=name, unit="ms", direction="min", must=must)


SPECS = (
    *(_ms(f"plan, {question}", 50) for question in _QUESTIONS),
    _ms("plan, the slowest of all", 50),
    _ms("plan, 50,000 behind, nothing asked before"),
    _ms("add one version and plan to it", 50),
    _ms("decide what to fold, cut and drop"),
    Spec(name="memory of the graph", unit="MiB", direction="min"),
    *lag.SPECS,
)


def measure(quick: bool) -> Iterator[Measurement]:
    """All rows. Raises whatever goes wrong."""
    before = _resident()
    large = Large()
    grown = (_resident() - before) / 2**20
    note = f"{VERSIONS:,} versions, {sum(1 for _ in large.graph.edges()):,} edges"
    cold = seconds(lambda: large.ask("50,000 behind"))
    slowest = 0.0
    for question in _QUESTIONS:
        hops = large.ask(question)
        times = [1e3 * seconds(lambda question=question: large.ask(question)) for _ in range(RUNS)]
        slowest = max(slowest, *times)
        said = "refused, and what is missing is said" if hops is None else f"{hops} edges"
        yield _row(f"plan, {question}", times, said)
    yield Measurement(name="plan, the slowest of all", value=slowest, runs=RUNS * len(_QUESTIONS), note=note)
    yield Measurement(
        name="plan, 50,000 behind, nothing asked before", value=1e3 * cold, runs=1, note="surveys all cells"
    )
    yield _row(
        "add one version and plan to it", [1e3 * seconds(large.publish) for _ in range(RUNS)], "from the one before"
    )
    yield _row(
        "decide what to fold, cut and drop", [1e3 * seconds(large.decide) for _ in range(RUNS)], "with ten readers"
    )
    yield Measurement(name="memory of the graph", value=grown, runs=1, note=f"resident, {note}")
    coder, why_not = fast_backend()
    if coder is None:
        yield from (skipped(spec.name, why_not) for spec in lag.SPECS)
    else:
        yield from lag.measure(coder, part=QUICK_PART if quick else PART)


class Large:
    """A run of 100,000 versions whose ladder is complete, and questions about it."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._serial = 0
        self.graph = VersionGraph("bf16")
        self.line: list[tuple[int, VersionId]] = []
        self._powers: list[list[float]] = []
        for _ in range(VERSIONS):
            self._one_more()
        edges = list(self.graph.edges())
        self._lacking: dict[Digest, int | None] = {
            edge.manifest: None for edge in self._rng.sample(edges[-4000:], 100) if edge.base is not None
        }

    def ask(self, question: str) -> int | None:
        """How many edges the answer has; None where there is none."""
        newest = len(self.line) - 1
        at = lambda back: self.line[newest - back][1]  # noqa: E731
        try:
            match question:
                case "newcomer":
                    path = self.graph.path(at(0))
                case "rolled back by 100" | "rolled back by 50,000":
                    back = 100 if question.endswith(" 100") else 50_000
                    path = self.graph.path(at(back + 37), {at(37)}, backwards=True)
                case "edges lacking, 1,000 behind":
                    path = self.graph.path(at(0), {at(1000)}, left=self._lacking)
                case "unreachable":
                    path = self.graph.path(at(0), anchors=False)
                case _:
                    back = {"one behind": 1, "100 behind": 100, "50,000 behind": 50_000}[question]
                    path = self.graph.path(at(0), {at(back)})
        except NotFoundError:
            return None
        return len(path.hops)

    def publish(self) -> None:
        """One more version, with what its rungs are, and the path to it."""
        self._one_more()
        self.graph.path(self.line[-1][1], {self.line[-2][1]})

    def decide(self) -> None:
        """All that the policy decides, for ten readers at various distances."""
        newest = self.line[-1][1]
        readers = [Reader(f"region-{i}", self.line[-1 - 3 * i * i][1], newest) for i in range(10)]
        plan(self.graph, self.line, readers, Budget(None, _ANCHOR, None, _ANCHOR))

    def _one_more(self) -> None:
        sequence = len(self.line) + 1
        version = VersionId(RunId("policy"), Version(1, sequence))
        self.graph.add_version(version, sequence)
        if sequence % _ANCHOR_EVERY == 1:
            self._add(EdgeKind.ANCHOR, None, version, _ANCHOR)
        if self.line:
            power = (_SINGLE * self._rng.uniform(0.8, 1.25)) ** (1 / GROWTH)
            self._add(EdgeKind.DELTA, self.line[-1][1], version, power**GROWTH)
            self._rungs(version, sequence, power)
        self.line.append((sequence, version))

    def _rungs(self, version: VersionId, sequence: int, power: float) -> None:
        """Sizes add up as `deltad.store.graph.policy.estimate` has it."""
        level, span = 0, 2
        while sequence % span == 0 and sequence > span:
            if level == len(self._powers):
                self._powers.append([])
            power += self._powers[level].pop() if self._powers[level] else power
            self._add(EdgeKind.SKIP_DELTA, self.line[sequence - span - 1][1], version, power**GROWTH)
            level, span = level + 1, span * 2
        if level < len(self._powers):
            self._powers[level].append(power)
        else:
            self._powers.append([power])

    def _add(self, kind: EdgeKind, base: VersionId | None, target: VersionId, size: float) -> None:
        self._serial += 1
        coders = (int(Coder.PACKED if base is None else Coder.BLIND),)
        manifest = Digest(self._serial.to_bytes(32, "big"))
        self.graph.add(Edge(kind, base, target, manifest, 1000, int(size), coders, kind is EdgeKind.SKIP_DELTA))


def _row(name: str, times: list[float], note: str) -> Measurement:
    return Measurement(
        name=name, value=statistics.median(times), spread=(min(times), max(times)), runs=len(times), note=note
    )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
