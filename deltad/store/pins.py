"""Versions that somebody wants kept whatever the retention says, with who and why. Durable.

A pin that is lost in a power cut was not acknowledged; one that was removed may come back, and keeps too much.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from deltad.errors import FormatError
from deltad.store.disk import FileSystem, make_directory, read_file, store_error, write_durably
from deltad.types import Version

_NAME = re.compile(r"e([0-9]{6,})-v([0-9]{6,})\.pin", re.ASCII)


class Pin(msgspec.Struct, frozen=True):
    """Who pinned a version, and why."""

    by: str
    why: str

    def __str__(self) -> str:
        return f"{self.by}: {self.why}" if self.why else self.by


class Pins:
    """The pins of one run. The caller allows one change at a time."""

    def __init__(self, directory: Path, scratch: Path, files: FileSystem) -> None:
        self._directory = directory
        self._scratch = scratch
        self._files = files
        self._pins: dict[Version, Pin] = {}

    def load(self) -> None:
        """Raises FormatError for what is no pin: without it nobody can say what is pinned."""
        try:
            if self._files.entry(self._directory) is None:
                return
            self._files.sync_directory(self._directory)
            for entry in self._files.entries(self._directory):
                path = self._directory / entry.name
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    raise FormatError(f"{path}", expected="a pin named like e000001-v000123.pin")
                self._pins[Version(int(match[1]), int(match[2]))] = _decode(path, read_file(path, self._files))
        except OSError as error:
            raise store_error(error, self._directory, 0, self._files) from error

    def all(self) -> dict[Version, Pin]:
        return dict(self._pins)

    def add(self, version: Version, pin: Pin) -> None:
        """Durable on return; replaces an earlier pin of this version."""
        make_directory(self._directory, self._files)
        write_durably(self._path(version), msgspec.json.encode(pin), scratch=self._scratch, files=self._files)
        self._pins[version] = pin

    def remove(self, version: Version) -> None:
        """Does nothing for a version that is not pinned."""
        if self._pins.pop(version, None) is not None:
            try:
                self._files.unlink(self._path(version))
            except OSError as error:
                raise store_error(error, self._path(version), 0, self._files) from error

    def _path(self, version: Version) -> Path:
        return self._directory / f"e{version.epoch:06d}-v{version.number:06d}.pin"


def _decode(path: Path, data: bytes) -> Pin:
    try:
        return msgspec.json.decode(data, type=Pin)
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}", expected="a pin", found=str(error)) from None
