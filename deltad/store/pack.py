"""The bytes of pack files: entries that describe themselves, and the index of a pack that is full. Pure.

A pack is a run of entries. An entry is a header of 64 bytes, a chunk, and zeros up to the next multiple of
4096, so that no page that was synced is ever written again. The header says how much of the pack had been
synced when it was written: whatever lies before that is proven, so only what follows the last such border
has to be hashed after a crash. The pack's token, random and part of its name, is in every header: bytes
within a chunk cannot pass for an entry. The layout is in docs/STORE.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from deltad.delta.encoding import sha256
from deltad.types import DIGEST_BYTES, Digest

PAGE = 4096
HEADER_BYTES = 64
_HEADER = struct.Struct("<4s8sQQ32s")
_CHECK = struct.Struct("<I")
_MAGIC = b"dPK1"
_INDEX_HEAD = struct.Struct("<8s8sQQ")
_INDEX_ENTRY = struct.Struct("<32sQQ")
_INDEX_MAGIC = b"deltadI1"

Read = Callable[[int, int], bytes]
"""`count` bytes from an offset of the pack; fewer only at its end."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One chunk in a pack: where its bytes begin, and how many they are."""

    digest: Digest
    offset: int
    size: int

    @property
    def start(self) -> int:
        """Where its entry begins."""
        return self.offset - HEADER_BYTES

    @property
    def end(self) -> int:
        """Where the next entry begins."""
        return _aligned(self.offset + self.size)


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a pack holds. `end` is where the last whole entry ends.

    All before `synced` is proven to be durable; the entries behind it are whole, and no more is known.
    `rotten` is where an entry is unreadable although later bytes prove that it had been synced, else None.
    """

    entries: tuple[Packed, ...]
    end: int
    synced: int
    rotten: int | None = None


def entry_bytes(size: int) -> int:
    """What an entry with a chunk of `size` bytes takes."""
    return _aligned(HEADER_BYTES + size)


def encode_entry(token: bytes, digest: Digest, data: bytes, *, synced: int) -> bytes:
    """An entry. All of the pack before offset `synced` is known to be durable."""
    header = _HEADER.pack(_MAGIC, token, len(data), synced, digest)
    padding = bytes(entry_bytes(len(data)) - HEADER_BYTES - len(data))
    return b"".join((_sealed(header), data, padding))


def is_framed(entry: bytes, token: bytes, packed: Packed) -> bool:
    """Whether all of an entry beside its chunk, which is not looked at, is as it was written."""
    found = _parse(entry[:HEADER_BYTES], token, packed.start)
    padding = entry[HEADER_BYTES + packed.size :]
    return found is not None and found[0] == packed and padding == bytes(packed.end - packed.offset - packed.size)


def scan(read: Read, size: int, token: bytes, *, proven: bool) -> Scanned:
    """Find the entries of a pack of `size` bytes by their headers.

    Chunks are hashed only where nothing proves that they had been synced; of those the first that is not
    whole ends the pack. With `proven` all of the pack had been, and whatever is unreadable is rot.
    """
    entries: list[Packed] = []
    synced, at = size if proven else 0, 0
    for packed, border in _entries(read, size, token):
        entries.append(packed)
        synced, at = max(synced, border), packed.end
    if at < size:
        synced = max([synced, *_borders(read, size, token, at)])
        if synced > at:
            return Scanned(tuple(entries), at, at, rotten=at)
    for i, packed in enumerate(entries):
        if packed.start >= synced and sha256(read(packed.size, packed.offset)) != packed.digest:
            return Scanned(tuple(entries[:i]), packed.start, synced)
    return Scanned(tuple(entries), at, synced)


def encode_index(token: bytes, entries: Iterable[Packed], length: int) -> bytes:
    """The index of a pack of `length` bytes, all of which are synced."""
    packed = [_INDEX_ENTRY.pack(entry.digest, entry.offset, entry.size) for entry in entries]
    body = _INDEX_HEAD.pack(_INDEX_MAGIC, token, length, len(packed)) + b"".join(packed)
    return body + sha256(body)


@dataclass(frozen=True, slots=True)
class Index:
    """What the index of a full pack says: the length of the pack in bytes, and its entries."""

    length: int
    entries: tuple[Packed, ...]


def decode_index(data: bytes, token: bytes) -> Index | None:
    """Parse an index; None if it is damaged or another pack's."""
    body, check = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    count, rest = divmod(len(body) - _INDEX_HEAD.size, _INDEX_ENTRY.size)
    if count < 0 or rest or sha256(body) != check:
        return None
    magic, found, length, listed = _INDEX_HEAD.unpack_from(body)
    if (magic, found, listed) != (_INDEX_MAGIC, token, count):
        return None
    parts = _INDEX_ENTRY.iter_unpack(body[_INDEX_HEAD.size :])
    return Index(length, tuple(Packed(Digest(digest), offset, size) for digest, offset, size in parts))


def _entries(read: Read, size: int, token: bytes) -> Iterator[tuple[Packed, int]]:
    """The entries from the start on, each with the border that its header names, until one is not whole."""
    at = 0
    while found := _parse(read(HEADER_BYTES, at), token, at):
        packed, border = found
        if packed.end > size:
            return
        yield packed, border
        at = packed.end


def _borders(read: Read, size: int, token: bytes, start: int) -> Iterator[int]:
    """The borders that headers anywhere from `start` on name."""
    for at in range(start, size, PAGE):
        if found := _parse(read(HEADER_BYTES, at), token, at):
            yield found[1]


def _parse(header: bytes, token: bytes, at: int) -> tuple[Packed, int] | None:
    """The entry that begins at `at` and the border it names; None if these bytes are not its header."""
    if len(header) < HEADER_BYTES:
        return None
    magic, found, size, synced, digest = _HEADER.unpack_from(header)
    if magic != _MAGIC or found != token or synced > at or header != _sealed(header[: _HEADER.size]):
        return None
    return Packed(Digest(digest), at + HEADER_BYTES, size), synced


def _sealed(header: bytes) -> bytes:
    """A header with its check, 64 bytes."""
    return (header + _CHECK.pack(zlib.crc32(header))).ljust(HEADER_BYTES, b"\0")


def _aligned(size: int) -> int:
    return -(-size // PAGE) * PAGE
