"""Damage to what a store holds, done behind its back."""

from __future__ import annotations

from deltad.store.store import Store
from deltad.types import Digest


def overwrite(store: Store, digest: Digest, data: bytes) -> None:
    """Put other bytes where an object is; what it had beyond their length stays, if other objects follow it."""
    extent = store.objects.extent(digest)
    with extent.path.open("r+b") as file:
        file.seek(extent.offset)
        file.write(data)
        if not extent.path.name.endswith(".pack"):
            file.truncate()


def lose(store: Store, digest: Digest) -> None:
    """Remove the file of a small object."""
    extent = store.objects.extent(digest)
    assert not extent.path.name.endswith(".pack"), "a pack holds more than one chunk"
    extent.path.unlink()


def flip(store: Store, digest: Digest, at: int, bit: int = 3) -> None:
    """Flip one bit of an object, or of what lies around it in its pack: `at` may be outside of it."""
    extent = store.objects.extent(digest)
    with extent.path.open("r+b") as file:
        file.seek(extent.offset + at)
        (byte,) = file.read(1)
        file.seek(extent.offset + at)
        file.write(bytes([byte ^ (1 << bit)]))
