"""A run whose keys are known is pulled only as those keys have signed it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from deltad.delta.encoding import encode, sha256
from deltad.delta.keys import SigningKey
from deltad.delta.record import EdgeRef
from deltad.delta.signing import sign
from deltad.errors import PeerError
from deltad.protocol.pull import PullPolicy
from deltad.protocol.trust import Scope, TrustedKey, TrustList
from deltad.types import Digest, Version
from tests.kit.derived import Derived, skip_delta
from tests.kit.pulling import PullingDaemon
from tests.kit.versions import Lineage, Published

TRAINER, BORDER, STRANGER = (SigningKey.from_seed(bytes([number] * 32)) for number in (1, 2, 3))
TRUST = TrustList(
    [
        TrustedKey(TRAINER.public, frozenset({Scope.PUBLISH})),
        TrustedKey(BORDER.public, frozenset({Scope.DERIVE})),
    ]
)


def signed(published: Published, key: SigningKey) -> Published:
    record = sign(published.record, key)
    return replace(published, record=record, data=record.encode())


def signed_edge(made: Derived, key: SigningKey) -> Derived:
    manifest = sign(made.manifest, key)
    data = encode(manifest)
    ref = EdgeRef(made.ref.kind, made.ref.base, sha256(data), len(data))
    objects = {digest: part for digest, part in made.objects.items() if digest != made.ref.manifest}
    return replace(made, manifest=manifest, ref=ref, objects={**objects, Digest(ref.manifest): data})


@pytest.fixture(scope="module")
def chain() -> list[Published]:
    lineage = Lineage(tensors=1, elements=512)
    return [lineage.publish() for _ in range(6)]


def pulling(*offered: Published) -> PullingDaemon:
    daemon = PullingDaemon("policy", PullPolicy(trust=TRUST))
    daemon.offer(*offered)
    return daemon


def test_versions_that_their_publisher_signed_are_pulled(chain: list[Published]) -> None:
    versions = [signed(published, TRAINER) for published in chain]
    daemon = pulling(*versions)
    daemon.notice(versions[-1])
    daemon.finish()
    assert daemon.commits[-1] == Version(1, 6)


@pytest.mark.parametrize("key", [None, BORDER, STRANGER])
def test_a_record_that_no_publisher_signed_is_not_believed(chain: list[Published], key: SigningKey | None) -> None:
    last = chain[-1] if key is None else signed(chain[-1], key)
    daemon = pulling(*chain[:-1], last)
    with pytest.raises(PeerError, match=TRAINER.public.id):
        daemon.notice(last)
    assert TRAINER.public.id in str(daemon.pull.problem), "and that is what the run waits for"
    daemon.finish()
    assert daemon.commits == []


def test_a_record_that_was_changed_after_it_was_signed_is_not_believed(chain: list[Published]) -> None:
    record = msgspec.structs.replace(signed(chain[-1], TRAINER).record, identity="another")
    forged = replace(chain[-1], record=record, data=record.encode())
    daemon = pulling(forged)
    with pytest.raises(PeerError, match="over other bytes"):
        daemon.notice(forged)


@pytest.mark.parametrize(("key", "taken"), [(BORDER, True), (TRAINER, True), (STRANGER, False), (None, False)])
def test_a_derived_edge_is_taken_if_a_key_that_may_derive_has_signed_it_and_passed_over_if_not(
    chain: list[Published], key: SigningKey | None, taken: bool
) -> None:
    versions = [signed(published, TRAINER) for published in chain]
    skip = skip_delta(chain)
    skip = skip if key is None else signed_edge(skip, key)
    daemon = pulling(*versions)
    daemon.holdings.hold(versions[0])
    daemon.hints.append(skip.hint)
    daemon.peer_objects |= skip.objects
    daemon.notice(versions[-1])
    daemon.finish()
    between = [Version(1, number) for number in range(2, 6)]
    assert daemon.commits == ([] if taken else between) + [Version(1, 6)]


def test_a_key_that_is_revoked_while_its_version_is_on_its_way_publishes_nothing_any_more(
    chain: list[Published],
) -> None:
    first = signed(chain[0], TRAINER)
    trust = TrustList([TrustedKey(TRAINER.public, frozenset({Scope.PUBLISH}))])
    daemon = PullingDaemon("policy", PullPolicy(trust=trust))
    daemon.offer(first)
    daemon.notice(first)
    trust.replace(TrustList([TrustedKey(STRANGER.public, frozenset({Scope.PUBLISH}))]))
    daemon.finish()
    assert daemon.commits == []
    assert TRAINER.public.id in str(daemon.pull.problem)
