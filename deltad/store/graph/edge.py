"""What the version graph is made of: edges, and the hops of a path over them. Pure.

A version is named by its `VersionId`: the base of a fork's first version belongs to another run. Every variant of a
run has a graph of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltad.delta.coding import WHOLE, Coder
from deltad.delta.manifest import EdgeKind
from deltad.types import Digest, VersionId


@dataclass(frozen=True, slots=True)
class Edge:
    """An anchor, delta or skip delta that leads to `target`.

    `size` is that of the manifest, `bytes` all that a reader fetches: manifest, pages and chunks. `coders` are those
    of the manifest. `derived` edges were made by a daemon, and no record lists them. Raises ValueError for a base
    where there is none, none where there is one, or sizes that cannot be.
    """

    kind: EdgeKind
    base: VersionId | None
    target: VersionId
    manifest: Digest
    size: int
    bytes: int
    coders: tuple[int, ...] = ()
    derived: bool = False

    def __post_init__(self) -> None:
        if (self.base is None) != (self.kind is EdgeKind.ANCHOR) or self.base == self.target:
            raise ValueError(f"{self.kind} to {self.target}: expected another base, or none for an anchor")
        if not 0 < self.size <= self.bytes:
            raise ValueError(f"{self.kind} to {self.target}: {self.bytes} bytes, of which {self.size} are the manifest")

    @property
    def foldable(self) -> bool:
        """A delta that folds without weights: all frames are blind or whole."""
        return self.base is not None and all(coder == Coder.BLIND or coder in WHOLE for coder in self.coders)

    @property
    def invertible(self) -> bool:
        """A delta that can be walked backwards without other weights: whole frames do not know what they replaced."""
        return self.base is not None and all(coder == Coder.BLIND for coder in self.coders)


@dataclass(frozen=True, slots=True)
class Hop:
    """An edge of a path, walked forwards or, where it is `inverse`, from its target back to its base."""

    edge: Edge
    inverse: bool = False

    @property
    def base(self) -> VersionId | None:
        """Where the hop begins; None for an anchor."""
        return self.edge.target if self.inverse else self.edge.base

    @property
    def target(self) -> VersionId:
        """Where the hop leads."""
        if self.inverse and self.edge.base is not None:
            return self.edge.base
        return self.edge.target


@dataclass(frozen=True, slots=True)
class Path:
    """Hops in the order of applying them. `start` is the version they start from, None for an anchor.

    `bytes` are all that is still to be fetched for it.
    """

    start: VersionId | None
    hops: tuple[Hop, ...]
    bytes: int
