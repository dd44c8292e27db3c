"""Keeping the files of the checkpoint that was published last, so that the next one is compared with them.

A trainer prunes its old checkpoints, and a hard link or a reflink outlives that without copying a byte. But
a trainer that overwrites in place changes what a hard link shows. Owns one invariant: a kept baseline is
opened only while size, time of change and inode of every file are those that were recorded when it was kept.
Whoever reads it still compares its sums with the published ones.

Killed while keeping: a directory without a record is left. It is never opened, and the next keep replaces it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import msgspec

from deltad.checkpoint.directory import Checkpoint, open_checkpoint
from deltad.checkpoint.files import FileStamp
from deltad.errors import CheckpointError, FormatError
from deltad.limits import DEFAULT_LIMITS, Limits

RECORD_NAME = "kept.json"
_FICLONE = 0x40049409
_NO_SUCH_WAY = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS}
)


class _Record(msgspec.Struct, frozen=True):
    """What was kept: the version, and (name, size, time of change, inode) of each file."""

    version: str
    files: tuple[tuple[str, int, int, int], ...]


def keep_baseline(checkpoint: Checkpoint, directory: Path, version: str) -> bool:
    """Keep a checkpoint's files in `directory` as the baseline that is `version`, without copying them.

    Hard links, else reflinks. Replaces what `directory` held. False, leaving no directory, where neither
    works, or where the files are not those that were opened any more.
    """
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(parents=True)
        stamps = [_keep(source, directory, stamp) for source, stamp in checkpoint.file_stamps().items()]
        if None not in stamps:
            files = tuple((s.name, s.size, s.mtime_ns, s.inode) for s in stamps if s is not None)
            temporary = directory / (RECORD_NAME + ".tmp")
            temporary.write_bytes(msgspec.json.encode(_Record(version, files)))
            os.rename(temporary, directory / RECORD_NAME)
            return True
    except (OSError, RuntimeError):
        pass  # the file was removed meanwhile, or the disk is full: a baseline is an economy, never a need
    shutil.rmtree(directory, ignore_errors=True)
    return False


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


def _keep(source: Path, directory: Path, stamp: FileStamp) -> FileStamp | None:
    """Keep one file; its stamp in `directory`, or None where it cannot be kept or is another file by now."""
    target = directory / source.name
    if not _hard_link(source, target) and not _reflink(source, target, stamp):
        return None
    kept = FileStamp.of(source.name, os.stat(target, follow_symlinks=False))
    return kept if (kept.size, kept.mtime_ns) == (stamp.size, stamp.mtime_ns) else None


def _hard_link(source: Path, target: Path) -> bool:
    try:
        os.link(source.resolve(strict=True), target)
    except OSError as error:
        if error.errno in _NO_SUCH_WAY:
            return False
        raise
    return True


def _reflink(source: Path, target: Path, stamp: FileStamp) -> bool:
    """Share the blocks of `source`, to be copied when either is written. The copy gets the original's time."""
    with source.open("rb") as original, target.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
        except OSError as error:
            if error.errno in _NO_SUCH_WAY:
                return False
            raise
        status = os.fstat(original.fileno())
        os.utime(copy.fileno(), ns=(status.st_atime_ns, stamp.mtime_ns))
        return FileStamp.of(stamp.name, status) == stamp
