"""Chunks in append-only pack files, and the index over all of them.

Owns two invariants: a chunk that the index lists is synced, under a name that is synced; and bytes that were
synced are never written again. One pack is open for writing; chunks lie in the order in which they were
added, so an edge that one publisher adds lies in one run. What a kill leaves in each gap, and how it heals,
is told in docs/STORE.md.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from deltad.delta.encoding import sha256
from deltad.errors import FormatError, IntegrityError, StoreFullError
from deltad.limits import Limits
from deltad.store.disk import File, FileSystem, read_file, store_error, write_durably
from deltad.store.pack import (
    HEADER_BYTES,
    Packed,
    decode_index,
    encode_entry,
    encode_index,
    entry_bytes,
    is_framed,
    scan,
)
from deltad.types import Digest

log = structlog.get_logger()

_NAME = re.compile(r"p([0-9]{8,})-([0-9a-f]{16})\.(pack|index)", re.ASCII)
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """Where an object's bytes are: `size` of them from `offset` of a file."""

    path: Path
    offset: int
    size: int


@dataclass(eq=False, slots=True)
class _Pack:
    """One pack. `end` is where the next entry goes; all before it is synced."""

    number: int
    token: bytes
    path: Path
    end: int = 0
    sealed: bool = False
    file: File | None = None
    """Open while this pack is written."""

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".index")


class Packs:
    """All packs of one store. Methods may be called from any thread."""

    def __init__(self, directory: Path, scratch: Path, limits: Limits, files: FileSystem) -> None:
        self._directory = directory
        self._scratch = scratch
        self._limits = limits
        self._files = files
        self._writing = threading.Lock()
        self._packs: list[_Pack] = []
        self._current: _Pack | None = None
        self._last = 0
        self._index: dict[Digest, tuple[_Pack, int, int]] = {}

    def load(self) -> None:
        """Find what is there, heal what a crash left, and sync it.

        Raises FormatError for a foreign file, IntegrityError for damage to what had been durable.
        """
        try:
            sizes = {self._directory / entry.name: entry.size for entry in self._files.entries(self._directory)}
            for path in sizes:
                if not _NAME.fullmatch(path.name):
                    raise FormatError(f"{path}", expected="a pack, or the index of one", found="a foreign file")
                if path.suffix == ".index" and path.with_suffix(".pack") not in sizes:
                    raise IntegrityError(f"{path.with_suffix('.pack')}", found="missing, and its index is here")
            self._files.sync_directory(self._directory)
            for path in sorted((path for path in sizes if path.suffix == ".pack"), key=_parse_name):
                self._load(path, sizes[path], sealed=path.with_suffix(".index") in sizes)
            for pack in self._packs[:-1]:
                with suppress(StoreFullError):  # an index saves time, and a full disk must not keep us from starting
                    self._seal(pack)
            if self._packs and not self._packs[-1].sealed:
                self._current = self._packs[-1]
        except OSError as error:
            raise store_error(error, self._directory, 0, self._files) from error

    def close(self) -> None:
        with self._writing:
            self._let_go()

    def extent(self, digest: Digest) -> Extent | None:
        """Where a chunk is; None if it is not held."""
        found = self._index.get(digest)
        return None if found is None else Extent(found[0].path, found[1], found[2])

    def sizes(self) -> dict[Digest, int]:
        """All chunks that are held, with their sizes in bytes."""
        with self._writing:
            return {digest: size for digest, (_, _, size) in self._index.items()}

    def extents(self) -> list[tuple[Digest, Extent]]:
        """All chunks that are held, in the order in which they lie on the disk."""
        with self._writing:
            found = sorted((pack.number, at, size, digest) for digest, (pack, at, size) in self._index.items())
            paths = {pack.number: pack.path for pack in self._packs}
        return [(digest, Extent(paths[number], at, size)) for number, at, size, digest in found]

    def used_bytes(self) -> int:
        with self._writing:
            return sum(pack.end for pack in self._packs)

    def add(self, digest: Digest, data: bytes) -> None:
        """Append a chunk; durable on return. One that is held already is superseded.

        Raises StoreFullError or StoreError; then it is not held, or as it was held before.
        """
        with self._writing:
            try:
                pack = self._open_for(len(data))
                self._append(pack, digest, data)
            except OSError as error:
                raise store_error(error, self._directory, len(data), self._files) from error

    def forget(self, dead: set[Digest]) -> tuple[list[_Pack], list[_Pack]]:
        """Chunks that nobody needs. Returns the packs to remove, and those of which less than half is alive.

        Of these packs the dead chunks are not held any more. In other packs they stay, and are held.
        """
        empty: list[_Pack] = []
        sparse: list[_Pack] = []
        with self._writing:
            members: dict[_Pack, list[tuple[Digest, int]]] = {pack: [] for pack in self._packs}
            for digest, (pack, _, size) in self._index.items():
                members[pack].append((digest, size))
            for pack, chunks in members.items():
                alive = sum(entry_bytes(size) for digest, size in chunks if digest not in dead)
                if 2 * alive > pack.end:
                    continue
                (sparse if alive else empty).append(pack)
                for digest, _ in chunks:
                    if digest in dead:
                        del self._index[digest]
        return empty, sparse

    def is_framed(self, digest: Digest, extent: Extent) -> bool:
        """Whether all that lies around a chunk in its pack is as it was written. Raises OSError."""
        packed = Packed(digest, extent.offset, extent.size)
        file = self._files.open(extent.path)
        try:
            entry = file.read(packed.end - packed.start, packed.start)
        finally:
            file.close()
        return is_framed(entry, _parse_name(extent.path)[1], packed)

    def move(self, digest: Digest, data: bytes, extent: Extent) -> None:
        """Store a chunk anew whose entry is damaged around it, and rely on that entry no more.

        Raises StoreFullError or StoreError; then it is held as before.
        """
        with self._writing:
            if self.extent(digest) != extent:
                return
            pack = self._index[digest][0]
            try:
                if pack is self._current:
                    # Without an index, the next start would have to find its entries by their headers.
                    self._seal(pack)
                    self._let_go()
                self._append(self._open_for(len(data)), digest, data)
            except OSError as error:
                raise store_error(error, self._directory, len(data), self._files) from error

    def remove(self, packs: list[_Pack]) -> None:
        """Remove packs that hold nothing. What is being read from them stays readable to its end."""
        with self._writing:
            for pack in packs:
                if any(held is pack for held, _, _ in self._index.values()):
                    continue  # a chunk was put into it meanwhile
                if pack is self._current:
                    self._let_go()
                try:
                    if pack.sealed:
                        # An index without its pack tells of a loss, so it goes first, for good.
                        self._files.unlink(pack.index_path)
                        pack.sealed = False
                        self._files.sync_directory(self._directory)
                    self._files.unlink(pack.path)
                except OSError as error:
                    raise store_error(error, pack.path, 0, self._files) from error
                self._packs.remove(pack)

    def rewrite(self, packs: list[_Pack]) -> None:
        """Move what lives in these packs behind the chunk that was stored last, and remove them."""
        for pack in packs:
            try:
                self._end(pack)
            except StoreFullError as error:
                log.warning("pack_not_rewritten", pack=str(pack.path), error=str(error))
                continue
            alive = [(digest, at, size) for digest, (held, at, size) in list(self._index.items()) if held is pack]
            try:
                file = self._files.open(pack.path)
                try:
                    chunks = ((digest, file.read(size, at)) for digest, at, size in alive)
                    for digest, data in chunks:
                        if sha256(data) != digest:
                            raise IntegrityError(f"{pack.path}", expected=f"chunk {digest.hex()}", found="other bytes")
                        self.add(digest, data)
                finally:
                    file.close()
            except OSError as error:
                raise store_error(error, pack.path, 0, self._files) from error
            except (IntegrityError, StoreFullError) as error:
                # Left as it is: it costs space, and nothing else.
                log.warning("pack_not_rewritten", pack=str(pack.path), error=str(error))
                continue
            self.remove([pack])

    def _end(self, pack: _Pack) -> None:
        """Write to another pack from now on, if it was this one."""
        with self._writing:
            if pack is self._current:
                self._seal(pack)
                self._let_go()

    def _append(self, pack: _Pack, digest: Digest, data: bytes) -> None:
        file = pack.file
        assert file is not None
        try:
            file.write(encode_entry(pack.token, digest, data, synced=pack.end), pack.end)
            file.sync()
            if pack.end == 0:
                self._files.sync_directory(self._directory)
        except OSError:
            self._give_up(pack)
            raise
        self._enter(pack, Packed(digest, pack.end + HEADER_BYTES, len(data)))

    def _enter(self, pack: _Pack, packed: Packed) -> None:
        self._index[packed.digest] = (pack, packed.offset, packed.size)
        pack.end = packed.end

    def _give_up(self, pack: _Pack) -> None:
        """Never write to this pack again: what a failed write or sync left of it is unknown."""
        with suppress(OSError):
            if pack.end:
                assert pack.file is not None
                pack.file.truncate(pack.end)
            else:
                self._files.unlink(pack.path)
                self._packs.remove(pack)
        self._let_go()

    def _open_for(self, size: int) -> _Pack:
        """The pack that the next chunk goes to."""
        pack = self._current
        if pack is not None and (not pack.end or pack.end + entry_bytes(size) <= self._limits.pack_bytes):
            if pack.file is None:
                pack.file = self._files.edit(pack.path)
            return pack
        if pack is not None:
            self._seal(pack)
            self._let_go()
        token = os.urandom(_TOKEN_BYTES)
        path = self._directory / f"p{self._last + 1:08d}-{token.hex()}.pack"
        pack = _Pack(self._last + 1, token, path, file=self._files.create(path))
        self._last = pack.number
        self._packs.append(pack)
        self._current = pack
        return pack

    def _let_go(self) -> None:
        if self._current is not None and self._current.file is not None:
            self._current.file.close()
            self._current.file = None
        self._current = None

    def _seal(self, pack: _Pack) -> None:
        """Write the index of a pack that is not written to any more."""
        if pack.sealed:
            return
        listed = [Packed(digest, at, size) for digest, (held, at, size) in self._index.items() if held is pack]
        index = encode_index(pack.token, listed, pack.end)
        write_durably(pack.index_path, index, scratch=self._scratch, files=self._files)
        pack.sealed = True

    def _load(self, path: Path, size: int, *, sealed: bool) -> None:
        number, token = _parse_name(path)
        pack = _Pack(number, token, path, sealed=sealed)
        self._last = max(self._last, pack.number)
        listed = decode_index(read_file(pack.index_path, self._files), pack.token) if sealed else None
        if listed is None:
            # No index, or a damaged one: then it is made anew.
            pack.sealed = False
            entries = self._scan(pack, size, proven=sealed)
        elif listed.length != size:
            raise IntegrityError(f"{path}", expected=f"{listed.length} bytes", found=f"{size}", hint=_HINT)
        else:
            entries = listed.entries
        if not entries:
            # A pack that was created and not yet written.
            self._files.unlink(path)
            return
        self._packs.append(pack)
        for packed in entries:
            self._enter(pack, packed)

    def _scan(self, pack: _Pack, size: int, *, proven: bool) -> tuple[Packed, ...]:
        """Read a pack by its entries, cut a torn tail off, and sync what is left."""
        file = self._files.edit(pack.path)
        try:
            found = scan(file.read, size, pack.token, proven=proven)
            if found.rotten is not None:
                raise IntegrityError(
                    f"{pack.path}",
                    expected=f"an entry at byte {found.rotten}",
                    found="other bytes, where later ones prove that it had been written",
                    hint=_HINT,
                )
            if found.end < size:
                log.warning("pack_tail_cut", pack=str(pack.path), at=found.end, bytes=size - found.end)
                file.truncate(found.end)
            # What a killed process wrote, and did not sync or failed to, is seen here, but is not yet on the disk.
            # Written again, it is synced in truth; the bytes are the same, so a torn write does no harm.
            for packed in found.entries:
                if packed.start >= found.synced:
                    file.write(file.read(packed.end - packed.start, packed.start), packed.start)
            file.sync()
        finally:
            file.close()
        return found.entries


_HINT = "the disk has lost what it had stored; move the pack and its index away, and its chunks are pulled again"


def _parse_name(path: Path) -> tuple[int, bytes]:
    """Number and token."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), bytes.fromhex(match[2])
