"""Hints of edges: the cheapest way is taken over anchors, deltas and derived edges, and no hint does more than cost
time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.delta.coding import CODERS
from deltad.delta.manifest import EdgeKind, State
from deltad.delta.record import EdgeRef
from deltad.errors import NotFoundError
from deltad.protocol.hints import Hint
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_decisions import Commit, Fetch, FetchRecord, ListEdges, ListVersions
from deltad.types import Digest, Version
from tests.kit.derived import Derived, altered, anchor, between, edge_of, skip_delta
from tests.kit.pulling import PullingDaemon
from tests.kit.versions import Lineage, Published

POLICY = PullPolicy(in_flight=4)


@pytest.fixture(scope="module")
def chain() -> list[Published]:
    """v1, an anchor, to v12, each with a delta from the one before."""
    lineage = Lineage(tensors=1, elements=512)
    return [lineage.publish() for _ in range(12)]


def laggard(chain: list[Published], *edges: Derived, held: int = 1, policy: PullPolicy = POLICY) -> PullingDaemon:
    """Holds v1 up to `held`; its peer has the chain and these edges, and speaks of them."""
    pulling = PullingDaemon("policy", policy)
    pulling.offer(*chain)
    for published in chain[:held]:
        pulling.holdings.hold(published)
    for made in edges:
        pulling.peer_objects |= made.objects
        pulling.hints.append(made.hint)
    pulling.restart()
    return pulling


def numbers(pulling: PullingDaemon) -> list[int]:
    return [version.number for version in pulling.commits]


def catch_up(pulling: PullingDaemon, newest: Published) -> None:
    """Hear of the newest version until it is held, however often that takes; what is refused is forgiven in time."""
    for _ in range(20):
        pulling.notice(newest)
        pulling.finish()
        if pulling.holdings.latest() == newest.version:
            return
        pulling.now += pulling.policy.refused_delay
    raise AssertionError(f"{newest.version} was not reached: {pulling.pull.problem}")


def fetched(pulling: PullingDaemon) -> int:
    """Bytes of all objects that were asked for."""
    return sum(len(pulling.peer_objects[digest]) * times for digest, times in pulling.fetches.items())


def test_a_laggard_takes_skip_deltas_and_asks_for_nothing_that_they_pass_over(chain: list[Published]) -> None:
    first, second = skip_delta(chain[0:9]), skip_delta(chain[8:11])
    pulling = laggard(chain, first, second)
    last = edge_of(chain[11])
    pulling.hints += [edge_of(chain[10]).hint, edge_of(chain[11]).hint]
    pulling.notice(chain[11])
    pulling.finish()
    assert numbers(pulling) == [9, 11, 12]
    assert sorted(version.number for version in pulling.record_fetches) == [9, 11]
    assert fetched(pulling) == first.bytes + second.bytes + last.bytes


def test_the_records_on_a_hinted_way_are_asked_for_at_once(chain: list[Published]) -> None:
    pulling = laggard(chain, skip_delta(chain[0:9]), skip_delta(chain[8:12]))
    pulling.notice(chain[11])
    (question,) = pulling.outstanding
    assert question == ListEdges(Version(1, 1))
    pulling.answer(question)
    assert pulling.outstanding == [FetchRecord(Version(1, 9))]


def test_a_commit_names_the_derived_edges_it_came_over_and_no_others(chain: list[Published]) -> None:
    made = skip_delta(chain[0:12])
    pulling = laggard(chain, made)
    pulling.notice(chain[11])
    while not isinstance(pulling.outstanding[0], Commit):
        pulling.answer(pulling.outstanding[0])
    assert pulling.outstanding == [Commit(Version(1, 12), chain[11].data, (Digest(made.ref.manifest),))]
    pulling.finish()
    pulling.offer(after := replaced(chain))
    pulling.notice(after)
    while not isinstance(pulling.outstanding[0], Commit):
        pulling.answer(pulling.outstanding[0])
    assert pulling.outstanding == [Commit(after.version, after.data)]


def replaced(chain: list[Published]) -> Published:
    """What comes after the chain."""
    lineage = Lineage(tensors=1, elements=512, versions=list(chain))
    return lineage.publish()


def test_a_newcomer_takes_one_anchor_and_one_skip_delta(chain: list[Published]) -> None:
    base, rest = anchor(chain[5]), skip_delta(chain[5:12])
    pulling = laggard(chain, base, rest, held=0)
    pulling.notice(chain[11])
    pulling.finish()
    assert numbers(pulling) == [6, 12]
    assert fetched(pulling) - base.bytes - rest.bytes == pulling_common(chain[11])


def pulling_common(published: Published) -> int:
    """Bytes of a version's layout and files, which a newcomer needs as well."""
    layout = published.layout
    return len(layout.encode()) + sum(file.size for file in layout.files)


def test_no_anchor_is_taken_where_deltas_lead_from_what_is_held_however_dear_they_are(chain: list[Published]) -> None:
    cheap = replace(anchor(chain[11]).hint, bytes=1)
    pulling = laggard(chain, held=1)
    pulling.hints = [cheap, *(replace(edge_of(version).hint, bytes=1 << 40) for version in chain[1:])]
    pulling.peer_objects |= anchor(chain[11]).objects
    pulling.notice(chain[11])
    pulling.finish()
    assert numbers(pulling) == list(range(2, 13))
    assert pulling.fetches[Digest(cheap.edge.manifest)] == 0


def test_the_fewest_bytes_win_and_not_the_fewest_edges(chain: list[Published]) -> None:
    dear = replace(skip_delta(chain[0:12]).hint, bytes=10_000_000)
    pulling = laggard(chain, skip_delta(chain[0:6]), skip_delta(chain[5:12]))
    pulling.hints.insert(0, dear)
    pulling.notice(chain[11])
    pulling.finish()
    assert numbers(pulling) == [6, 12]


def test_whoever_is_one_delta_away_asks_for_no_hints(chain: list[Published]) -> None:
    pulling = laggard(chain, skip_delta(chain[0:12]), held=11)
    pulling.notice(chain[11])
    assert not any(isinstance(decision, ListEdges) for decision in pulling.outstanding)
    pulling.finish()
    assert numbers(pulling) == [12]


def test_a_peer_is_asked_for_hints_once_for_each_newest_version(chain: list[Published]) -> None:
    pulling = laggard(chain[:11], skip_delta(chain[0:6]), skip_delta(chain[5:11]))
    asked = []
    for newest in (chain[10], chain[10], chain[11], chain[11]):
        pulling.offer(newest)
        pulling.notice(newest)
        for decision in [d for d in pulling.outstanding if isinstance(d, ListEdges)]:
            asked.append(newest.version.number)
            pulling.answer(decision)
    assert asked == [11, 12]


def test_hints_that_fail_are_asked_for_again_a_few_times_and_then_done_without(chain: list[Published]) -> None:
    pulling = laggard(chain, skip_delta(chain[0:12]))
    pulling.notice(chain[11])
    failed = 0
    while any(isinstance(decision, ListEdges) for decision in pulling.outstanding):
        pulling.lose(pulling.outstanding[0])
        failed += 1
        if pulling.wake is not None and not pulling.outstanding:
            pulling.now = pulling.wake
            pulling.decide()
    assert failed == 3
    pulling.finish()
    assert numbers(pulling) == list(range(2, 13))


def test_what_has_begun_is_pulled_to_its_end_whatever_comes_out_meanwhile() -> None:
    """A trainer faster than the link, and always a cheaper way to its newest version: something is committed."""
    lineage = Lineage(tensors=1, elements=16384, density=0.3)
    chain = [lineage.publish() for _ in range(16)]
    made = between(chain[0], chain[2])
    assert len(made.objects) > 5
    pulling = laggard(chain[:3], made)
    pulling.notice(chain[2])
    for newest in range(3, 16):
        made = between(chain[0], chain[newest])
        pulling.offer(chain[newest])
        pulling.peer_objects |= made.objects
        pulling.hints = [replace(made.hint, bytes=made.ref.size + 1)]
        pulling.notice(chain[newest])
        while asides := [d for d in pulling.outstanding if not isinstance(d, Fetch)]:
            pulling.answer(asides[0])
        pulling.answer(pulling.outstanding[0])  # the link carries no more while the trainer makes a version
    assert numbers(pulling)[0] == 4, "the first of which there were hints"
    pulling.finish()
    assert numbers(pulling)[-1] == 16
    assert len(numbers(pulling)) < 10, "and most in between were passed over"


def test_what_is_here_of_an_edge_already_speaks_for_it(chain: list[Published]) -> None:
    first, second, whole = skip_delta(chain[0:3]), skip_delta(chain[2:11]), skip_delta(chain[2:12])
    pulling = laggard(chain[:11], first, second)
    pulling.notice(chain[10])
    wanted = min(second.chunks)
    while rest := [d for d in pulling.outstanding if not isinstance(d, Commit)]:
        last = rest == [Fetch(d.wanted, d.version) for d in rest if isinstance(d, Fetch) and d.wanted.digest == wanted]
        if last:
            break
        pulling.answer(next(d for d in rest if not (isinstance(d, Fetch) and d.wanted.digest == wanted)))
    last_step = edge_of(chain[11])
    cheaper = second.bytes + last_step.bytes - 1
    pulling.offer(chain[11])
    pulling.peer_objects |= whole.objects
    pulling.hints = [second.hint, last_step.hint, replace(whole.hint, bytes=cheaper)]
    pulling.notice(chain[11])
    pulling.answer(ListEdges(Version(1, 3)))
    pulling.finish()
    assert numbers(pulling) == [3, 11, 12]


def test_a_skip_delta_is_taken_up_while_single_deltas_are_pulled(chain: list[Published]) -> None:
    pulling = laggard(chain[:3], held=1)
    pulling.notice(chain[1])
    pulling.answer(pulling.outstanding[0])
    made = skip_delta(chain[1:12])
    pulling.offer(*chain)
    pulling.peer_objects |= made.objects
    pulling.hints = [made.hint]
    pulling.notice(chain[11])
    assert ListEdges(Version(1, 2)) in pulling.outstanding, "from what will be held next"
    pulling.finish()
    assert numbers(pulling) == [2, 12]


def test_an_interrupted_way_goes_on_where_it_was(chain: list[Published]) -> None:
    first, second = skip_delta(chain[0:7]), skip_delta(chain[6:12])
    pulling = laggard(chain, first, second)
    pulling.notice(chain[11])
    for _ in range(6):
        pulling.answer(pulling.outstanding[0])
    pulling.restart()
    pulling.notice(chain[11])
    pulling.finish()
    assert numbers(pulling) == [7, 12]
    assert sum(pulling.fetches.values()) - len(pulling.fetches) <= POLICY.in_flight, "but for what was in flight"


# Hints that lead nowhere.


def broken(made: Derived, how: str, chain: list[Published]) -> tuple[Hint, dict[Digest, bytes]]:
    """A skip delta from v1 to v12 that cannot be used, as a hint, and what the peer has of it."""
    objects, hint = dict(made.objects), made.hint
    match how:
        case "its manifest is lacking":
            del objects[Digest(made.ref.manifest)]
        case "a chunk is lacking":
            del objects[min(made.chunks)]
        case "its size is another":
            hint = replace(hint, edge=EdgeRef(hint.edge.kind, hint.edge.base, hint.edge.manifest, hint.edge.size + 1))
        case "its manifest is no manifest":
            objects[Digest(made.ref.manifest)] = b"\xff" * made.ref.size
        case "its base is another version":
            hint = replace(hint, edge=EdgeRef(hint.edge.kind, Version(1, 1), hint.edge.manifest, hint.edge.size))
            other = altered(made, base=State(chain[2].version, chain[2].record.variants[0].root))
            objects = other.objects
            hint = replace(other.hint, edge=replace_base(other.ref, Version(1, 1)))
        case "its root is another":
            other = altered(made, target=State(chain[11].version, b"\0" * 32))
            objects, hint = other.objects, other.hint
        case "its run is another":
            other = altered(made, run="other")
            objects, hint = other.objects, other.hint
        case "it needs a coder that is not read here":
            other = altered(made, coders=(max(CODERS),))
            objects, hint = other.objects, replace(other.hint, coders=(0,))
        case _:
            raise AssertionError(how)
    return hint, objects


def replace_base(ref: EdgeRef, base: Version) -> EdgeRef:
    return EdgeRef(ref.kind, base, ref.manifest, ref.size)


@pytest.mark.parametrize(
    "how",
    [
        "its manifest is lacking",
        "a chunk is lacking",
        "its size is another",
        "its manifest is no manifest",
        "its base is another version",
        "its root is another",
        "its run is another",
        "it needs a coder that is not read here",
    ],
)
def test_a_derived_edge_that_is_no_good_is_left_and_another_way_taken(chain: list[Published], how: str) -> None:
    hint, objects = broken(skip_delta(chain[0:12]), how, chain)
    pulling = laggard(chain, policy=replace(POLICY, coders=CODERS - {max(CODERS)}))
    pulling.peer_objects |= objects
    pulling.hints = [hint]
    pulling.notice(chain[11])
    pulling.finish()
    assert numbers(pulling) == list(range(2, 13))
    assert pulling.now < POLICY.refused_delay, "at once, and no version is refused for it"


def test_where_nothing_leads_on_the_peer_is_asked_again_for_edges_that_it_has_come_by(chain: list[Published]) -> None:
    """The one edge that the record names is lacking at the peer, which has reached the version in another way."""
    pulling = laggard(chain[:11], held=0)
    pulling.holdings.hold(chain[9])
    pulling.restart()
    delta = edge_of(chain[10])
    del pulling.peer_objects[Digest(delta.ref.manifest)]
    pulling.notice(chain[10])
    while pulling.outstanding:
        pulling.answer(pulling.outstanding[0])
    assert pulling.pull.problem is not None
    whole = anchor(chain[10])
    pulling.peer_objects |= whole.objects
    pulling.hints = [whole.hint]
    pulling.finish()
    assert numbers(pulling) == [11]
    assert POLICY.refused_delay <= pulling.now < 2 * POLICY.refused_delay


def test_a_version_that_only_a_hint_has_spoken_of_is_not_missed(chain: list[Published]) -> None:
    pulling = laggard(chain)
    delta = edge_of(chain[1]).hint
    nowhere = Version(1, 7)
    del pulling.peer_records[nowhere]
    there = replace(delta, target=nowhere, edge=EdgeRef(EdgeKind.SKIP_DELTA, Version(1, 1), b"\1" * 32, 100))
    onward = replace(delta, target=chain[11].version, edge=EdgeRef(EdgeKind.SKIP_DELTA, nowhere, b"\2" * 32, 100))
    made = skip_delta(chain[0:12])
    pulling.peer_objects |= made.objects
    pulling.hints = [there, onward, replace(made.hint, bytes=1 << 50)]
    pulling.notice(chain[11])
    while not pulling.record_fetches[nowhere]:
        pulling.answer(pulling.outstanding[0])
    pulling.answer(FetchRecord(nowhere))
    assert (pulling.pull.problem, pulling.pull.forgives_at) == (None, None)
    pulling.finish()
    assert numbers(pulling) == [12]
    assert pulling.record_fetches[nowhere] == 1


def test_a_version_that_a_list_names_and_the_peer_lacks_is_asked_for_once(chain: list[Published]) -> None:
    """One that no record points to yet: it is below a base whose own record is on its way."""
    pulling = laggard(chain, policy=replace(POLICY, in_flight=8))
    pulling.notice(chain[11])
    pulling.answer(FetchRecord(Version(1, 11)))
    pulling.outstanding.remove(ListVersions(Version(1, 1)))
    pulling.pull.versions_listed([Version(1, number) for number in range(2, 12)])
    pulling.answer(FetchRecord(Version(1, 10)))
    del pulling.peer_records[Version(1, 7)]
    pulling.answer(FetchRecord(Version(1, 7)))
    assert pulling.record_fetches[Version(1, 7)] == 1
    assert FetchRecord(Version(1, 7)) not in pulling.outstanding


def test_a_peer_whose_hints_lead_nowhere_again_and_again_is_not_asked_for_a_while(chain: list[Published]) -> None:
    made = [skip_delta(chain[0:3]), skip_delta(chain[1:4])]
    pulling = laggard(chain)
    pulling.hints = [
        replace(
            made[0].hint, target=chain[11].version, edge=EdgeRef(EdgeKind.SKIP_DELTA, Version(1, 1), bytes([n]) * 32, 9)
        )
        for n in range(60)
    ]
    pulling.notice(chain[11])
    pulling.finish()
    tried = [n for n in range(60) if pulling.fetches[Digest(bytes([n]) * 32)]]
    assert len(tried) == 4
    assert numbers(pulling) == list(range(2, 13))


def test_hints_that_lead_on_now_and_then_go_on_being_asked_for(chain: list[Published]) -> None:
    pulling = laggard(chain[:1])
    for number in (2, 4, 6, 8, 10):
        made = skip_delta(chain[number - 2 : number + 1])
        absent = EdgeRef(EdgeKind.SKIP_DELTA, made.ref.base, bytes([number]) * 32, 9)
        pulling.offer(*chain[: number + 1])
        pulling.peer_objects |= made.objects
        pulling.hints = [made.hint, replace(made.hint, edge=absent, bytes=9)]
        pulling.notice(chain[number])
        pulling.finish()
        assert pulling.fetches[Digest(absent.manifest)] == 1
    assert numbers(pulling) == [3, 5, 7, 9, 11]


def test_an_edge_in_a_coder_that_is_not_read_here_is_not_asked_for(chain: list[Published]) -> None:
    made = skip_delta(chain[0:12])
    pulling = laggard(chain, made)
    pulling.hints = [replace(made.hint, coders=(99,))]
    pulling.notice(chain[11])
    pulling.finish()
    assert numbers(pulling) == list(range(2, 13))
    assert pulling.fetches[Digest(made.ref.manifest)] == 0


def test_a_record_that_only_a_hint_has_spoken_of_and_that_never_comes_right_is_done_without(
    chain: list[Published],
) -> None:
    whole = skip_delta(chain[0:12])
    pulling = laggard(chain, skip_delta(chain[0:7]), skip_delta(chain[6:12]))
    pulling.peer_objects |= whole.objects
    pulling.hints.append(replace(whole.hint, bytes=1 << 30))
    pulling.notice(chain[11])
    pulling.answer(pulling.outstanding[0])
    while FetchRecord(Version(1, 7)) in pulling.outstanding:
        pulling.outstanding.remove(FetchRecord(Version(1, 7)))
        pulling.pull.record_failed(Version(1, 7), pulling.now, wrong=True)
        pulling.decide()
        if not pulling.outstanding:
            pulling.now = pulling.wake or pulling.now
            pulling.decide()
    assert pulling.record_fetches[Version(1, 7)] == 3
    pulling.finish()
    assert numbers(pulling) == [12]


def test_what_is_built_on_a_version_whose_edge_turned_out_no_good_waits_for_it(chain: list[Published]) -> None:
    made = skip_delta(chain[0:5])
    pulling = laggard(chain, made, policy=replace(POLICY, in_flight=8))
    lacking = min(made.chunks)
    del pulling.peer_objects[lacking]
    pulling.notice(chain[11])
    while others := [d for d in pulling.outstanding if not (isinstance(d, Fetch) and d.wanted.digest == lacking)]:
        pulling.answer(others[0])
    assert numbers(pulling) == []
    pulling.finish()
    assert numbers(pulling) == list(range(2, 13))


def test_a_base_that_is_gone_when_its_version_is_committed_is_found_out(chain: list[Published]) -> None:
    pulling = laggard(chain, made := skip_delta(chain[0:12]), held=2)
    pulling.notice(chain[11])
    while not isinstance(pulling.outstanding[0], Commit):
        pulling.answer(pulling.outstanding[0])
    assert pulling.outstanding == [Commit(Version(1, 12), chain[11].data, (Digest(made.ref.manifest),))]
    del pulling.holdings.records[Version(1, 1)]
    pulling.outstanding.clear()
    pulling.pull.commit_failed(Version(1, 12), NotFoundError("its base"), pulling.now)
    pulling.finish()
    assert numbers(pulling) == list(range(3, 13))


@st.composite
def hints(draw: st.DrawFn, chain: list[Published], real: list[Derived]) -> list[Hint]:
    """Anything that a peer might say: true, half true, and nonsense."""
    manifests = st.sampled_from([made.ref.manifest for made in real]) | st.binary(min_size=32, max_size=32)
    versions = st.builds(Version, st.integers(1, 2), st.integers(0, 14))
    edges = st.builds(EdgeRef, st.sampled_from(EdgeKind), st.none() | versions, manifests, st.integers(1, 500))
    lies = st.builds(
        Hint,
        st.sampled_from(["bf16", "fp8"]),
        versions,
        edges,
        st.integers(0, 1 << 60),
        st.sampled_from([(), (1,), (99,)]),
    )
    told = [
        draw(st.just(made.hint) | st.builds(lambda h, n: replace(h, bytes=n), st.just(made.hint), st.integers(0, 9)))
        for made in draw(st.lists(st.sampled_from(real), max_size=4))
    ]
    return draw(st.permutations(told + draw(st.lists(lies, max_size=12))))


@settings(max_examples=60)
@given(st.data())
def test_whatever_a_peer_says_of_edges_the_daemon_ends_with_its_newest_version(data: st.DataObject) -> None:
    chain, real = _material()
    held = data.draw(st.integers(0, 11), label="held")
    pulling = laggard(chain, held=held)
    for made in real:
        pulling.peer_objects |= made.objects
    pulling.hints = data.draw(hints(chain, real), label="hints")
    gone = data.draw(st.sets(st.sampled_from([digest for made in real for digest in made.objects]), max_size=3))
    plain = {digest for published in chain for digest in published.objects}
    for digest in gone - plain:
        del pulling.peer_objects[digest]
    catch_up(pulling, chain[11])
    assert pulling.commits == sorted(set(pulling.commits))
    anchors = [m for p in chain for e in p.record.variants[0].edges if e.base is None for m in [Digest(e.manifest)]]
    if held:
        assert not any(pulling.fetches[manifest] for manifest in anchors), "an anchor where a base is held"


_made: list[tuple[list[Published], list[Derived]]] = []


def _material() -> tuple[list[Published], list[Derived]]:
    """A chain of twelve, and derived edges of all kinds, made once."""
    if not _made:
        lineage = Lineage(tensors=1, elements=512)
        chain = [lineage.publish() for _ in range(12)]
        real = [skip_delta(chain[a:b]) for a, b in [(0, 5), (4, 9), (8, 12), (0, 12), (2, 12)]]
        _made.append((chain, [*real, anchor(chain[6]), anchor(chain[11])]))
    return _made[0]
