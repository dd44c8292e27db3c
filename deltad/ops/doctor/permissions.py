"""Who owns and may do what: the store, the socket's directory and the watched directories. Pure.

The questions are asked for the user who examines; where that is root and the store is not root's, root's own
rights prove nothing, and that is said.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from deltad.config import Config
from deltad.ops.doctor.facts import Facts, Place
from deltad.ops.doctor.finding import Finding, Level

_SOCKET_BYTES = 107


def examine_permissions(config: Config, facts: Facts) -> Iterator[Finding]:
    findings = [*_store(facts), *_socket(config, facts), *_watched(facts)]
    if all(finding.level is Level.NOTE for finding in findings):
        findings.insert(0, Finding(Level.OK, "permissions", f"user {facts.user} may do all that is needed"))
    yield from findings


def _store(facts: Facts) -> Iterator[Finding]:
    place = facts.store if facts.store.exists else facts.store_parent
    if place.error:
        return
    if not place.writable or not place.readable:
        yield Finding(
            Level.ERROR,
            "permissions",
            f"user {facts.user} may not write {place.path} (owner {place.owner}, mode {place.mode:04o})",
            "the user that the daemon runs as",
            f"run the daemon as user {place.owner}, or `chown` the store",
        )
    elif facts.store.exists and facts.user != place.owner:
        yield Finding(
            Level.NOTE if facts.user == 0 else Level.WARNING,
            "permissions",
            f"the store belongs to user {place.owner}, and you are user {facts.user}",
            advice=f"what is said of permissions here holds for user {facts.user}; ask as the daemon's user",
        )
    if not facts.store.exists:
        return
    if facts.foreign_owned:
        yield Finding(
            Level.ERROR if place.owner != 0 else Level.WARNING,
            "permissions",
            f"{facts.foreign_owned[0]} does not belong to user {place.owner}, as the store does",
            "one owner for all of it",
            f"a daemon was started once as another user: `chown -R {place.owner} {place.path}` while none runs",
        )
    if place.mode & stat.S_IWOTH:
        yield Finding(
            Level.ERROR,
            "permissions",
            f"everybody may write {place.path} (mode {place.mode:04o})",
            "its owner alone",
            f"`chmod 750 {place.path}`",
        )
    elif place.mode & stat.S_IROTH:
        yield Finding(
            Level.NOTE,
            "permissions",
            f"everybody on this host may read {place.path}, weights included (mode {place.mode:04o})",
            advice=f"`chmod 750 {place.path}`, unless that is meant",
        )


def _socket(config: Config, facts: Facts) -> Iterator[Finding]:
    path, place = config.daemon.socket, facts.socket
    if len(bytes(path)) > _SOCKET_BYTES:
        yield Finding(
            Level.ERROR,
            "socket",
            f"{path} has {len(bytes(path))} bytes",
            f"at most {_SOCKET_BYTES}, as Unix sockets allow",
            "set a shorter `socket` in [daemon]",
        )
    if not place.writable or not place.is_directory:
        yield Finding(
            Level.ERROR,
            "socket",
            f"user {facts.user} may make no socket below {place.path} (owner {place.owner}, mode {place.mode:04o})",
            "a directory of the daemon's user",
            "`RuntimeDirectory=deltad` in its unit makes one, or set another `socket` in [daemon]",
        )
    elif path.parent == place.path and place.mode & stat.S_IWOTH:
        yield Finding(
            Level.NOTE if place.mode & stat.S_ISVTX else Level.WARNING,
            "socket",
            f"everybody may write {place.path} (mode {place.mode:04o})",
            "a directory of its own" if place.mode & stat.S_ISVTX else "a directory that others cannot write",
            "another user may put a socket of theirs there before the daemon starts: use a directory of its own",
        )


def _watched(facts: Facts) -> Iterator[Finding]:
    for watched in facts.watched:
        yield from _watched_place(facts.user, watched.place)


def _watched_place(user: int, place: Place) -> Iterator[Finding]:
    about = f"watched directory {place.path}"
    if not place.exists:
        yield Finding(
            Level.NOTE, about, "not there yet", advice="it is watched for; is the path right, and is it mounted?"
        )
    elif not place.is_directory:
        yield Finding(Level.ERROR, about, "a file", "a directory", "set another `directory` in its [[watch]]")
    elif not place.readable or place.error:
        yield Finding(
            Level.ERROR,
            about,
            f"user {user} may not read it (owner {place.owner}, mode {place.mode:04o})",
            "a directory that the daemon's user may list and read",
            "put the trainer and the daemon into one group, or run both as one user",
        )
    elif user not in (0, place.owner):
        yield Finding(
            Level.NOTE,
            about,
            f"it belongs to user {place.owner}, and you are user {user}",
            advice="files of another user cannot be leased, so they are read instead of mapped, which takes longer; "
            "run the daemon as the trainer's user",
        )
