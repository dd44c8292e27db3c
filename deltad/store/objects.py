"""Immutable objects (chunks, pages, manifests, layouts, files), each named by its SHA-256.

An object's bytes are compared with its name whenever they are read, so rot is found by use.
"""

from __future__ import annotations

from pathlib import Path

from deltad.delta.encoding import sha256
from deltad.errors import DeltadError, IntegrityError, NotFoundError, StoreFullError
from deltad.limits import Limits
from deltad.store.disk import free_bytes, make_directory, store_error, write_durably
from deltad.types import Digest


class ObjectStore:
    """All objects of one store. Methods may be called from any thread."""

    def __init__(self, root: Path, scratch: Path, limits: Limits) -> None:
        self._root = root
        self._scratch = scratch
        self._limits = limits

    def path(self, digest: Digest) -> Path:
        name = digest.hex()
        return self._root / name[:2] / name[2:]

    def has(self, digest: Digest) -> bool:
        return self.path(digest).exists()

    def size(self, digest: Digest) -> int:
        """Size in bytes. Raises NotFoundError."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            raise NotFoundError(f"object {digest.hex()}", found="not held here") from None

    def read(self, digest: Digest) -> bytes:
        """The object's bytes, checked. Raises NotFoundError or IntegrityError."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFoundError(f"object {digest.hex()}", found="not held here") from None
        except OSError as error:
            raise store_error(error, path, 0) from error
        found = sha256(data)
        if found != digest:
            raise IntegrityError(
                f"{path}",
                expected=f"SHA-256 {digest.hex()}",
                found=found.hex(),
                hint="the file is damaged; it is replaced when the same bytes are published or pulled again",
            )
        return data

    def put(self, data: bytes) -> Digest:
        """Store `data`; durable on return. What is held already is compared, and replaced if damaged."""
        digest = sha256(data)
        path = self.path(digest)
        if self._holds(path, data):
            return digest
        self._keep_reserve(path, len(data))
        make_directory(path.parent)
        try:
            write_durably(path, data, scratch=self._scratch)
        except DeltadError:
            # Without its directory's sync a name may be lost in a power cut, and whoever finds it would
            # take it for durable.
            path.unlink(missing_ok=True)
            raise
        return digest

    def _holds(self, path: Path, data: bytes) -> bool:
        try:
            return path.read_bytes() == data
        except OSError:
            return False

    def _keep_reserve(self, path: Path, size: int) -> None:
        free = free_bytes(self._root)
        if free - size < self._limits.disk_reserve_bytes:
            raise StoreFullError(
                f"{path}",
                expected=f"room for {size} bytes above the reserve of {self._limits.disk_reserve_bytes}",
                found=f"{free} bytes free",
                hint="free some space; publishing and pulling resume by themselves",
            )
