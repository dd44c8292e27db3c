"""The heartbeats that this daemon gives to others: those of its own runs, and the newest of those that it has heard.

Owns one invariant: the numbers of a run that is published here grow over restarts, whatever a kill takes: each life
reserves its own before it makes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import structlog

from deltad.delta import FORMAT
from deltad.delta.heartbeat import Heartbeat
from deltad.delta.keys import SigningKey
from deltad.delta.signing import sign
from deltad.errors import DeltadError
from deltad.store.disk import make_directory, read_file, write_durably
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import RunId

log = structlog.get_logger()

BEAT_SECONDS = 5.0
"""How old one of its own may be when it is given away."""
_LIFE = 1 << 32
"""How many numbers a life reserves: one every five seconds lasts for 680 years."""


class Heartbeats:
    """Those of one daemon. `published` are the runs that `key` speaks for. `make_ready` may block."""

    def __init__(
        self,
        store: Store,
        published: tuple[RunId, ...],
        key: SigningKey | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._published = published if key is not None else ()
        self._key = key
        self._clock = clock
        self._next: dict[RunId, int] = {}
        self._made: dict[RunId, tuple[float, Heartbeat]] = {}
        self._heard: dict[RunId, Heartbeat] = {}

    def make_ready(self) -> None:
        """Reserve the numbers of this life. A run whose numbers cannot be had goes without; that is logged."""
        for run in self._published:
            try:
                self._next[run] = _reserve(self._store.run(run), self._store)
            except DeltadError as error:
                log.error("no_heartbeat", run=run, error=str(error))

    def heard(self, beat: Heartbeat) -> None:
        """One came from an upstream, and was checked."""
        run = RunId(beat.run)
        if run not in self._heard or beat.number > self._heard[run].number:
            self._heard[run] = beat

    def give(self, run: RunId) -> bytes | None:
        """The newest of a run, for whoever asks; None if there is none."""
        if run not in self._next:
            return self._heard[run].encode() if run in self._heard else None
        now, latest = self._clock(), self._store.run(run).latest()
        version = None if latest is None else latest.version
        made = self._made.get(run)
        if made is None or now - made[0] >= BEAT_SECONDS or made[1].latest != version:
            assert self._key is not None
            made = now, sign(Heartbeat(FORMAT, run, self._next[run], version), self._key)
            self._next[run] += 1
            self._made[run] = made
        return made[1].encode()


def _reserve(run: RunStore, store: Store) -> int:
    """The first number of this life; durable before it is used. Raises StoreError."""
    path = run.directory / "heartbeat"
    first = 1
    if store.files.entry(path) is not None:
        try:
            first = max(1, msgspec.json.decode(read_file(path, store.files), type=int))
        except msgspec.DecodeError:
            log.warning("heartbeat_numbers_lost", run=run.run, path=str(path))
    make_directory(run.directory, store.files)
    write_durably(path, msgspec.json.encode(first + _LIFE), scratch=store.scratch, files=store.files)
    return first
