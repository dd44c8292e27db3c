"""What the host allows a process, its file-system events, and its clock. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deltad.config import Config
from deltad.delta.threads import default_threads
from deltad.figures import count, duration, size, when
from deltad.limits import MIB
from deltad.ops.doctor.facts import Facts
from deltad.ops.doctor.finding import Finding, Level
from deltad.ops.doctor.magic import NETWORK, name_of

REPLICAS = 64
PEERS = 16
"""How many replicas, and how many regions that pull from here, room is asked for: no configuration tells."""
_FILES = 128
"""Descriptors for the daemon itself: the store, a checkpoint's files, the log."""
_CONNECTIONS_OF_A_PEER = 8
_FRAME_BYTES = 60 * MIB
_BASE_BYTES = 256 * MIB
_CHUNK_BYTES = 8 * MIB
_LOCKED_BYTES = 64 * MIB
_JUMP = 30.0
_AHEAD = 60.0


def files_needed(config: Config) -> int:
    """Descriptors for everything that the configuration has connections to, with `REPLICAS` and `PEERS`."""
    below = PEERS * _CONNECTIONS_OF_A_PEER if config.relay else 0
    return _FILES + 2 * REPLICAS + below + sum(upstream.connections for upstream in config.upstreams)


def memory_needed(config: Config) -> int:
    """Bytes for the frames in work, the chunks in flight and the process itself."""
    threads = config.backend.threads or default_threads()
    flights = sum(upstream.connections for upstream in config.upstreams) + (PEERS if config.relay else 0)
    return _BASE_BYTES + threads * _FRAME_BYTES + flights * _CHUNK_BYTES


def examine_ceilings(config: Config, facts: Facts) -> Iterator[Finding]:
    """Descriptors and memory."""
    ceilings = facts.ceilings
    whose = "of the running daemon" if ceilings.of_daemon else "here (a service may have others)"
    needed = files_needed(config)
    if ceilings.files is not None:
        found = f"{ceilings.files:,} open files {whose}"
        if ceilings.files < needed:
            yield Finding(
                Level.ERROR if ceilings.files < _FILES else Level.WARNING,
                "limits",
                found,
                f"{needed:,}, for {REPLICAS} replicas"
                + (f" and {PEERS} regions that pull from here" if config.relay else ""),
                "`LimitNOFILE=65536` in its unit, or `ulimit -n 65536` before it starts",
            )
        else:
            yield Finding(Level.OK, "limits", found)
    needed = memory_needed(config)
    most = min((bound for bound in (ceilings.memory, ceilings.host_memory) if bound is not None), default=None)
    if most is not None:
        what = "this host has" if most == ceilings.host_memory else f"the control group {whose} allows"
        if most < needed:
            yield Finding(
                Level.ERROR,
                "memory",
                f"{what} {size(most)}",
                f"{size(needed)}, for the frames in work and the chunks in flight",
                "raise `MemoryMax`, or set `threads` in [backend] or `connections` in [[upstream]] lower",
            )
        else:
            yield Finding(Level.OK, "memory", f"{what} {size(most)}; up to {size(needed)} are used, page cache aside")
    locked = ceilings.locked_memory
    if config.backend.kind == "cupy" and locked is not None and locked < _LOCKED_BYTES:
        yield Finding(
            Level.NOTE,
            "limits",
            f"{size(locked)} of locked memory {whose}",
            f"{size(_LOCKED_BYTES)}, where the GPU's driver counts its host buffers",
            "`LimitMEMLOCK=infinity` in its unit",
        )


def examine_watching(config: Config, facts: Facts) -> Iterator[Finding]:
    """Whether events of the watched directories come. A rescan finds everything without them, only later."""
    rescan = max((watch.rescan for watch in config.watches), default=0.0)
    late = f"checkpoints are found by the rescan each {duration(rescan)} instead of at once"
    for watched in facts.watched:
        if watched.place.file_system in NETWORK:
            yield Finding(
                Level.NOTE,
                f"watched directory {watched.place.path}",
                f"on {name_of(watched.place.file_system)}: no events come of what other hosts write",
                advice=late,
            )
    if not facts.watched:
        return
    ceilings, directories = facts.ceilings, sum(watched.directories for watched in facts.watched)
    own = 0 if facts.running.process is not None else directories
    free = None if ceilings.watches is None else ceilings.watches - ceilings.watches_used
    if free is not None and free < own:
        yield Finding(
            Level.WARNING,
            "inotify",
            f"{count(max(free, 0), 'watch', 'watches')} left of {ceilings.watches:,}",
            f"{directories:,}, one a directory",
            f"{late}; `sysctl fs.inotify.max_user_watches={max(8 * directories, 524_288)}`",
        )
        return
    own = 0 if facts.running.process is not None else len(facts.watched)
    free = None if ceilings.instances is None else ceilings.instances - ceilings.instances_used
    if free is not None and free < own:
        yield Finding(
            Level.WARNING,
            "inotify",
            f"{count(max(free, 0), 'instance')} left of {ceilings.instances}",
            f"{len(facts.watched)}, one a watched directory",
            f"{late}; `sysctl fs.inotify.max_user_instances=1024`",
        )
        return
    if ceilings.watches is not None:
        to_watch = count(directories, "directory", "directories")
        yield Finding(Level.OK, "inotify", f"{to_watch} to watch, and room for it")


def examine_clock(facts: Facts) -> Iterator[Finding]:
    """The wall clock. A wrong one changes displayed times and nothing else, so nothing here is an error."""
    clock, good = facts.clock, True
    jump = facts.running.clock_jump
    if jump is not None and abs(jump) > _JUMP:
        good = False
        yield Finding(
            Level.WARNING,
            "clock",
            f"it was set {'forward' if jump > 0 else 'back'} by {duration(abs(jump))} since the daemon started",
            "a clock that goes on evenly",
            "times in `deltad log` from before and after do not compare; nothing is decided by them",
        )
    newest = max((run.created[-1] for run in facts.look.runs if run.created), default=0.0)
    if newest > clock.now + _AHEAD:
        good = False
        yield Finding(
            Level.WARNING,
            "clock",
            f"the newest version is of {when(newest)}, {duration(newest - clock.now)} from now",
            "versions of the past",
            "the clock here is behind, or that of the publisher is ahead: see that both are synchronised",
        )
    if clock.synchronised is False:
        yield Finding(
            Level.NOTE,
            "clock",
            f"{when(clock.now)}, and the kernel says that nothing keeps it synchronised",
            advice="displayed times may be off; run chrony or systemd-timesyncd",
        )
    elif good:
        said = {True: "synchronised", None: "whether it is synchronised is unknown"}[clock.synchronised]
        yield Finding(Level.OK, "clock", f"{when(clock.now)}, {said}")
