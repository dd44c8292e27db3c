"""A way to a version: edges in the order of applying them."""

from __future__ import annotations

from dataclasses import dataclass

from deltad.delta.record import EdgeRef, VersionRecord
from deltad.types import VersionId


@dataclass(frozen=True, slots=True)
class Hop:
    """One edge and the version that it leads to."""

    record: VersionRecord
    edge: EdgeRef


@dataclass(frozen=True, slots=True)
class Path:
    """Hops in the order of applying them. `start` is the held version they start from, None for an anchor.

    A path to a fork may begin in the run that it forks.
    """

    start: VersionId | None
    hops: tuple[Hop, ...]
