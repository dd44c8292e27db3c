"""The scrub's eyes: reads what a store holds piece by piece, in an order that stays, and sets aside what is damaged.

One pass sees that all is there that the versions need, and reads every object with all that lies around it in its
pack, every version record, and all weights of every generation of the mirrors. It goes on where it was after a
restart; how fast is the caller's affair. Owns one invariant: a piece is a few MiB, whatever the model's size, and so
is what it takes of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog

from deltad.delta.record import VersionRecord
from deltad.errors import CheckpointError, DeltadError, FormatError, IntegrityError, NotFoundError
from deltad.store.disk import read_file, write_durably
from deltad.store.mirror import Mirror
from deltad.store.needs import find_lost
from deltad.store.objects import Health
from deltad.store.packs import Extent
from deltad.store.scrub import Progress, decode_progress
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version

log = structlog.get_logger()

SAVE_SECONDS = 60.0
"""How often is noted how far the scrub has come."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """A generation of a mirror that was damaged. `wrong` names the elements, one text a tensor.

    `problem` says why it could not be made anew, and is empty if it was.
    """

    mirror: str
    version: Version
    wrong: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step did. `bytes` were read; `mended` names a file that was written anew."""

    key: str
    bytes: int
    mended: str = ""
    renewed: Renewed | None = None


class Scrubber:
    """Reads one store. The caller takes one step at a time, from any thread."""

    def __init__(self, store: Store, *, wall: Callable[[], float] = time.time) -> None:
        self._store = store
        self._wall = wall
        self._path = store.path / "scrub"
        self._steps: Iterator[Piece] | None = None
        self._saved = store.clock()
        self._started = False
        self.total = 0
        """Bytes of all that this pass reads."""
        self.progress = self._load()

    def step(self, mirrors: Sequence[Mirror]) -> Piece | None:
        """Read the next piece; None at the end of a pass. `mirrors` are looked at as a pass begins, or goes on."""
        if self._steps is None:
            self.total = self._measure(mirrors)
            self._steps = self._walk(mirrors, self.progress.after)
        try:
            piece = next(self._steps)
        except StopIteration:
            self._steps = None
            self.progress = self.progress.finished(self._wall())
            return None
        except BaseException:
            # A generator that has raised is at its end; another goes on where it was.
            self._steps = None
            raise
        self.progress = self.progress.read(piece.key)
        if self._store.clock() - self._saved >= SAVE_SECONDS:
            self.save()
        return piece

    def save(self) -> None:
        """Keep how far the scrub has come, as far as the disk lets."""
        self._saved = self._store.clock()
        try:
            data = msgspec.json.encode(self.progress)
            write_durably(self._path, data, scratch=self._store.scratch, files=self._store.files)
        except DeltadError as error:
            log.warning("scrub_progress_not_kept", error=str(error))

    def _walk(self, mirrors: Sequence[Mirror], after: str) -> Iterator[Piece]:
        # Each life looks first at what is missing: a start cuts off what rot has made of the end of a pack.
        started, self._started = self._started, True
        for run in self._store.held_runs():
            for record in self._store.run(run).records():
                key = f"0 {run} {record.version.epoch:06d} {record.version.number:09d}"
                if key > after or not started:
                    yield Piece(max(key, after), self._miss(record))
        for key, digest, extent in self._objects():
            if key > after:
                yield Piece(key, extent.size, mended=self.examine(digest, extent))
        for run in self._store.held_runs():
            if (key := f"3 {run}") > after:
                yield self._read_records(key, run)
        for mirror in sorted(mirrors, key=_mirror_key):
            for version in sorted(mirror.generations()):
                yield from self._read_generation(mirror, version, after)

    def _objects(self) -> Iterator[tuple[str, Digest, Extent]]:
        for digest, extent in self._store.objects.extents():
            if extent.path.suffix == ".pack":
                yield f"1 {extent.path.name} {extent.offset:020d}", digest, extent
            else:
                yield f"2 {digest.hex()}", digest, extent

    def _miss(self, record: VersionRecord) -> int:
        """Note what a version needs and is not there; returns the bytes that were read."""
        read, lost = find_lost(self._store, record)
        # One that a collection takes meanwhile is no loss.
        if lost and record in self._store.run(RunId(record.run)).records():
            for digest in lost:
                self._store.objects.miss(digest)
        return read

    def examine(self, digest: Digest, extent: Extent | None = None) -> str:
        """Examine one object; the file that was damaged around it and is relied on no more, if there is one."""
        place = extent or self._store.objects.place(digest)
        if place is None:
            return ""
        try:
            moved = self._store.objects.examine(digest, place) is Health.MOVED
        except DeltadError as error:
            log.warning("damage_not_mended", place=f"{place.path}", error=str(error))
            return ""
        return f"{place.path}" if moved else ""

    def _read_records(self, key: str, run: RunId) -> Piece:
        try:
            return Piece(key, *self._store.run(run).mend_records())
        except DeltadError as error:
            log.warning("damage_not_mended", place=f"the records of {run}", error=str(error))
            return Piece(key, 0)

    def _read_generation(self, mirror: Mirror, version: Version, after: str) -> Iterator[Piece]:
        start = f"{_mirror_key(mirror)} {version.epoch:06d} {version.number:09d} "
        begun = after.startswith(start)
        if after > start and not begun:
            return
        # How many tensors were read to their end.
        first = int(after.removeprefix(start)) if begun else 0
        failed: Renewed | None = None
        try:
            for checked in mirror.check(version, first=first):
                key = f"{start}{checked.tensor:09d}"
                if not checked.wrong:
                    yield Piece(key, checked.bytes)
                    continue
                failed = renew(mirror, version, (*(failed.wrong if failed else ()), checked.wrong), failed)
                yield Piece(key, checked.bytes, renewed=failed)
                if not failed.problem:
                    return  # all of it was read when it was made anew
        except NotFoundError:
            return  # the mirror has moved on, and what it has now was read as it was written
        except (IntegrityError, CheckpointError, FormatError) as error:
            if mirror.has_generation(version):
                yield Piece(f"{start}{first:09d}", 0, renewed=renew(mirror, version, (str(error),)))

    def _measure(self, mirrors: Sequence[Mirror]) -> int:
        total = sum(extent.size for _, extent in self._store.objects.extents())
        for mirror in mirrors:
            total += sum(_tree_bytes(self._store, path) for path in mirror.generations().values())
        return total

    def _load(self) -> Progress:
        try:
            return decode_progress(read_file(self._path, self._store.files), self._wall())
        except OSError:
            return Progress(began=self._wall())


def renew(mirror: Mirror, version: Version, wrong: tuple[str, ...], failed: Renewed | None = None) -> Renewed:
    """Make a damaged generation anew, unless that has `failed`. `wrong` is what is known of the damage."""
    if failed is not None:
        return replace(failed, wrong=wrong)
    try:
        return Renewed(mirror.name, version, tuple(mirror.renew(version)) or wrong)
    except DeltadError as error:
        return Renewed(mirror.name, version, wrong, str(error))


def _mirror_key(mirror: Mirror) -> str:
    return f"4 {mirror.name}"


def _tree_bytes(store: Store, directory: Path) -> int:
    try:
        return sum(entry.size for entry in store.files.entries(directory))
    except OSError:
        return 0
