"""Versions that somebody wants kept whatever the retention says, with who, why and when. Durable.

A pin that is lost in a power cut was not acknowledged; one that was removed may come back, and keeps too much.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deltad.errors import FormatError
from deltad.figures import when
from deltad.store.disk import FileSystem, make_directory, read_file, store_error, write_durably
from deltad.types import Version

_NAME = re.compile(r"e([0-9]{6,})-v([0-9]{6,})\.pin", re.ASCII)


class Pin(msgspec.Struct, frozen=True):
    """Who pinned a version, why, and when by the wall clock, in Unix seconds; 0 where that was not noted."""

    by: str
    why: str
    at: float = 0.0

    def __str__(self) -> str:
        since = f" on {when(self.at)}" if self.at else ""
        return f"{self.by}{since}: {self.why}" if self.why else f"{self.by}{since}"


class Pins:
    """The pins of one run. The caller allows one change at a time; anybody may look."""

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

    def all(self) -> Mapping[Version, Pin]:
        """As it is now; what changes later does not show in it."""
        return self._pins

    def add(self, version: Version, pin: Pin) -> None:
        """Durable on return; replaces an earlier pin of this version."""
        make_directory(self._directory, self._files)
        write_durably(self._path(version), msgspec.json.encode(pin), scratch=self._scratch, files=self._files)
        self._pins = {**self._pins, version: pin}

    def remove(self, version: Version) -> bool:
        """False for a version that is not pinned. Raises StoreError; then it still is."""
        if version not in self._pins:
            return False
        try:
            self._files.unlink(self._path(version))
        except OSError as error:
            raise store_error(error, self._path(version), 0, self._files) from error
        self._pins = {known: pin for known, pin in self._pins.items() if known != version}
        return True

    def _path(self, version: Version) -> Path:
        return self._directory / f"e{version.epoch:06d}-v{version.number:06d}.pin"


def _decode(path: Path, data: bytes) -> Pin:
    try:
        return msgspec.json.decode(data, type=Pin)
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}", expected="a pin", found=str(error)) from None
