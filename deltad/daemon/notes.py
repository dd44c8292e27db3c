"""What this daemon measured about versions: for people and reports, never for decisions.

Kept beside the records so that a restart does not forget it. A lost or damaged note is an empty one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from deltad.client.messages import Cache, Seconds
from deltad.errors import DeltadError
from deltad.store.disk import FileSystem, make_directory, read_file
from deltad.types import Version


class Note(msgspec.Struct, frozen=True):
    """How long the stages took here, how many bytes were pulled for the version, how it was coded and why, and what is
    to become of replicas' caches where it is committed."""

    seconds: Seconds = Seconds()
    pulled_bytes: int = 0
    coder: str = ""
    coder_reason: str = ""
    cache: Cache = ""


class Notes:
    """The notes of one run."""

    def __init__(self, directory: Path, files: FileSystem) -> None:
        self._directory = directory
        self._files = files

    def read(self, version: Version) -> Note:
        try:
            return msgspec.json.decode(read_file(self._path(version), self._files), type=Note)
        except (OSError, msgspec.DecodeError):
            return Note()

    def write(self, version: Version, note: Note) -> None:
        path = self._path(version)
        temporary = path.with_suffix(".tmp")
        # Not synced: what a power cut takes or tears is an empty note.
        with suppress(OSError, DeltadError):
            make_directory(self._directory, self._files)
            if self._files.entry(temporary) is not None:
                self._files.unlink(temporary)  # a kill left it
            file = self._files.create(temporary)
            try:
                file.write(msgspec.json.encode(note), 0)
            finally:
                file.close()
            self._files.rename(temporary, path)

    def forget(self, version: Version) -> None:
        with suppress(OSError):
            self._files.unlink(self._path(version))

    def _path(self, version: Version) -> Path:
        return self._directory / f"e{version.epoch:06d}-v{version.number:06d}.json"
