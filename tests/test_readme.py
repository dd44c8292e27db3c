"""What README and the pages of reference say that can be told from the code is what the code says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import deltad
from deltad.config import UNITS, explain
from deltad.ops.reference import config_page, metrics_page

README = (Path(deltad.__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_keys_is_what_the_sections_say() -> None:
    rows = ["| key | default | what it is |", "|---|---|---|"]
    for section in explain():
        rows.append(f"| **`{section.name}`** | | **{section.text.rstrip('.')}** |")
        for key in section.keys:
            default = "required" if key.required else f"`{key.default}`"
            rows.append(f"| `{key.name}` | {default} | {key.text} |")
    assert "\n".join(rows) in README
    assert UNITS in README


@pytest.mark.parametrize(("page", "written"), [("METRICS", metrics_page), ("CONFIG", config_page)])
def test_the_pages_of_reference_are_what_the_code_says(page: str, written: Callable[[], str]) -> None:
    path = Path(deltad.__file__).parent / "docs" / f"{page}.md"
    hint = f"python -m deltad ops show {page.lower()} > deltad/docs/{page}.md"
    assert path.read_text(encoding="utf-8") == written(), hint
