"""Ed25519 keys (RFC 8032): their bytes, their names and their files. FORMAT §4.

Light: the library that computes is loaded when a key is used.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deltad.errors import FormatError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_BYTES: Final = 32
_SPELLED: Final = "ed25519:"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """32 bytes that signatures are checked with. Raises FormatError for any other length."""

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != KEY_BYTES:
            raise FormatError("public key", expected=f"{KEY_BYTES} bytes", found=f"{len(self.data)}")

    @property
    def id(self) -> str:
        """How signed things name it: the first 16 hex digits of its SHA-256."""
        return hashlib.sha256(self.data).hexdigest()[:16]

    def __str__(self) -> str:
        """`ed25519:` and the bytes in Base64: the form in which people pass it on."""
        return _SPELLED + base64.b64encode(self.data).decode()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether the signature is one of this key's over just these bytes."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.data).verify(signature, message)
        except (InvalidSignature, ValueError):  # ValueError: no point of the curve has these bytes
            return False
        return True


def parse_public_key(text: str) -> PublicKey:
    """A key as `str` writes it. Raises FormatError."""
    try:
        if not text.startswith(_SPELLED):
            raise ValueError(text)
        return PublicKey(base64.b64decode(text.removeprefix(_SPELLED), validate=True))
    except (ValueError, binascii.Error, FormatError):
        expected = f"{_SPELLED} and {KEY_BYTES} bytes in Base64, as `deltad keys show` prints it"
        raise FormatError("public key", expected=expected, found=repr(text[:80])) from None


class SigningKey:
    """A private key. It is never printed, and asked for its content only to be stored."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"SigningKey({self.public.id})"

    @classmethod
    def new(cls) -> SigningKey:
        """A key that nobody had before."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> SigningKey:
        """The key of 32 secret bytes."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_pem(cls, data: bytes) -> SigningKey:
        """A key in PKCS #8, not encrypted, as `pem` and `openssl genpkey` write it. Raises FormatError."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # What the library says may repeat a part of the file.
            raise FormatError("private key", expected="Ed25519 in PKCS #8 (PEM), without a password") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise FormatError("private key", expected="an Ed25519 key", found="one of another kind")
        return cls(key)

    def pem(self) -> bytes:
        """The key in PKCS #8, not encrypted."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return self._key.sign(message)
