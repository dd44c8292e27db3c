"""What was said about the target of one run, durable: `runs/<run>/target`, one file, replaced atomically.

What stands and the history of it are one file, so no crash leaves one without the other. A power cut during a
change leaves the old content or the new one; a change that was refused may be found after a restart, as one
that was killed may.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from deltad.errors import FormatError
from deltad.protocol.target import Targets, check_statement
from deltad.store.disk import FileSystem, make_directory, read_file, store_error, write_durably


class TargetFile:
    """The statements of one run. The caller allows one change at a time; anybody may look."""

    def __init__(self, path: Path, scratch: Path, files: FileSystem) -> None:
        self._path = path
        self._scratch = scratch
        self._files = files
        self.now = Targets()

    def load(self) -> None:
        """Raises FormatError for what is no target: without it nobody can say what the fleets are to serve."""
        try:
            if self._files.entry(self._path) is None:
                return
            # A name whose directory was not synced before a kill is there, but not yet for good.
            self._files.sync_directory(self._path.parent)
            data = read_file(self._path, self._files)
        except OSError as error:
            raise store_error(error, self._path, 0, self._files) from error
        try:
            found = msgspec.json.decode(data, type=Targets)
            for said in found.heard:
                check_statement(said)
        except (msgspec.DecodeError, UnicodeDecodeError, FormatError) as error:
            raise FormatError(
                f"{self._path}",
                expected="what was said about the target of a run",
                found=str(error),
                hint="without the file, the run's fleets follow its newest version",
            ) from None
        self.now = found

    def change(self, move: Callable[[Targets], Targets]) -> bool:
        """Replace what stands by what `move` makes of it; durable on return. False if that is the same.

        Raises what `move` raises, and StoreError; then what stands in this life is what stood before.
        """
        moved = move(self.now)
        if moved is self.now:
            return False
        make_directory(self._path.parent, self._files)
        write_durably(self._path, msgspec.json.encode(moved), scratch=self._scratch, files=self._files)
        self.now = moved
        return True
