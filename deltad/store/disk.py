"""Durable writes, and what the operating system's refusals mean.

Owns one invariant: a path that is visible under its final name is whole and synced. Crash notes:
killed before the rename, a file in `tmp/` is left and removed at the next start; killed between the
rename and the directory's sync, the file is whole under its name or absent, and both are states that
the caller's order of writes allows.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path

from deltad.errors import DeltadError, StoreError, StoreFullError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_durably(path: Path, data: bytes, *, scratch: Path) -> None:
    """Create or replace `path` with `data`, all or nothing, synced. `scratch` is on the same file system.

    Raises StoreFullError or StoreError; then `path` is as it was or, if only the directory could not be
    synced, has its new content without a promise that it stays. A failed fsync is never tried again: the
    kernel may have dropped the pages that it could not write.
    """
    temporary = scratch / uuid.uuid4().hex
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise store_error(error, path, len(data)) from error


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, each synced into its parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir(mode=0o750, exist_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise store_error(error, path, 0) from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """What an unprivileged writer may still write on the file system of `path`."""
    return shutil.disk_usage(path).free


def store_error(error: OSError, path: Path, size: int) -> DeltadError:
    """The deltad error for a refusal by the operating system."""
    if error.errno in _FULL:
        return StoreFullError(
            f"{path}",
            expected=f"room for {size} bytes" if size else "room for a directory",
            found=f"{error.strerror}, {_free_in_words(path)}",
            hint="free some space; publishing and pulling resume by themselves",
        )
    return StoreError(f"{path}", found=f"{error.strerror} (errno {error.errno})")


def _free_in_words(path: Path) -> str:
    try:
        return f"{free_bytes(path.parent)} bytes free"
    except OSError:
        return "free space unknown"
