"""Which epoch a watch publishes in: a trainer that was replaced must not write into the epoch of the one after it.

Owns the invariant that the epoch of a watched directory moves only by a publish of one of its checkpoints, and that it
has moved durably before that publish is visible: a daemon that is killed in between does not lock its trainer out.
"""

from __future__ import annotations

from pathlib import Path

from deltad.config import WatchConfig
from deltad.store.runs import RunStore


class WatchFence:
    """The fence of one watch. Blocks on the disk; one caller at a time, the one who publishes the run."""

    def __init__(self, run: RunStore, config: WatchConfig) -> None:
        self._run = run
        self._directory = config.directory

    def settle(self) -> None:
        """Note the newest epoch for a directory that is new, and take back one that was to be opened and was not."""
        noted, newest = self._run.watch_epochs.of(self._directory), self._newest()
        if noted is None or noted > newest:
            self._run.watch_epochs.note(self._directory, newest)

    @property
    def epoch(self) -> int:
        """The epoch in which the trainer of the watched directory writes. `settle` came before."""
        return self._run.watch_epochs.of(self._directory) or self._newest()

    def holds(self, checkpoint: Path) -> bool:
        """Whether a checkpoint lies in the watched directory, so that whoever publishes it speaks for its trainer."""
        return checkpoint.resolve().is_relative_to(self._directory.resolve())

    def opens(self, epoch: int) -> None:
        """A checkpoint of the watched directory is about to open this epoch."""
        self._run.watch_epochs.note(self._directory, epoch)

    def _newest(self) -> int:
        latest = self._run.latest()
        return latest.version.epoch if latest else 1
