"""A daemon's status in words: itself, its versions, the regions, their replicas, the upstreams. Pure.

A replica counts as live only where its own weights were read back and their root is the published one;
what a region that fell silent said last has aged to unknown before it comes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from deltad.client.messages import (
    RegionReport,
    RegionView,
    ReplicaReport,
    ReplicaState,
    ScrubView,
    StatusView,
    Target,
    UpstreamView,
    VersionInfo,
)
from deltad.figures import duration, percent, percent_of, rate, short, size, stages, when
from deltad.ops.blocks import Block, Cell, Facts, Table, Tone, columns

_VERSIONS = 5

Roots = dict[tuple[str, str, str], str]
"""(run, variant, version) → published root."""

_TONES = {
    ReplicaState.VERIFIED: Tone.GOOD,
    ReplicaState.ROLLED_BACK: Tone.BAD,
    ReplicaState.FENCED: Tone.BAD,
    ReplicaState.UNKNOWN: Tone.WARN,
}


def status_blocks(view: StatusView) -> list[Block]:
    """Everything that `deltad status` shows."""
    regions = [RegionView(view.region, 0.0, True), *view.regions]
    return [
        _daemon(view),
        _versions(view.region),
        *_targets(regions),
        _regions(regions),
        _replicas(regions, published_roots(regions)),
        _upstreams(view.upstreams),
        *_damage(view.scrub),
    ]


def status_line(view: StatusView) -> str:
    """The daemon in one line, as `systemctl status` shows it."""
    parts = []
    for name, run in view.region.runs.items():
        parts.append(f"{name} {run.latest or 'without a version'}" + (f" ({run.activity})" if run.activity else ""))
    regions = [RegionView(view.region, 0.0, True), *view.regions]
    replicas = [(region, run, r) for region in regions for run in region.report.runs.values() for r in run.replicas]
    if replicas:
        live = sum(region.fresh and run.is_at_target(replica) for region, run, replica in replicas)
        parts.append(f"{live} of {len(replicas)} replicas verified at their target")
    said = "; ".join(parts) or "no run yet"
    return said if view.ready else f"not ready: {', '.join(view.reasons)}; {said}"


def without_clocks(view: StatusView) -> StatusView:
    """The view with everything taken out that changes while nothing happens: two equal ones tell the same."""
    return msgspec.structs.replace(
        view,
        uptime=0.0,
        store_bytes=0,
        free_bytes=0,
        region=msgspec.structs.replace(view.region, sequence=0),
        upstreams=tuple(msgspec.structs.replace(u, rtt=0.0, rate=0.0, bytes_received=0) for u in view.upstreams),
        scrub=msgspec.structs.replace(view.scrub, covered=0.0, read_bytes=0, total_bytes=0, activity=""),
        regions=tuple(
            RegionView(msgspec.structs.replace(r.report, sequence=0, pull_rate=0.0), 0.0, r.fresh) for r in view.regions
        ),
    )


def published_roots(regions: list[RegionView]) -> Roots:
    """What each version's weights must be, as far as anyone here tells. The first to tell is believed."""
    roots: Roots = {}
    for region in regions:
        for run in region.report.runs.values():
            for info in run.versions:
                for variant, root in {info.variant: info.root, **info.others}.items():
                    roots.setdefault((info.run, variant, info.version), root)
    return roots


def mismatched(run: str, regions: Iterable[RegionView], versions: Iterable[VersionInfo]) -> int:
    """How many replicas of a run serve, by what they read back, weights that are not those of the version they name."""
    roots = {
        (variant, info.version): root
        for info in versions
        for variant, root in {info.variant: info.root, **info.others}.items()
    }
    replicas = (replica for region in regions for replica in region.report.runs[run].replicas)
    return sum(roots.get((r.variant, r.version), r.root) != r.root for r in replicas if r.root)


def _daemon(view: StatusView) -> Facts:
    ready = (
        Cell("yes", Tone.GOOD) if view.ready else Cell(f"no: {'; '.join(view.reasons) or 'no reason given'}", Tone.BAD)
    )
    return Facts(
        "",
        [
            ("daemon", f"{view.daemon}, deltad {view.version}, up {duration(view.uptime)}"),
            ("ready", ready),
            ("store", f"{view.store}, {size(view.store_bytes)} held, {size(view.free_bytes)} free"),
            ("backend", f"{view.backend}: {view.backend_reason}"),
            ("scrub", _scrub(view.scrub)),
        ],
    )


def _scrub(scrub: ScrubView) -> Cell:
    """How far the reading of all that is stored has come, and whether something is damaged."""
    covered = f"what was stored by {when(scrub.covered)} was read since" if scrub.covered else "no pass has ended yet"
    parts = [covered, f"{size(scrub.read_bytes)} read"]
    if scrub.activity:
        parts.insert(0, scrub.activity)
    if scrub.damaged:
        parts.append(f"{scrub.damaged} damaged")
    if scrub.consequences:
        parts.append(scrub.consequences)
    return Cell("; ".join(parts), Tone.BAD if scrub.damaged else Tone.PLAIN)


def _damage(scrub: ScrubView) -> list[Block]:
    """What was found damaged, and what became of it; nothing if nothing was."""
    if not scrub.damage:
        return []
    rows = [
        (
            one.thing,
            one.place,
            Cell("healed", Tone.GOOD) if one.healed else Cell("damaged", Tone.BAD),
            one.detail or "–",
        )
        for one in scrub.damage
    ]
    return [Table("damage", columns("what", "where", "state", "detail"), rows)]


def _versions(region: RegionReport) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for name, run in sorted(region.runs.items()):
        for info in run.versions[::-1][:_VERSIONS]:
            latest = info.version == run.latest
            marks = ", ".join(mark for mark, on in (("latest", latest), ("pinned", info.pin is not None)) if on)
            rows.append(
                (
                    name,
                    Cell(f"{info.version} ({marks})" if marks else info.version, Tone.PLAIN if latest else Tone.DIM),
                    when(info.created),
                    info.kind,
                    percent(info.density),
                    size(info.delta_bytes),
                    percent_of(info.delta_bytes, info.full_bytes),
                    info.coder or "–",
                    Cell(info.coder_reason or "–", Tone.DIM),
                    stages(info.seconds) or "–",
                )
            )
    heads = columns("run", "version", "published", "kind", ">changed", ">bytes", ">of full", "coder", "why", "took")
    return Table("versions", heads, rows, empty="none yet")


def _targets(regions: list[RegionView]) -> list[Block]:
    """The fleets that are held; nothing at all while every one follows its newest version."""
    rows: list[tuple[Cell | str, ...]] = [
        (region.report.daemon, name, Cell(held_words(run.target, run.latest), Tone.WARN))
        for region in regions
        for name, run in sorted(region.report.runs.items())
        if run.target
    ]
    return [Table("targets", columns("region", "run", "its fleet is"), rows)] if rows else []


def held_words(target: Target, latest: str) -> str:
    """Where a fleet is held, by whom, where that was said, since when and why, and what it would follow."""
    why = f": {target.why}" if target.why else ""
    return (
        f"held at {target.version} by {target.by} at {target.daemon} since {when(target.when)}{why}; "
        + (f"latest is {latest}" if latest else "no version yet")
        + ("" if target.here else f"; target {target.version} is not held here, so each replica stays where it is")
    )


def follows_words(latest: str) -> str:
    """What a fleet does that is not held."""
    return f"follows the newest version, {latest}" if latest else "no versions yet"


def whose_fleet(target: Target) -> str:
    """The fleets that a statement is about, for the start of a sentence about them."""
    return f"the fleet of {target.fleet} is" if target.fleet else "all fleets are"


def _regions(regions: list[RegionView]) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for place, region in enumerate(regions):
        report = region.report
        heard = Cell("here", Tone.DIM) if not place else _age(region)
        pulls = rate(report.pull_rate) if report.pull_rate else "–"
        if not report.runs:
            rows.append((report.daemon, "–", "–", "–", "–", pulls, heard))
        for name, run in sorted(report.runs.items()):
            proven = sum(map(run.is_at_target, run.replicas))
            verified = f"{proven} of {len(run.replicas)}" if run.replicas else "–"
            rows.append((report.daemon, name, run.latest or "–", run.activity or "idle", verified, pulls, heard))
    return Table("regions", columns("region", "run", "latest", "doing", ">verified", ">pulls at", ">heard"), rows)


def _age(region: RegionView) -> Cell:
    return Cell(f"{duration(region.age)} ago", Tone.PLAIN if region.fresh else Tone.BAD)


def _replicas(regions: list[RegionView], roots: Roots) -> Table:
    rows = [
        (
            region.report.daemon,
            replica.replica,
            name,
            Cell(replica.state, _TONES.get(replica.state, Tone.PLAIN)),
            replica.version or "–",
            _root(replica, roots),
            _staleness(replica),
            duration(replica.seconds.pause) if replica.seconds.pause else "–",
            Cell(replica.error, Tone.BAD),
        )
        for region, name, replica in _each_replica(regions)
    ]
    heads = columns("region", "replica", "run", "state", "serves", "root", ">behind", ">pause", "error")
    return Table("replicas", heads, rows, empty="none registered")


def _each_replica(regions: list[RegionView]) -> Iterator[tuple[RegionView, str, ReplicaReport]]:
    for region in regions:
        for name, run in sorted(region.report.runs.items()):
            for replica in run.replicas:
                yield region, name, replica


def _root(replica: ReplicaReport, roots: Roots) -> Cell:
    if not replica.root:
        return Cell("not read back", Tone.DIM)
    published = roots.get((replica.run, replica.variant, replica.version))
    if published is None:
        return Cell(f"{short(replica.root)} unknown here", Tone.WARN)
    return Cell("match", Tone.GOOD) if published == replica.root else Cell(f"{short(replica.root)} WRONG", Tone.BAD)


def _staleness(replica: ReplicaReport) -> Cell:
    return Cell(str(replica.staleness), Tone.WARN if replica.staleness > 1 else Tone.PLAIN)


def _upstreams(upstreams: tuple[UpstreamView, ...]) -> Table:
    rows = [
        (
            upstream.url,
            Cell("up", Tone.GOOD) if upstream.up else Cell("down", Tone.BAD),
            upstream.activity or "idle",
            duration(upstream.rtt) if upstream.rtt else "–",
            size(upstream.bytes_received),
            rate(upstream.rate) if upstream.rate else "–",
            Cell(upstream.error, Tone.BAD),
        )
        for upstream in upstreams
    ]
    heads = columns("upstream", "link", "doing", ">round trip", ">received", ">rate", "error")
    return Table("upstreams", heads, rows)
