"""Which versions of a run are kept, and why, in words. Pure.

Owns one invariant: a version that is kept can be rebuilt from what is kept: every version on its path from an
anchor is kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltad.delta.record import VersionRecord
from deltad.errors import NotFoundError
from deltad.store.path import find_path
from deltad.types import Version


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of a run is kept: every bound that is given holds, and the newest version stays in any case.

    `versions` is their number, `seconds` how long this daemon has held one, in its present life and by the
    monotonic clock, `bytes` what their edges take together.
    """

    versions: int | None = None
    seconds: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that is held: for how many seconds, what its edges take, and who needs it, in words or empty."""

    record: VersionRecord
    age: float = 0.0
    bytes: int = 0
    pinned: str = ""
    leased: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something is kept, and why."""

    kept: bool
    why: str


def judge(candidates: Sequence[Candidate], retention: Retention, *, settling: float = 0.0) -> dict[Version, Verdict]:
    """Decide about all versions of a run, given in ascending order.

    For `settling` seconds more, readers that a restart has cut off may still come back for what they had leased.
    """
    verdicts: dict[Version, Verdict] = {}
    total, leased = 0, ""
    for newer, candidate in enumerate(reversed(candidates)):
        total += candidate.bytes
        verdicts[candidate.record.version] = _judge(candidate, retention, newer, total)
    for candidate in candidates:
        version = candidate.record.version
        if candidate.leased:
            leased = f"{candidate.leased} holds {version}"
        if leased and not verdicts[version].kept:
            mine = candidate.leased and f"leased by {candidate.leased}"
            verdicts[version] = Verdict(True, mine or f"on the way to the newest from where {leased}")
        if settling > 0 and not verdicts[version].kept:
            verdicts[version] = Verdict(True, f"readers have {settling:.0f} s after a start to say what they hold")
    _keep_paths([candidate.record for candidate in candidates], verdicts)
    return dict(sorted(verdicts.items()))


def _judge(candidate: Candidate, retention: Retention, newer: int, total: int) -> Verdict:
    if newer == 0 or candidate.pinned or candidate.target:
        why = candidate.target or f"pinned by {candidate.pinned}"
        return Verdict(True, why if newer else "the newest version")
    if retention.versions is not None and newer >= retention.versions:
        return Verdict(False, f"{newer} versions are newer, and {retention.versions} are kept")
    if retention.seconds is not None and candidate.age > retention.seconds:
        return Verdict(False, f"held for {candidate.age:.0f} s, and versions are kept for {retention.seconds:.0f} s")
    if retention.bytes is not None and total > retention.bytes:
        return Verdict(False, f"takes {total} bytes with all newer ones, and {retention.bytes} are kept")
    if retention == Retention():
        return Verdict(True, "nothing bounds what is kept of this run")
    return Verdict(True, "within what is kept of this run")


def _keep_paths(records: Sequence[VersionRecord], verdicts: dict[Version, Verdict]) -> None:
    """Keep what lies between an anchor and each kept version. Older versions first, so no path is walked twice."""
    known = {record.version: record for record in records}
    reached: dict[str, set[Version]] = {}
    for record in records:
        if not verdicts[record.version].kept:
            continue
        for variant in record.variants:
            held = reached.setdefault(variant.name, set())
            for version in _path(record, variant.name, held, _lookup(known)):
                held.add(version)
                if not verdicts[version].kept:
                    verdicts[version] = Verdict(True, f"on the path to {record.version}")


def _path(
    record: VersionRecord, variant: str, held: set[Version], lookup: Callable[[Version], VersionRecord]
) -> list[Version]:
    try:
        return [hop.record.version for hop in find_path(record, variant, held=held, record=lookup).hops]
    except NotFoundError:
        # Nothing here leads to it, as after a pull of its anchor's neighbour alone: then nothing is missed.
        return [record.version]


def _lookup(known: dict[Version, VersionRecord]) -> Callable[[Version], VersionRecord]:
    def lookup(version: Version) -> VersionRecord:
        if version not in known:
            raise NotFoundError(f"{version}", found="not held here")
        return known[version]

    return lookup
