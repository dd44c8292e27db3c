"""Judging the facts. Pure.

Owns one invariant: what is unknown is called unknown; nothing is called good that was not seen to be.
"""

from __future__ import annotations

from deltad.config import Config
from deltad.limits import DEFAULT_LIMITS, Limits
from deltad.ops.doctor import exposure, host, network, permissions, space, storage
from deltad.ops.doctor.facts import Facts
from deltad.ops.doctor.finding import Finding, Level


def examine(config: Config, facts: Facts, *, limits: Limits = DEFAULT_LIMITS) -> list[Finding]:
    """Everything that there is to say, the worst first."""
    findings = [
        *storage.examine_store(config, facts),
        *storage.examine_disk(facts),
        *space.examine_space(config, facts, limits),
        *permissions.examine_permissions(config, facts),
        *host.examine_ceilings(config, facts),
        *host.examine_watching(config, facts),
        *host.examine_clock(facts),
        *network.examine_tcp(config, facts),
        *exposure.examine_exposure(config),
        *(Finding(Level.WARNING, "configuration", doubt) for doubt in facts.doubts),
    ]
    return sorted(findings, key=lambda finding: -finding.level.rank)
