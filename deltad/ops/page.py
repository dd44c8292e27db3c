"""The status page and the page of a run: HTML from plain data. Pure; every word that came from elsewhere is escaped.

The pages work without their script, which only brings them up to date without losing the place: then they reload
themselves. They load nothing, and a policy that names the one style and the one script by digest holds them to it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from urllib.parse import quote

from deltad.client.messages import RegionView, StatusView, UpstreamView, VersionInfo
from deltad.figures import count, duration, percent, rate, size, stages, when
from deltad.ops.blocks import Block, Cell, Facts, Line, Table, Tone
from deltad.ops.drawings import escape, lineage, plot, sparkline
from deltad.ops.history import Event, behind
from deltad.ops.overview import mismatched, status_blocks

_TONES = {Tone.PLAIN: "", Tone.GOOD: "good", Tone.BAD: "bad", Tone.WARN: "warn", Tone.DIM: "dim"}
_STYLE = files("deltad.ops").joinpath("files", "page", "page.css").read_text(encoding="utf-8")
_SCRIPT = files("deltad.ops").joinpath("files", "page", "page.js").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


PAGE_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_digest(_STYLE)}'; script-src 'sha256-{_digest(_SCRIPT)}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Samples = Mapping[tuple[str, str], Sequence[int]]


def render_page(view: StatusView, samples: Samples | None = None, events: Sequence[Event] = ()) -> str:
    """The status: what is amiss first, then freshness, what is under way, lineage, the tables, and the last events."""
    regions = [RegionView(view.region, 0.0, True), *view.regions]
    parts = [
        *_alarms(view, regions),
        _freshness(regions, samples or {}),
        _under_way(view),
        *_lineages(view),
        _disk(view),
        *(_drawn(block) for block in status_blocks(view)),
        _events(events),
    ]
    return _document(f"deltad {view.daemon}", "".join(parts))


def render_run(view: StatusView, run: str, versions: Sequence[VersionInfo]) -> str:
    """A run over its versions: density, bytes, and the time that each took up to here."""
    deltas = [info for info in versions if info.kind != "anchor"]
    plots = (
        plot("changed elements, by delta", [(v.version, v.density) for v in deltas], percent),
        plot("bytes, by delta", [(v.version, float(v.delta_bytes)) for v in deltas], size),
        plot("time up to here", [(v.version, _took(v)) for v in versions], duration),
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(v.version)}</th><td>{escape(v.kind)}</td><td>{when(v.created)}</td>'
        f'<td class="right">{percent(v.density)}</td><td class="right">{size(v.delta_bytes)}</td>'
        f"<td>{escape(v.coder or '–')}</td><td>{escape(stages(v.seconds) or '–')}</td>"
        f"<td>{escape(v.reason or '–')}</td></tr>"
        for v in reversed(versions)
    )
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("version", "kind", "published", "changed", "bytes", "coder", "took", "why")
    )
    body = (
        f'<p><a href="/">{escape(view.daemon)}</a></p><section class="plots">{"".join(plots)}</section>'
        f"<h2>Lineage</h2>{lineage(versions)}"
        f"<table><caption>versions</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )
    return _document(f"run {run} at {view.daemon}", body)


def _address(run: str) -> str:
    """The name of a run as a part of an address."""
    return quote(run, safe="")


def _took(info: VersionInfo) -> float:
    seconds = info.seconds
    return seconds.settle + seconds.encode + seconds.transfer + seconds.stage + seconds.pause + seconds.verify


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width">'
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        f"<style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>{body}</main>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _alarms(view: StatusView, regions: Sequence[RegionView]) -> list[str]:
    found = []
    for run, held in view.region.runs.items():
        having = [region for region in regions if run in region.report.runs]
        if wrong := mismatched(run, having, held.versions):
            found.append(
                f"integrity alarm: {count(wrong, 'replica')} of {run} with weights that were never published; "
                "RUNBOOK.md, DeltadReplicaMismatch"
            )
    if view.scrub.damaged:
        damaged = count(view.scrub.damaged, "stored object")
        found.append(f"integrity alarm: damaged and not healed: {damaged}; RUNBOOK.md, DeltadDamage")
    return [f'<p class="alarm" role="alert">{escape(words)}</p>' for words in found]


def _freshness(regions: Sequence[RegionView], samples: Samples) -> str:
    """A row for each region and run: how far it has come, and how far behind it was of late."""
    lags = behind(regions)
    rows = []
    for region in regions:
        for name, run in sorted(region.report.runs.items()):
            key = (region.report.daemon, name)
            proven = sorted({r.version for r in run.replicas if run.is_at_target(r)})
            staging = sum(r.state == "staging" for r in run.replicas)
            ready = sum(r.state == "ready" for r in run.replicas)
            staged = ", ".join(f"{n} {word}" for n, word in ((staging, "staging"), (ready, "ready")) if n) or "–"
            served = sorted({r.version for r in run.replicas if r.version} - {*proven})
            verified = ", ".join(proven) or "–"
            words = f", {escape(', '.join(served))} served and not at target"
            others = f'<span class="warn">{words}</span>' if served else ""
            lag = lags[key]
            tone = "good" if lag == 0 else "warn" if lag > 1 else ""
            line = sparkline([*samples.get(key, ())] or [lag], f"versions behind of {name} at {key[0]}")
            rows.append(
                f'<tr><th scope="row">{escape(region.report.daemon)}</th>'
                f'<td><a href="/runs/{quote(name, safe="")}">{escape(name)}</a></td>'
                f"<td>{escape(run.latest or '–')}</td><td>{staged}</td><td>{escape(verified)}{others}</td>"
                f'<td class="right {tone}">{lag}</td><td>{line}</td></tr>'
            )
    if not rows:
        return '<p class="dim">No run is declared or held here yet.</p>'
    heads = ("region", "run", "durable there", "staged", "verified", "behind", "versions behind, last half hour")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return f"<table><caption>freshness</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _under_way(view: StatusView) -> str:
    """What is being done now, and how long the newest version took up to here, stage by stage."""
    items = []
    for name, run in sorted(view.region.runs.items()):
        if run.activity:
            items.append(f"<li><b>{escape(name)}</b>: {escape(run.activity)}{_speed(view.upstreams)}</li>")
        newest = run.versions[-1] if run.versions else None
        if newest and (took := stages(newest.seconds)):
            items.append(f"<li><b>{escape(name)} {escape(newest.version)}</b> took {escape(took)}</li>")
    return f"<h2>Under way</h2><ul>{''.join(items) or '<li class=dim>nothing</li>'}</ul>"


def _speed(upstreams: Sequence[UpstreamView]) -> str:
    total = sum(upstream.rate for upstream in upstreams)
    return f" at {rate(total)}" if total else ""


def _lineages(view: StatusView) -> list[str]:
    return [
        f'<h2>Lineage of <a href="/runs/{quote(name, safe="")}">{escape(name)}</a></h2>{lineage(run.versions)}'
        for name, run in sorted(view.region.runs.items())
        if run.versions
    ]


def _disk(view: StatusView) -> str:
    whole = max(view.store_bytes + view.free_bytes, 1)
    held = 300 * view.store_bytes / whole
    words = f"{size(view.store_bytes)} held, {size(view.free_bytes)} may still be written"
    return (
        f'<h2>Disk</h2><p><svg class="disk" role="img" width="300" height="14" viewBox="0 0 300 14">'
        f'<title>{words}</title><rect class="free" width="300" height="14"/>'
        f'<rect class="held" width="{held:.1f}" height="14"/></svg> {words}</p>'
    )


def _events(events: Sequence[Event]) -> str:
    rows = "".join(
        f"<tr><td>{when(event.at)}</td><td{_class(_LEVELS.get(event.level, Tone.PLAIN))}>{escape(event.level)}</td>"
        f"<td>{escape(event.words)}</td></tr>"
        for event in reversed(events)
    )
    return f"<table><caption>last events</caption><tbody>{rows}</tbody></table>" if rows else ""


_LEVELS = {"warning": Tone.WARN, "error": Tone.BAD, "critical": Tone.BAD}


def _drawn(block: Block) -> str:
    match block:
        case Line(text):
            return f"<p>{_cell(text, 'span')}</p>"
        case Facts(title, facts):
            head = ""
            rows = [f'<th scope="row">{escape(name)}</th>{_cell(value)}' for name, value in facts]
        case Table(title, columns, cells, empty):
            if not cells:
                return f"<p><b>{escape(title)}</b>: {_cell(Cell(empty, Tone.DIM), 'span')}</p>"
            heads = "".join(f'<th scope="col"{_class(right=c.right)}>{escape(c.name)}</th>' for c in columns)
            head = f"<thead><tr>{heads}</tr></thead>"
            rows = [
                "".join(_cell(cell, right=column.right) for cell, column in zip(row, columns, strict=True))
                for row in cells
            ]
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    return f"<table>{caption}{head}<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _cell(cell: Cell | str, tag: str = "td", *, right: bool = False) -> str:
    text, tone = (cell.text, cell.tone) if isinstance(cell, Cell) else (cell, Tone.PLAIN)
    return f"<{tag}{_class(tone, right=right)}>{escape(text)}</{tag}>"


def _class(tone: Tone = Tone.PLAIN, *, right: bool = False) -> str:
    names = " ".join(filter(None, (_TONES[tone], "right" if right else "")))
    return f' class="{names}"' if names else ""
