"""What this daemon measured about versions: for people and reports, never for decisions.

Kept beside the records so that a restart does not forget it. A lost or damaged note is an empty one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from deltad.client.messages import Seconds
from deltad.types import Version


class Note(msgspec.Struct, frozen=True):
    """How long the stages took here, how many bytes were pulled for the version, and how it was coded and why."""

    seconds: Seconds = Seconds()
    pulled_bytes: int = 0
    coder: str = ""
    coder_reason: str = ""


class Notes:
    """The notes of one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, version: Version) -> Note:
        try:
            return msgspec.json.decode(self._path(version).read_bytes(), type=Note)
        except (OSError, msgspec.DecodeError):
            return Note()

    def write(self, version: Version, note: Note) -> None:
        path = self._path(version)
        temporary = path.with_suffix(".tmp")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(note))
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)

    def forget(self, version: Version) -> None:
        with suppress(OSError):
            self._path(version).unlink()

    def _path(self, version: Version) -> Path:
        return self._directory / f"e{version.epoch:06d}-v{version.number:06d}.json"
