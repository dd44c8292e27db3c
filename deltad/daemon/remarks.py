"""What the watches have to say, in words, for `deltad status`. Pure; decides nothing.

Owns one invariant: a refused checkpoint is told of until a newer version is published, whoever publishes it,
or a newer checkpoint is refused.
"""

from __future__ import annotations

from pathlib import Path

from deltad.errors import DeltadError
from deltad.types import RunId, Version


class Remarks:
    """One remark at most about each run, which has one watch."""

    def __init__(self) -> None:
        self._missing: dict[RunId, Path] = {}
        self._refused: dict[RunId, tuple[Version | None, str]] = {}

    def refused(self, run: RunId, error: DeltadError, newest: Version | None) -> None:
        """A checkpoint was refused while `newest` was the run's newest version."""
        self._refused[run] = (newest, f"refused {error}")

    def waits(self, run: RunId, error: DeltadError, newest: Version | None) -> None:
        """A checkpoint is to be taken once what it needs is there, which it was not while `newest` was the newest."""
        self._refused[run] = (newest, f"waits for the base of {error}")

    def is_there(self, run: RunId, directory: Path, there: bool) -> None:
        """The watched directory was found missing, or has appeared."""
        if there:
            self._missing.pop(run, None)
        else:
            self._missing[run] = directory

    def about(self, run: RunId, newest: Version | None) -> str:
        """What is to be said of the watch now; empty if it is well."""
        if run in self._missing:
            return f"waits for directory {self._missing[run]} to appear"
        at, words = self._refused.get(run, (None, ""))
        return words if at == newest else ""
