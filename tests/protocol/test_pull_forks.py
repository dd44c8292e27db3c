"""Pulling a run that forks another: from what is held of that one, whatever is known of it."""

from __future__ import annotations

import pytest

from deltad.errors import NotFoundError
from deltad.protocol.pull import PullPolicy
from deltad.types import Digest, Version, VersionId
from tests.kit.pulling import PullingDaemon
from tests.kit.versions import Lineage, Published

POLICY = PullPolicy(in_flight=4)


@pytest.fixture(scope="module")
def other() -> Lineage:
    other = Lineage()
    for _ in range(3):
        other.publish()
    return other


def fork_of(base: Published, *, anchor: bool = False) -> Lineage:
    fork = Lineage("fork", seed=3, forks=base)
    fork.publish(anchor=anchor)
    for _ in range(2):
        fork.publish()
    return fork


def pulling(fork: Lineage, *held: Published) -> PullingDaemon:
    """A daemon that holds these versions of other runs, and a peer that has the fork."""
    daemon = PullingDaemon("fork", POLICY)
    daemon.offer(*fork.versions)
    for published in held:
        hold(daemon, published)
    return daemon


def hold(daemon: PullingDaemon, published: Published) -> None:
    daemon.holdings.others[VersionId(published.run, published.version)] = published.record
    daemon.holdings.objects |= published.objects


def test_a_fork_is_pulled_as_deltas_where_the_other_run_is_held(other: Lineage) -> None:
    fork = fork_of(other.versions[1])
    daemon = pulling(fork, *other.versions)
    daemon.notice(fork.versions[-1])
    daemon.finish()
    assert daemon.commits == [Version(1, 1), Version(1, 2), Version(1, 3)]
    fetched = sum(len(daemon.peer_objects[digest]) for digest in daemon.fetches)
    assert 0 < fetched < other.versions[0].bytes / 4
    assert not daemon.fetches.keys() & other.objects().keys()


def test_no_anchor_of_a_fork_is_fetched_where_what_it_starts_from_is_held(other: Lineage) -> None:
    fork = fork_of(other.versions[1], anchor=True)
    delta, anchor = fork.versions[0].record.variants[0].edges
    daemon = pulling(fork, *other.versions)
    daemon.notice(fork.versions[0])
    daemon.finish()
    assert daemon.commits == [Version(1, 1)]
    assert Digest(delta.manifest) in daemon.fetches
    assert Digest(anchor.manifest) not in daemon.fetches


def test_a_fork_is_reached_by_its_anchor_where_the_other_run_is_not_held(other: Lineage) -> None:
    fork = fork_of(other.versions[1], anchor=True)
    daemon = pulling(fork)
    daemon.notice(fork.versions[-1])
    daemon.finish()
    assert daemon.commits == [Version(1, 1), Version(1, 2), Version(1, 3)]
    assert Digest(fork.versions[0].record.variants[0].edges[0].manifest) not in daemon.fetches


def test_a_fork_that_nothing_leads_to_names_the_run_to_pull_and_goes_on_once_that_is_here(other: Lineage) -> None:
    fork = fork_of(other.versions[1])
    daemon = pulling(fork, other.versions[0], other.versions[2])
    daemon.notice(fork.versions[0])
    assert daemon.outstanding == []
    assert isinstance(daemon.pull.problem, NotFoundError)
    assert "fork/v000001: expected policy/v000002, from which it forks, or an anchor" in str(daemon.pull.problem)
    assert "pull run policy too" in str(daemon.pull.problem)
    assert daemon.wake is not None, "the other run may come in without a word to this one"
    hold(daemon, other.versions[1])
    daemon.finish()
    assert daemon.commits == [Version(1, 1)]
    assert daemon.pull.problem is None


def test_the_base_of_a_fork_is_no_version_of_its_own_run(other: Lineage) -> None:
    """A run that forks another one in its midst, from a version that has the number of one of its own."""
    run = Lineage("fork", seed=3)
    for _ in range(3):
        run.publish()
    across = Lineage("fork", seed=4, forks=other.versions[1])
    run.versions.append(across.publish(number=4))
    daemon = pulling(run, *other.versions)
    for published in run.versions:
        daemon.pull.record_seen(published.data, daemon.now)
    daemon.finish()
    assert daemon.commits == [Version(1, 4)]
    assert not daemon.fetches.keys() & run.versions[1].objects.keys() - run.versions[3].objects.keys()
