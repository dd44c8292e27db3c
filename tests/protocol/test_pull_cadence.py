"""A trainer that is faster than the link: something newer always comes, the newest is never starved, and the trainer is
told (P24)."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.protocol.cadence import RECENT, Cadence
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_decisions import Fetch, ListEdges
from deltad.types import Version
from tests.kit.derived import Derived, edge_of, skip_delta
from tests.kit.pulling import PullingDaemon
from tests.kit.versions import Lineage, Published

VERSIONS = 24


@cache
def chain() -> tuple[Published, ...]:
    """v1, an anchor, to v24, each with a delta from the one before."""
    lineage = Lineage(tensors=2, elements=4096, density=0.05)
    return tuple(lineage.publish() for _ in range(VERSIONS))


@cache
def way(base: int, target: int) -> Derived:
    """What leads from one version to another: a delta, or a skip delta."""
    versions = chain()
    return edge_of(versions[target - 1]) if target == base + 1 else skip_delta(versions[base - 1 : target])


class SlowLink:
    """A region that holds v1, behind a link that carries `per_step` objects between two versions of the trainer.

    Its upstream has a skip delta from wherever the region says it is to the newest version, as one that derives for
    its regions has.
    """

    def __init__(self) -> None:
        self.pulling = PullingDaemon("policy", PullPolicy(in_flight=4))
        self.pulling.holdings.hold(chain()[0])
        self.pulling.offer(chain()[0])
        self.pulling.hints.append(way(1, 2).hint)
        self.pulling.restart()
        self.newest = 1
        self.newest_at_commit: list[int] = []
        """Of each version that was committed, the newest that there was by then."""

    def publish(self) -> None:
        self.newest += 1
        self.pulling.offer(chain()[self.newest - 1])
        self.pulling.notice(chain()[self.newest - 1])

    def carry(self, objects: int) -> None:
        """Questions and records are answered at once, and so many objects come."""
        while self.pulling.outstanding:
            small = [decision for decision in self.pulling.outstanding if not isinstance(decision, Fetch)]
            if not small and not objects:
                return
            decision = small[0] if small else self.pulling.outstanding[0]
            objects -= not small
            if isinstance(decision, ListEdges):
                self._hint(decision.after)
            self.pulling.answer(decision)
            while len(self.newest_at_commit) < len(self.pulling.commits):
                self.newest_at_commit.append(self.newest)

    def _hint(self, after: Version | None) -> None:
        start = after.number if after else 1
        self.pulling.hints.clear()
        if start < self.newest:
            made = way(start, self.newest)
            self.pulling.peer_objects |= made.objects
            self.pulling.hints.append(made.hint)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=VERSIONS - 1, max_size=VERSIONS - 1))
def test_each_version_that_comes_is_at_least_the_newest_there_was_when_the_one_before_came(carried: list[int]) -> None:
    link = SlowLink()
    for objects in carried:
        link.publish()
        link.carry(objects)
    link.carry(1000)
    numbers = [version.number for version in link.pulling.commits]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == VERSIONS, "once the trainer pauses, the newest is here"
    for came, newest in zip(numbers[1:], link.newest_at_commit, strict=False):
        assert came >= newest, "nothing older is fetched than what was newest when fetching it began"


def test_a_link_that_is_slow_again_and_again_is_told_of_and_forgotten_when_it_keeps_up() -> None:
    cadence = Cadence()
    for sequence in (1, 2, 3):
        cadence.arrived(sequence)
    assert cadence.remark() == ""
    cadence.arrived(50)
    assert cadence.remark() == "", "it was gone for a while, and took what had come meanwhile at once"
    cadence.arrived(53)
    assert cadence.remark() == "the link is slower than the cadence: 48 of the last 52 versions skipped"
    for sequence in range(54, 54 + RECENT - 1):
        cadence.arrived(sequence)
    assert cadence.remark() == ""


def test_who_catches_up_passes_over_what_was_there_before_and_says_nothing_of_the_link() -> None:
    cadence = Cadence()
    for sequence in (1, 4, 6, 7):
        cadence.arrived(sequence, newest=7)
    assert cadence.remark() == ""
    cadence.arrived(9, newest=10)
    cadence.arrived(12, newest=13)
    assert cadence.remark() == "the link is slower than the cadence: 3 of the last 8 versions skipped"


@given(st.lists(st.integers(1, 10), min_size=1, max_size=50))
def test_what_is_told_is_counted_right(steps: list[int]) -> None:
    cadence, sequence = Cadence(), 1
    cadence.arrived(sequence)
    for step in steps:
        sequence += step
        cadence.arrived(sequence)
    recent = steps[-RECENT:]
    slow = sum(step > 1 for step in recent) > 1
    told = f"{sum(recent) - len(recent)} of the last {sum(recent)} versions skipped"
    assert cadence.remark("it") == (f"it is slower than the cadence: {told}" if slow else "")
