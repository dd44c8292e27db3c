"""P19 and P20: whatever order, loss, repetition and restart, the daemon ends with the peer's versions."""

from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltad.delta.encoding import sha256
from deltad.errors import PeerError, StoreFullError
from deltad.protocol.pull import PullPolicy
from deltad.protocol.pull_decisions import Commit, Decision, Fetch, FetchRecord, ListEdges, ListVersions, Load
from deltad.protocol.pull_plan import check_arrival
from tests.kit.derived import Derived, anchor, between
from tests.kit.pulling import PullingDaemon
from tests.kit.versions import Lineage, Published

IN_FLIGHT = 3


@cache
def lineage(anchors: tuple[bool, ...]) -> tuple[Published, ...]:
    """Versions with a delta each, and anchors where asked for; v4 has no delta, so no way leads through it."""
    made = Lineage(tensors=2, elements=1024, density=0.3)
    for i, whole in enumerate(anchors):
        made.publish(anchor=whole, delta=i != 3)
    return tuple(made.versions)


@cache
def derived(anchors: tuple[bool, ...], base: int | None, target: int) -> Derived:
    """An edge between two versions of a lineage, or an anchor."""
    versions = lineage(anchors)
    return anchor(versions[target]) if base is None else between(versions[base], versions[target])


class AnyOrder(RuleBasedStateMachine):
    @initialize(anchors=st.tuples(*[st.booleans()] * 5))
    def begin(self, anchors: tuple[bool, ...]) -> None:
        self.anchors = anchors
        self.versions = lineage(anchors)
        self.daemon = PullingDaemon("policy", PullPolicy(in_flight=IN_FLIGHT, versions_ahead=2, records_ahead=2))
        self.published = 1
        self.daemon.offer(self.versions[0])
        self.earlier: list[Decision] = []
        self.allowed = 0

    def pick(self, data: st.DataObject, *kinds: type) -> Decision | None:
        found = [d for d in self.daemon.outstanding if isinstance(d, kinds)]
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: self.published < len(self.versions))
    @rule()
    def the_peer_gets_a_version(self) -> None:
        self.daemon.offer(self.versions[self.published])
        self.published += 1

    @rule(data=st.data())
    def the_peer_derives_an_edge(self, data: st.DataObject) -> None:
        base = data.draw(st.none() | st.integers(0, len(self.versions) - 2))
        at = data.draw(st.integers(0 if base is None else base + 1, len(self.versions) - 1))
        if at < self.published:
            made = derived(self.anchors, base, at)
            self.daemon.peer_objects |= made.objects
            self.daemon.hints.append(made.hint)

    @rule(data=st.data())
    def a_notice_comes_in(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, self.published - 1))
        self.daemon.notice(self.versions[at])

    @rule(data=st.data())
    def a_decision_is_carried_out(self, data: st.DataObject) -> None:
        if decision := self.pick(data, Fetch, FetchRecord, ListVersions, ListEdges, Load, Commit):
            self.earlier.append(decision)
            self.daemon.answer(decision)

    @rule(data=st.data())
    def an_old_answer_comes_again(self, data: st.DataObject) -> None:
        old = [d for d in self.earlier if isinstance(d, (Fetch, FetchRecord))]
        if old:
            self.daemon.answer(data.draw(st.sampled_from(old)))

    @rule(data=st.data())
    def a_request_is_lost(self, data: st.DataObject) -> None:
        if decision := self.pick(data, Fetch, FetchRecord, ListVersions, ListEdges):
            self.allowed += isinstance(decision, Fetch)
            self.daemon.lose(decision)

    @rule(data=st.data())
    def an_object_comes_damaged(self, data: st.DataObject) -> None:
        decision = self.pick(data, Fetch)
        if isinstance(decision, Fetch):
            good = self.daemon.peer_objects[decision.wanted.digest]
            with pytest.raises(PeerError, match="peer-1"):
                check_arrival(decision.wanted, data.draw(damaged(good)), "peer-1")
            self.allowed += 1
            self.daemon.lose(decision)

    @rule(data=st.data())
    def the_disk_is_full_for_once(self, data: st.DataObject) -> None:
        decision = self.pick(data, Fetch)
        if isinstance(decision, Fetch):
            daemon, wanted = self.daemon, decision.wanted
            if daemon.pull.object_arrived(
                check_arrival(wanted, daemon.peer_objects[wanted.digest], "peer-1"), daemon.now
            ):
                self.allowed += 1
                daemon.pull.object_failed(wanted, daemon.now)
            daemon.outstanding.remove(decision)
            daemon.decide()

    @rule(data=st.data())
    def a_commit_finds_the_disk_full(self, data: st.DataObject) -> None:
        decision = self.pick(data, Commit)
        if isinstance(decision, Commit):
            self.daemon.outstanding.remove(decision)
            self.daemon.pull.commit_failed(decision.version, StoreFullError("store"), self.daemon.now)
            self.daemon.decide()

    @rule()
    def the_daemon_restarts(self) -> None:
        lost = self.daemon.restart()
        self.earlier += lost
        self.allowed += sum(isinstance(decision, Fetch) for decision in lost)

    @rule(seconds=st.floats(0.0, 60.0))
    def time_passes(self, seconds: float) -> None:
        self.daemon.now += seconds
        self.daemon.decide()

    @rule(seconds=st.floats(0.1, 10.0))
    def the_peer_goes_down_for_a_while(self, seconds: float) -> None:
        self.daemon.pull.peer_down(self.daemon.now + seconds)
        before = len(self.daemon.outstanding)
        self.daemon.decide()
        assert not [
            d for d in self.daemon.outstanding[before:] if isinstance(d, (Fetch, FetchRecord, ListVersions, ListEdges))
        ], "nothing is asked of a peer that is down"

    @invariant()
    def only_what_was_in_flight_is_fetched_again(self) -> None:
        if hasattr(self, "daemon"):
            again = sum(self.daemon.fetches.values()) - len(self.daemon.fetches)
            assert again <= self.allowed

    def teardown(self) -> None:
        if hasattr(self, "daemon"):
            newest = self.versions[self.published - 1]
            self.daemon.pull.peer_up()
            self.daemon.notice(newest)
            self.daemon.finish()
            self.daemon.notice(newest)
            self.daemon.finish()
            assert self.daemon.holdings.latest() == newest.version
            held = self.daemon.holdings
            assert all(sha256(data) == digest for digest, data in held.objects.items())
            for published in self.versions:
                if published.version in held.records:
                    assert held.records[published.version] == published.record
            assert self.daemon.commits == sorted(set(self.daemon.commits)), "ascending, each once"


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Other bytes: one flipped, some cut off, dropped, doubled or appended."""
    at = draw(st.integers(0, len(good) - 1))
    match draw(st.sampled_from(["flip", "cut", "drop", "double", "append"])):
        case "flip":
            return good[:at] + bytes([good[at] ^ draw(st.integers(1, 255))]) + good[at + 1 :]
        case "cut":
            return good[:at]
        case "drop":
            return good[:at] + good[at + 1 :]
        case "double":
            return good[: at + 1] + good[at:]
        case _:
            return good + draw(st.binary(min_size=1, max_size=8))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=60)
