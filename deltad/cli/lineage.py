"""A run's lineage, drawn as lines that part where versions fork, newest first. Pure: text from plain data.

Owns one invariant: every version has one row, and a line leads from it to its parent wherever both are shown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltad.figures import count, percent, percent_of, size, when
from deltad.ops.blocks import Cell, Tone
from deltad.ops.overview import follows_words, held_words, whose_fleet
from deltad.types import Version, parse_version

if TYPE_CHECKING:
    from deltad.client.messages import PinInfo, Target, TargetsReply, VersionInfo

Line = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Strokes:
    """What lines are drawn with. `arm` and `crossing` lie between `branch` and `corner`, where two lines meet."""

    node: str
    line: str
    branch: str
    arm: str
    crossing: str
    corner: str


ASCII = Strokes("*", "|", "|", "_", "|", "/")
BOXES = Strokes("●", "│", "├", "─", "┼", "╯")


@dataclass(frozen=True, slots=True)
class Drawn:
    """The strokes beside one version: on its own row, below it on rows of notes, and where lines meet after those."""

    row: str
    below: str
    meeting: str = ""


def draw(parents: Sequence[tuple[str, str]], strokes: Strokes) -> list[Drawn]:
    """The strokes for (version, parent) pairs, newest first; a parent that is not among them ends its line."""
    known = {name for name, _ in parents}
    lanes: list[str] = []
    """By lane the version that its line leads to; empty where there is no line."""
    drawn = []
    for name, parent in parents:
        at = lanes.index(name) if name in lanes else lanes.index("") if "" in lanes else len(lanes)
        lanes[at : at + 1] = [name]
        row = _row(lanes, strokes, at)
        lanes[at] = parent if parent in known else ""
        below, meeting = _row(lanes, strokes), ""
        same = [lane for lane, leads_to in enumerate(lanes) if leads_to and leads_to == lanes[at]]
        if len(same) > 1:
            left, right = same
            meeting = _meeting(lanes, strokes, left, right)
            lanes[right] = ""
        while lanes and not lanes[-1]:
            lanes.pop()
        drawn.append(Drawn(row, below, meeting))
    return drawn


def _row(lanes: Sequence[str], strokes: Strokes, node: int | None = None) -> str:
    marks = (strokes.node if lane == node else strokes.line if leads_to else " " for lane, leads_to in enumerate(lanes))
    return " ".join(marks).rstrip()


def _meeting(lanes: Sequence[str], strokes: Strokes, left: int, right: int) -> str:
    """The line of lane `right` bends into that of `left`."""
    marks = list(_row(lanes, strokes).ljust(2 * right + 1))
    marks[2 * left] = strokes.branch
    for at in range(2 * left + 1, 2 * right):
        marks[at] = strokes.arm if marks[at] == " " else strokes.crossing
    bend = 2 * right if strokes.corner == "╯" else 2 * right - 1
    marks[2 * right], marks[bend] = " ", strokes.corner
    return "".join(marks).rstrip()


def log_lines(
    run: str,
    ascending: Sequence[VersionInfo],
    targets: TargetsReply,
    *,
    limit: int | None,
    strokes: Strokes,
    width: int,
) -> Iterator[Line]:
    """What `deltad log` prints, in lines of at most `width` columns where words allow."""
    latest = ascending[-1].version if ascending else ""
    held = held_words(targets.target, latest) if targets.target else follows_words(latest)
    yield from _wrapped(Cell(f"run {run}: {held}", Tone.WARN if targets.target else Tone.PLAIN), width)
    notes = forks(ascending)
    newest_first = ascending[::-1]
    drawn = draw([(info.version, info.parent) for info in newest_first], strokes)
    columns = max((len(one.row) for one in drawn), default=0)
    named = max((len(info.version) for info in ascending), default=0)
    for info, one in list(zip(newest_first, drawn, strict=True))[:limit]:
        marks = "; ".join(_marks(info.version, latest, targets))
        yield Cell(one.row.ljust(columns) + "  "), *_figures(info, named, marked=bool(marks))
        fork = notes.get(info.version, "")
        for text, tone in ((marks, Tone.GOOD), (fork, Tone.WARN), ("; ".join(_notes(info)), Tone.DIM)):
            for line in textwrap.wrap(text, max(width - columns - 4, 20)):
                yield Cell(one.below.ljust(columns) + "    "), Cell(line, tone)
        if one.meeting:
            yield (Cell(one.meeting),)
    if targets.moves:
        yield (Cell(""),)
        yield (Cell("who moved the target, newest first:"),)
        for moved in reversed(targets.moves):
            yield from _wrapped(Cell(f"  {when(moved.when)}  {moved_words(moved)}", Tone.DIM), width)


def moved_words(moved: Target) -> str:
    """One move in words: who, where, whose fleet, and to what."""
    why = f": {moved.why}" if moved.why else ""
    to = f"held at {moved.version}" if moved.version else "released"
    return f"{whose_fleet(moved)} {to} by {moved.by} at {moved.daemon}{why}"


def forks(ascending: Sequence[VersionInfo]) -> dict[str, str]:
    """For each version that does not go on from the one before: where it comes from, and what stays behind."""
    notes: dict[str, str] = {}
    before: list[Version] = []
    held = {info.version for info in ascending}
    for info in ascending:
        version = parse_version(info.version)
        # The parent may be a version of another run, which none of these is after.
        parent = parse_version(info.parent) if info.parent and "/" not in info.parent else None
        missing = ", which is not held here" if parent is not None and info.parent not in held else ""
        if before and parent is not None and version.epoch == parent.epoch > before[-1].epoch:
            opened = f"epoch {version.epoch} opened with versions that are not held here"
            notes[info.version] = f"{opened}; goes on from {info.parent}"
        elif before and version.epoch > before[-1].epoch:
            left = sum(parent is None or old > parent for old in before if old.epoch == before[-1].epoch)
            behind = f", leaving {count(left, 'version')} behind" if left else ""
            notes[info.version] = f"epoch {version.epoch} opens here, from {info.parent or 'nothing'}{missing}{behind}"
        elif info.parent and (not before or parent != before[-1]):
            notes[info.version] = f"{'forks' if parent is None else 'goes on from'} {info.parent}{missing}"
        before.append(version)
    return notes


def _marks(version: str, latest: str, targets: TargetsReply) -> Iterator[str]:
    if version == latest:
        yield "latest"
    for target in targets.standing:
        if target.version == version:
            yield f"target: {whose_fleet(target)} held here by {target.by}"


def _figures(info: VersionInfo, named: int, *, marked: bool) -> Line:
    figures = (
        f"{info.kind:<6}  {percent(info.density):>8}  {size(info.delta_bytes):>8}  "
        f"{percent_of(info.delta_bytes, info.full_bytes):>8}  {when(info.created)}"
    )
    return Cell(info.version.ljust(named), Tone.GOOD if marked else Tone.PLAIN), Cell(f"  {figures}")


def _notes(info: VersionInfo) -> Iterator[str]:
    if info.pin:
        yield f"pinned by {pinned_by(info.pin)}"
    if info.base not in ("", info.parent):
        yield f"reached from {info.base}"
    if info.reason:
        yield info.reason
    if info.coder:
        yield f"coder {info.coder}" + (f" ({info.coder_reason})" if info.coder_reason else "")
    if info.identity:
        yield f"identity {info.identity}"
    if info.source:
        yield f"from {info.source}"


def pinned_by(pin: PinInfo) -> str:
    """Who pinned a version, when and why."""
    since = f" on {when(pin.at)}" if pin.at else ""
    return f"{pin.by}{since}" + (f": {pin.why}" if pin.why else "")


def _wrapped(cell: Cell, width: int) -> Iterator[Line]:
    for line in textwrap.wrap(cell.text, width, subsequent_indent="    ", drop_whitespace=False):
        yield (Cell(line.rstrip(), cell.tone),)
