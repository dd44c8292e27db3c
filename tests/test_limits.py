"""Every ceiling is respected somewhere, and told of."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import deltad
from deltad.limits import Limits

PACKAGE = Path(deltad.__file__).parent


def test_every_ceiling_is_in_the_table_and_in_the_code() -> None:
    table = re.findall(r"^\| `(\w+)` \| [0-9]", (PACKAGE / "docs" / "SECURITY.md").read_text(), re.MULTILINE)
    assert table == [field.name for field in fields(Limits)]
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "limits.py")
    assert [name for name in table if not re.search(rf"\b(limits|LIMITS|_limits)\.{name}\b", code)] == []
