"""The replicas that may answer, and which of them gets a request.

Pure. A prompt goes to the replica that rendezvous hashing gives its beginning, so that requests of one prefix meet one
cache, unless that replica has more than its share of the load: then to the next one. (Rendezvous hashing: Thaler and
Ravishankar, 1998; the bound on the load: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads",
2018, with ε = 1/4.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from deltad.client.messages import PROVEN, FleetView, ReplicaReport, ReplicaState
from deltad.types import Version, parse_version
from rollout_plugin.gateway.wanted import Wanted

PREFIX_TOKENS = 256
"""Prompts that begin with the same tokens meet the same replica."""

_TOGETHER = 4
"""So many requests a replica takes before its share of the load is looked at: samples of one prompt come as a group."""

_SWAPPING = frozenset({ReplicaState.COMMITTING, ReplicaState.COMMITTED})


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that serves. `proven`: no swap is under way there. `near`: it is at the gateway's own daemon."""

    name: str
    address: str
    version: Version
    staleness: int
    proven: bool = True
    near: bool = True


@dataclass(frozen=True, slots=True)
class Roster:
    """What is known of a run's fleet at a moment. `sequence` counts the run's versions."""

    members: tuple[Member, ...] = ()
    latest: Version | None = None
    sequence: int = 0

    def fit(self, wanted: Wanted, without: Collection[str] = ()) -> tuple[Member, ...]:
        """Those that may answer; of several kinds the best: near before far, at rest before in the midst of a swap."""
        fit = [m for m in self.members if m.name not in without and wanted.takes(m.version, m.staleness)]
        best = max(((m.near, m.proven) for m in fit), default=None)
        return tuple(m for m in fit if (m.near, m.proven) == best)

    def said(self) -> str:
        """What is served, in words."""
        served = sorted({m.version for m in self.members})
        return f"{', '.join(map(str, served))} served" if served else "no replica that serves"


def roster_of(view: FleetView, variant: str) -> Roster:
    """The roster of a fleet as its daemon sees it. Replicas of a region that is not heard of are `unknown` there."""
    members: dict[str, Member] = {}
    latest: list[Version] = []
    sequence = 0
    for at, region in enumerate(view.regions):
        run = region.report.runs[view.run]
        if run.latest:
            latest.append(parse_version(run.latest))
        sequence = max([sequence, *(version.sequence for version in run.versions)])
        for replica in run.replicas:
            if (member := _member(replica, region.report.daemon, near=at == 0)) and replica.variant == variant:
                members[member.name] = member
    return Roster(tuple(members.values()), max(latest, default=None), sequence)


def _member(replica: ReplicaReport, daemon: str, *, near: bool) -> Member | None:
    proven = replica.state in PROVEN and bool(replica.root)
    if not (proven or replica.state in _SWAPPING) or not replica.version or not replica.address:
        return None
    name = f"{daemon}/{replica.replica}"
    return Member(name, replica.address, parse_version(replica.version), replica.staleness, proven, near)


def pick(fit: Sequence[Member], prompt: Sequence[int], loads: Mapping[str, int]) -> Member:
    """Who of these (at least one) answers a prompt. `loads`: the requests that each has now, by name."""
    key = ",".join(map(str, prompt[:PREFIX_TOKENS]))
    ranked = sorted(fit, key=lambda member: hashlib.blake2b(f"{member.name} {key}".encode(), digest_size=8).digest())
    fair = math.ceil(1.25 * (sum(loads.get(member.name, 0) for member in fit) + 1) / len(fit))
    share = max(fair, _TOGETHER)
    return next((member for member in ranked if loads.get(member.name, 0) < share), ranked[0])
