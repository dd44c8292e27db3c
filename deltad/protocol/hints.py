"""What a peer says of the edges that lead to its latest version: how large those are that records name, and which
others there are.

Pure. It may not ask or fetch. Owns one invariant: a hint is never worth more than time: what it says of an edge is
compared with the records when the edge's manifest comes, one that leads nowhere is dropped, and a peer whose hints
lead nowhere again and again is not asked for any for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from deltad.delta.record import EdgeRef
from deltad.types import Version

_FAULTS = 4
"""Edges in a row that led nowhere, after which a peer's hints are not wanted."""
_REST = 20.0
"""For how many times as long as a refused version they are not wanted then."""


@dataclass(frozen=True, slots=True)
class Hint:
    """An edge as a peer speaks of it. `bytes` is all that fetching it takes."""

    variant: str
    target: Version
    edge: EdgeRef
    bytes: int
    coders: tuple[int, ...] = ()


class Hints:
    """The hints of one peer about one run, by manifest. `coders` are those read here, `refused_delay` in seconds."""

    def __init__(self, *, coders: frozenset[int], refused_delay: float) -> None:
        self.by_manifest: dict[bytes, Hint] = {}
        self._coders = coders
        self._refused_delay = refused_delay
        self._newest: Version | None = None
        self._faults = 0
        self._off_until = 0.0

    def lacks(self, newest: Version, now: float) -> bool:
        """Whether the peer has not been asked yet how to reach this version, or a newer one."""
        return now >= self._off_until and (self._newest is None or newest > self._newest)

    def ask_again(self) -> None:
        """Nothing that the peer spoke of led on: what it said is no answer any more."""
        self._newest = None

    def take(self, hints: Iterable[Hint], newest: Version, keep: Collection[bytes]) -> None:
        """The peer's answer when it was asked how to reach `newest`. Of earlier ones, those in `keep` stay."""
        kept = {manifest: hint for manifest, hint in self.by_manifest.items() if manifest in keep}
        usable = (hint for hint in hints if self._coders.issuperset(hint.coders))
        self.by_manifest = {hint.edge.manifest: hint for hint in usable} | kept
        self._newest = newest if self._newest is None else max(newest, self._newest)

    def leads(self, version: Version) -> bool:
        """Whether a hint leads to or from a version."""
        return any(version in (hint.target, hint.edge.base) for hint in self.by_manifest.values())

    def drop(self, manifests: Collection[bytes], now: float) -> None:
        """These edges led nowhere."""
        for manifest in manifests:
            self.by_manifest.pop(manifest, None)
        self._faults += 1
        if self._faults >= _FAULTS:
            self._faults = 0
            self._off_until = now + _REST * self._refused_delay
            self.by_manifest.clear()

    def drop_version(self, version: Version, now: float) -> None:
        """The peer has no such version after all."""
        over = [m for m, hint in self.by_manifest.items() if version in (hint.target, hint.edge.base)]
        self.drop(over, now)

    def led_on(self) -> None:
        """A version was reached over a derived edge."""
        self._faults = 0

    def forget_held(self, latest: Version) -> None:
        """Nothing at or below the newest version held is pulled any more."""
        for manifest in [m for m, hint in self.by_manifest.items() if hint.target <= latest]:
            del self.by_manifest[manifest]
