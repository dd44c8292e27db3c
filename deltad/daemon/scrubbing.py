"""The scrub beside everything else: at its pace, at low priority, and healing what it finds.

A damaged object is fetched from an upstream that brings its run, or else made again from weights that are here; a
damaged generation of a mirror is made anew from the store's own chunks. Owns one invariant: whatever cannot be
healed is told of, with what follows from it, for as long as that is so; and is tried again.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import structlog

from deltad.client.messages import DamageView, ScrubView
from deltad.config import ScrubConfig
from deltad.errors import DeltadError
from deltad.ops.metrics import Metrics
from deltad.protocol.pull_plan import Kind
from deltad.relay.puller import Puller
from deltad.store.mirror import Mirror
from deltad.store.needs import Need, find_needs, unreachable
from deltad.store.quarantine import SetAside
from deltad.store.rederive import Rederiver
from deltad.store.scrub import Pace, Pacer
from deltad.store.scrubber import Piece, Renewed, Scrubber, renew
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version, VersionId

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

FIRST_REST, LONGEST_REST = 1.0, 600.0
"""Seconds between two tries to heal what is damaged: twice as many each time."""
_POLL_SECONDS = 1.0
_LOWEST_PRIORITY = 19
SHOWN = 20
"""How much damage is told of one by one."""
_REMEDY = (
    "they are fetched once an upstream has them; where the run is published, the next version is stored whole, and "
    "newcomers start from that"
)


class Scrubbing:
    """One store's scrub. Methods belong to the event loop's thread.

    `mirrors` gives all mirrors of the store, and `rederiver` what makes objects of a variant of a run again.
    """

    def __init__(
        self,
        store: Store,
        config: ScrubConfig,
        metrics: Metrics,
        pullers: Sequence[Puller],
        *,
        mirrors: Callable[[], Sequence[Mirror]],
        rederiver: Callable[[RunId, str], Rederiver],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._config = config
        self._metrics = metrics
        self._pullers = pullers
        self._mirrors = mirrors
        self._rederiver = rederiver
        self._clock = clock
        self._pacer = Pacer(Pace(max(config.every, 1.0), config.budget), clock())
        self._scrubber = Scrubber(store)
        self._worker: ThreadPoolExecutor | None = None
        self._read = 0
        self._due = 0.0
        self._rest = FIRST_REST
        self._known: set[Digest] = set()
        self._needs: dict[Digest, Need] = {}
        self._names: dict[Digest, str] = {}
        self._unrenewed: dict[tuple[str, Version], Renewed] = {}
        self._mended: deque[DamageView] = deque(maxlen=SHOWN)
        self._found = self._healed = 0
        self._told = (0, 0)
        self._consequences = ""
        self.problem = ""
        """Why this daemon is not well: newcomers cannot be given the newest version, or a mirror is damaged."""

    async def run(self) -> None:
        """Scrub for ever."""
        loop = asyncio.get_running_loop()
        worker = self._worker = ThreadPoolExecutor(1, thread_name_prefix="deltad-scrub", initializer=_give_way)
        try:
            while True:
                rest = await self.turn()
                await asyncio.sleep(min(rest, _POLL_SECONDS))
        finally:
            # What has begun ends before the loop's own threads have ended, and so before the store is closed.
            self._worker = None
            loop.run_in_executor(None, self._end, worker)

    def _end(self, worker: ThreadPoolExecutor) -> None:
        worker.shutdown(cancel_futures=True)
        self._scrubber.save()

    async def turn(self) -> float:
        """Do what is due; returns for how many seconds nothing is."""
        for digest in self._store.objects.suspects():
            if mended := await self._aside(self._scrubber.examine, digest):
                self._mend(mended)
        await self._heal(self._clock())
        if not self._config.every:
            return _POLL_SECONDS
        busy = self._store.leases.oldest_work() is not None
        rest = self._pacer.rest(self._clock(), self._scrubber.total, busy=busy)
        if rest:
            return rest
        piece = await self._aside(self._scrubber.step, self._mirrors())
        if piece is not None:
            self._take(piece)
        self._tell()
        return 0.0 if piece is not None else _POLL_SECONDS

    def view(self) -> ScrubView:
        """What `deltad status` shows of it."""
        asides = self._store.objects.quarantine.entries()
        damaged = [one for one in asides if not one.healed]
        lost = [*map(_generation, self._unrenewed.values()), *map(self._damage, damaged[:SHOWN])]
        healed = [*self._mended, *(self._damage(one) for one in asides[len(damaged) :][:SHOWN])]
        if not self._config.every:
            activity = "reads nothing, as configured"
        elif self._store.leases.oldest_work() is not None:
            activity = "gives way to other work"
        else:
            activity = "reads"
        return ScrubView(
            covered=self._scrubber.progress.covered,
            read_bytes=self._read,
            total_bytes=self._scrubber.total,
            activity=activity,
            damaged=len(damaged) + len(self._unrenewed),
            damage=(*lost[:SHOWN], *healed[:SHOWN]),
            consequences=self._consequences,
        )

    def _take(self, piece: Piece) -> None:
        self._pacer.read(piece.bytes)
        self._read += piece.bytes
        self._metrics.scrubbed(piece.bytes)
        if piece.mended:
            self._mend(piece.mended)
        if piece.renewed is not None:
            self._renewed(piece.renewed)

    def _renewed(self, renewed: Renewed) -> None:
        key = (renewed.mirror, renewed.version)
        known, told = key in self._unrenewed, {"mirror": renewed.mirror, "version": str(renewed.version)}
        self._found += not known
        if renewed.problem:
            self._unrenewed[key] = renewed
            if not known:
                log.error("mirror_damaged", **told, wrong=_listed(renewed.wrong), problem=renewed.problem)
                self._soon()
            return
        self._unrenewed.pop(key, None)
        log.warning("mirror_healed", **told, wrong=_listed(renewed.wrong))
        self._healed += 1
        self._mended.appendleft(_generation(renewed))

    def _mend(self, files: str) -> None:
        """A record, or what lies around a chunk, was damaged and is written anew."""
        log.warning("file_mended", files=files)
        self._found += 1
        self._healed += 1
        self._mended.appendleft(DamageView("a record, or what lies around a chunk", files, True, "written anew"))

    # Healing.

    def _soon(self) -> None:
        self._due, self._rest = 0.0, FIRST_REST

    async def _heal(self, now: float) -> None:
        """Try to heal what is damaged, if that is due."""
        damaged = set(self._store.objects.quarantine.damaged())
        if damaged - self._known:
            self._soon()
        self._known = damaged
        if not damaged and not self._unrenewed:
            self._needs, self._consequences, self.problem = {}, "", ""
            return
        if now < self._due:
            return
        while damaged:
            self._needs = await self._aside(find_needs, self._store, damaged)
            self._names |= {digest: f"{need}" for digest, need in self._needs.items()}
            for need in self._needs.values():
                await self._fetch(need)
            await self._make_again()
            left = set(self._store.objects.quarantine.damaged())
            if left == damaged:
                break
            damaged = left  # what was healed may tell what the others are
        await self._renew_mirrors()
        await self._aside(self._conclude)
        self._due, self._rest = self._clock() + self._rest, min(2 * self._rest, LONGEST_REST)
        self._tell()

    async def _fetch(self, need: Need) -> None:
        """From the first upstream that has it."""
        put = self._store.put_chunk if need.wanted.kind is Kind.CHUNK else self._store.put
        for puller in self._pullers:
            if not puller.follows(need.version.run):
                continue
            try:
                data = await puller.fetch(need.wanted)
                await self._aside(put, data)
            except DeltadError as error:
                log.info("damaged_object_not_fetched", object=str(need.wanted), upstream=puller.url, error=str(error))
            else:
                return

    async def _make_again(self) -> None:
        """What no upstream gave, from weights that are here."""
        damaged = set(self._store.objects.quarantine.damaged())
        groups: dict[tuple[VersionId, str], list[Need]] = {}
        for digest, need in self._needs.items():
            if digest in damaged:
                groups.setdefault((need.version, need.variant), []).append(need)
        for (version, variant), needs in groups.items():
            try:
                record = self._store.run(version.run).record(version.version)
                await self._aside(self._rederiver(version.run, variant).make, record, needs)
            except DeltadError as error:
                log.info("not_made_again", version=str(version), error=str(error))

    async def _renew_mirrors(self) -> None:
        mirrors = {mirror.name: mirror for mirror in self._mirrors()}
        for key, failed in list(self._unrenewed.items()):
            mirror = mirrors.get(failed.mirror)
            if mirror is None or not await self._aside(mirror.has_generation, failed.version):
                del self._unrenewed[key]  # let go of, or replaced
                continue
            self._renewed(await self._aside(renew, mirror, failed.version, failed.wrong))

    def _conclude(self) -> None:
        """Say what follows from the damage that is left."""
        left = set(self._store.objects.quarantine.damaged())
        told, problems = [], []
        for run in sorted({need.version.run for digest, need in self._needs.items() if digest in left}):
            if not (lost := unreachable(self._store, run, left)):
                continue
            told.append(
                f"no newcomer can be given {run}/{lost[0]}"
                + (f" to {lost[-1]} ({len(lost)} versions)" if len(lost) > 1 else "")
                + "; those that hold them go on"
            )
            latest = self._store.run(run).latest()
            if latest is not None and latest.version in lost:
                problems.append(f"{told[-1]}; {_REMEDY}")
        problems += [
            f"the mirror of {one.mirror} is damaged at {one.version} ({_listed(one.wrong)}) and cannot be made anew: "
            f"{one.problem}"
            for one in self._unrenewed.values()
        ]
        if (problem := "; ".join(problems)) and problem != self.problem:
            log.error("damage_not_healed", problem=problem)
        self._consequences, self.problem = "; ".join(told), problem
        shown = {one.digest for one in self._store.objects.quarantine.entries()}
        self._names = {digest: name for digest, name in self._names.items() if digest in shown}

    def _damage(self, one: SetAside) -> DamageView:
        name = self._names.get(one.digest, "")
        detail = one.difference
        if not one.healed and not name:
            detail = "no version leads to it; a collection drops it"
        return DamageView(name or f"object {one.digest.hex()}", one.place, one.healed, detail)

    def _tell(self) -> None:
        quarantine = self._store.objects.quarantine
        found, healed = quarantine.found + self._found, quarantine.mended + self._healed
        self._metrics.damage(
            found=found - self._told[0],
            healed=healed - self._told[1],
            unhealed=len(quarantine.damaged()) + len(self._unrenewed),
            covered=self._scrubber.progress.covered,
        )
        self._told = found, healed

    async def _aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In the scrub's own thread, which gives way to all others."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, lambda: work(*args, **kwargs))


def _generation(renewed: Renewed) -> DamageView:
    detail = _listed(renewed.wrong)
    if renewed.problem:
        detail += f"; not healed: {renewed.problem}"
    return DamageView(f"mirror of {renewed.mirror}", f"{renewed.version}", not renewed.problem, detail)


def _listed(wrong: Sequence[str]) -> str:
    """The first few tensors that are wrong."""
    more = len(wrong) - SHOWN
    return "; ".join(wrong[:SHOWN]) + (f"; and {more} more tensors" if more > 0 else "")


def _give_way() -> None:
    """Let this thread, and those that it starts, run when nobody else wants to."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
