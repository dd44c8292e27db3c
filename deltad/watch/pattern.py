"""How a trainer names its checkpoints. Pure: text in, text and numbers out.

A pattern is a path below the watched directory. With `{number}` in one of its parts it names a checkpoint
per version (`step_{number}`, `global_step_{number}/actor`); without, one directory that is overwritten each
time (`latest`, or `.` for the watched directory itself). A name must match whole, so a temporary one
(`tmp-step_5`, `step_5.tmp`) never does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltad.errors import UsageError

_FIELD = "{number}"
_DIGITS = "([0-9]{1,15})"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern: the folder that is listed, the names that count in it, and the way on from there.

    `name` is None for a directory that is overwritten; then `before` is the path to it.
    """

    before: str
    name: re.Pattern[str] | None
    after: str

    @property
    def numbered(self) -> bool:
        """Whether each version has a directory of its own."""
        return self.name is not None

    def number(self, name: str) -> int | None:
        """The number in the name of a listed folder, zero-padded or not; None if it is not of this pattern."""
        match = self.name.fullmatch(name) if self.name else None
        return int(match[1]) if match else None

    def path(self, name: str) -> str:
        """The checkpoint's path below the watched directory, for a listed folder of that name."""
        return "/".join(part for part in (self.before, name, self.after) if part)


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern. Raises UsageError."""
    parts = [part for part in text.split("/") if part != "."]
    rest = text.replace(_FIELD, "", 1)
    if not text or text.startswith("/") or ".." in parts or "" in parts or set(rest) & set("{}\0"):
        raise UsageError(
            f"pattern {text[:120]!r}",
            expected=f"a relative path with at most one {_FIELD}, such as step_{_FIELD}",
        )
    at = next((i for i, part in enumerate(parts) if _FIELD in part), None)
    if at is None:
        return Pattern("/".join(parts), None, "")
    prefix, suffix = parts[at].split(_FIELD)
    name = re.compile(re.escape(prefix) + _DIGITS + re.escape(suffix), re.ASCII)
    return Pattern("/".join(parts[:at]), name, "/".join(parts[at + 1 :]))
