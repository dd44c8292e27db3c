"""What the pull machine decides: each is carried out by a shell and answered by one of the events it names. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deltad.protocol.pull_plan import Wanted
from deltad.types import Digest, Version


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """Ask the peer for a record → `record_seen`, `record_missing` or `record_failed`."""

    version: Version


@dataclass(frozen=True, slots=True)
class ListVersions:
    """Ask the peer which versions it has after this one → `versions_listed`."""

    after: Version | None


@dataclass(frozen=True, slots=True)
class ListEdges:
    """Ask the peer for the edges on the cheapest path to its latest version, from `after` or else from an anchor
    → `edges_listed`, or `edges_failed` if it could not be asked."""

    after: Version | None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask the peer for an object, on behalf of a version → `object_arrived` and, if that says so, store it →
    `object_stored`; or `object_missing` or `object_failed`."""

    wanted: Wanted
    version: Version


@dataclass(frozen=True, slots=True)
class Load:
    """Read an object that is held here → `object_loaded` or `load_failed`."""

    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Commit:
    """Make a version durable; all it needs is → `committed` or `commit_failed`.

    `derived`: manifests of the edges to it that its record does not name.
    """

    version: Version
    data: bytes
    derived: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Always the last decision: ask again after the next event, or at `until`."""

    until: float | None


Decision = FetchRecord | ListVersions | ListEdges | Fetch | Load | Commit | Wait
