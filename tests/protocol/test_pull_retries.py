"""When the pull machine tries again, and what it keeps of what it has paid for."""

import random

import pytest

from deltad.errors import (
    ConflictError,
    DeltadError,
    NotFoundError,
    PeerError,
    StoreError,
    StoreFullError,
)
from deltad.protocol.backoff import Backoff
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_decisions import Commit, Fetch
from deltad.protocol.pull_plan import Kind, check_arrival
from deltad.types import Digest
from tests.kit.versions import Lineage, Published
from tests.protocol.pulls import POLICY, answer_all, daemon, kinds, numbers, with_manifest


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
