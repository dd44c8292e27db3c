"""Making and dropping derived edges in the background, as the policy of the version graph decides.

One thing at a time, in one thread of the lowest priority, and within a budget: `derive_rate` bytes a second on
average, which may be saved up for an hour. Nothing is begun while a checkpoint is published here. Owns the invariant
that no commit, pull or replica waits for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import structlog

from deltad.client.messages import Decided, FleetView, PlanReply
from deltad.config import Config
from deltad.daemon.versions import Versions
from deltad.delta.record import VersionRecord
from deltad.errors import DeltadError
from deltad.ops.metrics import Metrics
from deltad.store.derive import Deriver
from deltad.store.graph import Action, Budget, CutAnchor, Drop, Plan, Reader, VersionGraph, line_to, plan
from deltad.store.mirror import Mirror
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import RunId, Variant, VersionId, parse_version

log = structlog.get_logger()

LOOK_SECONDS = 5.0
"""How often it is asked what there is to do."""
SAVED_SECONDS = 3600.0
"""For how long what may be read is saved up."""
REST_SECONDS = 300.0
"""How long something that could not be made is left alone."""

Planner: TypeAlias = Callable[[VersionGraph, VersionRecord, Sequence[VersionRecord], Sequence[Reader], Budget], Plan]
"""What to do, given a graph, the version that readers want, all versions, who reads what, and what it may cost."""


def by_policy(
    graph: VersionGraph,
    newest: VersionRecord,
    records: Sequence[VersionRecord],
    readers: Sequence[Reader],
    budget: Budget,
) -> Plan:
    """What the policy of `deltad.store.graph` says."""
    sequences = {record.id: record.sequence for record in records}
    parents = {
        record.id: VersionId(RunId(record.run), record.parent)
        for record in records
        if record.parent is not None and not record.parent_run
    }
    return plan(graph, line_to(graph, newest.id, sequences, parents), readers, budget)


class Deriving:
    """Methods belong to the event loop's thread."""

    def __init__(
        self,
        store: Store,
        config: Config,
        metrics: Metrics,
        *,
        planner: Planner = by_policy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._config = config
        self._metrics = metrics
        self._planner = planner
        self._clock = clock
        self._rate = config.daemon.derive_rate
        self._saved = float(self._rate * LOOK_SECONDS)
        self._looked: float | None = None
        self._rests: dict[tuple[RunId, str], float] = {}
        self._doing: dict[RunId, str] = {}
        self._settled: dict[tuple[RunId, Variant], object] = {}
        """What was known when nothing was left to do."""
        self._thread = ThreadPoolExecutor(1, "deltad-deriving", initializer=_yield_to_all_others)

    @property
    def busy(self) -> bool:
        """Whether something is being made now, which cannot be stopped."""
        return bool(self._doing)

    def activity(self, run: RunId) -> str:
        """What is being made of a run, in words, or nothing."""
        return self._doing.get(run, "")

    async def explain(self, versions: Versions, view: FleetView) -> PlanReply:
        """What would be done now, and why. Does nothing, and spends nothing."""
        newest, decided = versions.records.latest(), list[Decided]()
        for part in newest.variants if newest else ():
            assert newest is not None
            mirror, readers = versions.mirror(Variant(part.name)), _readers(view, newest, part.name)
            found = await asyncio.to_thread(self._plan, versions.records, mirror, newest, readers)
            decided += (Decided(part.name, str(action), action.reason) for action in found.actions)
            decided += (Decided(part.name, str(off.action), off.action.reason, off.why) for off in found.put_off)
        making = self.activity(versions.run)
        return PlanReply(versions.run, tuple(decided), making, self._rate, max(0, int(self._saved)))

    async def look(self, versions: Versions, view: FleetView, now: float) -> None:
        """Do what there is to do for one run, within the budget. Raises nothing that concerns one edge."""
        self._earn(now)
        self._rests = {thing: until for thing, until in self._rests.items() if until > now}
        newest = versions.records.latest()
        if newest is None or self._saved <= 0:
            return
        loop = asyncio.get_running_loop()
        for part in newest.variants:
            variant, readers = Variant(part.name), tuple(_readers(view, newest, part.name))
            mirror = versions.mirror(variant)
            facts = newest.version, readers, tuple(versions.records.derived())
            if self._settled.get((versions.run, variant)) == facts:
                continue
            decided = await loop.run_in_executor(self._thread, self._plan, versions.records, mirror, newest, readers)
            begun = self._clock()
            # What is dropped makes room, and takes a moment.
            for action, work in sorted(
                zip(decided.actions, decided.works, strict=True), key=lambda step: not isinstance(step[0], Drop)
            ):
                if self._clock() - begun > LOOK_SECONDS:
                    break  # what was decided is old by now; the next look decides anew
                if (versions.run, str(action)) not in self._rests:
                    self._saved -= work  # what is not begun costs nothing
                    await self._do(versions, variant, action, now)
            if not decided.actions and not decided.put_off:
                self._settled[versions.run, variant] = facts

    def _earn(self, now: float) -> None:
        if self._looked is not None:
            self._saved = min(self._saved + self._rate * (now - self._looked), self._rate * SAVED_SECONDS)
        self._looked = now

    def _plan(self, run: RunStore, mirror: Mirror, newest: VersionRecord, readers: Sequence[Reader]) -> Plan:
        records = run.records()
        state = mirror.layout(newest).weight_bytes
        derived = sum(edge.total_bytes for edge in run.derived() if edge.variant == mirror.variant)

        def decide(graph: VersionGraph) -> Plan:
            anchors = [edge for edge in graph.edges() if edge.base is None and edge.target.run == run.run]
            budget = Budget(
                disk=self._disk(run.run, derived),
                work=int(self._saved),
                state=state,
                anchor=max(anchors, key=lambda edge: edge.target).bytes if anchors else state,
            )
            return self._planner(graph, newest, records, readers, budget)

        return run.ask_graph(mirror.variant, decide)

    def _disk(self, run: RunId, derived: int) -> int:
        """What derived edges of a run may take."""
        declared = self._config.run(run)
        free = derived + max(0, self._store.free_bytes() - 2 * self._store.limits.disk_reserve_bytes) // 2
        return min(declared.derived_bytes, free) if declared and declared.derived_bytes else free

    async def _do(self, versions: Versions, variant: Variant, action: Action, now: float) -> None:
        loop = asyncio.get_running_loop()
        self._doing[versions.run] = f"in the background: {action}"
        try:
            deriver = versions.deriver(variant)
            await loop.run_in_executor(self._thread, self._work, versions.records, deriver, action)
        except DeltadError as error:
            self._rests[versions.run, str(action)] = now + REST_SECONDS
            self._metrics.edge_refused(versions.run, error)
            log.warning("edge_refused", run=versions.run, what=str(action), reason=action.reason, error=str(error))
        finally:
            del self._doing[versions.run]

    def _work(self, records: RunStore, deriver: Deriver, action: Action) -> None:
        """Blocks, in the one thread."""
        started, run = time.monotonic(), records.run
        if isinstance(action, Drop):
            records.drop_edges([action.edge.manifest])
            self._metrics.edge_dropped(run)
            log.info("edge_dropped", run=run, what=str(action), reason=action.reason, bytes=action.edge.bytes)
            return
        if isinstance(action, CutAnchor):
            made = deriver.cut_anchor(action.version.version, action.reason)
        else:
            made = deriver.make_edge(action.base.version, action.target.version)
        seconds = time.monotonic() - started
        self._metrics.edge_made(run, made.edge.kind, made.edge.total_bytes, seconds)
        log.info(
            "edge_made",
            run=run,
            what=str(action),
            how=made.how,
            reason=action.reason,
            bytes=made.edge.total_bytes,
            seconds=round(seconds, 3),
        )


def _readers(view: FleetView, newest: VersionRecord, variant: str) -> list[Reader]:
    """Who holds which version of a run, as far as it is known, and where it is led; those who are alike together."""
    run = RunId(newest.run)
    own, *below = [region for region in view.regions if region.fresh]
    held = [("region", region.report.runs[run].latest, "", bool(region.report.runs[run].awaits)) for region in below]
    for region in (own, *below):
        report = region.report.runs[run]
        target = report.target.version if report.target else ""
        held += [
            ("replica", replica.version, target, False) for replica in report.replicas if replica.variant == variant
        ]
    return [
        Reader(
            f"{count} {kind}s" if count > 1 else f"a {kind}",
            VersionId(run, parse_version(version)) if version else None,
            VersionId(run, parse_version(target)) if target else newest.id,
            count,
            alone=alone,
        )
        for (kind, version, target, alone), count in Counter(held).items()
    ]


def _yield_to_all_others() -> None:
    """Linux gives every thread a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
