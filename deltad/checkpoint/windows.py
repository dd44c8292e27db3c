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
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltad.checkpoint.files import unreadable
from deltad.errors import CheckpointChangedError

Bytes = npt.NDArray[np.uint8]

_LEAST_MAPPED = 64 << 10  # copying less than this takes no longer than mapping it
_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_AHEAD_BYTES = 2 << 20  # populated at once, for what follows is mostly asked for next
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


class Window(NamedTuple):
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


class _Mapped(threading.local):
    """What a thread has mapped of a file: how many windows, and the bytes within which all of them are.

    `ready` are the bytes that were populated last.
    """

    def __init__(self) -> None:
        self.windows = 0
        self.low = self.high = 0
        self.ready = range(0)


class WeightFile:
    """An open weight file, lent window by window. Safe for several threads, each with an arena of its own."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self.path = path
        self._file = file
        self._lock = threading.Lock()
        self._mappable = _is_one_hosts_own(file)
        self._mapping: Bytes | None = None
        self._address = 0
        self._leased_bytes = 0
        self._holders = 0
        """Threads that have something mapped."""
        self._mine = _Mapped()

    def borrow(self, at: int, size: int, arena: Arena) -> Window:
        """`size` bytes from `at` on, to be read until they are given back.

        Raises CheckpointChangedError where the file ends before that, CheckpointError if it is unreadable.
        """
        if (mapped := self._map(at, size)) is not None:
            return mapped
        window = Window(np.empty(size, np.uint8)) if size < _LEAST_MAPPED else arena.take(size)
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
            mine = self._mine
            mine.windows -= 1
            if not mine.windows:
                self._advise(mine.low, mine.high, mmap.MADV_DONTNEED)
                self._end_hold()

    def close(self) -> None:
        """End the lease, whatever is on loan. What is mapped stays so as long as there are views of it."""
        with self._lock:
            self._mappable = False
            if self._holders:
                self._end_lease()
            self._holders, self._mapping = 0, None

    def _map(self, at: int, size: int) -> Window | None:
        mine, end = self._mine, at + size
        if not mine.windows:
            if size < _LEAST_MAPPED or not self._begin_hold():
                return None
            mine.low, mine.high, mine.ready = at, end, range(0)
        if not (mine.ready.start <= at and end <= mine.ready.stop) and not self._populate(at, end):
            if not mine.windows:
                self._end_hold()
            return None
        mine.windows += 1
        mine.low, mine.high = min(mine.low, at), max(mine.high, mine.ready.stop)
        mapping = self._mapping
        assert mapping is not None, "there is a lease, so it is mapped"
        return Window(mapping[at:end], mapped=True)

    def _populate(self, at: int, end: int) -> bool:
        """Have these bytes mapped, and some behind them; False where touching them could be deadly."""
        if end > self._leased_bytes:
            return False
        ahead = min(max(end, at + _AHEAD_BYTES), self._leased_bytes)
        # This tells by an error what touching would tell by a signal. It may wait long for a disk, so only then it
        # is asked whether the lease still holds, and nobody waits for its end.
        if self._advise(at, ahead, _POPULATE_READ) and fcntl.fcntl(self._file, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
            self._mine.ready = range(at, ahead)
            return True
        return False

    def _begin_hold(self) -> bool:
        with self._lock:
            if self._holders or (self._mappable and self._take_lease()):
                self._holders += 1
                return True
            return False

    def _end_hold(self) -> None:
        with self._lock:
            if self._holders:
                self._holders -= 1
                if not self._holders:
                    self._end_lease()

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
            if self._mapping is None:
                mapped = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)
                mapped.madvise(mmap.MADV_SEQUENTIAL)  # so that a disk reads ahead as it does for `read`
                self._mapping = np.frombuffer(mapped, np.uint8)
                self._address = _address(self._mapping)
            self._leased_bytes = min(self._mapping.size, os.fstat(self._file.fileno()).st_size)
        except (OSError, ValueError):  # ValueError: it is empty by now
            self._mappable = False
            self._end_lease()
        return self._mappable

    def _end_lease(self) -> None:
        with suppress(OSError):  # the kernel has taken it away
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _advise(self, at: int, end: int, advice: int) -> bool:
        """madvise(2) for the pages that hold these bytes, without the interpreter's lock. Whether it did so."""
        if self._mapping is None:
            return False
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        return bool(_libc.madvise(self._address + start, end - start, advice) == 0)

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


def _address(window: Bytes) -> int:
    return int(window.__array_interface__["data"][0])
