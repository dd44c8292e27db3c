"""Trying a file system out on files without a name, which are gone when they are closed, even by a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from deltad.ops.doctor import kernel
from deltad.ops.doctor.facts import Disk

_FICLONE = 0x40049409
"""ioctl_ficlone(2): share all blocks of one file with another."""
_BLOCK = 4096
_SYNCS = 5
_NO_NAMELESS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


def probe_disk(directory: Path, store: Path, own: tuple[str, ...]) -> Disk:
    """Try out the file system of `directory`, which is there; `own` are directories of the store, if it is."""
    options, device = kernel.mount_of(directory)
    kind = kernel.file_system(directory)
    try:
        found = os.statvfs(directory)
        with ExitStack() as stack:
            one, other = (_nameless(directory, stack) for _ in range(2))
            syncs = tuple(_sync(one, i) for i in range(_SYNCS))
            reflink = _clones(one, other)
    except OSError as error:
        return Disk(directory, kind, options, refused=error.strerror or str(error))
    return Disk(
        directory,
        kind,
        options,
        free=found.f_bavail * found.f_frsize,
        free_inodes=found.f_favail if found.f_files else None,
        reflink=reflink,
        syncs=syncs,
        write_cache=kernel.write_cache(device),
        elsewhere=tuple(name for name in own if _is_elsewhere(store, store / name)),
    )


def _nameless(directory: Path, stack: ExitStack) -> int:
    """A file for reading and writing, without a name, or with one for a moment where that cannot be."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
        descriptor, name = tempfile.mkstemp(prefix=".deltad-doctor-", dir=directory)
        os.unlink(name)
    stack.callback(os.close, descriptor)
    return descriptor


def _sync(descriptor: int, block: int) -> float:
    """Seconds for a block to be written and synced."""
    began = time.perf_counter()
    os.pwrite(descriptor, os.urandom(_BLOCK), block * _BLOCK)
    os.fsync(descriptor)
    return time.perf_counter() - began


def _clones(one: int, other: int) -> bool:
    try:
        fcntl.ioctl(other, _FICLONE, one)
    except OSError:
        return False
    return os.pread(other, _BLOCK, 0) == os.pread(one, _BLOCK, 0)


def _is_elsewhere(store: Path, path: Path) -> bool:
    with suppress(OSError):
        return path.stat().st_dev != store.stat().st_dev
    return False
