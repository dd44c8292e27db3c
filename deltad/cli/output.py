"""How results are shown: blocks of plain data, drawn as rich tables on a terminal and as aligned text off one.

Text that came from files or other machines is shown as text, never as markup or terminal control: what
is not printable is escaped here, in one place.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from deltad.figures import clean
from deltad.ops.blocks import Block, Cell, Facts, Line, Table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


def show(blocks: Sequence[Block]) -> None:
    """Print blocks to standard output."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(draw(blocks))
    else:
        click.echo(plain(blocks))


def show_lines(lines: Iterable[Sequence[Cell]]) -> None:
    """Print lines that are laid out already to standard output, in colour on a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for line in lines:
            console.print(Text("").join(map(_rich_text, line)), soft_wrap=True)
    else:
        for line in lines:
            click.echo("".join(map(_text, line)).rstrip())


def terminal_width() -> int:
    """The columns of the terminal; 80 where the output is none."""
    return max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else 80


def shows_boxes() -> bool:
    """Whether standard output can show the strokes that boxes are drawn with."""
    try:
        "●│├─┼╯".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def show_json(value: object, *, compact: bool = False) -> None:
    """Print a value as JSON, on one line if `compact`."""
    data = msgspec.json.encode(value)
    click.echo(data if compact else msgspec.json.format(data, indent=2))


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
