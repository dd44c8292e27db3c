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


class Notifier:
    """Says how the daemon is to whoever started it."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """A path that begins with `@` names a socket in Linux's abstract namespace."""
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str = "") -> None:
        """All is bound and recovered; units that wait for this one may start."""
        self._send("READY=1", status)

    def stopping(self, status: str = "") -> None:
        """The daemon drains."""
        self._send("STOPPING=1", status)

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send("", status)

    def _send(self, state: str, status: str) -> None:
        if not self._address:
            return
        # A line break would start an assignment of its own.
        lines = [state] if state else []
        if status:
            lines.append("STATUS=" + " ".join(status.split()))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)
        except OSError as error:
            log.debug("service_manager_silent", error=str(error))
