"""What the pull machine asks for, in which order, what it refuses, and when it tries again."""

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import Mode
from deltad.delta.coding import CODERS, Coder
from deltad.delta.encoding import encode, sha256
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import (
    ChunkPage,
    EdgeKind,
    Manifest,
    PageRef,
    State,
    decode_manifest,
    decode_page,
)
from deltad.delta.record import EdgeRef, VariantRecord
from deltad.errors import (
    CoderError,
    ConflictError,
    DeltadError,
    LimitError,
    NotFoundError,
    PeerError,
    StoreError,
    StoreFullError,
)
from deltad.limits import Limits
from deltad.protocol.backoff import Backoff
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_decisions import Commit, Decision, Fetch, FetchRecord, Load
from deltad.protocol.pull_plan import Kind, check_arrival, want
from deltad.types import Digest, Version
from tests.kit.pulling import PullingDaemon
from tests.kit.versions import SMALL_CHUNKS, Lineage, Published, forge

POLICY = PullPolicy(in_flight=4)


def daemon(*offered: Published, policy: PullPolicy = POLICY, limits: Limits | None = None) -> PullingDaemon:
    made = PullingDaemon("policy", policy, limits=limits or Limits())
    made.offer(*offered)
    return made


def kinds(decisions: list[Decision]) -> list[str]:
    return [d.wanted.kind.value if isinstance(d, (Fetch, Load)) else type(d).__name__ for d in decisions]


def answer_all(pulling: PullingDaemon) -> list[str]:
    """Carry out everything that is outstanding now; returns what it was."""
    now = list(pulling.outstanding)
    for decision in now:
        pulling.answer(decision)
    return kinds(now)


def numbers(pulling: PullingDaemon) -> list[int]:
    return [version.number for version in pulling.commits]


@pytest.fixture(scope="module")
def chain() -> list[Published]:
    """v1 (anchor) … v8; v5 has an anchor beside its delta."""
    lineage = Lineage(tensors=1, elements=512)
    return [lineage.publish(anchor=i == 4) for i in range(8)]


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


# What is refused.


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda p: p.data[:-1], "not a VersionRecord"),
        (lambda p: p.data + b"\0", "not a VersionRecord"),
        (lambda p: forge(p, run="another").data, "that of another/v000001"),
        (lambda p: forge(p, version=Version(1, 2)).data, "that of policy/v000002"),
        (lambda p: forge(p, least_reader=7).data, "format 7"),
        (lambda p: forge(p, variants=p.record.variants * 2).data, "each variant once"),
        (lambda p: with_edges(p, EdgeRef(EdgeKind.DELTA, Version(1, 1), bytes(32), 9)).data, "versions below v000001"),
        (lambda p: with_edges(p, EdgeRef(EdgeKind.DELTA, Version(2, 0), bytes(32), 9)).data, "versions below v000001"),
    ],
)
def test_a_record_other_than_the_one_asked_for_is_the_peers_fault(
    chain: list[Published], change: Callable[[Published], bytes], found: str
) -> None:
    pulling = daemon()
    with pytest.raises(PeerError, match=r"^peer-1: record of policy/v000001") as caught:
        pulling.pull.record_seen(change(chain[0]), 0.0, asked=Version(1, 1))
    assert found in str(caught.value)
    pulling.decide()
    assert pulling.outstanding == []


def with_edges(published: Published, *edges: EdgeRef) -> Published:
    (variant,) = published.record.variants
    return forge(published, variants=(msgspec.structs.replace(variant, edges=edges),))


def with_manifest(published: Published, **changes: object) -> Published:
    """The same version with other fields in the manifest of its last edge, named as its record should."""
    (variant,) = published.record.variants
    edge = variant.edges[-1]
    manifest = decode_manifest(published.objects[Digest(edge.manifest)])
    data = encode(msgspec.structs.replace(manifest, **changes))
    edge = msgspec.structs.replace(edge, manifest=sha256(data), size=len(data))
    return replace(with_edges(published, edge), objects=published.objects | {sha256(data): data})


def with_page(published: Published, change: Callable[[ChunkPage], ChunkPage]) -> Published:
    """The same version with another first page, named as its manifest should."""
    manifest = decode_manifest(published.objects[Digest(published.record.variants[0].edges[-1].manifest)])
    ref = manifest.pages[0]
    layout = decode_layout(published.objects[Digest(manifest.layout)])
    page = ChunkPage(decode_page(published.objects[Digest(ref.digest)], ref, layout))
    data = encode(change(page))
    published = replace(published, objects=published.objects | {sha256(data): data})
    pages = (PageRef(sha256(data), len(data), ref.chunks), *manifest.pages[1:])
    return with_manifest(published, pages=pages)


def shorter_chunks(page: ChunkPage) -> ChunkPage:
    return ChunkPage(tuple(msgspec.structs.replace(chunk, size=chunk.size - 1) for chunk in page.chunks))


def foreign_tensors(page: ChunkPage) -> ChunkPage:
    return ChunkPage(tuple(msgspec.structs.replace(chunk, last_tensor=99) for chunk in page.chunks))


CONTRADICTIONS: list[tuple[Callable[[Published, Published], Published], str]] = [
    (lambda _, p: with_manifest(p, run="another"), "run: expected policy, found another"),
    (lambda _, p: with_manifest(p, variant="fp8"), "variant: expected bf16, found fp8"),
    (lambda _, p: with_manifest(p, kind=EdgeKind.SKIP_DELTA), "kind: expected delta"),
    (lambda _, p: with_manifest(p, layout=bytes(32)), "layout: expected"),
    (lambda _, p: with_manifest(p, target=State(Version(1, 9), p.record.variants[0].root)), "target: expected v000002"),
    (lambda _, p: with_manifest(p, target=State(p.version, bytes(32))), "target's root: expected"),
    (
        lambda _, p: with_manifest(p, target=State(p.version, p.record.variants[0].root, "another")),
        "target's run: expected policy",
    ),
    (lambda f, p: with_manifest(p, base=State(Version(1, 0), f.record.variants[0].root)), "base: expected v000001"),
    (lambda f, p: with_manifest(p, base=State(f.version, bytes(32))), "base's root: expected"),
    (
        lambda f, p: with_manifest(p, base=State(f.version, f.record.variants[0].root, "another")),
        "base's run: expected policy",
    ),
    (lambda _, p: with_manifest(p, sums=bytes(16)), "other tensor sums"),
    (lambda _, p: with_manifest(p, sums=bytes(15)), "sums of 1 tensors"),
    (lambda _, p: with_manifest(p, tensor_sha256=bytes(31)), "SHA-256 of all 1 tensors or none"),
    (lambda _, p: with_manifest(p, chunk_bytes=1), "chunks of 1 bytes together"),
    (lambda _, p: with_manifest(p, pages=()), "bytes together, found pages that list 0"),
    (lambda _, p: with_page(p, shorter_chunks), "bytes together"),
    (lambda _, p: with_page(p, foreign_tensors), "expected tensors below 1"),
]


@pytest.mark.parametrize(("contradict", "found"), CONTRADICTIONS)
def test_a_manifest_that_contradicts_its_record_is_refused(
    contradict: Callable[[Published, Published], Published], found: str
) -> None:
    lineage = Lineage(tensors=1, elements=512)
    first, second = lineage.publish(), lineage.publish()
    forged = contradict(first, second)
    pulling = daemon(first, forged)
    pulling.notice(first)
    pulling.finish()
    pulling.notice(forged)
    while pulling.outstanding:
        pulling.answer(pulling.outstanding[0])
    assert isinstance(pulling.pull.problem, PeerError)
    assert str(pulling.pull.problem).startswith("peer-1: policy/v000002: ")
    assert found in str(pulling.pull.problem)
    assert numbers(pulling) == [1]
    assert pulling.pull.newest == forged.version, "what comes after it is still asked for"


# Coders that are not read here.


def mixed(*how: tuple[Mode, bool]) -> list[Published]:
    """Versions whose deltas are coded as told, with an anchor beside them or not."""
    lineage = Lineage(tensors=1, elements=512)
    versions = [lineage.publish()]
    for lineage.mode, anchor in how:
        versions.append(lineage.publish(anchor=anchor))
    return versions


NO_CONTEXT = PullPolicy(in_flight=4, coders=CODERS - {Coder.CONTEXT})


def test_an_edge_in_a_coder_that_is_not_read_here_is_refused_by_name_and_nothing_of_it_is_fetched() -> None:
    versions = mixed(("blind", False), ("dense", False), ("dense", False))
    pulling = daemon(*versions, policy=NO_CONTEXT)
    pulling.notice(versions[-1])
    pulling.finish()
    assert numbers(pulling) == [1, 2]
    problem = str(pulling.pull.problem)
    assert problem.startswith("delta v000002 → v000003 of policy: expected the coders that are read here, 0 (raw), ")
    assert problem.endswith(
        'found 2 (context); update deltad here, or set `coder = "blind"` for the run where it is published'
    )
    assert isinstance(pulling.pull.problem, CoderError)
    chunks = set(versions[2].objects) - set(versions[1].objects) - {versions[2].record.variants[0].edges[0].manifest}
    assert not chunks & set(pulling.fetches)


def test_a_version_that_has_another_edge_is_reached_over_that_one_and_so_are_those_after_it() -> None:
    versions = mixed(("dense", False), ("dense", True), ("blind", False))
    pulling = daemon(*versions, policy=NO_CONTEXT)
    for published in versions:
        pulling.notice(published)
        pulling.finish()
    assert numbers(pulling) == [1, 3, 4]
    assert pulling.pull.problem is None


def test_an_edge_that_is_not_read_here_is_asked_for_once_however_long_it_is_the_newest() -> None:
    first, second = mixed(("dense", False))
    pulling = daemon(first, second, policy=NO_CONTEXT)
    for _ in range(5):
        pulling.notice(second)
        pulling.finish()
        pulling.now += 10 * POLICY.refused_delay
    assert numbers(pulling) == [1]
    assert pulling.fetches[Digest(second.record.variants[0].edges[0].manifest)] == 1
    assert isinstance(pulling.pull.problem, CoderError)


def test_a_coder_that_nobody_knows_is_named_by_its_number() -> None:
    lineage = Lineage(tensors=1, elements=512)
    first, second = lineage.publish(), lineage.publish()
    newer = with_manifest(second, coders=(1, 9))
    pulling = daemon(first, newer)
    pulling.notice(newer)
    pulling.finish()
    assert numbers(pulling) == [1]
    assert ", found 9; update deltad here" in str(pulling.pull.problem)


def test_a_version_is_looked_at_again_when_its_refusal_is_over(chain: list[Published]) -> None:
    bad = with_manifest(chain[0], run="another")
    pulling = daemon(chain[0], bad)
    pulling.notice(bad)
    while pulling.outstanding:
        answer_all(pulling)
    pulling.notice(chain[0])
    assert pulling.outstanding == [], "not before"
    pulling.now = POLICY.refused_delay
    pulling.decide()
    pulling.notice(chain[0])
    pulling.finish()
    assert numbers(pulling) == [1]
    assert pulling.pull.problem is None


def test_right_bytes_that_are_no_manifest_are_refused_and_not_stored(chain: list[Published]) -> None:
    junk = b"right bytes, wrong kind"
    bad = with_edges(chain[0], EdgeRef(EdgeKind.ANCHOR, None, sha256(junk), len(junk)))
    pulling = daemon(bad)
    pulling.peer_objects[sha256(junk)] = junk
    pulling.notice(bad)
    answer_all(pulling)
    assert "not a Manifest" in str(pulling.pull.problem)
    assert sha256(junk) not in pulling.holdings.objects


@pytest.mark.parametrize("kind", list(Kind))
def test_no_object_may_be_larger_than_its_kind(kind: Kind) -> None:
    limits = Limits(layout_bytes=10, manifest_bytes=11, page_bytes=12, file_bytes=13, chunk_bytes=14)
    most = {Kind.LAYOUT: 10, Kind.MANIFEST: 11, Kind.PAGE: 12, Kind.FILE: 13, Kind.CHUNK: 14}[kind]
    assert want(kind, bytes(32), most, limits=limits).size == most
    for size in (most + 1, -1, 1 << 62):
        with pytest.raises(LimitError, match=kind):
            want(kind, bytes(32), size, limits=limits)
    assert (want(kind, bytes(32), 0).size == 0) if kind is Kind.FILE else True


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        (Limits(layout_bytes=16), "a layout of 1 to 16 bytes"),
        (Limits(manifest_bytes=16), "a manifest of 1 to 16 bytes"),
        (Limits(record_bytes=16), "at most 16 bytes"),
    ],
)
def test_a_record_that_names_too_large_an_object_asks_for_nothing(
    chain: list[Published], limits: Limits, found: str
) -> None:
    pulling = daemon(chain[0], limits=limits)
    with pytest.raises(PeerError, match=found):
        pulling.notice(chain[0])
    pulling.decide()
    assert pulling.outstanding == []


@pytest.mark.parametrize(
    "limits", [Limits(chunk_bytes=1000), Limits(page_chunks=1), Limits(file_bytes=4), Limits(page_bytes=10)]
)
def test_a_manifest_or_layout_that_names_too_large_an_object_is_refused(chain: list[Published], limits: Limits) -> None:
    big = Lineage(tensors=2, elements=2048).publish()
    pulling = daemon(big, limits=limits)
    pulling.notice(big)
    while pulling.outstanding:
        pulling.answer(pulling.outstanding[0])
    assert isinstance(pulling.pull.problem, PeerError)
    assert pulling.commits == []


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_bytes_other_than_those_wanted_never_get_past_the_check(wanted: bytes, sent: bytes) -> None:
    if wanted:
        expected = want(Kind.CHUNK, sha256(wanted), len(wanted))
        if sent == wanted:
            assert check_arrival(expected, sent, "peer-1").data == sent
        else:
            with pytest.raises(PeerError, match=r"^peer-1: chunk ") as caught:
                check_arrival(expected, sent, "peer-1")
            assert len(sent) == len(wanted) or f"found {len(sent)} bytes" in str(caught.value)


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


# Trying again.


def test_delays_double_up_to_the_longest_and_lie_in_their_upper_half() -> None:
    backoff = Backoff(1.0, 10.0, random.Random(0))
    for longest in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0, *[10.0] * 2000):
        assert longest / 2 <= backoff.failed(100.0) - 100.0 <= longest
    backoff.succeeded()
    assert backoff.failed(0.0) <= 1.0


def test_an_object_that_fails_waits_longer_each_time_unless_it_progressed(chain: list[Published]) -> None:
    pulling = daemon(chain[0])
    pulling.notice(chain[0])
    delays = []
    for progressed in (False, False, False, True, False):
        fetch = next(d for d in pulling.outstanding if isinstance(d, Fetch) and d.wanted.kind is Kind.MANIFEST)
        pulling.outstanding.remove(fetch)
        pulling.pull.object_failed(fetch.wanted, pulling.now, progressed=progressed)
        pulling.decide()
        assert pulling.wake is not None
        delays.append(pulling.wake - pulling.now)
        pulling.now = pulling.wake
        pulling.decide()
    bounds = [(0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.1, 0.2), (0.2, 0.4)]
    for delay, (least, most) in zip(delays, bounds, strict=True):
        assert least <= delay <= most


def test_one_failing_object_does_not_hold_up_the_rest() -> None:
    first = Lineage(tensors=4).publish()
    pulling = daemon(first)
    pulling.notice(first)
    answer_all(pulling)
    answer_all(pulling)
    stuck = next(d for d in pulling.outstanding if isinstance(d, Fetch) and d.wanted.kind is Kind.CHUNK)
    while pulling.outstanding:
        for decision in list(pulling.outstanding):
            same = isinstance(decision, Fetch) and decision.wanted == stuck.wanted
            pulling.lose(decision) if same else pulling.answer(decision)
    assert pulling.pull.progress() is not None
    _, done, total = pulling.pull.progress() or (None, 0, 0)
    assert done == total - 1
    pulling.finish()
    assert numbers(pulling) == [1]


def test_nothing_is_asked_of_a_peer_that_is_down(chain: list[Published]) -> None:
    pulling = daemon(chain[0])
    pulling.pull.peer_down(50.0)
    pulling.notice(chain[0])
    assert pulling.outstanding == []
    assert pulling.wake == 50.0
    pulling.pull.peer_up()
    pulling.decide()
    assert pulling.outstanding != []


@pytest.mark.parametrize(
    ("error", "refused"),
    [(StoreFullError("disk"), False), (StoreError("disk"), False), (ConflictError("record"), True)],
)
def test_a_full_disk_passes_and_a_conflict_is_a_refusal(
    chain: list[Published], error: DeltadError, refused: bool
) -> None:
    pulling = daemon(chain[0])
    pulling.notice(chain[0])
    while not any(isinstance(d, Commit) for d in pulling.outstanding):
        pulling.answer(pulling.outstanding[0])
    (commit,) = pulling.outstanding
    assert isinstance(commit, Commit)
    pulling.outstanding.clear()
    pulling.pull.commit_failed(commit.version, error, pulling.now)
    pulling.decide()
    assert pulling.outstanding == []
    assert isinstance(pulling.pull.problem, PeerError) == refused
    assert pulling.pull.busy != refused
    if not refused:
        pulling.finish()
        assert numbers(pulling) == [1]


def test_a_damaged_object_that_is_held_is_fetched_again(chain: list[Published]) -> None:
    pulling = daemon(chain[0])
    pulling.holdings.objects |= chain[0].objects
    pulling.damaged = {Digest(chain[0].record.variants[0].edges[0].manifest)}
    pulling.restart()
    pulling.notice(chain[0])
    pulling.finish()
    assert numbers(pulling) == [1]
    assert pulling.fetches == dict.fromkeys([Digest(chain[0].record.variants[0].edges[0].manifest)], 1)


def test_a_damaged_object_that_was_fetched_again_is_used_by_the_next_version(chain: list[Published]) -> None:
    pulling = daemon(*chain)
    pulling.holdings.objects |= chain[0].objects
    pulling.damaged = {chain[0].layout.digest}
    pulling.restart()
    pulling.notice(chain[0])
    pulling.finish()
    pulling.notice(chain[1])
    pulling.finish()
    assert numbers(pulling) == [1, 2]
    assert pulling.fetches[chain[0].layout.digest] == 1


def test_a_held_object_of_another_size_is_not_trusted(chain: list[Published]) -> None:
    page = max(chain[0].objects, key=lambda digest: len(chain[0].objects[digest]))
    pulling = daemon(chain[0])
    pulling.holdings.objects = chain[0].objects | {page: b"cut short"}
    pulling.damaged = {page}
    pulling.restart()
    pulling.notice(chain[0])
    pulling.finish()
    assert pulling.fetches == {page: 1}


def test_an_object_that_vanished_before_the_commit_is_fetched_again(chain: list[Published]) -> None:
    pulling = daemon(chain[0])
    pulling.notice(chain[0])
    while not any(isinstance(d, Commit) for d in pulling.outstanding):
        pulling.answer(pulling.outstanding[0])
    vanished = next(iter(chain[0].objects))
    del pulling.holdings.objects[vanished]
    pulling.outstanding.clear()
    pulling.pull.commit_failed(chain[0].version, NotFoundError("chunk"), pulling.now)
    pulling.finish()
    assert numbers(pulling) == [1]
    assert pulling.fetches[vanished] == 2


def test_an_object_that_could_not_be_stored_is_fetched_again(chain: list[Published]) -> None:
    for digest in chain[0].objects:
        pulling = daemon(chain[0])
        pulling.notice(chain[0])
        while not (full := [d for d in pulling.outstanding if isinstance(d, Fetch) and d.wanted.digest == digest]):
            pulling.answer(pulling.outstanding[0])
        arrived = check_arrival(full[0].wanted, pulling.peer_objects[digest], "peer-1")
        assert pulling.pull.object_arrived(arrived, pulling.now)
        pulling.pull.object_failed(arrived.wanted, pulling.now)
        pulling.outstanding.remove(full[0])
        pulling.finish()
        assert numbers(pulling) == [1]
        assert pulling.holdings.objects == chain[0].objects
        assert pulling.fetches[digest] == 2


def test_nothing_is_committed_before_the_last_object_is_durable(chain: list[Published]) -> None:
    pulling = daemon(chain[0])
    pulling.notice(chain[0])
    while pulling.pull.progress() != (chain[0].version, len(chain[0].objects), 1 + len(chain[0].objects)):
        pulling.answer(pulling.outstanding[0])
    (last,) = pulling.outstanding
    assert isinstance(last, Fetch)
    arrived = check_arrival(last.wanted, pulling.peer_objects[last.wanted.digest], "peer-1")
    assert pulling.pull.object_arrived(arrived, 0.0)
    assert not pulling.pull.object_arrived(arrived, 0.0), "once is enough"
    pulling.outstanding.clear()
    pulling.decide()
    assert pulling.outstanding == []
    pulling.pull.object_stored(last.wanted)
    pulling.decide()
    assert kinds(pulling.outstanding) == ["Commit"]


def test_reading_what_is_held_counts_as_in_flight_too(chain: list[Published]) -> None:
    pulling = daemon(chain[0], policy=PullPolicy(in_flight=1))
    pulling.holdings.objects |= chain[0].objects
    pulling.restart()
    pulling.notice(chain[0])
    assert kinds(pulling.outstanding) == ["layout"]
    pulling.finish()
    assert numbers(pulling) == [1]


def test_what_is_no_longer_wanted_leaves_nothing_behind(chain: list[Published]) -> None:
    lineage = Lineage(tensors=1, elements=512, seed=5)
    versions = [lineage.publish(delta=False) for _ in range(4)]
    pulling = daemon(*versions)
    for published in versions:
        pulling.notice(published)
        for decision in list(pulling.outstanding):
            pulling.lose(decision)
    assert len(pulling.pull._backoffs) <= 2, "only of the objects of the newest version"
    pulling.finish()
    assert numbers(pulling) == [4]
    assert pulling.pull._backoffs == {}


def test_what_is_held_in_part_is_completed_and_not_fetched_again(chain: list[Published]) -> None:
    for left_out in chain[0].objects:
        pulling = daemon(chain[0])
        pulling.holdings.objects = {d: data for d, data in chain[0].objects.items() if d != left_out}
        pulling.restart()
        pulling.notice(chain[0])
        pulling.finish()
        assert numbers(pulling) == [1]
        assert pulling.fetches == {left_out: 1}


def test_layouts_and_manifests_mean_what_they_say(chain: list[Published]) -> None:
    layout = chain[0].layout
    arrived = check_arrival(want(Kind.LAYOUT, layout.digest, len(layout.encode())), layout.encode(), "peer-1")
    assert isinstance(arrived.content, Layout)
    edge = chain[0].record.variants[0].edges[0]
    data = chain[0].objects[Digest(edge.manifest)]
    assert isinstance(check_arrival(want(Kind.MANIFEST, edge.manifest, len(data)), data, "peer-1").content, Manifest)
