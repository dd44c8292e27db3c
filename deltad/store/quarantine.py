"""Objects whose bytes are damaged, set aside: they count as not held, and their bytes are kept as evidence.

One file each: `<SHA-256>` while an object is damaged, `<SHA-256>.healed` once its bytes were stored again. A file
is a line of JSON that says where the object lay, and behind it what was found there. Owns two invariants: what is
set aside counts as not held, over restarts too, until bytes with its name are durable; and the evidence of all of
them takes `EVIDENCE_BYTES` at most, beyond which only the line is kept.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import structlog

from deltad.errors import DeltadError, FormatError
from deltad.store.disk import FileSystem, make_directory, read_file, store_error, write_durably
from deltad.types import Digest

log = structlog.get_logger()

EVIDENCE_BYTES = 64 << 20
"""What the damaged bytes that are kept take together."""
EVIDENCE_SECONDS = 24 * 3600.0
"""How long the evidence of what was healed is kept."""
NOWHERE = "nowhere"
"""The place of what was not damaged but lost."""
_HEALED = ".healed"
_NAME = re.compile(r"([0-9a-f]{64})(\.healed)?", re.ASCII)
_HEAD_BYTES = 8192


class Mark(msgspec.Struct, frozen=True):
    """The first line of a file: where the object lay, and how many bytes were found there."""

    place: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class SetAside:
    """One object. `difference` tells, in words, what was wrong with it; it is known once it is healed.

    `kept` of the damaged bytes are kept as evidence. `since` is when it was set aside or healed, or, if that was
    in an earlier life, when this one began.
    """

    digest: Digest
    place: str
    kept: int
    since: float
    healed: bool = False
    difference: str = ""


class Quarantine:
    """All that one store has set aside. Methods may be called from any thread."""

    def __init__(
        self,
        directory: Path,
        scratch: Path,
        files: FileSystem,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when an object is held no more, or again. It may not wait for anybody."""
        self._on_change = on_change
        self._directory = directory
        self._scratch = scratch
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._damaged: dict[Digest, SetAside] = {}
        self._healed: dict[Digest, SetAside] = {}
        self.found = 0
        """How many objects were set aside in this life."""
        self.mended = 0
        """How many were healed in this life."""

    def load(self) -> None:
        """Read what earlier lives have set aside. Raises FormatError for a foreign file, OSError."""
        if self._files.entry(self._directory) is None:
            return
        self._files.sync_directory(self._directory)
        for entry in self._files.entries(self._directory):
            path = self._directory / entry.name
            match = _NAME.fullmatch(entry.name)
            if match is None:
                raise FormatError(f"{path}", expected="a damaged object, named by its SHA-256", found="a foreign file")
            digest, healed = Digest(bytes.fromhex(match[1])), match[2] is not None
            mark, kept = self._read_mark(path, entry.size)
            (self._healed if healed else self._damaged)[digest] = SetAside(
                digest, mark.place, kept, self._clock(), healed
            )

    def __contains__(self, digest: Digest) -> bool:
        """Whether an object is set aside, and not healed."""
        return digest in self._damaged

    def damaged(self) -> list[Digest]:
        """What is set aside and not healed."""
        with self._lock:
            return list(self._damaged)

    def entries(self) -> list[SetAside]:
        """What is damaged, and then what is healed and still kept as evidence."""
        with self._lock:
            return [*self._damaged.values(), *self._healed.values()]

    def add(self, digest: Digest, place: str, data: bytes) -> None:
        """Set an object aside. If that cannot be written, it holds for this life."""
        with self._lock:
            kept = len(data) if self._make_room(len(data)) else 0
            if digest not in self._damaged:
                self.found += 1
            self._damaged[digest] = SetAside(digest, place, kept, self._clock())
            head = msgspec.json.encode(Mark(place, len(data)))
            log.error("object_set_aside", object=digest.hex(), place=place, evidence_bytes=kept)
            try:
                make_directory(self._directory, self._files)
                content = head + b"\n" + data[:kept]
                write_durably(self._path(digest), content, scratch=self._scratch, files=self._files)
            except DeltadError as error:
                log.warning("damage_not_noted", object=digest.hex(), error=str(error))
        self._on_change()

    def heal(self, digest: Digest, data: bytes) -> None:
        """The right bytes of an object that is set aside are durable: it is held again."""
        with self._lock:
            one = self._damaged.pop(digest)
            self.mended += 1
            path = self._path(digest)
            difference = ""
            with suppress(OSError):
                evidence = read_file(path, self._files).partition(b"\n")[2]
                if one.kept:
                    difference = _difference(evidence, data)
                elif one.place == NOWHERE:
                    difference = "it was lost"
                self._files.rename(path, path.with_name(path.name + _HEALED))
                self._files.sync_directory(self._directory)
            self._healed[digest] = replace(one, since=self._clock(), healed=True, difference=difference)
            log.info("object_healed", object=digest.hex(), place=one.place, difference=difference)
        self._on_change()

    def drop(self, digest: Digest) -> None:
        """The damaged object is needed by nobody, and gone. Raises StoreError."""
        with self._lock:
            self._unlink(self._path(digest))
            self._damaged.pop(digest, None)

    def forget_healed(self, now: float) -> None:
        """Let go of evidence that has been kept for long. Raises StoreError."""
        with self._lock:
            for one in [one for one in self._healed.values() if now - one.since > EVIDENCE_SECONDS]:
                self._forget(one)

    def _make_room(self, size: int) -> bool:
        """Whether `size` bytes of evidence may be kept; that of what was healed, the oldest first, makes way."""
        kept = sum(one.kept for one in (*self._damaged.values(), *self._healed.values()))
        for one in sorted(self._healed.values(), key=lambda one: one.since):
            if kept + size <= EVIDENCE_BYTES:
                break
            try:
                self._forget(one)
            except DeltadError:
                return False
            kept -= one.kept
        return kept + size <= EVIDENCE_BYTES

    def _forget(self, one: SetAside) -> None:
        self._unlink(self._directory / (one.digest.hex() + _HEALED))
        del self._healed[one.digest]

    def _unlink(self, path: Path) -> None:
        try:
            with suppress(FileNotFoundError):
                self._files.unlink(path)
        except OSError as error:
            raise store_error(error, path, 0, self._files) from error

    def _path(self, digest: Digest) -> Path:
        return self._directory / digest.hex()

    def _read_mark(self, path: Path, size: int) -> tuple[Mark, int]:
        """The mark, and how many bytes of evidence follow it. A mark that is damaged itself says nothing."""
        file = self._files.open(path)
        try:
            head, newline, _ = file.read(_HEAD_BYTES, 0).partition(b"\n")
        finally:
            file.close()
        try:
            return msgspec.json.decode(head, type=Mark), size - len(head) - len(newline)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Mark(), 0


def _difference(found: bytes, right: bytes) -> str:
    """What was wrong with an object, in words."""
    if len(found) != len(right):
        return f"{len(found)} bytes where {len(right)} belong"
    where = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(right, np.uint8))
    if not where.size:
        return "read well again"
    if where.size == 1:
        return f"byte {where[0]} was 0x{found[where[0]]:02x}, not 0x{right[where[0]]:02x}"
    return f"{where.size} bytes were others, from byte {where[0]} to {where[-1]}"
