"""Names of checkpoints to numbers and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.errors import UsageError
from deltad.watch.pattern import parse_pattern


@pytest.mark.parametrize(
    ("pattern", "name", "number"),
    [
        ("step_{number}", "step_000100", 100),
        ("step_{number}", "step_0", 0),
        ("checkpoint-{number}", "checkpoint-500", 500),
        ("global_step_{number}", "global_step_12", 12),
        ("{number}", "7", 7),
        ("a.{number}+b", "a.3+b", 3),
        ("step_{number}", "step_", None),
        ("step_{number}", "step_5.tmp", None),
        ("step_{number}", "tmp-step_5", None),
        ("step_{number}", ".step_5", None),
        ("step_{number}", "step_5.incomplete", None),
        ("step_{number}", "global_step_5", None),
        ("step_{number}", "step_-5", None),
        ("step_{number}", "step_٣", None),
        ("step_{number}", "step_5\n", None),
        ("step_{number}", "step_" + "9" * 16, None),
        ("a.{number}", "ab3", None),
    ],
)
def test_a_name_has_the_number_that_its_pattern_gives(pattern: str, name: str, number: int | None) -> None:
    assert parse_pattern(pattern).number(name) == number


def test_a_pattern_may_be_a_path() -> None:
    pattern = parse_pattern("runs/./a/global_step_{number}/actor")
    assert (pattern.before, pattern.number("global_step_3"), pattern.after) == ("runs/a", 3, "actor")
    assert pattern.path("global_step_3") == "runs/a/global_step_3/actor"


@pytest.mark.parametrize(("text", "path"), [("latest", "latest"), (".", ""), ("out/hf", "out/hf")])
def test_without_a_number_it_is_one_directory_that_is_overwritten(text: str, path: str) -> None:
    pattern = parse_pattern(text)
    assert not pattern.numbered
    assert pattern.before == path
    assert pattern.number("latest") is None


@pytest.mark.parametrize(
    "text", ["", "/abs/{number}", "../{number}", "a/../{number}", "{number}_{number}", "{step}", "a//b", "a\0", "a{b"]
)
def test_what_names_no_checkpoint_below_the_directory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"a relative path with at most one \{number\}"):
        parse_pattern(text)


@given(
    prefix=st.text(st.characters(exclude_characters="/{}\0", exclude_categories=["Cs"]), max_size=5),
    number=st.integers(0, 10**15 - 1),
    zeros=st.integers(0, 3),
)
def test_any_name_gives_its_number_back(prefix: str, number: int, zeros: int) -> None:
    padded = str(number).rjust(min(15, len(str(number)) + zeros), "0")
    name = f"{prefix}x{padded}"
    assert parse_pattern(f"{prefix}x{{number}}").number(name) == number
