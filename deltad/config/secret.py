"""Reading files that hold a secret. Invariant: nothing of the content is in a message."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from deltad.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Secret:
    """What a file holds, and the permissions that it had. `thing` is the file in words."""

    path: Path
    thing: str
    mode: int
    content: bytes = field(repr=False)

    def doubts(self) -> tuple[str, ...]:
        """What makes it less secret than it could be, one sentence each."""
        if not self.mode & stat.S_IROTH:
            return ()
        return (
            f"{self.thing}: everybody on this host may read it (mode {stat.S_IMODE(self.mode):04o}); "
            f"run `chmod 600 {self.path}`",
        )


def read_secret(path: Path, thing: str, *, most: int) -> Secret:
    """Read up to `most` bytes. Raises ConfigError for what is no file, or may be written by others."""
    try:
        # Not blocking, so that a FIFO in this place cannot hang the daemon.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            content = os.read(descriptor, most) if stat.S_ISREG(mode) else b""
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
            hint=f"run `chmod 600 {path}`",
        )
    return Secret(path, thing, mode, content)
