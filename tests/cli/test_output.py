"""Numbers that people read, and text that no terminal obeys."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deltad.cli.output import clean, draw, plain
from deltad.figures import count, duration, percent, percent_of, rate, short, size, when
from deltad.ops.blocks import Block, Cell, Facts, Line, Table, Tone, columns


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1_572_864, "1.50 MiB"),
        (12_900_000, "12.3 MiB"),
        (283_115_520, "270 MiB"),
        (1_048_575, "1.00 MiB"),
        (2_000_000_000_000, "1.82 TiB"),
        (1 << 62, "4096 PiB"),
    ],
)
def test_sizes_have_three_digits_that_matter(number: int, text: str) -> None:
    assert size(number) == text


def test_a_rate_is_a_size_per_second() -> None:
    assert rate(5 << 20) == "5.00 MiB/s"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.000001, "<0.001 %"),
        (0.00034, "0.034 %"),
        (0.0031, "0.31 %"),
        (0.124, "12.4 %"),
        (0.999, "99.9 %"),
        (8190 / 8192, "99.975 %"),
        (0.9999999, "99.999 %"),
        (1.0, "100 %"),
        (1.0004, "100 %"),
    ],
)
def test_a_share_that_is_not_zero_or_not_all_is_never_shown_as_that(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_share_of_nothing_is_a_dash() -> None:
    assert percent_of(0, 0) == "–"
    assert percent_of(1, 4) == "25.0 %"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0001, "1 ms"),
        (0.083, "83 ms"),
        (0.9999, "1.00 s"),
        (4.213, "4.21 s"),
        (59.96, "1 min"),
        (200, "3 min 20 s"),
        (18_720, "5 h 12 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_grow_units_as_they_grow(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_moment_that_is_unknown_or_impossible_is_a_dash() -> None:
    assert when(0) == "–"
    assert when(1e30) == "–"
    assert re.fullmatch(r"2023-11-1[45] \d\d:\d\d:\d\d [+-]\d{4}", when(1_700_000_000))


def test_counts_agree_in_number() -> None:
    assert [count(n, "tensor") for n in (0, 1, 1204)] == ["0 tensors", "1 tensor", "1,204 tensors"]
    assert count(2, "directory", "directories") == "2 directories"


def test_a_long_digest_is_cut_and_a_missing_one_is_a_dash() -> None:
    assert short("ab" * 32) == "abababababab…"
    assert short("") == "–"


@given(st.text())
def test_no_text_of_strangers_reaches_the_terminal_as_a_control(text: str) -> None:
    assert clean(text).isprintable()


TABLE = Table("things", columns("name", ">bytes"), [("a", "1 B"), (Cell("long name", Tone.BAD), "12.3 MiB")])


def test_plain_text_is_aligned_and_numbers_stand_to_the_right() -> None:
    assert plain([TABLE]) == "\n".join(
        [
            "things:",
            "  name          bytes",
            "  a               1 B",
            "  long name  12.3 MiB",
        ]
    )


def test_plain_blocks_are_apart_and_empty_tables_say_so() -> None:
    empty = Table("replicas", columns("replica"), [], empty="none registered")
    text = plain([Line("a sentence"), Facts("", [("root", "ab"), ("n", "1")]), empty])
    assert text == "a sentence\n\nroot  ab\nn     1\n\nreplicas: none registered"


def drawn(*blocks: Block) -> str:
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=80, color_system="standard").print(draw(blocks))
    return stream.getvalue()


def test_on_a_terminal_the_same_text_is_drawn_with_meaning_as_colour() -> None:
    text = drawn(TABLE, Line("done"))
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "long name" in bare
    assert "12.3 MiB" in bare
    assert "done" in bare
    assert "\x1b[1;31mlong name" in text


def test_markup_and_escapes_in_names_are_shown_and_not_obeyed() -> None:
    hostile = "[bold]x[/bold]\x1b]0;owned\x07\n"
    for text in (drawn(Line(hostile), Facts(hostile, [("n", hostile)])), plain([Line(hostile)])):
        assert "[bold]x[/bold]" in text
        assert "\x1b]0" not in text
        assert "\x07" not in text
