"""What is settled: which of the checkpoints seen may be read now. Pure: sightings and the time in.

A checkpoint is settled when it is complete and its fingerprint has not changed for `quiet` seconds; or,
where each version has a directory of its own, when a newer complete one was begun after it and it did not
change between two looks.

Owns three invariants. Nothing is offered that is not settled. Nothing is offered twice in the same state.
No number is offered below one that was published from here, but for one case: a directory that is written again
after its number was offered is offered again, and the order goes on from what is published then; whoever
publishes decides what a second content under a number means. A number that was offered and not published
holds up nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltad.checkpoint.files import Fingerprint
from deltad.errors import CheckpointChangedError, CheckpointError, DeltadError

LOOKS_APART = 0.1
"""Seconds between two looks that count as two."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One checkpoint directory as one look found it.

    `path` is relative to the watched directory. `number` is None where the directory has none of its own.
    `pending` says why it cannot be judged by itself yet, whatever its weights look like.
    """

    path: str
    number: int | None
    fingerprint: Fingerprint
    pending: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """A checkpoint that may be read: its number, and when (on the caller's clock) this state was first seen.

    `counted`: the number was counted here, since the directory has none of its own.
    """

    path: str
    number: int
    fingerprint: Fingerprint
    found: float
    counted: bool = False


@dataclass(slots=True)
class _Watched:
    """What is known of one directory in its present state."""

    sighting: Sighting
    since: float
    complete: bool = False
    error: DeltadError | None = None
    checked: float | None = None
    done: bool = False
    """Offered, or known not to be worth an offer, in this state."""


@dataclass(slots=True)
class Settling:
    """Follows looks at a watched directory. Times are seconds on any clock that does not jump.

    `quiet`: how long a complete checkpoint must stand still. `recheck`: how often one that was refused is
    checked again in the same state, since a file system may fail for a while. `newest`: the number of the run's
    newest version, whoever published it; to be set anew before anything is asked for. What is there at the
    first look with such a number or a lower one is taken as published. `numbered`: whether each version has a
    directory of its own, so that a number may come too late.
    """

    quiet: float
    recheck: float
    newest: int | None = None
    numbered: bool = True
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _offered: set[int] = field(default_factory=set)
    _numbers: set[int] = field(default_factory=set)
    _reported: set[int] = field(default_factory=set)
    _after: int | None = None
    """The newest number when the watch began."""
    _overwritten: Fingerprint | None = None
    _looked: bool = False

    def __post_init__(self) -> None:
        self._after = self.newest

    def look(self, sightings: Iterable[Sighting], now: float) -> list[Sighting]:
        """Take in all that one look found; returns those whose completeness is to be checked now."""
        seen = {}
        for sighting in sightings:
            known = self._watched.get(sighting.path)
            if known is None or known.sighting != sighting:
                known = _Watched(sighting, now)
                if not self._looked and self._is_published(sighting):
                    self._remember(sighting.number, sighting.fingerprint)
                known.done = self._was_offered(sighting)
            seen[sighting.path] = known
        self._watched = seen
        self._looked = True
        return [known.sighting for known in seen.values() if self._wants_check(known, now)]

    def judge(self, sighting: Sighting, error: DeltadError | None, now: float) -> None:
        """The outcome of a check that `look` asked for: complete, or refused with `error`."""
        known = self._watched.get(sighting.path)
        if known is None or known.sighting != sighting:
            return
        if isinstance(error, CheckpointChangedError):
            known.since = now  # it was written during the check
            return
        known.checked = now
        known.complete, known.error = error is None, error

    def next_settled(self, now: float) -> Settled | None:
        """The lowest settled checkpoint that is due, if any; from now on it counts as offered."""
        for known in sorted(
            self._watched.values(), key=lambda known: (known.sighting.number or 0, known.sighting.path)
        ):
            if known.done or not self._is_settled(known, now):
                continue
            sighting = known.sighting
            number = sighting.number
            if number is None:
                number = 1 if self.newest is None else self.newest + 1
            elif self._is_late(number):
                self._refuse_late(known)
                continue
            known.done = True
            self._overwritten = sighting.fingerprint
            self._numbers.add(number)
            self._remember(number, sighting.fingerprint)
            return Settled(sighting.path, number, sighting.fingerprint, known.since, counted=sighting.number is None)
        return None

    def next_refused(self, now: float) -> tuple[str, DeltadError] | None:
        """A checkpoint that stands still and cannot be published, with the reason; each state of it once."""
        for known in self._watched.values():
            error = _reason(known)
            if error is not None and now >= known.since + self.quiet and hash(known.sighting) not in self._reported:
                self._reported.add(hash(known.sighting))
                return known.sighting.path, error
        return None

    def due(self) -> float:
        """When another look may have something new to say without any event; infinite if none will."""
        return min((self._next_time(known) for known in self._watched.values()), default=math.inf)

    def _next_time(self, known: _Watched) -> float:
        if _reason(known) is not None:
            return math.inf if hash(known.sighting) in self._reported else known.since + self.quiet
        if known.done:
            return math.inf
        if known.checked is None:
            return known.since + self._apart
        return known.since + (self._apart if self._has_newer(known) else self.quiet)

    @property
    def _apart(self) -> float:
        return min(LOOKS_APART, self.quiet)

    def _wants_check(self, known: _Watched, now: float) -> bool:
        if known.done or known.sighting.pending or known.complete or now < known.since + self._apart:
            return False
        return known.checked is None or now >= known.checked + self.recheck

    def _is_settled(self, known: _Watched, now: float) -> bool:
        # The same sums as in `_next_time`: a look at the very time that was due must find it settled.
        still_since = known.since + (self._apart if self._has_newer(known) else self.quiet)
        return known.complete and now >= still_since

    def _has_newer(self, known: _Watched) -> bool:
        """Whether a complete checkpoint of a higher number was begun after this one stood still."""
        number = known.sighting.number
        return number is not None and any(
            other.complete and other.since > known.since and (other.sighting.number or 0) > number
            for other in self._watched.values()
        )

    def _is_published(self, sighting: Sighting) -> bool:
        return self._after is not None and sighting.number is not None and sighting.number <= self._after

    def _is_late(self, number: int) -> bool:
        """Whether a higher number from here was published, and this one is new and not one that is written again.

        Where the newest came from elsewhere, whoever publishes decides what a lower one means.
        """
        if not self.numbered or self.newest is None or number >= self.newest or self.newest not in self._numbers:
            return False
        return number not in self._numbers and (self._after is None or number > self._after)

    def _was_offered(self, sighting: Sighting) -> bool:
        if sighting.number is None:
            return sighting.fingerprint == self._overwritten
        return hash((sighting.number, sighting.fingerprint)) in self._offered

    def _remember(self, number: int | None, state: Fingerprint) -> None:
        # Hashes, since a run has many checkpoints of many files each. A collision would skip a version.
        self._offered.add(hash((number, state)))

    def _refuse_late(self, known: _Watched) -> None:
        known.done = True
        self._remember(known.sighting.number, known.sighting.fingerprint)
        known.error = CheckpointError(
            known.sighting.path,
            expected=f"a number above {self.newest}, which was published before",
            found=f"{known.sighting.number}, complete only now",
            hint="it came too late and is skipped",
        )


def _reason(known: _Watched) -> DeltadError | None:
    """Why a checkpoint cannot be published as it stands; None if it can, or was not checked yet."""
    if known.sighting.pending and not known.done:
        return CheckpointError(known.sighting.path, found=known.sighting.pending)
    return known.error
