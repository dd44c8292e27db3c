"""Whom the configuration trusts, and what of the store is believed: what lay there before a key was trusted too.

Owns one invariant: of a run that is pulled, no version that is held lacks the signature that `[[trust]]` demands, and
none is reached over a derived edge that lacks it. What is published here is what this daemon says itself.
"""

from __future__ import annotations

import structlog

from deltad.config import Config
from deltad.delta.keys import PublicKey
from deltad.delta.record import VersionRecord
from deltad.delta.signing import is_signed_by
from deltad.errors import DeltadError, UntrustedError
from deltad.protocol.trust import Scope, TrustedKey, TrustList
from deltad.store.derived import DerivedEdge
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import Digest, Version

log = structlog.get_logger()


def trust_list(config: Config) -> TrustList:
    """The keys of all `[[trust]]` sections."""
    return TrustList(
        TrustedKey(trust.key, frozenset(scope for scope in Scope if scope in trust.scope), trust.runs, trust.name)
        for trust in config.trusts
    )


def sift_stored(store: Store, config: Config, trust: TrustList, key: PublicKey | None) -> None:
    """Count as not held what nobody who is trusted has signed, one signature a record and derived edge. Blocks."""
    for name in store.held_runs():
        run = store.run(name)
        if config.run(name) is not None:
            run.doubt(lambda record: "")
            continue
        _sift(run, trust, key)
        if doubts := run.doubts():
            log.warning("versions_not_believed", run=name, count=len(doubts), error=next(iter(doubts.values())))


def doubts_in_words(run: RunStore) -> str:
    """What is to be said of the versions of a run that are not believed; empty if there are none."""
    doubts = run.doubts()
    if not doubts:
        return ""
    first, words = next(iter(doubts.items()))
    more = f" and {len(doubts) - 1} more" if len(doubts) > 1 else ""
    return f"{first}{more} lie here and are neither served nor activated: {words}"


def _sift(run: RunStore, trust: TrustList, key: PublicKey | None) -> None:
    against = {record.version: _against(trust, record) for record in (*run.records(), *run.doubted_records())}
    run.doubt(lambda record: against[record.version])
    run.hide_edges([Digest(edge.manifest) for edge in run.derived(hidden=True) if _is_forged(run, trust, edge, key)])
    if run.doubts() and (lost := _lost(run)):
        # Signed themselves, but reached over what is not: they are to come anew, by a way that is believed.
        run.doubt(lambda record: against[record.version] or lost.get(record.version, ""))


def _lost(run: RunStore) -> dict[Version, str]:
    """The versions that are held and that nothing leads to any more, with what is to be said of each."""
    words = "what leads to it here is not believed"
    return {
        record.version: words
        for record in run.records()
        if not all(run.graph.is_led_to(record.version, variant.name) for variant in record.variants)
    }


def _against(trust: TrustList, record: VersionRecord) -> str:
    try:
        trust.check_record(record)
    except UntrustedError as error:
        return str(error)
    return ""


def _is_forged(run: RunStore, trust: TrustList, edge: DerivedEdge, key: PublicKey | None) -> bool:
    """Whether an edge that others may have made is signed by nobody who is trusted for it."""
    if edge.local or not trust.demands(run.run):
        return False
    try:
        manifest = run.read_manifest(edge.ref)
        if key is None or not is_signed_by(manifest, key):
            trust.check_derived(manifest)
    except UntrustedError as error:
        log.warning("edge_not_believed", run=run.run, error=str(error))
        return True
    except DeltadError:
        return False  # damaged: no path leads over it
    return False
