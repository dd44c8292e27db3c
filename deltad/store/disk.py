"""The port to the file system, the real one behind it, and durable writes on top.

Everything that the store does to a disk goes through `FileSystem`, so that a test can cut the power at any
operation. Owns one invariant: a path that `write_durably` made visible under its final name is whole and
synced. Crash notes: killed before the rename, a file in `tmp/` is left and removed at the next start;
killed between the rename and the directory's sync, the file is whole under its name or absent, and both
are states that the caller's order of writes allows.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltad.errors import DeltadError, StoreError, StoreFullError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_HINTS = {
    errno.EROFS: "mount it for writing; if it was before, the kernel met an error there (`dmesg`)",
    errno.EACCES: "run as the user whom the store belongs to; `deltad doctor` says what may not be done",
    errno.EIO: "the disk failed: see `dmesg`, and move the store to another one",
}
NO_SUCH_WAY = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS}
)
"""What a file system says that cannot link, reflink or copy between these two places."""
_FICLONE = 0x40049409
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """What a directory holds under one name. `size` is in bytes, 0 for a directory."""

    name: str
    size: int
    is_directory: bool


class File(Protocol):
    """An open file. Offsets and sizes are bytes; refusals are OSErrors.

    Several threads may `read` at once, and `write` where their bytes do not overlap.
    """

    def read(self, count: int, offset: int) -> bytes:
        """Up to `count` bytes from `offset`; fewer only where the file ends."""

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. After an error, any part of it may be there."""

    def allocate(self, size: int) -> None:
        """Make the file `size` bytes long, of zeros where nothing was written, with all the space that takes."""

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Make the content durable. After an error nothing that was not durable before ever will be."""

    def size(self) -> int: ...

    def close(self) -> None: ...


class Lock(Protocol):
    """A lock that dies with its process."""

    def close(self) -> None: ...


class FileSystem(Protocol):
    """What the store asks of a file system. Refusals are OSErrors with the errno of the system call.

    A name that was created, renamed or removed is durable only after `sync_directory` of its directory,
    content only after `File.sync`.
    """

    def create(self, path: Path) -> File:
        """A new file, open for writing. FileExistsError if there is one."""

    def edit(self, path: Path) -> File:
        """An existing file, open for reading and writing."""

    def open(self, path: Path) -> File:
        """An existing file, open for reading. It stays readable when its name is removed."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or directory another name; a file that has it is replaced at once."""

    def unlink(self, path: Path) -> None: ...

    def link(self, path: Path, name: Path) -> None:
        """Give a file a further name, which must be free. What is written under either is seen under both."""

    def reflink(self, path: Path, copy: Path) -> bool:
        """A new file with the content of another and its time of change, that shares its blocks until one is written.

        False, and there is no new file, where the file system cannot.
        """

    def copy(self, path: Path, copy: Path) -> None:
        """A new file with the content of another, in blocks of its own."""

    def mkdir(self, path: Path) -> None: ...

    def rmdir(self, path: Path) -> None: ...

    def entries(self, path: Path) -> list[Entry]:
        """What a directory holds, in order of names. Symbolic links are not followed."""

    def entry(self, path: Path) -> Entry | None:
        """What is under a path, or None. Symbolic links are followed."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""

    def free_bytes(self, path: Path) -> int:
        """What an unprivileged writer may still write on the file system of `path`."""

    def lock(self, path: Path) -> Lock:
        """Take the lock and leave this process's number in the file. BlockingIOError while another holds it."""


class _OpenFile:
    """`File` over a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, count: int, offset: int) -> bytes:
        parts = []
        while data := os.pread(self._descriptor, count, offset):
            parts.append(data)
            count, offset = count - len(data), offset + len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def allocate(self, size: int) -> None:
        os.posix_fallocate(self._descriptor, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)


class Disk:
    """The file system of this host."""

    def create(self, path: Path) -> File:
        return _OpenFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))

    def edit(self, path: Path) -> File:
        return _OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def open(self, path: Path) -> File:
        return _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def link(self, path: Path, name: Path) -> None:
        os.link(path, name)

    def reflink(self, path: Path, copy: Path) -> bool:
        with _copying(path, copy) as (source, target):
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError as error:
                if error.errno not in NO_SUCH_WAY:
                    raise
                os.unlink(copy)
                return False
            status = os.fstat(source)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            return True

    def copy(self, path: Path, copy: Path) -> None:
        with _copying(path, copy) as (source, target):
            left = os.fstat(source).st_size
            while left and (done := _copy_some(source, target, left)):
                left -= done

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o750)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def entries(self, path: Path) -> list[Entry]:
        with os.scandir(path) as found:
            entries = []
            for item in found:
                is_directory = item.is_dir(follow_symlinks=False)
                size = 0 if is_directory else item.stat(follow_symlinks=False).st_size
                entries.append(Entry(item.name, size, is_directory))
        return sorted(entries, key=lambda entry: entry.name)

    def entry(self, path: Path) -> Entry | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        is_directory = stat.S_ISDIR(found.st_mode)
        return Entry(path.name, 0 if is_directory else found.st_size, is_directory)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free

    def lock(self, path: Path) -> Lock:
        # An flock dies with its process, so a killed daemon's lock is free at once.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # a number is a courtesy, and the disk may be full
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return _OpenFile(descriptor)


@contextmanager
def _copying(path: Path, copy: Path) -> Iterator[tuple[int, int]]:
    """An existing file to read and a new one to write; the new one is removed again after an error."""
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            yield source, target
        except BaseException:
            with suppress(OSError):
                os.unlink(copy)
            raise
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy_some(source: int, target: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count)
    except OSError as error:
        if error.errno not in NO_SUCH_WAY:
            raise
        # Between file systems of two kinds: the same by hand.
        data = os.read(source, min(count, _COPY_BYTES))
        return os.write(target, data) if data else 0


DISK: FileSystem = Disk()


def read_file(path: Path, files: FileSystem = DISK, most: int | None = None) -> bytes:
    """The whole content of a file, or its first bytes. Raises OSError."""
    file = files.open(path)
    try:
        return file.read(file.size() if most is None else most, 0)
    finally:
        file.close()


def write_durably(path: Path, data: bytes, *, scratch: Path, files: FileSystem = DISK) -> None:
    """Create or replace `path` with `data`, all or nothing, synced. `scratch` is on the same file system.

    Raises StoreFullError or StoreError; then `path` is as it was or, if only the directory could not be
    synced, has its new content without a promise that it stays. A failed sync is never tried again: the
    kernel may have dropped the pages that it could not write.
    """
    temporary = scratch / uuid.uuid4().hex
    try:
        file = files.create(temporary)
        try:
            file.write(data, 0)
            file.sync()
        finally:
            file.close()
        files.rename(temporary, path)
        files.sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            files.unlink(temporary)
        raise store_error(error, path, len(data), files) from error


def make_directory(path: Path, files: FileSystem = DISK) -> None:
    """Create `path` and its missing parents, each synced into its parent."""
    try:
        found = files.entry(path)
        if found is not None and found.is_directory:
            return
        make_directory(path.parent, files)
        files.mkdir(path)
        try:
            files.sync_directory(path.parent)
        except OSError:
            # Left there, it would be taken for durable the next time.
            with suppress(OSError):
                files.rmdir(path)
            raise
    except FileExistsError:
        # Two threads make it at once; who of them was first syncs it too.
        pass
    except OSError as error:
        raise store_error(error, path, 0, files) from error


def remove_tree(path: Path, files: FileSystem = DISK) -> None:
    """Remove a directory and all below it, as far as the system lets; what is not there is no error."""
    with suppress(OSError):
        for entry in files.entries(path):
            if entry.is_directory:
                remove_tree(path / entry.name, files)
            else:
                with suppress(OSError):
                    files.unlink(path / entry.name)
        files.rmdir(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory of this host durable."""
    DISK.sync_directory(path)


def store_error(error: OSError, path: Path, size: int, files: FileSystem = DISK) -> DeltadError:
    """The deltad error for a refusal by the operating system."""
    if error.errno in _FULL:
        return StoreFullError(
            f"{path}",
            expected=f"room for {size} bytes" if size else "room for a directory",
            found=f"{error.strerror}, {_free_in_words(path, files)}",
            hint="free some space; publishing and pulling resume by themselves",
        )
    return StoreError(
        f"{path}",
        found=f"{error.strerror} (errno {error.errno})",
        hint=_HINTS.get(error.errno or 0, "see `deltad doctor`"),
    )


def _free_in_words(path: Path, files: FileSystem) -> str:
    try:
        return f"{files.free_bytes(path.parent)} bytes free"
    except OSError:
        return "free space unknown"
