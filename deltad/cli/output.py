"""How results are shown: blocks of plain data, drawn as rich tables on a terminal and as aligned text off one.

Text that came from files or other machines is shown as text, never as markup or terminal control: what
is not printable is escaped here, in one place.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


class Tone(StrEnum):
    """What a cell means, as a colour where there are colours. The text says the same without them."""

    PLAIN = ""
    GOOD = "green"
    BAD = "bold red"
    WARN = "yellow"
    DIM = "dim"


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text and what it means."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class Column:
    """A column; numbers are aligned to the right."""

    name: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names. An empty table shows `empty` in place of its rows."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell | str, ...]]
    empty: str = "none"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one a line."""

    title: str
    rows: Sequence[tuple[str, Cell | str]]


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence."""

    text: Cell | str


Block: TypeAlias = Table | Facts | Line


def columns(*names: str) -> tuple[Column, ...]:
    """Columns by name; a name that starts with `>` is aligned to the right."""
    return tuple(Column(name.removeprefix(">"), name.startswith(">")) for name in names)


def show(blocks: Sequence[Block]) -> None:
    """Print blocks to standard output."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(draw(blocks))
    else:
        click.echo(plain(blocks))


def show_json(value: object, *, compact: bool = False) -> None:
    """Print a value as JSON, on one line if `compact`."""
    data = msgspec.json.encode(value)
    click.echo(data if compact else msgspec.json.format(data, indent=2))


def clean(text: str) -> str:
    """The same text on one line with everything escaped that a terminal might obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(blocks: Sequence[Block]) -> str:
    """Blocks as aligned text, an empty line between them."""
    return "\n\n".join("\n".join(_plain_lines(block)) for block in blocks)


def _plain_lines(block: Block) -> list[str]:
    match block:
        case Line(text):
            return [_text(text)]
        case Facts(title, rows):
            width = max((len(name) for name, _ in rows), default=0)
            lines = [f"{name:<{width}}  {_text(value)}".rstrip() for name, value in rows]
        case Table(title, heads, rows, empty):
            if not rows:
                return [f"{title}: {empty}" if title else empty]
            grid = [tuple(head.name for head in heads), *(tuple(_text(cell) for cell in row) for row in rows)]
            widths = [max(len(row[i]) for row in grid) for i in range(len(heads))]
            lines = [
                "  ".join(
                    cell.rjust(width) if head.right else cell.ljust(width)
                    for cell, width, head in zip(row, widths, heads, strict=True)
                ).rstrip()
                for row in grid
            ]
    return [f"{title}:", *(f"  {line}" for line in lines)] if title else lines


def draw(blocks: Sequence[Block]) -> RenderableType:
    """Blocks as one rich renderable."""
    from rich.console import Group

    parts: list[RenderableType] = []
    for block in blocks:
        if parts:
            parts.append("")
        parts += _drawn(block)
    return Group(*parts)


def _drawn(block: Block) -> list[RenderableType]:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if isinstance(block, Line):
        return [_rich_text(block.text)]
    if isinstance(block, Table) and not block.rows:
        return [Text.assemble((clean(block.title), "bold"), ": " if block.title else "", (clean(block.empty), "dim"))]
    head: list[RenderableType] = [Text(clean(block.title), style="bold")] if block.title else []
    if isinstance(block, Facts):
        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in block.rows:
            grid.add_row(name, _rich_text(value))
        return [*head, grid]
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in block.columns:
        table.add_column(Text(column.name), justify="right" if column.right else "left", overflow="fold")
    for row in block.rows:
        table.add_row(*(_rich_text(cell) for cell in row))
    return [*head, table]


def _text(cell: Cell | str) -> str:
    return clean(cell.text if isinstance(cell, Cell) else cell)


def _rich_text(cell: Cell | str) -> Text:
    from rich.text import Text

    return Text(_text(cell), style=cell.tone.value if isinstance(cell, Cell) else "")


_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """Bytes for people: `512 B`, `1.50 KiB`, `12.3 MiB`, `270 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    value, unit = count / 1024, _UNITS[0]
    for larger in _UNITS[1:]:
        # 999.5 would be shown as 1000: the next unit says it shorter.
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{_digits(value)} {unit}"


def rate(per_second: float) -> str:
    """Bytes per second for people."""
    return f"{size(per_second)}/s"


def percent(share: float) -> str:
    """A share of one: `0.31 %`, `12.4 %`, `100 %`; what is not zero is never shown as zero."""
    value = share * 100
    if 0 < value < 0.001:
        return "<0.001 %"
    if value < 0.1:
        return f"{value:.3f} %" if value else "0 %"
    return f"{_digits(value)} %"


def percent_of(part: float, whole: float) -> str:
    """`part` as a percentage of `whole`; a dash where there is no whole."""
    return percent(part / whole) if whole else "–"


def duration(seconds: float) -> str:
    """Seconds for people: `83 ms`, `4.21 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{max(seconds * 1000, 1):.0f} ms"
    if seconds < 59.95:
        return f"{_digits(seconds)} s"
    whole = round(seconds)
    for unit, per, smaller, per_smaller in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= per:
            rest = whole % per // per_smaller
            return f"{whole // per} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def when(unix: float) -> str:
    """A moment in the local time of whoever reads it; a dash where it is unknown."""
    if not unix:
        return "–"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
    except (OverflowError, ValueError, OSError):
        return "–"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 tensor`, `1,204 tensors`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def short(digest: str) -> str:
    """The first 12 hex digits of a digest, enough to compare by eye."""
    return f"{digest[:12]}…" if len(digest) > 12 else digest or "–"


def _digits(value: float) -> str:
    """Three digits that matter, without a decimal point where none is needed."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
