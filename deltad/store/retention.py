"""Which versions of a run are kept, and why, in words. Pure.

Owns one invariant: a version that is kept can be rebuilt from what is kept: every version on its cheapest
path from an anchor is kept too. What a fork in another run was made from is kept for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltad.delta.record import VersionRecord
from deltad.store.graph import Edge
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
    """A version that is held: for how many seconds, what its edges take, and who needs it, in words or empty.

    `forked` says which versions of other runs were made from it.
    """

    record: VersionRecord
    age: float = 0.0
    bytes: int = 0
    pinned: str = ""
    leased: str = ""
    target: str = ""
    forked: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something is kept, and why."""

    kept: bool
    why: str


Join = Callable[[Version, str], Edge | None]
"""The last edge of the cheapest way to a version, in a variant, from an anchor; None where there is no such way."""


def judge(
    candidates: Sequence[Candidate], retention: Retention, joins: Join, *, settling: float = 0.0
) -> dict[Version, Verdict]:
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
    _keep_joins([candidate.record for candidate in candidates], verdicts, joins)
    return dict(sorted(verdicts.items()))


def _judge(candidate: Candidate, retention: Retention, newer: int, total: int) -> Verdict:
    pinned = f"pinned by {candidate.pinned}" if candidate.pinned else ""
    needed = candidate.target or pinned or candidate.forked
    if newer == 0 or needed:
        return Verdict(True, needed if newer else "the newest version")
    if retention.versions is not None and newer >= retention.versions:
        return Verdict(False, f"{newer} versions are newer, and {retention.versions} are kept")
    if retention.seconds is not None and candidate.age > retention.seconds:
        return Verdict(False, f"held for {candidate.age:.0f} s, and versions are kept for {retention.seconds:.0f} s")
    if retention.bytes is not None and total > retention.bytes:
        return Verdict(False, f"takes {total} bytes with all newer ones, and {retention.bytes} are kept")
    if retention == Retention():
        return Verdict(True, "nothing bounds what is kept of this run")
    return Verdict(True, "within what is kept of this run")


def _keep_joins(records: Sequence[VersionRecord], verdicts: dict[Version, Verdict], joins: Join) -> None:
    """Keep what each kept version's way from an anchor leads over. No version is walked over twice."""
    reached: set[tuple[str, Version]] = set()
    for record in records:
        if not verdicts[record.version].kept:
            continue
        for variant in record.variants:
            at: Version | None = record.version
            while at is not None and (variant.name, at) not in reached:
                reached.add((variant.name, at))
                if at in verdicts and not verdicts[at].kept:
                    verdicts[at] = Verdict(True, f"on the path to {record.version}")
                edge = joins(at, variant.name)
                # What a fork starts from is kept by its own run.
                base = None if edge is None else edge.base
                at = None if base is None or base.run != record.run else base.version
