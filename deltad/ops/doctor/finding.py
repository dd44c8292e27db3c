"""What an examination finds: how bad, what about, what is there, what was expected, and what to do."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad, from good to bad. With a `warning` the daemon works, worse than it could or not for long; with an
    `error` it does not start, or what it stores is not safe."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return list(Level).index(self)


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `expected` and `advice` are empty where nothing is amiss."""

    level: Level
    about: str
    found: str
    expected: str = ""
    advice: str = ""

    def __str__(self) -> str:
        parts = [f"{self.about}: {self.found}"]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.advice:
            parts.append(self.advice)
        return "; ".join(parts)
