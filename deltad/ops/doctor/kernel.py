"""What the Linux kernel tells: limits, clock, file systems, locks. Reads only; None or empty: it does not say."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS_OFFSET = 40
_UNSYNCHRONISED = 0x40
_TIME_ERROR = 5
_FLOCK = re.compile(r"[0-9]+: FLOCK +[A-Z]+ +[A-Z]+ +([0-9]+) ([0-9a-f]+:[0-9a-f]+:[0-9]+) ", re.ASCII)
_NO_LIMIT = 1 << 60
"""Control groups of version 1 say `no limit` as a number near 2^63."""


def text(path: Path | str) -> str:
    """The content of a small file, stripped."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path | str, *, field: int = 0) -> int | None:
    """One of the whole numbers in a small file."""
    try:
        return int(text(path).split()[field])
    except (IndexError, ValueError):
        return None


def file_system(path: Path) -> int | None:
    """The magic number of the file system of `path`, by statfs(2), which Python lacks."""
    buffer = ctypes.create_string_buffer(512)
    libc = _libc()
    if libc is None or libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)


def clock_synchronised() -> bool | None:
    """Whether something keeps the wall clock right, by adjtimex(2)."""
    buffer = ctypes.create_string_buffer(512)  # `modes` is 0: read only
    libc = _libc()
    state = -1 if libc is None else libc.adjtimex(buffer)
    if state < 0 or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    status = int.from_bytes(buffer.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], sys.byteorder)
    return state != _TIME_ERROR and not status & _UNSYNCHRONISED


def holder(lock: Path) -> tuple[int | None, float | None]:
    """The process that holds an flock on a file, without trying it, and when the file was last written."""
    try:
        found = lock.stat()
    except OSError:
        return None, None
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    process = flock_holder(text("/proc/locks"), file)
    return process, None if process is None else found.st_mtime


def flock_holder(locks: str, file: str) -> int | None:
    """The process that has an flock on `file`, given as `major:minor:inode`, in the words of /proc/locks."""
    for line in locks.splitlines():
        # 1: FLOCK  ADVISORY  WRITE 7638 fe:00:2196141 0 EOF; those that wait have an arrow before FLOCK.
        match = _FLOCK.match(line)
        if match and match[2] == file:
            return int(match[1]) or None  # 0 is a process of another name space
    return None


def seconds_lived(process: int) -> float | None:
    """How long ago a process began, by a clock that is never set (proc(5), `starttime`)."""
    fields = text(f"/proc/{process}/stat").rpartition(")")[2].split()
    up = text("/proc/uptime").split()
    try:
        return float(up[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return None


def resource_limits(process: int | None) -> tuple[int | None, int | None]:
    """Open files and bytes of locked memory, of a process or of this one; None is no limit, or unknown."""
    if process is None:
        return _limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_MEMLOCK)
    found: dict[str, int | None] = {}
    for line in text(f"/proc/{process}/limits").splitlines():
        for name in ("Max open files", "Max locked memory"):
            if line.startswith(name):
                soft = line[len(name) :].split()[0]
                found[name] = int(soft) if soft.isdecimal() else None
    return found.get("Max open files"), found.get("Max locked memory")


def group_memory(process: int | None) -> int | None:
    """The least memory that the control groups of a process, or of this one, allow."""
    found = []
    for line in text(f"/proc/{process or 'self'}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        roots = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}
        root, name = roots.get(controllers, ("", ""))
        if root:
            group = Path(root + path)
            found += [number(at / name) for at in (group, *group.parents) if at.is_relative_to(root)]
    bounds = [bound for bound in found if bound is not None and bound < _NO_LIMIT]
    return min(bounds, default=None)


def host_memory() -> int | None:
    kib = next((line.split()[1] for line in text("/proc/meminfo").splitlines() if line.startswith("MemTotal:")), "")
    return int(kib) * 1024 if kib.isdecimal() else None


def inotify_used(user: int) -> tuple[int, int]:
    """Watches and instances of a user's processes, as far as they may be looked at."""
    watches = instances = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended, or is not ours to look at
            if process.stat().st_uid == user:
                for descriptor in os.listdir(process / "fd"):
                    if _is_inotify(process / "fd" / descriptor):
                        instances += 1
                        watches += text(process / "fdinfo" / descriptor).count("inotify wd:")
    return watches, instances


def _is_inotify(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor) == "anon_inode:inotify"
    except OSError:
        return False


def mount_of(path: Path) -> tuple[frozenset[str], str]:
    """The options of the mount that `path` lies on, and its device as `major:minor`."""
    at = os.path.realpath(path)
    best, options, device = "", frozenset[str](), ""
    for line in text("/proc/self/mountinfo").splitlines():
        # 22 27 0:21 / /proc rw,relatime shared:1 - proc proc rw
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = fields[4].encode().decode("unicode_escape")
        if (at == point or at.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, device = point, fields[2]
            options = frozenset(fields[5].split(",")) | frozenset(rest[2].split(",")) - {"rw"}
    return options, device


def write_cache(device: str) -> str:
    """What the kernel says of a device's cache: `write back`, `write through`, or nothing."""
    for at in (Path(f"/sys/dev/block/{device}/queue"), Path(f"/sys/dev/block/{device}/../queue")):
        if found := text(at / "write_cache"):
            return found
    return ""


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
