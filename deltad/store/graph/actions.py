"""What the policy of the version graph may decide on, and what it decides by. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from deltad.store.graph.edge import Edge
from deltad.types import VersionId


@dataclass(frozen=True, slots=True)
class Fold:
    """Make the skip delta from `base` to `target` of consecutive deltas."""

    base: VersionId
    target: VersionId
    parts: tuple[Edge, ...]
    reason: str

    def __str__(self) -> str:
        return f"fold {self.base.version} → {self.target.version}"


@dataclass(frozen=True, slots=True)
class Encode:
    """Make a delta from `base` to `target` of the two states, since no parts fold to it."""

    base: VersionId
    target: VersionId
    reason: str

    def __str__(self) -> str:
        return f"encode {self.base.version} → {self.target.version}"


@dataclass(frozen=True, slots=True)
class CutAnchor:
    """Store a version whole."""

    version: VersionId
    reason: str

    def __str__(self) -> str:
        return f"cut an anchor of {self.version.version}"


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of a derived edge."""

    edge: Edge
    reason: str

    def __str__(self) -> str:
        base = "" if self.edge.base is None else f"{self.edge.base.version} → "
        return f"drop the {self.edge.kind} {base}{self.edge.target.version}"


Action: TypeAlias = Fold | Encode | CutAnchor | Drop


@dataclass(frozen=True, slots=True)
class Reader:
    """One or several replicas or regions that hold a version, or nothing yet, and are to get to another.

    `alone`: they hold nothing, and cannot have what their run forks, so that only an anchor of the run itself helps.
    """

    name: str
    held: VersionId | None
    target: VersionId
    count: int = 1
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """What derived edges may cost. All in bytes.

    `disk` is for all derived edges together, None for no bound. `work` is what may be read to make them now: the next
    one is begun while any of it is left, so a large one is made too, and what it took beyond is owed by later rounds.
    `state` is what it takes to read one whole state, for encoding anew and for anchors; None where there is no mirror
    to read it from. `anchor` is what an anchor will take.
    """

    disk: int | None
    work: int
    state: int | None
    anchor: int


@dataclass(frozen=True, slots=True)
class PutOff:
    """Something that should be made and cannot be now, and why."""

    action: Fold | Encode | CutAnchor
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order; what of `Budget.work` each of it takes; and what is put off."""

    actions: tuple[Action, ...]
    works: tuple[int, ...]
    put_off: tuple[PutOff, ...]

    @property
    def work(self) -> int:
        """What all of it takes."""
        return sum(self.works)
