"""Only what a trusted key has signed, with the scope for it, is believed; what is refused is told apart."""

from __future__ import annotations

import msgspec
import pytest

from deltad.delta.keys import SigningKey
from deltad.delta.manifest import EdgeKind, Manifest, decode_manifest
from deltad.delta.record import VersionRecord
from deltad.delta.signing import sign
from deltad.errors import UntrustedError
from deltad.protocol.trust import Scope, TrustedKey, TrustList
from deltad.types import Digest, RunId
from tests.kit.versions import Lineage

PUBLISHED = Lineage(tensors=1).publish()
RECORD = PUBLISHED.record
SKIP = msgspec.structs.replace(
    decode_manifest(PUBLISHED.objects[Digest(RECORD.variants[0].edges[0].manifest)]), kind=EdgeKind.ANCHOR
)
TRAINER, RELAY, STRANGER = (
    SigningKey.from_seed(bytes([1] * 32)),
    SigningKey.from_seed(bytes([2] * 32)),
    SigningKey.from_seed(bytes([3] * 32)),
)
TRUST = TrustList(
    [
        TrustedKey(TRAINER.public, frozenset({Scope.PUBLISH}), (RECORD.run,), "trainer"),
        TrustedKey(RELAY.public, frozenset({Scope.DERIVE}), name="border"),
    ]
)


def test_the_publisher_may_publish_and_derive() -> None:
    TRUST.check_record(sign(RECORD, TRAINER))
    TRUST.check_derived(sign(SKIP, TRAINER))


def test_a_deriving_key_may_derive_and_not_publish() -> None:
    TRUST.check_derived(sign(SKIP, RELAY))
    with pytest.raises(UntrustedError, match=f"{RELAY.public.id}, which may not publish"):
        TRUST.check_record(sign(RECORD, RELAY))


@pytest.mark.parametrize("thing", [RECORD, SKIP])
def test_each_refusal_has_its_own_words(thing: VersionRecord | Manifest) -> None:
    check = TRUST.check_record if isinstance(thing, VersionRecord) else TRUST.check_derived
    with pytest.raises(
        UntrustedError, match=rf"expected a signature of .*trainer \({TRAINER.public.id}\).*, found none"
    ):
        check(thing)  # type: ignore[arg-type]
    with pytest.raises(UntrustedError, match=f"found one of key {STRANGER.public.id};"):
        check(sign(thing, STRANGER))  # type: ignore[arg-type]
    forged = msgspec.structs.replace(sign(thing, TRAINER), least_reader=0)
    with pytest.raises(UntrustedError, match="over other bytes; it was forged"):
        check(forged)  # type: ignore[arg-type]


def test_a_revoked_key_vouches_for_nothing_and_its_run_demands_a_signature_all_the_same() -> None:
    revoked = TrustList([TrustedKey(TRAINER.public, frozenset(), (RECORD.run,), "trainer")])
    assert revoked.demands(RunId(RECORD.run))
    for record in (RECORD, sign(RECORD, TRAINER)):
        with pytest.raises(UntrustedError, match="none is trusted for that"):
            revoked.check_record(record)


def test_a_key_is_trusted_for_its_own_runs_alone() -> None:
    other = msgspec.structs.replace(RECORD, run="other")
    with pytest.raises(UntrustedError, match="none is trusted for that"):
        TRUST.check_record(sign(other, TRAINER))


def test_a_run_that_no_key_speaks_for_demands_no_signature() -> None:
    trust = TrustList([TrustedKey(TRAINER.public, frozenset({Scope.PUBLISH}), ("other",))])
    assert not trust.demands(RunId(RECORD.run))
    assert trust.demands(RunId("other"))
    trust.check_record(RECORD)
    trust.check_derived(SKIP)


def test_rotation_overlaps_and_revocation_ends() -> None:
    new = SigningKey.new()
    both = TrustList(TrustedKey(key.public, frozenset({Scope.PUBLISH})) for key in (TRAINER, new))
    both.check_record(sign(RECORD, TRAINER))
    both.check_record(sign(RECORD, new))
    alone = TrustList([TrustedKey(new.public, frozenset({Scope.PUBLISH}))])
    with pytest.raises(UntrustedError):
        alone.check_record(sign(RECORD, TRAINER))
