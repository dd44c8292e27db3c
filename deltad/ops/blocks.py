"""What there is to show, as blocks of plain data: drawn by the command line as text, and as HTML by the status page.

Draws nothing itself. A block holds words and what they mean, never markup; whoever draws it escapes what it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


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
