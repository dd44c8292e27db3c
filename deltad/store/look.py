"""Looking at a store from outside: what it is and what its newest versions take. Takes no lock, changes nothing.

A daemon may hold the store and go on meanwhile. Invariant: whatever is found there, even if it is damaged, foreign
or gone a moment later, a look ends without an error of its own; what could not be read is counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltad.delta.layout import decode_layout
from deltad.delta.manifest import EdgeKind, decode_manifest
from deltad.delta.record import VersionRecord, decode_record
from deltad.errors import DeltadError
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.store.derived import DerivedEdge
from deltad.store.disk import DISK, FileSystem, read_file
from deltad.types import Version

RECENT = 32
"""How many of a run's newest versions are looked at."""
_RECORD = re.compile(r"e([0-9]{6,})-v([0-9]{6,})\.record", re.ASCII)
_LINE_BYTES = 80


@dataclass(frozen=True, slots=True)
class RecentRun:
    """A run's newest versions, in bytes of the edges that were published: an edge of a version that has several
    counts under its own kind. `created` are wall clocks in Unix seconds, ascending. `held` counts all versions."""

    run: str
    held: int
    deltas: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()
    weight_bytes: int = 0
    created: tuple[float, ...] = ()
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """A store as it lies there. `format` is the content of FORMAT, empty where there is none; `names` its top level."""

    format: str = ""
    names: tuple[str, ...] = ()
    pack_bytes: int = 0
    runs: tuple[RecentRun, ...] = ()


def look(path: Path, *, limits: Limits = DEFAULT_LIMITS, files: FileSystem = DISK) -> Look:
    """What lies at `path`; an empty look if nothing does, or if it may not be read."""
    try:
        names = tuple(entry.name for entry in files.entries(path))
    except OSError:
        return Look()
    line = (_read(path / "FORMAT", files) or b"")[:_LINE_BYTES].decode(errors="replace")
    runs = tuple(_recent(path, name, limits, files) for name in _names(path / "runs", files)) if line else ()
    return Look(line, names, _size(path / "packs", files), runs)


def _recent(path: Path, run: str, limits: Limits, files: FileSystem) -> RecentRun:
    found = [match for name in _names(path / "runs" / run / "records", files) if (match := _RECORD.fullmatch(name))]
    newest = sorted(found, key=lambda match: Version(int(match[1]), int(match[2])))[-RECENT:]
    sizes: dict[EdgeKind, list[int]] = {kind: [] for kind in EdgeKind}
    derived = _derived(path / "runs" / run / "edges", files)
    created, unreadable, record = [], 0, None
    for match in newest:
        data = _read(path / "runs" / run / "records" / match[0], files)
        try:
            record = decode_record(data or b"", limits=limits)
            for kind, size in _edges(path, record, derived, limits, files):
                sizes[kind].append(size)
        except (DeltadError, OSError):
            unreadable += 1
            continue
        created.append(record.created_ns / 1e9)
    return RecentRun(
        run,
        held=len(found),
        deltas=tuple(sizes[EdgeKind.DELTA]),
        anchors=tuple(sizes[EdgeKind.ANCHOR]),
        weight_bytes=_weight_bytes(path, record, limits, files),
        created=tuple(created),
        unreadable=unreadable,
    )


def _edges(
    path: Path, record: VersionRecord, derived: Collection[tuple[str, Version]], limits: Limits, files: FileSystem
) -> list[tuple[EdgeKind, int]]:
    """Raises FormatError for what is damaged, and OSError where nothing that leads here is here.

    A version that was pulled came by one of its edges, or by a derived one; the others need not be held.
    """
    found = []
    for variant in record.variants:
        missing: OSError | None = None
        held = (variant.name, record.version) in derived
        for edge in variant.edges:
            try:
                data = read_file(_object(path, edge.manifest), files)
            except FileNotFoundError as error:
                missing = error
                continue
            manifest = decode_manifest(data, limits=limits)
            held = True
            found.append((edge.kind, edge.size + manifest.chunk_bytes + sum(page.size for page in manifest.pages)))
        if missing and not held:
            raise missing
    return found


def _derived(path: Path, files: FileSystem) -> set[tuple[str, Version]]:
    """The variants and versions that derived edges lead to."""
    found = set()
    for name in _names(path, files):
        with suppress(msgspec.DecodeError):
            edge = msgspec.json.decode(_read(path / name, files) or b"", type=DerivedEdge)
            found.add((edge.variant, edge.target))
    return found


def _weight_bytes(path: Path, record: VersionRecord | None, limits: Limits, files: FileSystem) -> int:
    total = 0
    for variant in record.variants if record else ():
        try:
            total += decode_layout(_read(_object(path, variant.layout), files) or b"", limits=limits).weight_bytes
        except DeltadError:
            continue
    return total


def _object(path: Path, digest: bytes) -> Path:
    return path / "objects" / digest.hex()[:2] / digest.hex()[2:]


def _read(path: Path, files: FileSystem) -> bytes | None:
    try:
        return read_file(path, files)
    except OSError:
        return None


def _names(path: Path, files: FileSystem) -> list[str]:
    try:
        return [entry.name for entry in files.entries(path)]
    except OSError:
        return []


def _size(path: Path, files: FileSystem) -> int:
    try:
        return sum(entry.size for entry in files.entries(path))
    except OSError:
        return 0
