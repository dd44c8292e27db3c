"""Where a private key is kept. Invariant: it lives in no object of the configuration, and is never shown or logged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltad.config.secret import Secret, read_secret
from deltad.delta.keys import SigningKey
from deltad.errors import ConfigError, FormatError

_MOST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A file with one private key, as `deltad keys new` writes it. Only its owner may write it."""

    path: Path

    def read(self) -> SigningKey:
        """The key as it stands in the file now. Raises ConfigError."""
        return _key(self._secret())

    def doubts(self) -> tuple[str, ...]:
        """What makes the key less secret than it could be, one sentence each. Raises ConfigError as `read` does."""
        secret = self._secret()
        _key(secret)
        return secret.doubts()

    def _secret(self) -> Secret:
        return read_secret(self.path, f"key file {self.path}", most=_MOST_BYTES)


def _key(secret: Secret) -> SigningKey:
    try:
        return SigningKey.from_pem(secret.content)
    except FormatError as error:
        raise ConfigError(
            secret.thing, expected=error.expected, found=error.found, hint="make one with `deltad keys new`"
        ) from None
