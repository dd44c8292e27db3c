"""What is known of a host, as plain data: gathered in one place, judged in another, made up in tests.

Sizes are bytes, times seconds. None is what could not be found out, which is never taken for good or bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deltad.store.look import Look


@dataclass(frozen=True, slots=True)
class Place:
    """A path and what this user may do there. `owner` and `mode` (its permission bits) are those of the path itself.

    `error` is what the system said where the path is there and cannot be looked at.
    """

    path: Path
    exists: bool = True
    is_directory: bool = True
    owner: int = 0
    mode: int = 0o750
    readable: bool = True
    writable: bool = True
    file_system: int | None = None
    """The magic number of the file system that it lies on, or would."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system under the store, or under where it will be, tried out on nameless files.

    `refused` is what the system said when a file was to be made and synced, and all that was tried after that is
    unknown. `syncs` are the seconds that each of a few small writes took to be synced. `write_cache` is what the
    kernel says of the device: `write back` or `write through`.
    """

    probed: Path
    file_system: int | None = None
    options: frozenset[str] = frozenset()
    free: int = 0
    free_inodes: int | None = None
    refused: str = ""
    reflink: bool | None = None
    syncs: tuple[float, ...] = ()
    write_cache: str = ""
    elsewhere: tuple[str, ...] = ()
    """Directories of the store that lie on another file system."""


@dataclass(frozen=True, slots=True)
class Running:
    """The process that holds the store. `answers` tells whether something answers at the configured socket.

    `clock_jump` is by how much the wall clock has moved against the monotonic one since it took the lock.
    """

    process: int | None = None
    answers: bool = False
    clock_jump: float | None = None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the daemon may use. Those of the running one, or else of whoever asks (`of_daemon` says which).

    `watches` and `instances` are inotify's per user, with how many are used now by this user, where that is known.
    `memory` is the least of the control groups' limits.
    """

    of_daemon: bool = False
    files: int | None = None
    locked_memory: int | None = None
    memory: int | None = None
    host_memory: int | None = None
    watches: int | None = None
    watches_used: int = 0
    instances: int | None = None
    instances_used: int = 0


@dataclass(frozen=True, slots=True)
class Clock:
    """`now` in Unix seconds; `synchronised` as the kernel says, None if it does not."""

    now: float
    synchronised: bool | None = None


@dataclass(frozen=True, slots=True)
class Tcp:
    """The kernel's TCP settings; windows are the most that one connection's buffers may grow to."""

    receive: int | None = None
    send: int | None = None
    congestion: str = ""
    available: tuple[str, ...] = ()
    slow_start_after_idle: bool | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """A watched directory and how many directories it has below it, itself included, as far as was counted."""

    place: Place
    directories: int = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that an examination looks at beside the configuration. `user` is the effective user id."""

    user: int
    store: Place
    store_parent: Place
    """The nearest directory above the store that is there; the store itself if it is."""
    look: Look
    disk: Disk
    socket: Place
    """The directory of the socket, or the nearest one above it that is there."""
    clock: Clock
    foreign_owned: tuple[Path, ...] = ()
    """A few paths within the store that belong to another user than the store itself."""
    running: Running = Running()
    ceilings: Ceilings = Ceilings()
    tcp: Tcp = Tcp()
    watched: tuple[Watched, ...] = ()
    round_trips: dict[str, float] = field(default_factory=dict)
    """Round trips to upstreams by URL, as the running daemon measured them."""
    doubts: tuple[str, ...] = ()
    """What the configuration itself warns of, such as tokens that anybody may read."""
