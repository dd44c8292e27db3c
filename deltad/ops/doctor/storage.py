"""The store itself and the file system under it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from deltad.config import Config
from deltad.figures import count, duration, size
from deltad.ops.doctor.facts import Disk, Facts
from deltad.ops.doctor.finding import Finding, Level
from deltad.ops.doctor.magic import IN_MEMORY, NETWORK, name_of
from deltad.store.store import foreign_names, is_known_format

_INSTANT = 20e-6
"""A sync that is faster than this reached no flash and no disk; a few take that long into a cache that is safe."""
_SLOW = 0.05
_NO_BARRIER = frozenset({"nobarrier", "barrier=0"})


def examine_store(config: Config, facts: Facts) -> Iterator[Finding]:
    """What lies at the configured place, and who holds it."""
    path, look = facts.store.path, facts.look
    if facts.store.error:
        yield Finding(
            Level.ERROR, "store", f"{path}: {facts.store.error}", "a directory that can be looked at", "see permissions"
        )
    elif not facts.store.exists:
        yield Finding(Level.OK, "store", f"{path} is not there yet; the first start makes it")
    elif not facts.store.is_directory:
        yield Finding(Level.ERROR, "store", f"{path} is a file", "a directory", "set another `store` in [daemon]")
    elif look.format and not is_known_format(look.format):
        yield Finding(
            Level.ERROR,
            "store",
            f"{path} says {look.format.strip()!r}",
            "a format that this deltad reads",
            "use the deltad that wrote it, or another directory; nothing in it is touched",
        )
    elif not look.format and (foreign := foreign_names(look.names)):
        yield Finding(
            Level.ERROR,
            "store",
            f"{path} holds {foreign[0]!r} and no FORMAT file",
            "an empty directory or a store",
            "set another `store` in [daemon]; nothing in it is touched",
        )
    else:
        held = sum(run.held for run in look.runs)
        yield Finding(
            Level.OK,
            "store",
            f"{path}, {look.format.strip() or 'empty'}, {count(len(look.runs), 'run')}, {count(held, 'version')}, "
            f"{size(look.pack_bytes)} in packs",
        )
    for run in look.runs:
        if run.unreadable:
            yield Finding(
                Level.WARNING,
                f"run {run.run}",
                f"{count(run.unreadable, 'record or manifest', 'records or manifests')} of the newest versions "
                "cannot be read",
                "none",
                "`deltad verify` tells which versions can still be rebuilt",
            )
    yield from _holder(config, facts)


def _holder(config: Config, facts: Facts) -> Iterator[Finding]:
    process, socket = facts.running.process, config.daemon.socket
    if process is None:
        if facts.running.answers:
            yield Finding(
                Level.WARNING,
                "daemon",
                f"something answers at {socket}, and nobody is seen to hold the store",
                "the daemon of this configuration, or nobody",
                "another daemon has this socket, or this user may not see who holds the lock",
            )
        return
    if facts.running.answers:
        yield Finding(Level.OK, "daemon", f"process {process} holds the store, and answers at {socket}")
    else:
        yield Finding(
            Level.WARNING,
            "daemon",
            f"process {process} holds the store, and nothing answers at {socket}",
            "one that answers, or nobody",
            "it is just starting, or it is another daemon: a second one on this store is refused",
        )


def examine_disk(facts: Facts) -> Iterator[Finding]:
    """What the file system can do and what its promises are worth, as far as that can be told from here."""
    disk = facts.disk
    kind = name_of(disk.file_system)
    if disk.refused:
        read_only = " (mounted read-only)" if "ro" in disk.options else ""
        yield Finding(
            Level.ERROR,
            "disk",
            f"no file can be made and synced at {disk.probed}{read_only}: {disk.refused}",
            "a place that this user can write",
            "mount it for writing, or put the permissions right"
            if not read_only
            else "mount it for writing; if it was before, the kernel met an error: see `dmesg`",
        )
    elif disk.file_system in NETWORK:
        yield Finding(
            Level.WARNING,
            "disk",
            f"the store is on {kind}, a network file system",
            "a local one",
            "its locks and syncs are kept by the server: a second daemon may get past the lock after a failover, "
            "and every sync crosses the network",
        )
    elif disk.file_system in IN_MEMORY:
        yield Finding(
            Level.WARNING,
            "disk",
            f"the store is on {kind}, in memory",
            "a file system on a disk",
            "it is gone after a reboot, and takes memory from everything else",
        )
    else:
        yield Finding(Level.OK, "disk", f"{kind} at {disk.probed}")
    for name in disk.elsewhere:
        yield Finding(
            Level.ERROR,
            "disk",
            f"{name} lies on another file system than the store",
            "one file system for all of the store, since files are renamed within it",
            "move the whole store instead",
        )
    if not disk.refused:
        yield from _reflink(disk)
        yield from _syncs(disk)


def _reflink(disk: Disk) -> Iterator[Finding]:
    if disk.reflink:
        yield Finding(Level.OK, "reflink", "files can share blocks (FICLONE works)")
    elif disk.reflink is not None:
        yield Finding(
            Level.NOTE,
            "reflink",
            "files cannot share blocks (FICLONE is refused)",
            advice="every export takes a full copy of the model; on XFS or btrfs copies can share blocks",
        )


def _syncs(disk: Disk) -> Iterator[Finding]:
    if disk.file_system in IN_MEMORY or not disk.syncs:
        return
    takes = median(disk.syncs)
    cache = f"; the device's cache is {disk.write_cache}" if disk.write_cache else ""
    found = f"a sync of 4 KiB takes {duration(takes) if takes >= 0.001 else f'{takes * 1e6:.0f} µs'}{cache}"
    if barred := sorted(_NO_BARRIER & disk.options):
        yield Finding(
            Level.WARNING,
            "sync",
            f"{found}; mounted with {barred[0]}",
            "barriers",
            "what was acknowledged may be lost in a power cut: mount it without that option",
        )
    elif takes < _INSTANT:
        yield Finding(
            Level.WARNING,
            "sync",
            found,
            f"{_INSTANT * 1e6:.0f} µs or more, as any disk needs",
            "syncs seem not to reach a disk (a library swallows them, or the host of a virtual disk does not wait): "
            "a power cut may then lose what was acknowledged",
        )
    elif takes > _SLOW:
        yield Finding(
            Level.WARNING,
            "sync",
            found,
            f"less than {duration(_SLOW)}",
            "every version waits for several syncs; give the store a faster or a less busy disk",
        )
    else:
        # A probe sees that a sync takes its time, never that the bytes outlive a power cut.
        yield Finding(Level.OK, "sync", f"{found}; only a power cut can tell whether the device keeps what it says")
