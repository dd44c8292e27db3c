"""Certificates and keys: from the files that the configuration names to what a connection is made with.

TLS 1.3 and nothing older. Owns two invariants: a private key is never held, shown or logged, and is refused where
others may write it; and a connection that is made with `ca` ends at nobody whom that authority did not certify.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltad.config.secret import read_secret
from deltad.errors import ConfigError

if TYPE_CHECKING:
    import ssl

_KEY_BYTES = 64 << 10
_SOON_DAYS = 21


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What one end of a connection has: its certificate (a chain, PEM) and key, and the authority that it trusts."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def server(self) -> ssl.SSLContext:
        """For listening. With `ca`, only a caller whom it certified gets through. Raises ConfigError."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.load(context)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            self._trust(context)
        return context

    def client(self) -> ssl.SSLContext:
        """For connecting; without `ca`, the authorities that the host trusts count. Raises ConfigError."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.ca is not None:
            self._trust(context)
        else:
            context.load_default_certs()
        if self.certificate is not None:
            self.load(context)
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Let connections that are made from now on show the certificate in its file. Raises ConfigError."""
        assert self.certificate is not None
        assert self.key is not None
        read_secret(self.key, f"key file {self.key}", most=_KEY_BYTES)
        try:
            # A password is never asked for on a terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except OSError as error:  # what ssl raises is one
            raise ConfigError(
                f"certificate {self.certificate} with key file {self.key}",
                expected="a certificate in PEM and its own private key, without a password",
                found=error.strerror or type(error).__name__,
            ) from None

    def doubts(self) -> tuple[str, ...]:
        """What makes the key less secret than it could be, and a certificate that ends soon, one sentence each.

        Raises ConfigError.
        """
        if self.key is None or self.certificate is None:
            return ()
        secret = read_secret(self.key, f"key file {self.key}", most=_KEY_BYTES)
        left = _days_left(self.certificate)
        if left is None or left > _SOON_DAYS:
            return secret.doubts()
        ends = f"ends in {left} days" if left >= 0 else "has ended"
        return (*secret.doubts(), f"certificate {self.certificate}: it {ends}; put a new one there and send SIGHUP")

    def _trust(self, context: ssl.SSLContext) -> None:
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            raise ConfigError(
                f"authority {self.ca}",
                expected="certificates in PEM",
                found=error.strerror or type(error).__name__,
            ) from None


def _days_left(certificate: Path) -> int | None:
    """Until the first certificate of a file ends; None where it cannot be told."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError):
        return None
    return (found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
