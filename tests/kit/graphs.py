"""Version graphs in a few words, and a search over all versions to hold the fast one to."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from deltad.delta.coding import Coder
from deltad.delta.manifest import EdgeKind
from deltad.store.graph import Edge, Path, VersionGraph
from deltad.types import Digest, RunId, Version, VersionId

RUN = RunId("policy")


def version(number: int, *, epoch: int = 1, run: str = RUN) -> VersionId:
    return VersionId(RunId(run), Version(epoch, number))


def edge(
    base: VersionId | None,
    target: VersionId,
    size: int = 100,
    *,
    coder: Coder = Coder.BLIND,
    kind: EdgeKind | None = None,
    derived: bool = False,
    name: object = "",
) -> Edge:
    """An edge of `size` bytes; its manifest's digest is made of its ends and `name`."""
    manifest = Digest(hashlib.sha256(f"{base} {target} {name}".encode()).digest())
    kind = kind or (EdgeKind.ANCHOR if base is None else EdgeKind.DELTA)
    coders = (int(Coder.PACKED if base is None else coder),)
    return Edge(kind, base, target, manifest, 1, size, coders, derived)


def graph(edges: Iterable[Edge], *, cell_versions: int = 3) -> VersionGraph:
    made = VersionGraph("bf16", cell_versions=cell_versions)
    for one in edges:
        made.add(one)
    return made


def plainly(
    edges: Collection[Edge],
    target: VersionId,
    starts: Collection[VersionId],
    left: Mapping[Digest, int | None],
    *,
    anchors: bool,
    backwards: bool,
) -> tuple[int, int, VersionId | None] | None:
    """Bytes, hops and start of the cheapest path, by relaxing every edge until nothing changes."""

    def cost(one: Edge) -> int | None:
        return left.get(one.manifest, one.bytes)

    far: dict[VersionId, tuple[int, int]] = {target: (0, 0)}
    steps = [(one.base, one.target, cost(one)) for one in edges if one.base is not None]
    if backwards:
        steps += [(one.target, one.base, cost(one)) for one in edges if one.base is not None and one.invertible]
    grown = True
    while grown:
        grown = False
        for before, after, bytes_ in steps:
            if before is None or after is None or bytes_ is None or after not in far:
                continue
            total = far[after][0] + bytes_, far[after][1] + 1
            if before not in far or total < far[before]:
                far[before] = total
                grown = True
    free, paid = [], []
    for start in starts:
        if start in far:
            newer = (-start.version.epoch, -start.version.number)
            free.append((*far[start], False, start.run != target.run, newer, start))
    for one in edges:
        bytes_ = cost(one)
        if anchors and one.base is None and one.target in far and bytes_ is not None:
            bytes_, hops = far[one.target][0] + bytes_, far[one.target][1] + 1
            (paid if cost(one) else free).append((bytes_, hops, True, False, (0, 0), None))
    ends = sorted(free, key=lambda end: end[:5]) or sorted(paid, key=lambda end: end[:5])
    return None if not ends else (ends[0][0], ends[0][1], ends[0][5])


def told(path: Path) -> list[str]:
    """A path as `anchor 4`, `4 → 6`, `6 → 5`."""
    return [
        f"anchor {hop.target.version.number}"
        if hop.base is None
        else f"{hop.base.version.number} → {hop.target.version.number}"
        for hop in path.hops
    ]
