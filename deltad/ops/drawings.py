"""Pictures of the status page as inline SVG: a sparkline, a plot over versions, a run's lineage. Pure.

Colours are classes, for the page's policy allows no style in an element; all text is escaped here, and a picture's
words are in its `<title>` for those who do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape as escape_markup

from deltad.client.messages import VersionInfo
from deltad.figures import clean, percent, size
from deltad.types import parse_version

_SPARK = (160, 24)
_PLOT = (420, 130)
_MARGIN = (8, 16)
_STEP, _LANE, _RADIUS = 46, 34, 7
SHOWN = 24
"""Of a run's versions, the newest so many are drawn."""


def escape(text: str) -> str:
    """Text from elsewhere as it may stand in a page: neither markup nor what turns the writing around."""
    return escape_markup(clean(text))


def sparkline(values: Sequence[float], label: str) -> str:
    """A line over time, its last value written beside it."""
    width, height = _SPARK
    top = max([*values, 1])
    points = _points([*values] if len(values) > 1 else [*values, *values], width - 30, height - 6, top, (2, 3))
    now = f"{values[-1]:g}" if values else "–"
    line = f'<polyline class="line" points="{points}"/>' if values else ""
    return (
        f'<svg class="spark" role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<title>{escape(label)}: {now} now, at most {max(values, default=0):g}</title>{line}"
        f'<text x="{width - 24}" y="{height - 7}">{now}</text></svg>'
    )


def plot(title: str, points: Sequence[tuple[str, float]], shown: Callable[[float], str]) -> str:
    """Values over versions, from 0; `points` are (version, value), and `shown` writes a value."""
    width, height = _PLOT
    left, below = _MARGIN
    values = [value for _, value in points]
    top = max([*values, 0.0]) or 1.0
    inner = (width - 2 * left, height - 2 * below)
    marks = "".join(
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{escape(name)}: {escape(shown(value))}</title>'
        "</circle>"
        for (name, value), (x, y) in zip(points, _places(values, *inner, top, (left, below)), strict=True)
    )
    line = f'<polyline class="line" points="{_points(values, *inner, top, (left, below))}"/>' if values else ""
    ends = ""
    if points:
        ends = (
            f'<text x="{left}" y="{height - 3}">{escape(points[0][0])}</text>'
            f'<text class="end" x="{width - left}" y="{height - 3}">{escape(points[-1][0])}</text>'
        )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class="plot" role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<title>{escape(title)}: from 0 to {escape(shown(top))}</title>"
        f'<line class="axis" x1="{left}" x2="{width - left}" y1="{height - below}" y2="{height - below}"/>'
        f'<text x="{left}" y="12">{escape(shown(top) if values else "no versions yet")}</text>'
        f"{line}{marks}{ends}</svg></figure>"
    )


def lineage(versions: Sequence[VersionInfo]) -> str:
    """The newest versions from left to right, an epoch a line: squares are anchors, bows skip deltas, slopes forks.

    `versions` in ascending order.
    """
    shown = versions[-SHOWN:]
    if not shown:
        return "<p class='dim'>no versions yet</p>"
    epochs = list(dict.fromkeys(parse_version(info.version).epoch for info in shown))
    place = {
        info.version: (30 + i * _STEP, 34 + epochs.index(parse_version(info.version).epoch) * _LANE)
        for i, info in enumerate(shown)
    }
    width, height = 60 + len(shown) * _STEP, 52 + len(epochs) * _LANE
    strokes = "".join(_stroke(info, place) for info in shown)
    nodes = "".join(_node(info, *place[info.version]) for info in shown)
    counts = ", ".join(
        f"{sum(info.kind == kind for info in shown)} {words}"
        for kind, words in (("anchor", "anchors"), ("delta", "deltas"))
    )
    return (
        f'<svg class="lineage" role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<title>{len(shown)} versions: {counts}, {len(epochs)} epochs</title>{strokes}{nodes}</svg>"
    )


def _stroke(info: VersionInfo, place: dict[str, tuple[int, int]]) -> str:
    """The edge over which a version is held, and a dashed line to a parent that it does not start from."""
    x, y = place[info.version]
    parts = []
    base = info.base if info.kind != "anchor" else ""
    if info.parent and info.parent != base:
        run, _, name = info.parent.rpartition("/")
        if run or name not in place:
            parts.append(f'<path class="fork" d="M{x - 24} {y + 16}L{x} {y}"/>')
        else:
            from_x, from_y = place[name]
            parts.append(f'<path class="fork" d="M{from_x} {from_y}L{x} {y}"/>')
    if base in place:
        from_x, from_y = place[base]
        straight = from_y == y and x - from_x == _STEP
        bow = f"L{x} {y}" if straight or from_y != y else f"Q{(from_x + x) / 2:g} {y - 30} {x} {y}"
        parts.append(f'<path class="{"edge" if base == info.parent else "skip"}" d="M{from_x} {from_y}{bow}"/>')
    elif base:
        parts.append(f'<path class="edge" d="M{x - 24} {y}L{x} {y}"/>')
    return "".join(parts)


def _node(info: VersionInfo, x: int, y: int) -> str:
    parent = f", parent {info.parent}" if info.parent else ""
    words = f"{info.version}: {info.kind} of {size(info.delta_bytes)}, {percent(info.density)} changed{parent}"
    title = f"<title>{escape(words)}{', pinned' if info.pin else ''}</title>"
    if info.kind == "anchor":
        shape = f'<rect class="node" x="{x - _RADIUS}" y="{y - _RADIUS}" width="{2 * _RADIUS}" height="{2 * _RADIUS}">'
        end = "</rect>"
    else:
        shape, end = f'<circle class="node" cx="{x}" cy="{y}" r="{_RADIUS - 1}">', "</circle>"
    version = parse_version(info.version)
    name = f"{version.number}" + (f"@e{version.epoch}" if version.epoch > 1 else "")
    return f'{shape}{title}{end}<text class="mid" x="{x}" y="{y + 20}">{escape(name)}</text>'


def _places(
    values: Sequence[float], width: float, height: float, top: float, at: tuple[float, float]
) -> list[tuple[float, float]]:
    step = width / max(len(values) - 1, 1)
    return [(at[0] + i * step, at[1] + height - height * value / top) for i, value in enumerate(values)]


def _points(values: Sequence[float], width: float, height: float, top: float, at: tuple[float, float]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in _places(values, width, height, top, at))
