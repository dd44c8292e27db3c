"""What the pull machine refuses, of records, manifests, coders and sizes, and that it asks for nothing of it."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.backend import Mode
from deltad.delta.coding import CODERS, Coder
from deltad.delta.encoding import encode, sha256
from deltad.delta.layout import decode_layout
from deltad.delta.manifest import (
    ChunkPage,
    EdgeKind,
    PageRef,
    State,
    decode_manifest,
    decode_page,
)
from deltad.delta.record import EdgeRef
from deltad.errors import (
    CoderError,
    LimitError,
    PeerError,
)
from deltad.limits import Limits
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_plan import Kind, check_arrival, want
from deltad.types import Digest, Version
from tests.kit.versions import Lineage, Published, forge
from tests.protocol.pulls import POLICY, answer_all, daemon, numbers, with_edges, with_manifest

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
