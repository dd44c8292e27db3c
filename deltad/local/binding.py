"""The Unix socket of the local API: bound so that only the right callers reach it, and never stolen.

Killed at any point, a daemon leaves at most a socket file that nobody listens on; the next one
replaces it. A file that is no socket is never touched.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import struct
from pathlib import Path

from deltad.errors import ConfigError

_MODE = 0o660
_BACKLOG = 128
_CREDENTIALS = struct.Struct("iii")
_SO_PEERGROUPS = 59
"""Of Linux since 4.13; the `socket` module does not name it."""
_MOST_GROUPS = 256
"""What `getsockopt` of Python has room for; of a caller with more, only the primary group is known."""


def bind_unix_socket(path: Path, group: int | None = None) -> socket.socket:
    """A listening socket at `path`, for its owner and group alone; missing parents are created.

    It belongs to `group`, where one is given, which needs that this process may do so.

    A stale socket file is replaced. Raises ConfigError where another process listens, where the path is
    taken by something else, and where the system refuses.
    """
    thing = f"socket {path}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        _remove_stale(path, thing)
        listener.bind(str(path))
        # Nobody can connect before `listen`, so the mode is right from the first connection on.
        os.chmod(path, _MODE)
        if group is not None:
            os.chown(path, -1, group)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            thing,
            expected="a path of at most 107 bytes where a socket can be made",
            found=error.strerror or str(error),
            hint="set `socket` in the [daemon] section",
        ) from None
    except BaseException:
        listener.close()
        raise
    return listener


def bind_tcp_once(host: str, port: int) -> None:
    """Bind every address that a name stands for, and let go of it. Raises OSError."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)


def caller_name(connection: socket.socket) -> str:
    """Who is at the other end of a connection to the Unix socket, as the kernel knows it: `ana (uid 1000)`.

    May block: looking up a name may ask the network.
    """
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def group_id(name: str) -> int | None:
    """The number of a group of this host; None for the empty name. Raises ConfigError."""
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError("[daemon] group", expected="a group of this host", found=repr(name)) from None


def may_connect(connection: socket.socket, group: int | None = None) -> bool:
    """Whether the kernel says that the caller is root, this process's own user, or a member of `group`."""
    _, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid in (0, os.geteuid()):
        return True
    if group is None:
        return False
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:
        data = b""
    return group == gid or group in struct.unpack(f"{len(data) // 4}I", data)


def _remove_stale(path: Path, thing: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(thing, expected="a free path or a socket", found="something else", hint="remove it by hand")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Not blocking: a listener whose backlog is full is alive, and must not be waited for.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            pass
    raise ConfigError(
        thing,
        expected="a socket that nobody listens on",
        found="another process that listens",
        hint="stop that daemon, or give this one another `socket`",
    )
