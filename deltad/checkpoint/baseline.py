"""Keeping the files of the checkpoint that was published last, so that the next one is compared with them.

A trainer prunes its old checkpoints, and a hard link or a reflink outlives that without copying a byte. But
a trainer that overwrites in place changes what a hard link shows. Owns one invariant: a kept baseline is
opened only while size, time of change and inode of every file are those that were recorded when it was kept.
Whoever reads it still compares its sums with the published ones.

Killed while keeping: a directory without a record is left, or one that was replaced. Neither is ever opened, and the
next keep replaces or removes it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from deltad.checkpoint.directory import Checkpoint, open_checkpoint
from deltad.checkpoint.files import FileStamp
from deltad.errors import CheckpointError, DeltadError, FormatError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.store.disk import DISK, NO_SUCH_WAY, FileSystem, make_directory, remove_tree

RECORD_NAME = "kept.json"


class _Record(msgspec.Struct, frozen=True):
    """What was kept: the version, and (name, size, time of change, inode) of each file."""

    version: str
    files: tuple[tuple[str, int, int, int], ...]


def keep_baseline(checkpoint: Checkpoint, directory: Path, version: str, *, files: FileSystem = DISK) -> bool:
    """Keep a checkpoint's files in `directory` as the baseline that is `version`, without copying them.

    Hard links, else reflinks. Replaces what `directory` held, whose files stay beside it until `drop_replaced`. False,
    leaving no directory, where neither works, or where the files are not those that were opened any more.
    """
    drop_replaced(directory, files)
    try:
        files.rename(directory, _replaced(directory))
    except OSError:
        remove_tree(directory, files)  # which is not there, as a rule
    try:
        make_directory(directory.parent, files)
        files.mkdir(directory)
        stamps = [_keep(source, directory, stamp, files) for source, stamp in checkpoint.file_stamps().items()]
        if None not in stamps:
            kept = tuple((s.name, s.size, s.mtime_ns, s.inode) for s in stamps if s is not None)
            temporary = directory / (RECORD_NAME + ".tmp")
            file = files.create(temporary)
            try:
                file.write(msgspec.json.encode(_Record(version, kept)), 0)
            finally:
                file.close()
            files.rename(temporary, directory / RECORD_NAME)
            return True
    except (OSError, RuntimeError, DeltadError):
        pass  # the file was removed meanwhile, or the disk is full: a baseline is an economy, never a need
    remove_tree(directory, files)
    return False


def drop_replaced(directory: Path, files: FileSystem = DISK) -> None:
    """Remove the files of the baseline that was replaced last.

    Where the trainer has pruned that checkpoint, these names are its last: then this frees its blocks, which takes as
    long as a good part of a publish, and is nothing that anybody has to wait for.
    """
    remove_tree(_replaced(directory), files)


def _replaced(directory: Path) -> Path:
    return directory.with_name(directory.name + ".replaced")


def open_baseline(
    directory: Path, version: str, *, publish_as: str = "source", limits: Limits = DEFAULT_LIMITS
) -> Checkpoint | None:
    """The baseline kept in `directory`, if it is `version` and its files are as they were kept.

    None where nothing is kept, something else is, or a file was written or lost since.
    """
    try:
        record = msgspec.json.decode((directory / RECORD_NAME).read_bytes(), type=_Record)
        if record.version != version:
            return None
        checkpoint = open_checkpoint(directory, publish_as=publish_as, limits=limits)
    except (OSError, msgspec.DecodeError, CheckpointError, FormatError):
        return None
    # Opening takes the fingerprint before it reads anything, so this holds for all that was read.
    found = [(s.name, s.size, s.mtime_ns, s.inode) for s in checkpoint.fingerprint.files]
    if found != sorted(record.files):
        checkpoint.close()
        return None
    return checkpoint


def _keep(source: Path, directory: Path, stamp: FileStamp, files: FileSystem) -> FileStamp | None:
    """Keep one file; its stamp in `directory`, or None where it cannot be kept or is another file by now."""
    target = directory / source.name
    if not _hard_link(source, target, files) and not files.reflink(source, target):
        return None
    kept = FileStamp.of(source.name, os.stat(target, follow_symlinks=False))
    return kept if (kept.size, kept.mtime_ns) == (stamp.size, stamp.mtime_ns) else None


def _hard_link(source: Path, target: Path, files: FileSystem) -> bool:
    try:
        files.link(source.resolve(strict=True), target)
    except OSError as error:
        if error.errno in NO_SUCH_WAY:
            return False
        raise
    return True
