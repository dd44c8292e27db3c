"""Removing from a bucket what no pointer there leads to any more. Only the daemon that owns the prefix does.

Owns one invariant: an object is removed only if this life of the daemon has seen, all through the grace, that no
pointer leads to it; so whoever read a pointer before it changed has that long to fetch what it named. The time is
monotonic, and a restart begins it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from deltad.store.bucket.index import OBJECTS, RUNS, object_key, object_of, run_of
from deltad.store.bucket.twin import Twin
from deltad.types import Digest, RunId

log = structlog.get_logger()


class Unneeded:
    """Since when each object has been seen without a pointer that leads to it. Pure; times are monotonic seconds."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._since: dict[Digest, float] = {}

    def due(self, listed: Collection[Digest], needed: Collection[Digest], now: float) -> list[Digest]:
        """What is to be removed now. Objects that are needed again, or gone, are forgotten."""
        self._since = {digest: self._since.get(digest, now) for digest in listed if digest not in needed}
        return [digest for digest, since in self._since.items() if now - since >= self._grace]


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: objects removed, and those that pointers lead to and that were gone, and were brought again."""

    removed: int
    restored: int


class Sweep:
    """One prefix. `grace` in seconds; `clock` gives monotonic seconds."""

    def __init__(self, twin: Twin, *, grace: float, clock: Callable[[], float]) -> None:
        self._twin = twin
        self._clock = clock
        self._unneeded = Unneeded(grace)

    async def run(self) -> Swept:
        """Look at everything below the prefix. Removes nothing where a pointer or a description cannot be read.

        Raises what the bucket and the store raise; then the next one goes on.
        """
        bucket = self._twin.bucket
        await self._twin.check_claim()
        listed = {digest async for key in bucket.keys(OBJECTS) if (digest := object_of(key)) is not None}
        # Pointers are read after the objects were listed: what one of them names by now is needed.
        needed: dict[Digest, RunId] = {}
        for run in [run async for key in bucket.keys(RUNS) if (run := run_of(key)) is not None]:
            if (index := await self._twin.index(run)) is not None:
                needed |= dict.fromkeys(await self._twin.objects_of(index), run)
        restored = 0
        for digest in needed.keys() - listed:
            await self._twin.bring(needed[digest], [digest])
            restored += 1
        due = self._unneeded.due(listed, needed, self._clock())
        for digest in due:
            await bucket.remove(object_key(digest))
        if due or restored:
            log.info("bucket_swept", bucket=bucket.url, removed=len(due), restored=restored)
        return Swept(len(due), restored)
