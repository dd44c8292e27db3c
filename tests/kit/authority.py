"""A private certificate authority, and certificates for the ends of a connection, in files as an operator has them.

authority = Authority(tmp_path / "ca")
trainer = authority.issue("trainer-1")            # trainer.certificate, trainer.key
TlsFiles(trainer.certificate, trainer.key, authority.certificate)
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_SIGNS = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, each in a file."""

    certificate: Path
    key: Path


class Authority:
    """Certifies names; `certificate` is the file that others trust."""

    def __init__(self, home: Path, name: str = "a private authority") -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._home = home
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = home / "ca.pem"
        made = self._certificate(self._name, self._key, [], authority=True)
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, expired: bool = False) -> Issued:
        """A certificate for these DNS names and 127.0.0.1, signed by this authority, in files named after the first."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        made = self._certificate(subject, key, list(names), expired=expired)
        certificate, private = self._home / f"{names[0]}.pem", self._home / f"{names[0]}.key"
        certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        private.touch(0o600)
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Issued(certificate, private)

    def _certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: list[str],
        *,
        authority: bool = False,
        expired: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * _DAY)
            .not_valid_after(now - _DAY if expired else now + 30 * _DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        # What OpenSSL's strict checks, which Python asks for from 3.13 on, want to see.
        mine = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuers = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(mine, critical=False).add_extension(issuers, critical=False)
        if authority:
            builder = builder.add_extension(_SIGNS, critical=True)
        if names:
            alternatives = [*map(x509.DNSName, names), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return builder.sign(self._key, hashes.SHA256())
