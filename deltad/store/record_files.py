"""The files of one run's version records, the pointer to the newest, and the note of those that are being let go.

Knows nothing of what versions need, or of who may write them. Owns one invariant: what `load` finds is durable, and
is all that was added and not dropped. The order of writes in `add` and `drop`, and what a kill leaves in each gap,
is told in docs/STORE.md and at the head of `deltad.store.runs`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import msgspec

from deltad.delta.record import VersionRecord, decode_record
from deltad.errors import DeltadError, FormatError, IntegrityError, StoreFullError
from deltad.limits import Limits
from deltad.store.disk import FileSystem, make_directory, read_file, store_error, write_durably
from deltad.types import RunId, Version

_RECORD_NAME = re.compile(r"e([0-9]{6,})-v([0-9]{6,})\.record", re.ASCII)


class Pointer(msgspec.Struct, frozen=True):
    """The content of `latest`."""

    version: Version
    record: bytes


class RecordFiles:
    """The caller lets one thread at a time write."""

    def __init__(self, run: RunId, directory: Path, scratch: Path, files: FileSystem, limits: Limits) -> None:
        self._run = run
        self._directory = directory
        self._records = directory / "records"
        self._dropping = directory / "dropping"
        self._scratch = scratch
        self._files = files
        self._limits = limits

    def load(self) -> dict[Version, VersionRecord]:
        """All that is held, after what was begun is brought to its end: see docs/STORE.md, "Opening".

        Raises FormatError for a foreign or damaged file, IntegrityError for a pointer to a record that is missing or
        another.
        """
        records: dict[Version, VersionRecord] = {}
        try:
            if self._files.entry(self._records) is not None:
                # A name whose directory was not synced before a kill is there, but not yet for good.
                self._files.sync_directory(self._directory)
                self._files.sync_directory(self._records)
                self.finish_dropping()
                for entry in self._files.entries(self._records):
                    record = self._read(self._records / entry.name)
                    records[record.version] = record
            self._check_pointer(records)
        except OSError as error:
            raise store_error(error, self._records, 0, self._files) from error
        return records

    def add(self, record: VersionRecord, data: bytes) -> None:
        """Make a version durable, and the newest. `data` is the record as its publisher wrote it."""
        make_directory(self._records, self._files)
        self._write(self._path(record.version), data)
        self._point(record)

    def holds(self, version: Version) -> bool:
        """Whether the record of a version is there."""
        return self._files.entry(self._path(version)) is not None

    def is_dropping(self) -> bool:
        """Whether versions are named that are gone from now on, whatever is left of them."""
        return self._files.entry(self._dropping) is not None

    def drop(self, versions: list[Version]) -> None:
        """Remove the records of versions, given newest first, for good. Raises StoreError."""
        if not versions:
            return
        try:
            self._write(self._dropping, msgspec.json.encode(versions))
        except StoreFullError:
            # No room even for that. One by one then, each before those that it was made from.
            for version in versions:
                self._remove([version])
        except DeltadError:
            with suppress(OSError):
                self._files.unlink(self._dropping)
            raise
        else:
            self.finish_dropping()

    def finish_dropping(self) -> None:
        """Bring to its end what `drop` has begun, if anything."""
        if not self.is_dropping():
            return
        try:
            # Its name may not be durable yet, if a kill came before that.
            self._files.sync_directory(self._directory)
            versions = msgspec.json.decode(read_file(self._dropping, self._files), type=list[Version])
            self._remove(versions)
            self._files.unlink(self._dropping)
            self._files.sync_directory(self._directory)
        except msgspec.DecodeError as error:
            raise FormatError(f"{self._dropping}", expected="a list of versions", found=str(error)) from None
        except OSError as error:
            raise store_error(error, self._dropping, 0, self._files) from error

    def mend(self, record: VersionRecord, *, latest: bool) -> tuple[int, list[str]]:
        """Compare the files of a version with what they should hold, and write anew what is damaged.

        Returns the bytes that were read, and the files that were written. Raises StoreError.
        """
        read, mended = 0, []
        parts = {self._path(record.version): record.encode()}
        if latest:
            parts[self._directory / "latest"] = _pointer(record)
        for path, data in parts.items():
            try:
                found = read_file(path, self._files)
            except OSError:
                found = b""
            read += len(found)
            if found != data:
                self._write(path, data)
                mended.append(f"{path}")
        return read, mended

    def _path(self, version: Version) -> Path:
        return self._records / f"e{version.epoch:06d}-v{version.number:06d}.record"

    def _point(self, record: VersionRecord) -> None:
        self._write(self._directory / "latest", _pointer(record))

    def _write(self, path: Path, data: bytes) -> None:
        write_durably(path, data, scratch=self._scratch, files=self._files)

    def _remove(self, versions: list[Version]) -> None:
        try:
            for version in versions:
                with suppress(FileNotFoundError):
                    self._files.unlink(self._path(version))
            self._files.sync_directory(self._records)
        except OSError as error:
            raise store_error(error, self._records, 0, self._files) from error

    def _read(self, path: Path) -> VersionRecord:
        match = _RECORD_NAME.fullmatch(path.name)
        if not match:
            raise FormatError(f"{path}", expected="a record named like e000001-v000123.record")
        try:
            record = decode_record(read_file(path, self._files), limits=self._limits)
        except FormatError as error:
            raise FormatError(
                f"{path}: {error.thing}", expected=error.expected, found=error.found, hint=error.hint
            ) from None
        if record.run != self._run or record.version != Version(int(match[1]), int(match[2])):
            raise IntegrityError(f"{path}", expected=f"the record of {self._run}", found=f"that of {record.id}")
        return record

    def _check_pointer(self, records: dict[Version, VersionRecord]) -> None:
        """The pointer must name a record that is here; an older one is rolled forward."""
        path = self._directory / "latest"
        pointed: Version | None = None
        if self._files.entry(path) is not None:
            try:
                pointer = msgspec.json.decode(read_file(path, self._files), type=Pointer)
            except msgspec.DecodeError as error:
                raise FormatError(f"{path}", expected="a pointer to a record", found=str(error)) from None
            record = records.get(pointer.version)
            if record is None or record.digest != pointer.record:
                raise IntegrityError(f"{path}", expected=f"the record of {pointer.version}", found="none, or another")
            pointed = pointer.version
        if records and pointed != (newest := max(records)):
            self._point(records[newest])


def _pointer(record: VersionRecord) -> bytes:
    """What `latest` holds while this version is the newest."""
    return msgspec.json.encode(Pointer(record.version, record.digest))
