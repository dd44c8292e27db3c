"""Looking at the host. Reads, and tries a few nameless files out that are gone when they are closed.

Takes no lock, so a daemon may run or start meanwhile. Invariant: what cannot be found out is None or empty, and no
refusal of the system ends an examination.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from deltad.client.client import Client
from deltad.config import Config, warnings
from deltad.errors import DeltadError
from deltad.ops.doctor import kernel
from deltad.ops.doctor.facts import Ceilings, Clock, Facts, Place, Running, Tcp, Watched
from deltad.ops.doctor.probe import probe_disk
from deltad.store.look import look

_OWN_DIRECTORIES = ("packs", "objects", "runs", "tmp", "exports")
_MOST_ENTRIES = 10_000
_ANSWER_SECONDS = 3.0


def gather(config: Config) -> Facts:
    """Everything that an examination asks for. Blocks for as long as a few syncs take."""
    path = config.daemon.store
    store = _place(path)
    parent = path if store.exists and store.is_directory else _nearest(path.parent)
    running, round_trips = _running(config)
    return Facts(
        user=os.geteuid(),
        store=store,
        store_parent=_place(parent),
        look=look(path),
        disk=probe_disk(parent, path, _OWN_DIRECTORIES),
        socket=_place(_nearest(config.daemon.socket.parent)),
        clock=Clock(time.time(), kernel.clock_synchronised()),
        foreign_owned=tuple(_foreign_owned(path, store.owner)) if store.exists else (),
        running=running,
        ceilings=_ceilings(running.process),
        tcp=_tcp(),
        watched=tuple(_watched(watch.directory) for watch in config.watches),
        round_trips=round_trips,
        doubts=warnings(config),
    )


def _place(path: Path) -> Place:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Place(path, exists=False)
    except OSError as error:
        return Place(path, readable=False, writable=False, error=error.strerror or str(error))
    is_directory = stat.S_ISDIR(found.st_mode)
    search = os.X_OK if is_directory else 0
    return Place(
        path,
        is_directory=is_directory,
        owner=found.st_uid,
        mode=stat.S_IMODE(found.st_mode),
        readable=os.access(path, os.R_OK | search, effective_ids=True),
        writable=os.access(path, os.W_OK | search, effective_ids=True),
        file_system=kernel.file_system(path),
    )


def _nearest(path: Path) -> Path:
    """The nearest of a path and what is above it that is there."""
    for found in (path, *path.parents):
        with suppress(OSError):
            if found.exists():
                return found
    return Path("/")


def _foreign_owned(store: Path, owner: int) -> list[Path]:
    """Up to three paths, of the first few levels of a store, that do not belong to its owner."""
    found: list[Path] = []
    for seen, path in enumerate(_first_levels(store)):
        with suppress(OSError):
            if path.lstat().st_uid != owner:
                found.append(path)
        if len(found) == 3 or seen == _MOST_ENTRIES:
            break
    return found


def _first_levels(store: Path) -> list[Path]:
    found: list[Path] = []
    level = [store]
    for _ in range(4):
        below: list[Path] = []
        for directory in level:
            with suppress(OSError), os.scandir(directory) as entries:
                below += [Path(entry.path) for entry in entries if entry.name not in ("lost+found", "exports")]
        found += below
        if len(found) > _MOST_ENTRIES:
            break
        level = [path for path in below if path.is_dir() and not path.is_symlink() and path.parent.name != "objects"]
    return found


def _running(config: Config) -> tuple[Running, dict[str, float]]:
    process, locked_at = kernel.holder(config.daemon.store / "lock")
    jump = None
    if process is not None and locked_at is not None and (lived := kernel.seconds_lived(process)) is not None:
        # The lock was written moments after the process began, both long ago by their own clocks.
        jump = time.time() - locked_at - lived
    try:
        view = Client(config.daemon.socket, timeout=_ANSWER_SECONDS).status()
    except DeltadError:
        return Running(process, answers=False, clock_jump=jump), {}
    return Running(process, answers=True, clock_jump=jump), {link.url: link.rtt for link in view.upstreams}


def _ceilings(process: int | None) -> Ceilings:
    files, locked = kernel.resource_limits(process)
    of_daemon = process is not None and files is not None
    if not of_daemon:
        files, locked = kernel.resource_limits(None)
    watches_used, instances_used = kernel.inotify_used(os.geteuid())
    return Ceilings(
        of_daemon=of_daemon,
        files=files,
        locked_memory=locked,
        memory=kernel.group_memory(process if of_daemon else None),
        host_memory=kernel.host_memory(),
        watches=kernel.number("/proc/sys/fs/inotify/max_user_watches"),
        watches_used=watches_used,
        instances=kernel.number("/proc/sys/fs/inotify/max_user_instances"),
        instances_used=instances_used,
    )


def _tcp() -> Tcp:
    ipv4 = Path("/proc/sys/net/ipv4")
    idle = kernel.number(ipv4 / "tcp_slow_start_after_idle")
    return Tcp(
        receive=kernel.number(ipv4 / "tcp_rmem", field=2),
        send=kernel.number(ipv4 / "tcp_wmem", field=2),
        congestion=kernel.text(ipv4 / "tcp_congestion_control"),
        available=tuple(kernel.text(ipv4 / "tcp_available_congestion_control").split()),
        slow_start_after_idle=None if idle is None else bool(idle),
    )


def _watched(directory: Path) -> Watched:
    place = _place(directory)
    directories = 0
    if place.exists and place.is_directory:
        for _ in os.walk(directory):
            directories += 1
            if directories == _MOST_ENTRIES:
                break
    return Watched(place, directories)
