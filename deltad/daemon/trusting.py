"""Whom the configuration trusts, for the pull machine."""

from __future__ import annotations

from deltad.config import Config
from deltad.protocol.trust import Scope, TrustedKey, TrustList


def trust_list(config: Config) -> TrustList:
    """The keys of all `[[trust]]` sections."""
    return TrustList(
        TrustedKey(trust.key, frozenset(map(Scope, trust.scope)), trust.runs, trust.name) for trust in config.trusts
    )
