"""What README says that can be told from the code is what the code says."""

from __future__ import annotations

from pathlib import Path

import deltad
from deltad.config import UNITS, explain

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
