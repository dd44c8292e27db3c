"""Telling the service manager how the daemon is, by the sd_notify protocol.

Does nothing when nobody asked (no `NOTIFY_SOCKET`), and never fails or blocks the daemon: a service
manager that does not listen is its own problem.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import structlog

log = structlog.get_logger()

_MICROSECONDS = 1_000_000


class Notifier:
    """Says how the daemon is to whoever started it."""

    def __init__(self, environment: Mapping[str, str] = os.environ, *, process: int | None = None) -> None:
        """A path that begins with `@` names a socket in Linux's abstract namespace. `process`: by default this one."""
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog = _watchdog(environment, os.getpid() if process is None else process)
        """Within how many seconds `alive` must be said again and again; 0 where nobody waits for it."""

    def ready(self, status: str = "") -> None:
        """All is bound and recovered; units that wait for this one may start. Ends a reload, too."""
        self._send(["READY=1"], status)

    def reloading(self, now: float) -> None:
        """The configuration is read anew; `ready` says that it is over. `now`: seconds of CLOCK_MONOTONIC."""
        self._send(["RELOADING=1", f"MONOTONIC_USEC={int(now * _MICROSECONDS)}"])

    def stopping(self, status: str = "") -> None:
        """The daemon drains."""
        self._send(["STOPPING=1"], status)

    def alive(self, status: str = "") -> None:
        """The daemon does its work: the watchdog may wait again."""
        self._send(["WATCHDOG=1"], status)

    def extend(self, seconds: float, status: str = "") -> None:
        """What the service manager waits for may take so much longer from now."""
        self._send([f"EXTEND_TIMEOUT_USEC={int(seconds * _MICROSECONDS)}"], status)

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send([], status)

    def _send(self, lines: list[str], status: str = "") -> None:
        if not self._address:
            return
        if status:
            # A line break would start an assignment of its own.
            lines.append("STATUS=" + " ".join(status.split()))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)
        except OSError as error:
            log.debug("service_manager_silent", error=str(error))


def _watchdog(environment: Mapping[str, str], process: int) -> float:
    """What is not a number, or meant for another process, asks for nothing."""
    if environment.get("WATCHDOG_PID", str(process)) != str(process):
        return 0.0
    text = environment.get("WATCHDOG_USEC", "")
    return int(text) / _MICROSECONDS if text.isascii() and text.isdigit() else 0.0
