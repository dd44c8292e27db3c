"""Where a secret is kept. Invariant: it lives in no object; it is read when asked, and never shown or logged."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from deltad.errors import ConfigError

_TOKEN = re.compile(rb"[!-~]{1,4096}")
_SHORT = 16


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Where a bearer token is kept. The token itself is never held, shown or logged.

    The file holds one line of printable ASCII without blanks, and only its owner may write it.
    """

    path: Path

    def read(self) -> str:
        """The token as it stands in the file now, so that a rotated one is picked up. Raises ConfigError."""
        return self._read()[0]

    def doubts(self) -> tuple[str, ...]:
        """What makes the secret weaker than it could be, one sentence each. Raises ConfigError as `read` does."""
        token, mode = self._read()
        found = []
        if mode & stat.S_IROTH:
            found.append(
                f"token file {self.path}: everybody on this host may read it (mode {stat.S_IMODE(mode):04o}); "
                f"run `chmod 600 {self.path}`"
            )
        if len(token) < _SHORT:
            found.append(
                f"token file {self.path}: a token of fewer than {_SHORT} characters can be guessed; "
                "make one with `openssl rand -hex 32`"
            )
        return tuple(found)

    def _read(self) -> tuple[str, int]:
        """The token and the file's mode. Raises ConfigError."""
        thing = f"token file {self.path}"
        try:
            # Not blocking, so that a FIFO in this place cannot hang the daemon.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                mode = os.fstat(descriptor).st_mode
                content = os.read(descriptor, 8192).strip() if stat.S_ISREG(mode) else b""
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(thing, expected="a readable file", found=error.strerror or str(error)) from None
        if not stat.S_ISREG(mode):
            raise ConfigError(thing, expected="a regular file")
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                thing,
                expected="a file that only its owner may write",
                found=f"mode {stat.S_IMODE(mode):04o}",
                hint=f"run `chmod 600 {self.path}`",
            )
        if not content:
            raise ConfigError(thing, expected="a token", found="an empty file")
        if not _TOKEN.fullmatch(content):
            raise ConfigError(thing, expected="one line of at most 4096 printable ASCII characters without blanks")
        return content.decode("ascii"), mode
