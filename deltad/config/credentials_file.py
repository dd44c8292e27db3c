"""Where a bucket's credentials are kept. Invariant: no object of the configuration holds them; nothing shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deltad.config.secret import Secret, read_secret
from deltad.errors import ConfigError

_MOST_BYTES = 64 << 10
_LINE = re.compile(r"(?:export\s+)?([A-Za-z][A-Za-z0-9_]{0,80})=(.*)")


@dataclass(frozen=True, slots=True)
class CredentialsFile:
    """A file of lines `NAME=value`, named like the provider's variables in the environment. Only its owner may write
    it.

    Empty lines and those that start with `#` say nothing; quotes around a value are not part of it.
    """

    path: Path

    def read(self) -> dict[str, str]:
        """The settings as they stand in the file now, so that rotated ones are picked up. Raises ConfigError."""
        return _settings(self._secret())

    def doubts(self) -> tuple[str, ...]:
        """What makes it less secret than it could be, one sentence each. Raises ConfigError as `read` does."""
        secret = self._secret()
        _settings(secret)
        return secret.doubts()

    def _secret(self) -> Secret:
        return read_secret(self.path, f"credentials file {self.path}", most=_MOST_BYTES)


def _settings(secret: Secret) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        lines = secret.content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(secret.thing, expected="UTF-8") from None
    for place, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            # The line may be a secret that was put here without a name, and is not repeated.
            raise ConfigError(secret.thing, expected="lines like NAME=value", found=f"another in line {place}")
        value = match[2].strip()
        found[match[1]] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return found
