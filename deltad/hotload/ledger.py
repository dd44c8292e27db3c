"""What was loaded into a deployment, and what may be loaded next. Pure: told the time, asked for decisions.

Owns three invariants: at most one load is under way; an identity means the same bytes for ever; and a delta is taken on
what is served, at the end of a chain that begins with a full snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from deltad.client.messages import Cache
from deltad.errors import PreconditionError, UsageError

MOST_DELTAS = 128
"""Deltas after a full snapshot."""
IDENTITY_CHARACTERS = 128
INITIAL = "initial"
"""What the weights are called that were served before any load."""
_KEPT = 4096


class LoadState(StrEnum):
    """Where a load is. Those after `in-progress` are ends."""

    PENDING = "pending"
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def is_end(self) -> bool:
        return self not in (LoadState.PENDING, LoadState.IN_PROGRESS)


class ReplicaLoad(StrEnum):
    """How far a replica is with a load. `ready` is verified: it has read the version back from its engine."""

    PENDING = "pending"
    UPDATING = "updating"
    READY = "ready"
    ERROR = "error"


class ReplicaStatus(msgspec.Struct, frozen=True):
    """A replica as a load sees it; `region` is the daemon that it is at, `identity` what it serves, as read back."""

    region: str
    replica: str
    state: ReplicaLoad
    identity: str = ""
    error: str = ""
    ready_at: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """One load. `base` is the identity that a delta applies to, empty for a full snapshot. Times are Unix seconds.

    `version` is there once it is durable; `files` are the snapshot's, name → (size, tag in the bucket); `replicas` are
    as they were at the end.
    """

    id: str
    identity: str
    base: str
    files: dict[str, tuple[int, str]]
    created: float
    updated: float
    cache: Cache = ""
    by: str = ""
    state: LoadState = LoadState.PENDING
    finished: float = 0.0
    version: str = ""
    reason: str = ""
    replicas: tuple[ReplicaStatus, ...] = ()


def check_identity(identity: str) -> str:
    """Raises UsageError for what cannot be an identity."""
    plain = identity.isprintable() and "/" not in identity and identity not in (".", "..")
    if not 1 <= len(identity) <= IDENTITY_CHARACTERS or not plain:
        raise UsageError(
            f"identity {identity[:160]!r}", expected=f"one path segment of 1 to {IDENTITY_CHARACTERS} characters"
        )
    if identity == INITIAL:
        raise UsageError(f"identity {INITIAL!r}", found="the name of the weights that were served before any load")
    return identity


class Ledger(msgspec.Struct, frozen=True):
    """The loads of a deployment, oldest first. Every change is a new ledger. `since`: loads before that are forgotten
    as bases (Unix seconds)."""

    loads: tuple[Load, ...] = ()
    since: float = 0.0

    @property
    def active(self) -> Load | None:
        """The one that is under way."""
        return next((load for load in reversed(self.loads) if not load.state.is_end), None)

    @property
    def served(self) -> Load | None:
        """The last one that completed: what a delta must be made on."""
        return next((load for load in reversed(self.loads) if load.state is LoadState.COMPLETED), None)

    def find(self, load_id: str) -> Load | None:
        return next((load for load in self.loads if load.id == load_id), None)

    def latest_of(self, identity: str) -> Load | None:
        """The newest load of an identity whose version became durable, else the newest of all."""
        mine = [load for load in reversed(self.loads) if load.identity == identity]
        return next((load for load in mine if load.version), mine[0] if mine else None)

    def chain(self, load: Load) -> list[Load]:
        """From the full snapshot to this one, as far as it is known."""
        found = [load]
        while found[0].base and len(found) <= _KEPT:
            before = self.latest_of(found[0].base)
            if before is None or before in found:
                break
            found.insert(0, before)
        return found

    def begin(self, load: Load) -> tuple[Ledger, Load]:
        """Take in a new load; returns the one that is to be followed, which may have begun before.

        Raises UsageError for an id that means something else, PreconditionError for a load that cannot be now.
        """
        if known := self.find(load.id):
            if (known.identity, known.base, known.cache) != (load.identity, load.base, load.cache):
                raise UsageError(f"hot load {load.id}", expected=f"identity {known.identity!r}, as it was begun")
            return self, known
        if active := self.active:
            raise PreconditionError(
                f"hot load of {load.identity!r}",
                found=f"another one is already in progress: {active.id} ({active.identity!r})",
                hint="wait for it, or cancel it",
            )
        self.check_same(load.identity, load.files)
        if load.base:
            self._check_base(load)
        return self._with(load), load

    def check_same(self, identity: str, files: Mapping[str, tuple[int, str]]) -> None:
        """Raises PreconditionError if the identity was loaded with other files."""
        known = self.latest_of(identity)
        if known is not None and known.version and known.files != files:
            raise PreconditionError(
                f"snapshot {identity!r}",
                expected="the bytes with which it was loaded before",
                found="others",
                hint="an identity never changes its bytes; upload under a new one",
            )

    def _check_base(self, load: Load) -> None:
        served = self.served
        if served is None or served.identity != load.base or served.created < self.since:
            current = served.identity if served is not None and served.created >= self.since else INITIAL
            raise PreconditionError(
                f"delta {load.identity!r} on {load.base!r}",
                expected=f"a delta on {current!r}, which is served" if current != INITIAL else "a full snapshot first",
                found="another base",
                hint="load a full snapshot, which begins a chain anew",
            )
        deltas = sum(bool(before.base) for before in self.chain(served))
        if deltas >= MOST_DELTAS:
            raise PreconditionError(
                f"delta {load.identity!r}",
                expected=f"at most {MOST_DELTAS} deltas after a full snapshot",
                found=f"{deltas + 1}",
                hint="load a full snapshot, which begins a chain anew",
            )

    def _with(self, load: Load) -> Ledger:
        loads = (*self.loads, load)
        return msgspec.structs.replace(self, loads=loads[-_KEPT:])

    def change(self, load: Load, now: float, **how: object) -> tuple[Ledger, Load]:
        """A load goes on; its new state. One that has ended stays as it is."""
        known = self.find(load.id)
        if known is None or known.state.is_end:
            return self, known or load
        changed = msgspec.structs.replace(known, updated=now, **how)
        if changed.state.is_end:
            changed = msgspec.structs.replace(changed, finished=now)
        loads = tuple(changed if each.id == load.id else each for each in self.loads)
        return msgspec.structs.replace(self, loads=loads), changed

    def forget(self, now: float) -> Ledger:
        """What was loaded is no base any more: the next snapshot must be full. Raises PreconditionError during one."""
        if active := self.active:
            raise PreconditionError("the ledger", found=f"a hot load is already in progress: {active.id}")
        return Ledger((), now)
