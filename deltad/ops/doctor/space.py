"""Free space against what the next versions will take. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from deltad.config import Config, RunConfig
from deltad.figures import count, size
from deltad.limits import Limits
from deltad.ops.doctor.facts import Facts
from deltad.ops.doctor.finding import Finding, Level
from deltad.store.look import RecentRun
from deltad.types import parse_run

NEXT = 100
"""How many versions ahead are looked at."""
_LEAST_INODES = 10_000


def examine_space(config: Config, facts: Facts, limits: Limits) -> Iterator[Finding]:
    """Whether the next version fits, and the next hundred."""
    if facts.disk.refused:
        return
    free, reserve = facts.disk.free, limits.disk_reserve_bytes
    room = free - reserve
    if room <= 0:
        yield Finding(
            Level.ERROR,
            "space",
            f"{size(free)} free at {facts.disk.probed}",
            f"more than the reserve of {size(reserve)}",
            "nothing is published or pulled until there is room: free some, or give the store a larger disk",
        )
    else:
        runs = [run for run in facts.look.runs if run.deltas or run.anchors]
        if runs:
            yield _next_versions(config, runs, room)
        else:
            yield Finding(
                Level.NOTE,
                "space",
                f"{size(free)} free; what a version takes is not known before there is one",
                advice="ask again after the first versions; the first one takes about two thirds of the model, "
                "and each full copy beside it (the mirror, each export) all of it",
            )
        yield from _unbounded(config, runs, room)
    if facts.disk.free_inodes is not None and 0 < facts.disk.free_inodes < _LEAST_INODES:
        yield Finding(
            Level.WARNING,
            "space",
            f"{count(facts.disk.free_inodes, 'free inode')}",
            f"at least {_LEAST_INODES:,}: every version takes a few small files",
            "remove files on this file system, or make it anew with more inodes",
        )


def _next_versions(config: Config, runs: list[RecentRun], room: int) -> Finding:
    once = sum(need_at_once(run) for run in runs)
    growth = sum(grows_by(run, config.run(parse_run(run.run))) for run in runs)
    each = sum(_delta(run) for run in runs)
    found = (
        f"room for {size(room)}; the next {NEXT} versions keep {size(growth)} more, and on the way an anchor and "
        f"a new generation of the mirror take {size(once)}"
    )
    if room < each + once:
        return Finding(
            Level.ERROR if room < each else Level.WARNING,
            "space",
            found,
            f"room for one version with its anchor and mirror, {size(each + once)}",
            "free some space, keep fewer versions (`keep_versions`, `keep_bytes`), or give the store a larger disk",
        )
    if room < growth + once:
        fits = int((room - once) / each) if each else NEXT
        return Finding(
            Level.WARNING,
            "space",
            found,
            f"room for {size(growth + once)}",
            f"about {count(fits, 'version')} fit: keep fewer (`keep_versions`, `keep_for`, `keep_bytes`), or free some",
        )
    return Finding(Level.OK, "space", found)


def _unbounded(config: Config, runs: list[RecentRun], room: int) -> Iterator[Finding]:
    for run in runs:
        declared = config.run(parse_run(run.run))
        bounded = declared is not None and (declared.keep_versions or declared.keep_for or declared.keep_bytes)
        if not bounded and (each := _delta(run)):
            yield Finding(
                Level.NOTE,
                f"retention of run {run.run}",
                f"nothing bounds what is kept: at {size(each)} a version the disk is full in about "
                f"{count(int(room / each), 'version')}",
                "a bound, where a run goes on for long",
                "set `keep_versions`, `keep_for` or `keep_bytes` in its [[run]]"
                if declared
                else "declare it in a [[run]] with `keep_versions`, `keep_for` or `keep_bytes`",
            )


def need_at_once(run: RecentRun) -> int:
    """Bytes that come and go, or may come at any time: an anchor, and the mirror's new generation beside the old."""
    return max(run.anchors, default=0) + run.weight_bytes


def grows_by(run: RecentRun, declared: RunConfig | None, versions: int = NEXT) -> int:
    """By how many bytes the run grows over the next versions, as far as its retention lets it.

    At `keep_for`, versions are taken to come as often as the recent ones did.
    """
    each = _delta(run)
    if declared is not None:
        if declared.keep_versions:
            versions = min(versions, max(0, declared.keep_versions - run.held))
        if declared.keep_for and len(run.created) > 1:
            apart = (run.created[-1] - run.created[0]) / (len(run.created) - 1)
            if apart > 0:
                versions = min(versions, max(0, round(declared.keep_for / apart) - run.held))
    total = int(each * versions)
    if declared is not None and declared.keep_bytes:
        total = min(total, declared.keep_bytes)
    return total


def _delta(run: RecentRun) -> float:
    """What a version of this run takes as a rule."""
    return mean(run.deltas or run.anchors)
