"""Where a token is kept. Invariant: it lives in no object; it is read when asked, and never shown or logged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deltad.config.secret import Secret, read_secret
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
        token, secret = self._read()
        found = list(secret.doubts())
        if len(token) < _SHORT:
            found.append(
                f"token file {self.path}: a token of fewer than {_SHORT} characters can be guessed; "
                "make one with `openssl rand -hex 32`"
            )
        return tuple(found)

    def _read(self) -> tuple[str, Secret]:
        secret = read_secret(self.path, f"token file {self.path}", most=8192)
        token = secret.content.strip()
        if not token:
            raise ConfigError(secret.thing, expected="a token", found="an empty file")
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                secret.thing, expected="one line of at most 4096 printable ASCII characters without blanks"
            )
        return token.decode("ascii"), secret
