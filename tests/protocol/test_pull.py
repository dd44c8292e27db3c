"""What the pull machine asks for, over which edges, and in which order."""

import msgspec
import pytest

from deltad.delta.encoding import encode, sha256
from deltad.delta.layout import Layout
from deltad.delta.manifest import (
    EdgeKind,
    Manifest,
    decode_manifest,
)
from deltad.delta.record import VariantRecord
from deltad.errors import (
    PeerError,
)
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_decisions import Commit, Fetch, FetchRecord
from deltad.protocol.pull_plan import Kind, check_arrival, want
from deltad.types import Digest, Version
from tests.kit.versions import SMALL_CHUNKS, Lineage, Published, forge
from tests.protocol.pulls import POLICY, answer_all, daemon, numbers

# Order.


def test_a_version_is_fetched_from_its_record_down_and_then_committed() -> None:
    first = Lineage(tensors=1, elements=512).publish()
    pulling = daemon(first)
    pulling.notice(first)
    assert answer_all(pulling) == ["layout", "manifest"]
    assert sorted(answer_all(pulling)) == ["file", "page"]
    assert set(answer_all(pulling)) == {"chunk"}
    assert answer_all(pulling) == ["Commit"]
    assert pulling.outstanding == []
    assert numbers(pulling) == [1]
    assert pulling.pull.progress() is None
    assert not pulling.pull.busy


def test_progress_counts_the_record_and_every_object(chain: list[Published]) -> None:
    pulling = daemon(chain[0])
    pulling.notice(chain[0])
    assert pulling.pull.progress() == (Version(1, 1), 1, 3)
    answer_all(pulling)
    _, done, total = pulling.pull.progress() or (None, 0, 0)
    assert (done, total) == (3, 1 + len(chain[0].objects))
    while not any(isinstance(d, Commit) for d in pulling.outstanding):
        pulling.answer(pulling.outstanding[0])
    assert pulling.pull.progress() == (Version(1, 1), total, total)


def test_a_long_chunk_list_is_opened_page_by_page() -> None:
    first = Lineage(tensors=8, elements=8192).publish()
    assert len(first.objects) > 40
    pulling = daemon(first, policy=PullPolicy(in_flight=1))
    pulling.notice(first)
    totals = set()
    while pulling.outstanding:
        (decision,) = pulling.outstanding
        pulling.answer(decision)
        for plan in pulling.pull._plans.values():
            assert len(plan.open()) <= 4 * pulling.policy.in_flight + SMALL_CHUNKS.page_chunks
            totals.add(plan.progress[1])
    assert max(totals) == 1 + len(first.objects), "all pages are counted from the start"
    assert numbers(pulling) == [1]


def test_a_version_without_changes_needs_no_chunks() -> None:
    lineage = Lineage(tensors=1, elements=512)
    first = lineage.publish()
    lineage.density = 0.0
    second = lineage.publish()
    pulling = daemon(first, second)
    pulling.notice(first)
    pulling.finish()
    pulling.notice(second)
    pulling.finish()
    assert numbers(pulling) == [1, 2]


# Ways.


def test_a_newcomer_starts_at_the_newest_anchor(chain: list[Published]) -> None:
    pulling = daemon(*chain, policy=PullPolicy(records_ahead=1))
    pulling.notice(chain[7])
    pulling.finish()
    assert numbers(pulling) == [5, 6, 7, 8]
    assert sorted(version.number for version in pulling.record_fetches) == [5, 6, 7]
    delta = chain[4].record.variants[0].edges[0]
    assert pulling.fetches[Digest(delta.manifest)] == 0, "an anchor is enough to begin with"


def test_a_newcomer_prefers_the_newest_anchor_to_an_older_one_and_deltas(chain: list[Published]) -> None:
    pulling = daemon(*chain)
    for published in chain:
        pulling.pull.record_seen(published.data, 0.0)
    pulling.finish()
    assert numbers(pulling) == [5, 6, 7, 8]


def test_whoever_holds_a_base_takes_deltas_and_never_an_anchor(chain: list[Published]) -> None:
    pulling = daemon(*chain)
    pulling.holdings.hold(chain[0])
    pulling.restart()
    pulling.notice(chain[7])
    pulling.finish()
    assert numbers(pulling) == [2, 3, 4, 5, 6, 7, 8]
    anchor = chain[4].record.variants[0].edges[1]
    assert anchor.kind is EdgeKind.ANCHOR
    assert pulling.fetches[Digest(anchor.manifest)] == 0


def test_records_of_a_long_chain_are_asked_for_many_at_a_time(chain: list[Published]) -> None:
    pulling = daemon(*chain, policy=PullPolicy(in_flight=8))
    pulling.holdings.hold(chain[0])
    pulling.restart()
    pulling.notice(chain[7])
    rounds = 0
    while not any(isinstance(d, Fetch) for d in pulling.outstanding):
        answer_all(pulling)
        rounds += 1
    assert rounds <= 4, "not one round trip for each of seven records"


def test_an_anchor_only_version_makes_those_before_it_needless(chain: list[Published]) -> None:
    lineage = Lineage(tensors=1, elements=512)
    versions = [lineage.publish(delta=i != 3) for i in range(5)]
    pulling = daemon(*versions)
    pulling.notice(versions[0])
    pulling.finish()
    pulling.notice(versions[4])
    pulling.finish()
    assert numbers(pulling) == [1, 4, 5]


def test_another_edge_is_taken_where_the_peer_lacks_one(chain: list[Published]) -> None:
    pulling = daemon(*chain)
    anchor = chain[4].record.variants[0].edges[1]
    del pulling.peer_objects[Digest(anchor.manifest)]
    pulling.notice(chain[7])
    pulling.finish()
    assert numbers(pulling) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_edge_that_the_peer_lacks_is_asked_for_again_after_a_while(chain: list[Published]) -> None:
    pulling = daemon(chain[0])
    manifest = Digest(chain[0].record.variants[0].edges[0].manifest)
    kept = pulling.peer_objects.pop(manifest)
    pulling.notice(chain[0])
    while pulling.outstanding:
        answer_all(pulling)
    assert "does not have it" in str(pulling.pull.problem)
    assert pulling.wake == POLICY.refused_delay
    pulling.peer_objects[manifest] = kept
    pulling.now = POLICY.refused_delay
    pulling.finish()
    assert numbers(pulling) == [1]


def test_a_fork_starts_at_its_anchor_for_its_base_is_another_run(chain: list[Published]) -> None:
    forked = forge(chain[4], parent_run="another", parent=Version(1, 4))
    pulling = daemon(forked)
    pulling.holdings.hold(chain[3])
    pulling.restart()
    pulling.notice(forked)
    pulling.finish()
    assert numbers(pulling) == [5]
    delta, anchor = chain[4].record.variants[0].edges
    assert pulling.fetches[Digest(anchor.manifest)] == 1
    assert pulling.fetches[Digest(delta.manifest)] == 0


@pytest.mark.parametrize("anchor", [True, False])
def test_a_base_older_than_what_is_held_can_no_longer_be_pulled(anchor: bool) -> None:
    lineage = Lineage(tensors=1, elements=512)
    _, second, third = (lineage.publish() for _ in range(3))
    lineage.versions.remove(third)
    fourth = lineage.publish(number=4, anchor=anchor)
    pulling = daemon(second, fourth)
    pulling.holdings.hold(third)
    pulling.restart()
    pulling.notice(fourth)
    pulling.finish()
    assert numbers(pulling) == [4] * anchor
    assert sum(pulling.record_fetches.values()) == 0
    assert anchor or "expected an anchor, or a delta from a version that is held here" in str(pulling.pull.problem)


def test_versions_at_or_below_the_newest_one_held_are_not_pulled(chain: list[Published]) -> None:
    pulling = daemon(*chain)
    pulling.holdings.hold(chain[5])
    pulling.restart()
    pulling.notice(chain[3])
    pulling.notice(chain[5])
    assert pulling.outstanding == []
    pulling.notice(chain[7])
    pulling.finish()
    assert numbers(pulling) == [7, 8]


def test_versions_that_came_by_another_hand_are_not_pulled_again(chain: list[Published]) -> None:
    pulling = daemon(*chain)
    pulling.notice(chain[0])
    pulling.holdings.hold(chain[0])
    pulling.decide()
    assert not pulling.pull.busy
    pulling.finish()
    assert pulling.commits == []


def test_a_newer_version_does_not_hold_up_the_one_being_pulled(chain: list[Published]) -> None:
    pulling = daemon(*chain)
    pulling.notice(chain[0])
    answer_all(pulling)
    pulling.notice(chain[2])
    assert any(isinstance(d, FetchRecord) for d in pulling.outstanding)
    for decision in [d for d in pulling.outstanding if isinstance(d, FetchRecord)]:
        pulling.lose(decision)
    while any(isinstance(d, (Fetch, Commit)) for d in pulling.outstanding):
        pulling.answer(next(d for d in pulling.outstanding if isinstance(d, (Fetch, Commit))))
    assert numbers(pulling) == [1]
    pulling.finish()
    assert numbers(pulling) == [1, 2, 3]


def test_a_base_that_the_peer_does_not_have_ends_the_walk(chain: list[Published]) -> None:
    pulling = daemon(chain[2])
    pulling.notice(chain[2])
    answer_all(pulling)
    assert "v000002: its record: the peer does not have it" in str(pulling.pull.problem)
    assert pulling.outstanding == []
    pulling.offer(*chain)
    pulling.now += POLICY.refused_delay
    pulling.finish()
    assert numbers(pulling) == [1, 2, 3]


def test_a_chain_without_end_is_given_up_at_a_bound() -> None:
    lineage = Lineage(tensors=1, elements=512)
    versions = [lineage.publish() for _ in range(12)]
    pulling = daemon(*versions, policy=PullPolicy(in_flight=2, chain_bytes=20_000))
    pulling.notice(versions[-1])
    while pulling.pull.problem is None:
        for decision in list(pulling.outstanding):
            if isinstance(decision, FetchRecord):
                pulling.pull.record_seen(pulling.peer_records[decision.version], 0.0, asked=decision.version)
                pulling.outstanding.remove(decision)
        if pulling.pull.problem is None:
            pulling.decide()
            answer_all(pulling)
    assert isinstance(pulling.pull.problem, PeerError)
    assert "at most 20000 bytes" in str(pulling.pull.problem)
    for published in versions[:-1]:
        pulling.pull.record_seen(published.data, 0.0, asked=published.version)
    assert not pulling.pull.busy, "what was on its way does not begin another walk"
    assert pulling.pull.newest == versions[-1].version
    assert pulling.pull.forgives_at == POLICY.refused_delay


# Several variants.


def test_every_variant_of_a_version_is_pulled() -> None:
    lineage = Lineage(tensors=1, elements=512)
    first, second = lineage.publish(), lineage.publish()
    two, objects = [], dict[Digest, bytes]()
    for published in (first, second):
        (variant,) = published.record.variants
        manifest = decode_manifest(published.objects[Digest(variant.edges[0].manifest)])
        other = encode(msgspec.structs.replace(manifest, variant="copy"))
        objects[sha256(other)] = other
        edge = msgspec.structs.replace(variant.edges[0], manifest=sha256(other), size=len(other))
        copy = VariantRecord("copy", variant.layout, variant.layout_size, variant.root, (edge,))
        two.append(forge(published, variants=(variant, copy)))
    pulling = daemon(*two)
    pulling.peer_objects |= objects
    pulling.notice(two[1])
    pulling.finish()
    assert numbers(pulling) == [1, 2]
    assert objects.keys() <= pulling.holdings.objects.keys()
    assert pulling.fetches.most_common(1)[0][1] == 1, "what both need is fetched once"


# What is read.


def test_layouts_and_manifests_mean_what_they_say(chain: list[Published]) -> None:
    layout = chain[0].layout
    arrived = check_arrival(want(Kind.LAYOUT, layout.digest, len(layout.encode())), layout.encode(), "peer-1")
    assert isinstance(arrived.content, Layout)
    edge = chain[0].record.variants[0].edges[0]
    data = chain[0].objects[Digest(edge.manifest)]
    assert isinstance(check_arrival(want(Kind.MANIFEST, edge.manifest, len(data)), data, "peer-1").content, Manifest)
