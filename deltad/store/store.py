"""The store: one directory, one daemon, one format number.

FORMAT   lock   tmp/   packs/   objects/ab/…   runs/<run>/{latest, records/, notes/, mirror/, baseline/}   exports/
quarantine/   scrub

What is written in which order, and what a kill leaves in each gap, is told in docs/STORE.md.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from deltad.errors import FormatError, StoreBusyError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.store.disk import (
    DISK,
    FileSystem,
    Lock,
    make_directory,
    read_file,
    remove_tree,
    store_error,
    write_durably,
)
from deltad.store.forks import Forks
from deltad.store.leases import Leases
from deltad.store.objects import ObjectReader, ObjectStore
from deltad.store.packs import Packs
from deltad.store.runs import RunStore
from deltad.types import Digest, RunId, parse_run

STORE_FORMAT = 2
_FORMAT_LINE = f"deltad store {STORE_FORMAT}\n"
_OLDER_LINES = ("deltad store 1\n",)
"""Format 1 kept chunks in files of their own, which are still read there."""
_LOCK = re.compile(rb"[0-9\n\0]{0,32}")
"""What a lock may hold: a process number, not synced, of which a power cut may leave zeros."""
_SCRATCH = re.compile(r"[0-9a-f]{32}", re.ASCII)
_BEFORE_FORMAT = frozenset({"lock", "tmp", "lost+found"})
"""What a kill during the very first start may leave without a FORMAT file, and what a new file system begins with."""


class Store:
    """A host's durable state. Open it once per process; methods may be called from any thread."""

    def __init__(
        self, path: Path, lock: Lock, *, limits: Limits, files: FileSystem, clock: Callable[[], float]
    ) -> None:
        self.path = path
        self.limits = limits
        self._lock = lock
        self.files = files
        self._guard = threading.Lock()
        self.scratch = path / "tmp"
        self._packs = Packs(path / "packs", self.scratch, limits, files)
        self.objects = ObjectStore(
            path / "objects",
            self._packs,
            scratch=self.scratch,
            limits=limits,
            files=files,
            clock=clock,
            on_change=self._forget_ways,
        )
        self.clock = clock
        self.leases = Leases(clock)
        self._forks = Forks()
        self._runs: dict[RunId, RunStore] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        limits: Limits = DEFAULT_LIMITS,
        files: FileSystem = DISK,
        clock: Callable[[], float] = time.monotonic,
    ) -> Store:
        """Open or create the store at `path` and hold it until `close`. An older format becomes this one.

        Raises StoreBusyError while another process holds it (a killed one does not), FormatError for a
        store of a newer format or a directory that is no store, IntegrityError for damage that stands in
        the way, StoreError if the disk refuses.
        """
        make_directory(path, files)
        _check_is_store(path, files)
        lock = _take_lock(path / "lock", files)
        try:
            store = cls(path, lock, limits=limits, files=files, clock=clock)
            store._prepare()
        except OSError as error:
            lock.close()
            raise store_error(error, path, 0, files) from error
        except BaseException:
            lock.close()
            raise
        return store

    def close(self) -> None:
        """Let go of the store. Nothing needs to be flushed: all that was reported is durable."""
        self._packs.close()
        self._lock.close()

    def has(self, digest: Digest) -> bool:
        return self.objects.has(digest)

    def size(self, digest: Digest) -> int:
        """Size of an object in bytes. Raises NotFoundError."""
        return self.objects.extent(digest).size

    def read(self, digest: Digest) -> bytes:
        """An object's bytes, checked against its name. Raises NotFoundError or IntegrityError."""
        return self.objects.read(digest)

    def open_object(self, digest: Digest) -> ObjectReader:
        """Open an object to read it piece by piece, unchecked. Raises NotFoundError or StoreError."""
        return self.objects.open(digest)

    def put(self, data: bytes) -> Digest:
        """Store an object that is no chunk; durable on return. Raises StoreFullError or StoreError."""
        return self.objects.put(data)

    def put_chunk(self, data: bytes) -> Digest:
        """Store a chunk, behind the one that was stored last; durable on return. Raises like `put`."""
        return self.objects.put_chunk(data)

    def runs(self) -> list[RunId]:
        """The runs that have at least one version here."""
        with self._guard:
            return sorted(run for run, store in self._runs.items() if store.latest() is not None)

    def held_runs(self) -> list[RunId]:
        """All runs that have a directory here or were asked for, with versions or without."""
        with self._guard:
            return sorted(self._runs)

    def run(self, run: RunId) -> RunStore:
        """The run's records; a run without versions is empty, not an error."""
        with self._guard:
            if run not in self._runs:
                self._runs[run] = RunStore(
                    run,
                    self.path / "runs" / run,
                    self.objects,
                    scratch=self.scratch,
                    limits=self.limits,
                    files=self.files,
                    leases=self.leases,
                    clock=self.clock,
                    forks=self._forks,
                    find_run=self.find_run,
                )
            return self._runs[run]

    def find_run(self, run: RunId) -> RunStore | None:
        """The run's records, if it has a directory here or was asked for. Waits for nobody."""
        return self._runs.get(run)

    def _forget_ways(self) -> None:
        """What is held has changed under the graphs of the runs: an object is damaged, or healed."""
        for run in list(self._runs.values()):
            run.graph.forget()

    def exports(self) -> Path:
        """Where checkpoints that were handed to engines live."""
        return self.path / "exports"

    def free_bytes(self) -> int:
        return self.files.free_bytes(self.path)

    def used_bytes(self) -> int:
        """What all objects take on the disk."""
        return self.objects.used_bytes()

    def _prepare(self) -> None:
        make_directory(self.scratch, self.files)
        marker = self.path / "FORMAT"
        if self.files.entry(marker) is None or read_file(marker, self.files) != _FORMAT_LINE.encode():
            # Before anything that an older deltad would not understand is written.
            write_durably(marker, _FORMAT_LINE.encode(), scratch=self.scratch, files=self.files)
        # What is in tmp/ was never visible under a final name; exports belong to replicas of an
        # earlier life of this daemon, which register again and are given new ones.
        for leftovers in (self.scratch, self.exports()):
            remove_tree(leftovers, self.files)
            make_directory(leftovers, self.files)
        runs = self.path / "runs"
        for directory in (self.path / "packs", self.path / "objects", runs):
            make_directory(directory, self.files)
        for directory in (self.path, runs):
            # A directory whose name was not synced before a kill is there, but not yet for good.
            self.files.sync_directory(directory)
        self.objects.load()
        for entry in self.files.entries(runs):
            try:
                run = parse_run(entry.name)
            except UsageError:
                raise FormatError(
                    f"{runs / entry.name}", expected="a run's directory", found="a foreign name"
                ) from None
            self.run(run)


def is_known_format(content: str) -> bool:
    """Whether a store with this content of FORMAT is opened."""
    return content in (_FORMAT_LINE, *_OLDER_LINES)


def foreign_names(names: Iterable[str]) -> list[str]:
    """Of what a directory without a FORMAT file holds, that which says that it is no store in the making."""
    return [name for name in names if name not in _BEFORE_FORMAT]


def _foreign(path: Path, files: FileSystem) -> list[str]:
    """What speaks against a directory without a FORMAT file: a start would write over it, or remove it."""
    names = [entry.name for entry in files.entries(path)]
    foreign = foreign_names(names)
    if "lock" in names and not _LOCK.fullmatch(read_file(path / "lock", files)):
        foreign.append("lock")
    if "tmp" in names:
        foreign += [f"tmp/{entry.name}" for entry in files.entries(path / "tmp") if not _SCRATCH.fullmatch(entry.name)]
    return foreign


def _check_is_store(path: Path, files: FileSystem) -> None:
    marker = path / "FORMAT"
    try:
        if files.entry(marker) is not None:
            found = read_file(marker, files)[:80].decode(errors="replace")
            if not is_known_format(found):
                raise FormatError(
                    f"{marker}",
                    expected=repr(_FORMAT_LINE.strip()),
                    found=repr(found.strip()),
                    hint="the store was written by another version of deltad; use that version, or another directory",
                )
        elif foreign := _foreign(path, files):
            raise FormatError(
                f"{path}",
                expected="an empty directory or a deltad store",
                found=f"{foreign[0]!r} and no FORMAT file",
                hint="choose another directory for the store",
            )
    except OSError as error:
        raise store_error(error, path, 0, files) from error


def _take_lock(path: Path, files: FileSystem) -> Lock:
    try:
        return files.lock(path)
    except BlockingIOError:
        owner = read_file(path, files)[:32].decode("ascii", "replace").strip()
        raise StoreBusyError(
            f"{path.parent}",
            expected="a store that no other daemon holds",
            found=f"held by process {owner or 'unknown'}",
            hint="stop that daemon, or give this one another `store`",
        ) from None
    except OSError as error:
        raise store_error(error, path, 0, files) from error
