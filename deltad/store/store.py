"""The store: one directory, one daemon, one format number.

FORMAT   lock   tmp/   objects/ab/…   runs/<run>/{latest, records/, notes/, mirror/, baseline/}   exports/
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from pathlib import Path

from deltad.errors import FormatError, StoreBusyError, UsageError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.store.disk import free_bytes, make_directory, store_error, write_durably
from deltad.store.objects import ObjectStore
from deltad.store.runs import RunStore
from deltad.types import Digest, RunId, parse_run

STORE_FORMAT = 1
_FORMAT_LINE = f"deltad store {STORE_FORMAT}\n"


class Store:
    """A host's durable state. Open it once per process; methods may be called from any thread."""

    def __init__(self, path: Path, lock: int, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self._lock_descriptor = lock
        self._guard = threading.Lock()
        self.scratch = path / "tmp"
        self._objects = ObjectStore(path / "objects", self.scratch, limits)
        self._runs: dict[RunId, RunStore] = {}

    @classmethod
    def open(cls, path: Path, *, limits: Limits = DEFAULT_LIMITS) -> Store:
        """Open or create the store at `path` and hold it until `close`.

        Raises StoreBusyError while another process holds it (a killed one does not), FormatError for a
        store of another format or a directory that is no store, StoreError if the disk refuses.
        """
        make_directory(path)
        _check_is_store(path)
        lock = _take_lock(path / "lock")
        try:
            store = cls(path, lock, limits)
            store._prepare()
        except BaseException:
            os.close(lock)
            raise
        return store

    def close(self) -> None:
        """Let go of the store. Nothing needs to be flushed: all that was reported is durable."""
        os.close(self._lock_descriptor)

    def has(self, digest: Digest) -> bool:
        return self._objects.has(digest)

    def size(self, digest: Digest) -> int:
        """Size of an object in bytes. Raises NotFoundError."""
        return self._objects.size(digest)

    def read(self, digest: Digest) -> bytes:
        """An object's bytes, checked against its name. Raises NotFoundError or IntegrityError."""
        return self._objects.read(digest)

    def object_path(self, digest: Digest) -> Path:
        return self._objects.path(digest)

    def put(self, data: bytes) -> Digest:
        """Store an object; durable on return. Raises StoreFullError or StoreError."""
        return self._objects.put(data)

    def runs(self) -> list[RunId]:
        """The runs that have at least one version here."""
        with self._guard:
            return sorted(run for run, store in self._runs.items() if store.latest() is not None)

    def run(self, run: RunId) -> RunStore:
        """The run's records; a run without versions is empty, not an error."""
        with self._guard:
            if run not in self._runs:
                directory = self.path / "runs" / run
                self._runs[run] = RunStore(run, directory, self._objects, self.scratch, self.limits)
            return self._runs[run]

    def exports(self) -> Path:
        """Where checkpoints that were handed to engines live."""
        return self.path / "exports"

    def free_bytes(self) -> int:
        return free_bytes(self.path)

    def used_bytes(self) -> int:
        """Size of all objects."""
        total = 0
        for shard in os.scandir(self.path / "objects"):
            total += sum(entry.stat().st_size for entry in os.scandir(shard.path))
        return total

    def _prepare(self) -> None:
        if not (self.path / "FORMAT").exists():
            make_directory(self.scratch)
            write_durably(self.path / "FORMAT", _FORMAT_LINE.encode(), scratch=self.scratch)
        # What is in tmp/ was never visible under a final name; exports belong to replicas of an
        # earlier life of this daemon, which register again and are given new ones.
        for leftovers in (self.scratch, self.exports()):
            shutil.rmtree(leftovers, ignore_errors=True)
            make_directory(leftovers)
        make_directory(self.path / "objects")
        runs = self.path / "runs"
        make_directory(runs)
        for entry in sorted(runs.iterdir()):
            try:
                run = parse_run(entry.name)
            except UsageError:
                raise FormatError(f"{entry}", expected="a run's directory", found="a foreign name") from None
            self.run(run)


def _check_is_store(path: Path) -> None:
    try:
        marker = path / "FORMAT"
        if marker.exists():
            found = marker.read_text(errors="replace")[:80]
            if found != _FORMAT_LINE:
                raise FormatError(
                    f"{marker}",
                    expected=repr(_FORMAT_LINE.strip()),
                    found=repr(found.strip()),
                    hint="the store was written by another version of deltad; use that version, or another directory",
                )
        elif foreign := sorted(entry.name for entry in path.iterdir() if entry.name not in ("lock", "tmp")):
            raise FormatError(
                f"{path}",
                expected="an empty directory or a deltad store",
                found=f"{foreign[0]!r} and no FORMAT file",
                hint="choose another directory for the store",
            )
    except OSError as error:
        raise store_error(error, path, 0) from error


def _take_lock(path: Path) -> int:
    """An flock dies with its process, so a killed daemon's lock is free at once."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise store_error(error, path, 0) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise StoreBusyError(
            f"{path.parent}",
            expected="a store that no other daemon holds",
            found=f"held by process {owner or 'unknown'}",
            hint="stop that daemon, or give this one another `store`",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
