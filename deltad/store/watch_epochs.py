"""In which epoch each watched directory of a run publishes, durable: `runs/<run>/watch`, one file, replaced atomically.

A directory has no epoch of its own, and its trainer does not say in which one it writes. So what is noted is the epoch
that was the newest when the directory was first watched, or that was opened with a checkpoint of the directory since;
once another publisher has opened a newer one, what still comes from here comes from a trainer that was replaced.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from deltad.errors import FormatError
from deltad.store.disk import FileSystem, make_directory, read_file, store_error, write_durably


class WatchEpochs:
    """The watched directories of one run. The caller allows one change at a time; anybody may look."""

    def __init__(self, path: Path, scratch: Path, files: FileSystem) -> None:
        self._path = path
        self._scratch = scratch
        self._files = files
        self._epochs: dict[str, int] = {}

    def load(self) -> None:
        """Raises FormatError for what is no such file: without it a trainer that was replaced could not be told."""
        try:
            if self._files.entry(self._path) is None:
                return
            # A name whose directory was not synced before a kill is there, but not yet for good.
            self._files.sync_directory(self._path.parent)
            data = read_file(self._path, self._files)
        except OSError as error:
            raise store_error(error, self._path, 0, self._files) from error
        try:
            self._epochs = msgspec.json.decode(data, type=dict[str, int])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FormatError(
                f"{self._path}",
                expected="the epochs in which watched directories publish",
                found=str(error),
                hint="without the file, each publishes in the newest epoch",
            ) from None

    def of(self, directory: Path) -> int | None:
        """The epoch of a directory; None for one that was not watched yet."""
        return self._epochs.get(str(directory))

    def note(self, directory: Path, epoch: int) -> None:
        """Durable on return."""
        if self._epochs.get(str(directory)) == epoch:
            return
        epochs = {**self._epochs, str(directory): epoch}
        make_directory(self._path.parent, self._files)
        write_durably(self._path, msgspec.json.encode(epochs), scratch=self._scratch, files=self._files)
        self._epochs = epochs
