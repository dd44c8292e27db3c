"""Signatures of records, manifests and parts of drafts: Ed25519 (RFC 8032) over their bytes. FORMAT §4, 5, 13.

What is signed is a prefix that names the kind of thing, and the thing encoded with an empty signature; so a
signature of one kind is never one of another. Which keys are trusted for what is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from deltad.delta.encoding import encode, sha256
from deltad.delta.manifest import Manifest
from deltad.delta.record import VersionRecord
from deltad.errors import FormatError

KEY_BYTES: Final = 32

_PREFIX: Final[dict[type[msgspec.Struct], bytes]] = {
    VersionRecord: b"deltad record\0",
    Manifest: b"deltad edge\0",
}

Signable = TypeVar("Signable", VersionRecord, Manifest)


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
        return sha256(self.data).hex()[:16]

    def has_signed(self, thing: VersionRecord | Manifest) -> bool:
        """Whether the signature of `thing` is one of this key's over just these bytes."""
        try:
            Ed25519PublicKey.from_public_bytes(self.data).verify(thing.signature, _message(thing))
        except (InvalidSignature, ValueError):  # ValueError: no point of the curve has these bytes
            return False
        return thing.key_id == self.id


class SigningKey:
    """A private key. It is never printed, and its bytes are asked for only to be stored."""

    def __init__(self, seed: bytes) -> None:
        """`seed`: the 32 bytes of the private key. Raises FormatError for any other length."""
        if len(seed) != KEY_BYTES:
            raise FormatError("private key", expected=f"{KEY_BYTES} bytes", found=f"{len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = PublicKey(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def __repr__(self) -> str:
        return f"SigningKey({self.public.id})"

    @classmethod
    def new(cls) -> SigningKey:
        """A key that nobody had before."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    def seed(self) -> bytes:
        """The 32 bytes to make this key from again."""
        return self._key.private_bytes_raw()

    def sign(self, thing: Signable) -> Signable:
        """The same thing with this key's name and signature, in place of any that it had."""
        named = msgspec.structs.replace(thing, key_id=self.public.id, signature=b"")
        return msgspec.structs.replace(named, signature=self._key.sign(_message(named)))


def _message(thing: VersionRecord | Manifest) -> bytes:
    return _PREFIX[type(thing)] + encode(msgspec.structs.replace(thing, signature=b""))
