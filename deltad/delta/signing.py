"""Signatures of records, manifests and heartbeats. FORMAT §4, 5.

What is signed is a prefix that names the kind of thing, and the thing encoded with an empty signature; so a
signature of one kind is never one of another. Which keys are trusted for what is decided elsewhere.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from deltad.delta.encoding import encode
from deltad.delta.heartbeat import Heartbeat
from deltad.delta.keys import PublicKey, SigningKey
from deltad.delta.manifest import Manifest
from deltad.delta.record import VersionRecord

_PREFIX: Final[dict[type[msgspec.Struct], bytes]] = {
    VersionRecord: b"deltad record\0",
    Manifest: b"deltad edge\0",
    Heartbeat: b"deltad heartbeat\0",
}

Signable = TypeVar("Signable", VersionRecord, Manifest, Heartbeat)


def sign(thing: Signable, key: SigningKey) -> Signable:
    """The same thing with the key's name and signature, in place of any that it had."""
    named = msgspec.structs.replace(thing, key_id=key.public.id, signature=b"")
    return msgspec.structs.replace(named, signature=key.sign(_message(named)))


def is_signed_by(thing: VersionRecord | Manifest | Heartbeat, key: PublicKey) -> bool:
    """Whether a thing names the key, and its signature is one of that key's over just these bytes."""
    return thing.key_id == key.id and key.verifies(thing.signature, _message(thing))


def _message(thing: VersionRecord | Manifest | Heartbeat) -> bytes:
    return _PREFIX[type(thing)] + encode(msgspec.structs.replace(thing, signature=b""))
