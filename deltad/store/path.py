"""Which edges lead to a version. Pure.

The plainest answer to the version graph's question: walk back along deltas until a version that is
held, or an anchor, is met.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from deltad.delta.manifest import EdgeKind
from deltad.delta.record import EdgeRef, VersionRecord
from deltad.errors import NotFoundError
from deltad.types import Version


@dataclass(frozen=True, slots=True)
class Hop:
    """One edge and the version that it leads to."""

    record: VersionRecord
    edge: EdgeRef


@dataclass(frozen=True, slots=True)
class Path:
    """Hops in the order of applying them. `start` is the held version they start from, None for an anchor."""

    start: Version | None
    hops: tuple[Hop, ...]


def find_path(
    target: VersionRecord,
    variant: str,
    *,
    held: Collection[Version],
    record: Callable[[Version], VersionRecord],
    anchors: bool = True,
) -> Path:
    """The path to `target` from the nearest held version, or else from an anchor where `anchors` allows.

    `record` looks a version up and raises NotFoundError for one that is unknown. Raises NotFoundError
    if nothing leads there.
    """
    hops: list[Hop] = []
    at = target
    while at.version not in held:
        edges = at.variant(variant).edges
        delta = next((edge for edge in edges if edge.kind is not EdgeKind.ANCHOR), None)
        anchor = next((edge for edge in edges if edge.kind is EdgeKind.ANCHOR), None)
        if anchor is not None and anchors:
            hops.append(Hop(at, anchor))
            return Path(None, tuple(reversed(hops)))
        if delta is None or delta.base is None:
            raise NotFoundError(
                f"a path to {target.id} variant {variant}",
                expected="deltas from a version that is held" + (", or an anchor" if anchors else ""),
                found=f"nothing that leads to {at.version}",
            )
        hops.append(Hop(at, delta))
        at = record(delta.base)
    return Path(at.version, tuple(reversed(hops)))
