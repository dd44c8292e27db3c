"""Windows of a weight file: mapped while nobody can write to it, else read into memory that is kept.

A mapped file that is cut short kills its reader with SIGBUS, and one that is written changes between being
compared and being encoded. So a window is mapped under a read lease alone (`fcntl(F_SETLEASE)`): whoever opens
the file to write or truncate it waits in the kernel until the windows on loan are given back, a frame's time.
Where no lease is to be had (the file is another user's, someone has it open for writing, the file system is
shared with other hosts), a window is read with `preadv` into pages that are there already.

Owns one invariant: what a window shows neither changes nor vanishes until it is given back. The kernel takes a
lease away by force after `/proc/sys/fs/lease-break-time`, 45 seconds: no window may be on loan for as long.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltad.checkpoint.files import unreadable
from deltad.errors import CheckpointChangedError

Bytes = npt.NDArray[np.uint8]

_LEAST_MAPPED = 64 << 10  # copying less than this takes no longer than mapping it
_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which `mmap` does not name

_ONE_HOSTS_OWN = frozenset(
    {
        0xEF53,  # ext2 to ext4
        0x58465342,  # XFS
        0x9123683E,  # Btrfs
        0xF2F52010,  # F2FS
        0xCA451A4E,  # bcachefs
        0x2FC12FC1,  # ZFS
        0x01021994,  # tmpfs
        0x794C7630,  # overlayfs
    }
)
"""File systems, by the magic number of statfs(2), that no other host writes to behind a lease."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes on loan: mapped, read into an arena from `start` on, or in memory of their own."""

    bytes: Bytes
    mapped: bool = False
    arena: Arena | None = None
    start: int = 0


class Arena:
    """Memory for what one thread has on loan, used again once it is back.

    Fresh memory costs more in page faults than it takes to fill. What does not fit gets memory of its own.
    """

    def __init__(self) -> None:
        self._memory: Bytes | None = None
        self._starts: list[int] = []
        self._used = 0

    def take(self, size: int) -> Window:
        if self._memory is None:
            self._memory = _huge_pages(_ARENA_BYTES)
        start = self._used
        if start + size > self._memory.size:
            return Window(np.empty(size, np.uint8))
        self._starts.append(start)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return Window(self._memory[start : start + size], arena=self, start=start)

    def put_back(self, start: int) -> None:
        """What was taken last is free at once, all else when everything behind it is back too."""
        self._starts.remove(start)
        if not self._starts or self._starts[-1] < start:
            self._used = start if self._starts else 0


class WeightFile:
    """An open weight file, lent window by window. Safe for several threads, each with an arena of its own."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self.path = path
        self._file = file
        self._lock = threading.Lock()
        self._mappable = _is_one_hosts_own(file)
        self._on_loan = 0
        self._leased_bytes = 0
        self._mapping: Bytes | None = None

    def borrow(self, at: int, size: int, arena: Arena) -> Window:
        """`size` bytes from `at` on, to be read until they are given back.

        Raises CheckpointChangedError where the file ends before that, CheckpointError if it is unreadable.
        """
        if size < _LEAST_MAPPED:
            window = Window(np.empty(size, np.uint8))
        elif (mapped := self._map(at, size)) is not None:
            return mapped
        else:
            window = arena.take(size)
        try:
            self._read(at, window.bytes)
        except BaseException:
            self.give_back(window)
            raise
        return window

    def give_back(self, window: Window) -> None:
        """The end of a loan, in the thread that took it. With the last one, whoever waits to write goes on."""
        if window.arena is not None:
            window.arena.put_back(window.start)
        if window.mapped:
            _advise(window.bytes, mmap.MADV_DONTNEED)
            self._end_loan()

    def close(self) -> None:
        """End the lease, whatever is on loan. What is mapped stays so as long as there are views of it."""
        with self._lock:
            self._mappable = False
            if self._on_loan:
                self._end_lease()
            self._on_loan, self._mapping = 0, None

    def _map(self, at: int, size: int) -> Window | None:
        with self._lock:
            if not self._on_loan and not (self._mappable and self._take_lease()):
                return None
            self._on_loan += 1
            mapping, end = self._mapping, self._leased_bytes
        if mapping is not None and at + size <= min(end, mapping.size):
            window = Window(mapping[at : at + size], mapped=True)
            # Populating tells by an error what touching would tell by a signal. It may wait long for a disk, so
            # only then it is asked whether the lease still holds.
            if _advise(window.bytes, _POPULATE_READ) and self._is_leased():
                return window
        self._end_loan()
        return None

    def _take_lease(self) -> bool:
        try:
            # The signal that says that a writer waits kills, unless it is one that is ignored where nobody asks.
            fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            # EAGAIN: someone has it open for writing, and may close it.
            self._mappable = error.errno == errno.EAGAIN
            return False
        try:
            self._leased_bytes = os.fstat(self._file.fileno()).st_size
            if self._mapping is None:
                mapped = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)
                self._mapping = np.frombuffer(mapped, np.uint8)
        except (OSError, ValueError):  # ValueError: it is empty by now
            self._mappable = False
            self._end_lease()
        return self._mappable

    def _is_leased(self) -> bool:
        """Whether there is a lease and nobody waits for its end."""
        return fcntl.fcntl(self._file, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def _end_loan(self) -> None:
        with self._lock:
            if self._on_loan:
                self._on_loan -= 1
                if not self._on_loan:
                    self._end_lease()

    def _end_lease(self) -> None:
        with suppress(OSError):  # the kernel has taken it away
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _read(self, at: int, into: Bytes) -> None:
        view = into.data
        try:
            while view:
                size = os.preadv(self._file.fileno(), [view], at)
                if not size:
                    raise CheckpointChangedError(
                        f"{self.path}",
                        expected=f"bytes from {at} on, as when it was opened",
                        found="the end of the file",
                        hint="it was cut short while it was read; nothing was published",
                    )
                view = view[size:]
                at += size
        except OSError as error:
            raise unreadable(self.path, error) from error


def _is_one_hosts_own(file: FileIO) -> bool:
    status = ctypes.create_string_buffer(512)
    if _libc.fstatfs(file.fileno(), status):
        return False
    return ctypes.c_long.from_buffer(status).value in _ONE_HOSTS_OWN


def _huge_pages(size: int) -> Bytes:
    """Zeros, in huge pages where the system has them, so that filling them takes few faults."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return whole[-_address(whole) % _HUGE_PAGE :][:size]


def _advise(window: Bytes, advice: int) -> bool:
    """madvise(2) for the pages that hold a window, without the interpreter's lock. Whether it did so."""
    address = _address(window)
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_libc.madvise(start, address + window.size - start, advice) == 0)


def _address(window: Bytes) -> int:
    return int(window.__array_interface__["data"][0])
