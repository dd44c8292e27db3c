"""Immutable objects (chunks, pages, manifests, layouts, files), each named by its SHA-256.

Chunks lie in packs; what is small lies in a file of its own, as its publisher made it. An object's bytes are
compared with its name whenever they are read, so rot is found by use; `examine` finds it where nobody reads. Owns
one invariant: what was found damaged is set aside, and counts as not held until its bytes are stored again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from deltad.delta.encoding import sha256
from deltad.errors import DeltadError, FormatError, IntegrityError, NotFoundError, StoreFullError
from deltad.limits import Limits
from deltad.store.disk import File, FileSystem, make_directory, store_error, write_durably
from deltad.store.packs import Extent, Packs
from deltad.store.quarantine import NOWHERE, Quarantine
from deltad.types import Digest

_SHARD = re.compile(r"[0-9a-f]{2}", re.ASCII)
_REST = re.compile(r"[0-9a-f]{62}", re.ASCII)
_SUSPECTS = 10_000


class Health(Enum):
    """What became of an object that was examined."""

    WHOLE = "whole"
    MOVED = "whole, in an entry that was not, and stored anew"
    DAMAGED = "damaged, and set aside"
    GONE = "not there any more"


class ObjectReader:
    """An object that is open: it can be read to its end even if it is collected meanwhile. Not checked."""

    def __init__(self, file: File, extent: Extent) -> None:
        self._file = file
        self._offset = extent.offset
        self.size = extent.size

    def read(self, count: int, offset: int) -> bytes:
        """Up to `count` bytes from `offset` within the object; fewer only where it ends, or is cut short on disk."""
        return self._file.read(max(0, min(count, self.size - offset)), self._offset + offset)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ObjectStore:
    """All objects of one store. Methods may be called from any thread."""

    def __init__(
        self,
        root: Path,
        packs: Packs,
        *,
        scratch: Path,
        limits: Limits,
        files: FileSystem,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change`: see `Quarantine`."""
        self._root = root
        self._packs = packs
        self._scratch = scratch
        self._limits = limits
        self._files = files
        self._clock = clock
        self._asking = threading.Lock()
        self._asked: dict[Digest, float] = {}
        self.quarantine = Quarantine(root.with_name("quarantine"), scratch, files, clock, on_change)
        self._judging = threading.Lock()
        """Held while an object is set aside, or found healed."""
        self._suspects: dict[Digest, None] = {}

    def load(self) -> None:
        """Sync the names of all objects, and heal the packs."""
        # A name whose directory was not synced before a kill is there, but not yet for good.
        self._files.sync_directory(self._root)
        for shard in self._shards():
            self._files.sync_directory(shard)
        self._packs.load()
        self.quarantine.load()

    def last_asked(self, digest: Digest) -> float | None:
        """When an object was last stored, read or asked for in this life."""
        return self._asked.get(digest)

    def has(self, digest: Digest) -> bool:
        self._ask(digest)
        return self.is_held(digest)

    def is_held(self, digest: Digest) -> bool:
        """Like `has`, by one who does not need the object."""
        return digest not in self.quarantine and self.place(digest) is not None

    def extent(self, digest: Digest) -> Extent:
        """Where an object's bytes are now. Raises NotFoundError."""
        self._ask(digest)
        return self._extent(digest)

    def _extent(self, digest: Digest) -> Extent:
        if digest in self.quarantine:
            raise NotFoundError(f"object {digest.hex()}", found="damaged, and set aside", hint=_HINT)
        extent = self.place(digest)
        if extent is None:
            raise NotFoundError(f"object {digest.hex()}", found="not held here")
        return extent

    def place(self, digest: Digest) -> Extent | None:
        """Where an object lies, damaged or not; None if nothing does. For one who does not need it."""
        if extent := self._packs.extent(digest):
            return extent
        path = self._path(digest)
        entry = self._files.entry(path)
        return None if entry is None else Extent(path, 0, entry.size)

    def open(self, digest: Digest) -> ObjectReader:
        """Open an object for reading piece by piece. Raises NotFoundError or StoreError."""
        self._ask(digest)
        return self._open(digest)

    def _open(self, digest: Digest) -> ObjectReader:
        while True:
            extent = self._extent(digest)
            try:
                return ObjectReader(self._files.open(extent.path), extent)
            except FileNotFoundError:
                # Removed or moved to another pack between the two calls, or lost.
                if self._packs.extent(digest) == extent:
                    raise NotFoundError(f"{extent.path}", found=f"gone, with object {digest.hex()}") from None
            except OSError as error:
                raise store_error(error, extent.path, 0, self._files) from error

    def read(self, digest: Digest) -> bytes:
        """The object's bytes, checked. Raises NotFoundError, IntegrityError or StoreError."""
        self._ask(digest)
        return self.read_unasked(digest)

    def read_unasked(self, digest: Digest) -> bytes:
        """Like `read`, by one who does not need the object."""
        extent = self._extent(digest)
        with self._open(digest) as reader:
            try:
                data = reader.read(reader.size, 0)
            except OSError as error:
                raise store_error(error, extent.path, 0, self._files) from error
        found = sha256(data)
        if found != digest:
            if len(self._suspects) < _SUSPECTS:
                self._suspects[digest] = None
            expected = f"SHA-256 {digest.hex()}"
            raise IntegrityError(_in_words(extent), expected=expected, found=found.hex(), hint=_HINT)
        return data

    def put(self, data: bytes) -> Digest:
        """Store a small object; durable on return. What is held already is compared, and replaced if damaged."""
        digest = sha256(data)
        self._ask(digest)
        if self._holds(digest, data):
            self._found_whole(digest, data)
            return digest
        if self._packs.extent(digest):
            return self.put_chunk(data)  # damaged where it is looked for first
        path = self._path(digest)
        self._keep_reserve(path, len(data))
        make_directory(path.parent, self._files)
        try:
            write_durably(path, data, scratch=self._scratch, files=self._files)
        except DeltadError:
            # Without its directory's sync a name may be lost in a power cut, and whoever finds it would
            # take it for durable.
            with suppress(OSError):
                self._files.unlink(path)
            raise
        self._found_whole(digest, data)
        return digest

    def put_chunk(self, data: bytes) -> Digest:
        """Store a chunk behind the one that was stored last; durable on return. Else like `put`."""
        digest = sha256(data)
        self._ask(digest)
        if not self._holds(digest, data):
            self._keep_reserve(self._root, len(data))
            self._packs.add(digest, data)
        self._found_whole(digest, data)
        return digest

    def suspects(self) -> list[Digest]:
        """What was found damaged by use since the last call; it is to be examined."""
        found, self._suspects = list(self._suspects), {}
        return found

    def extents(self) -> list[tuple[Digest, Extent]]:
        """All objects that are held, in an order that stays: chunks as they lie in their packs, then the others."""
        found = self._packs.extents()
        for shard in self._shards():
            for entry in self._files.entries(shard):
                digest = Digest(bytes.fromhex(shard.name + entry.name))
                found.append((digest, Extent(shard / entry.name, 0, entry.size)))
        return found

    def examine(self, digest: Digest, extent: Extent | None = None) -> Health:
        """Read an object at `extent`, or where it lies, and set it aside if it is damaged.

        One whose bytes are whole, and whose entry in a pack is damaged around them, is stored anew. Raises
        StoreFullError or StoreError if that fails.
        """
        place = self.place(digest)
        if place is None or (extent is not None and place != extent) or digest in self.quarantine:
            return Health.GONE
        data = self._peek(place)
        if sha256(data) == digest:
            if not _is_packed(place) or self._framed(digest, place):
                return Health.WHOLE
            self._packs.move(digest, data, place)
            return Health.MOVED
        with self._judging:
            # Asked again: somebody may have stored it anew since.
            if self.place(digest) != place:
                return Health.GONE
            data = self._peek(place)
            if sha256(data) == digest:
                return Health.WHOLE
            self.quarantine.add(digest, _in_words(place), data)
        return Health.DAMAGED

    def is_lost(self, digest: Digest) -> bool:
        """Whether nothing lies under this name, whole or damaged. For one who does not need the object."""
        return digest not in self.quarantine and self.place(digest) is None

    def miss(self, digest: Digest) -> None:
        """Note that an object is lost that should be there: it counts as damaged until it is stored again."""
        with self._judging:
            if self.is_lost(digest):
                self.quarantine.add(digest, NOWHERE, b"")

    def _peek(self, extent: Extent) -> bytes:
        """What lies there; nothing if the disk cannot read it."""
        try:
            file = self._files.open(extent.path)
            try:
                return file.read(extent.size, extent.offset)
            finally:
                file.close()
        except OSError:
            return b""

    def _framed(self, digest: Digest, extent: Extent) -> bool:
        try:
            return self._packs.is_framed(digest, extent)
        except OSError:
            return False

    def _found_whole(self, digest: Digest, data: bytes) -> None:
        """Bytes that are an object's are durable."""
        if digest in self.quarantine:
            with self._judging:
                if digest in self.quarantine:
                    self.quarantine.heal(digest, data)

    def sizes(self) -> dict[Digest, int]:
        """All objects that are held, with their sizes in bytes. Raises FormatError for a foreign file."""
        found = self._packs.sizes()
        for shard in self._shards():
            for entry in self._files.entries(shard):
                if not _REST.fullmatch(entry.name):
                    raise FormatError(f"{shard / entry.name}", expected="an object", found="a foreign file")
                found.setdefault(Digest(bytes.fromhex(shard.name + entry.name)), entry.size)
        return found

    def remove(self, dead: Iterable[Digest], spared: Callable[[Digest], bool]) -> None:
        """Remove objects, but for those that are `spared` at the very moment.

        The space of chunks comes back where little or nothing else is left in their pack. Raises StoreError.
        """
        packed: set[Digest] = set()
        for digest in dead:
            if self._packs.extent(digest) is not None:
                packed.add(digest)
            path = self._path(digest)
            with self._asking:
                if not spared(digest):
                    try:
                        self._files.unlink(path)
                    except FileNotFoundError:
                        pass
                    except OSError as error:
                        raise store_error(error, path, 0, self._files) from error
        with self._asking:
            empty, sparse = self._packs.forget({digest for digest in packed if not spared(digest)})
        self._packs.remove(empty)
        self._packs.rewrite(sparse)
        for digest in self.quarantine.damaged():
            if self.place(digest) is None and not spared(digest):
                self.quarantine.drop(digest)
        self.quarantine.forget_healed(self._clock())

    def forget_asked(self, before: float) -> None:
        """Forget what was asked for, and when, if that is long ago."""
        with self._asking:
            self._asked = {digest: asked for digest, asked in self._asked.items() if asked >= before}

    def used_bytes(self) -> int:
        """What all objects take on the disk, in bytes of file content."""
        loose = sum(entry.size for shard in self._shards() for entry in self._files.entries(shard))
        return loose + self._packs.used_bytes()

    def _ask(self, digest: Digest) -> None:
        # Under the lock that `remove` holds: whoever asks either keeps the object or finds it gone.
        with self._asking:
            self._asked[digest] = self._clock()

    def _path(self, digest: Digest) -> Path:
        name = digest.hex()
        return self._root / name[:2] / name[2:]

    def _shards(self) -> list[Path]:
        entries = self._files.entries(self._root)
        for entry in entries:
            if not entry.is_directory or not _SHARD.fullmatch(entry.name):
                raise FormatError(
                    f"{self._root / entry.name}", expected="a directory of objects", found="a foreign file"
                )
        return [self._root / entry.name for entry in entries]

    def _holds(self, digest: Digest, data: bytes) -> bool:
        place = self.place(digest)
        return place is not None and self._peek(place) == data

    def _keep_reserve(self, path: Path, size: int) -> None:
        free = self._files.free_bytes(self._root)
        if free - size < self._limits.disk_reserve_bytes:
            raise StoreFullError(
                f"{path}",
                expected=f"room for {size} bytes above the reserve of {self._limits.disk_reserve_bytes}",
                found=f"{free} bytes free",
                hint="free some space; publishing and pulling resume by themselves",
            )


_HINT = "it is fetched or made again where that is possible; `deltad status` says what became of it"


def _is_packed(extent: Extent) -> bool:
    return extent.path.suffix == ".pack"


def _in_words(extent: Extent) -> str:
    return f"{extent.path}" + (f" from byte {extent.offset}" if extent.offset else "")
