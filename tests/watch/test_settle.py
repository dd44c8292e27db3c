"""What is settled (P1, P3): decided over looks and times alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.checkpoint.files import FileStamp, Fingerprint
from deltad.errors import CheckpointChangedError, CheckpointError
from deltad.watch.settle import LOOKS_APART, Settled, Settling, Sighting

QUIET = 2.0


def state(number: int) -> Fingerprint:
    return Fingerprint((FileStamp("model.safetensors", 100, number, 7),))


@dataclass
class Trainer:
    """A directory of checkpoints as a trainer leaves it, and a watcher's decisions over it."""

    settling: Settling
    now: float = 0.0
    there: dict[str, Sighting] = field(default_factory=dict)
    broken: set[Fingerprint] = field(default_factory=set)
    offered: list[tuple[int, int]] = field(default_factory=list)
    """(number, state) in the order of the offers."""
    refused: list[str] = field(default_factory=list)
    still_since: dict[str, float] = field(default_factory=dict)
    publishes: bool = True
    """Whether what is offered is published."""

    def write(self, number: int | None, content: int, *, broken: bool = False, pending: str = "") -> None:
        path = "latest" if number is None else f"step_{number}"
        self.there[path] = Sighting(path, number, state(content), pending)
        self.still_since[path] = self.now
        if broken:
            self.broken.add(state(content))

    def look(self, after: float = 0.0) -> list[int]:
        """Let time pass, look once and take everything that is offered; returns the numbers."""
        return self.look_at(self.now + after)

    def look_at(self, now: float) -> list[int]:
        self.now = now
        for sighting in self.settling.look(self.there.values(), self.now):
            error = CheckpointError("half") if sighting.fingerprint in self.broken else None
            self.settling.judge(sighting, error, self.now)
        while refused := self.settling.next_refused(self.now):
            self.refused.append(str(refused[1]))
        numbers = []
        while settled := self.settling.next_settled(self.now):
            numbers.append(settled.number)
            self.check(settled)
            self.offered.append((settled.number, settled.fingerprint.files[0].mtime_ns))
            if self.publishes:
                self.settling.newest = settled.number
        return numbers

    def check(self, settled: Settled) -> None:
        """Every offer, in every test: of what is there now, complete and still."""
        assert self.there[settled.path].fingerprint == settled.fingerprint
        assert settled.fingerprint not in self.broken
        assert settled.found >= self.still_since[settled.path]

    def until_still(self) -> list[int]:
        """Look whenever a look is due, until nothing more is due."""
        numbers = self.look()
        for _ in range(50):
            due = self.settling.due()
            if due == math.inf:
                return numbers
            numbers += self.look_at(max(due, self.now))
        pytest.fail("a look is due for ever")


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(Settling(QUIET, recheck=5.0))


def test_a_checkpoint_is_offered_when_it_was_still_for_long_enough(trainer: Trainer) -> None:
    trainer.write(1, content=1)
    assert trainer.look() == []
    assert trainer.look(after=QUIET - 0.125) == []
    trainer.write(1, content=2)
    assert trainer.look(after=0.125) == []
    assert trainer.look(after=QUIET - 0.125) == []
    assert trainer.look(after=0.125) == [1]
    assert trainer.offered == [(1, 2)]


def test_a_look_is_due_exactly_when_it_can_say_something_new(trainer: Trainer) -> None:
    assert trainer.settling.due() == math.inf
    trainer.write(1, content=1)
    trainer.look()
    assert trainer.settling.due() == LOOKS_APART
    trainer.look_at(LOOKS_APART)
    assert trainer.settling.due() == QUIET
    assert trainer.until_still() == [1]


def test_one_that_has_a_newer_complete_one_after_it_need_not_be_waited_for(trainer: Trainer) -> None:
    trainer.write(1, content=1)
    trainer.look()
    trainer.write(2, content=2)
    assert trainer.look(after=0.3) == []
    assert trainer.look(after=0.3) == [1], "the second look at the newer one finds it complete"
    assert trainer.until_still() == [2]


def test_a_newer_one_that_is_not_complete_proves_nothing(trainer: Trainer) -> None:
    trainer.write(1, content=1)
    trainer.look()
    trainer.write(2, content=2, broken=True)
    assert trainer.look(after=0.3) == []
    assert trainer.look(after=0.3) == []
    assert trainer.look(after=QUIET) == [1]


def test_an_older_one_that_is_written_again_is_waited_for_although_newer_ones_are_there(trainer: Trainer) -> None:
    for number in (1, 2, 3):
        trainer.write(number, content=number)
    assert trainer.until_still() == [1, 2, 3]
    trainer.write(2, content=20)
    assert trainer.look() == []
    assert trainer.look(after=QUIET / 2) == []
    assert trainer.look(after=QUIET / 2) == [2]


def test_all_that_is_there_comes_in_ascending_order_with_gaps(trainer: Trainer) -> None:
    for number in (30, 4, 100, 9):
        trainer.write(number, content=number)
    assert trainer.until_still() == [4, 9, 30, 100]


def test_what_was_published_before_is_not_offered_but_its_rewrite_is() -> None:
    trainer = Trainer(Settling(QUIET, recheck=5.0, newest=10))
    for number in (9, 10, 11):
        trainer.write(number, content=number)
    assert trainer.until_still() == [11]
    trainer.write(9, content=90)
    assert trainer.until_still() == [9]
    trainer.write(10, content=100)
    assert trainer.until_still() == [10], "the order goes on from the number that was written again"


def test_one_that_comes_after_a_higher_number_is_skipped_and_said_so_once(trainer: Trainer) -> None:
    trainer.write(5, content=5)
    trainer.until_still()
    trainer.write(3, content=3)
    assert trainer.until_still() == []
    assert trainer.look(after=QUIET) == []
    assert trainer.refused == [
        "step_3: expected a number above 5, which was published before, found 3, complete only now;"
        " it came too late and is skipped"
    ]


def test_a_number_that_was_offered_and_not_published_holds_up_no_lower_one(trainer: Trainer) -> None:
    trainer.write(5, content=5)
    assert trainer.until_still() == [5]
    trainer.publishes = False
    trainer.write(55, content=55)
    assert trainer.until_still() == [55]
    trainer.publishes = True
    trainer.write(6, content=6)
    assert trainer.until_still() == [6]
    assert trainer.refused == []


def test_a_new_epoch_that_was_opened_elsewhere_begins_the_order_anew(trainer: Trainer) -> None:
    for number in (40, 41):
        trainer.write(number, content=number)
    trainer.until_still()
    trainer.settling.newest = 9
    trainer.write(10, content=10)
    assert trainer.until_still() == [10]


def test_a_number_below_one_that_was_published_elsewhere_is_for_the_publisher_to_judge(trainer: Trainer) -> None:
    trainer.write(5, content=5)
    trainer.until_still()
    trainer.settling.newest = 50
    trainer.write(6, content=6)
    assert trainer.until_still() == [6]
    assert trainer.refused == []


def test_the_same_state_is_never_offered_twice_even_if_it_went_away_and_came_back(trainer: Trainer) -> None:
    trainer.write(1, content=1)
    assert trainer.until_still() == [1]
    before = dict(trainer.there)
    trainer.there.clear()
    assert trainer.until_still() == []
    trainer.there |= before
    assert trainer.until_still() == []
    trainer.write(1, content=2)
    assert trainer.until_still() == [1]
    trainer.there |= before
    assert trainer.until_still() == []


def test_one_that_cannot_be_published_is_reported_once_for_each_state(trainer: Trainer) -> None:
    trainer.write(1, content=1, broken=True)
    assert trainer.look() == []
    trainer.look(after=QUIET / 2)
    assert trainer.refused == [], "it may still be being written"
    for _ in range(5):
        trainer.look(after=10.0)
    assert trainer.refused == ["half"]
    trainer.write(1, content=2, broken=True)
    trainer.until_still()
    assert trainer.refused == ["half", "half"]
    trainer.write(2, content=3)
    assert trainer.until_still() == [2], "it holds up nobody"


def test_one_that_could_not_be_read_for_a_while_is_offered_in_the_end(trainer: Trainer) -> None:
    trainer.write(1, content=1, broken=True)
    trainer.until_still()
    trainer.broken.clear()
    assert trainer.look(after=1.0) == [], "it is not checked in a loop"
    assert trainer.look(after=5.0) == [1]


def test_one_that_changes_during_its_check_starts_over(trainer: Trainer) -> None:
    trainer.write(1, content=1)
    settling = trainer.settling
    settling.look(trainer.there.values(), 0.0)
    (asked,) = settling.look(trainer.there.values(), 1.0)
    settling.judge(asked, CheckpointChangedError("it"), 1.0)
    assert settling.due() == 1.0 + LOOKS_APART
    assert settling.next_settled(QUIET) is None
    (asked,) = settling.look(trainer.there.values(), 2.0)
    trainer.write(1, content=2)
    settling.look(trainer.there.values(), 2.1)
    settling.judge(asked, None, 2.1)
    assert settling.next_settled(9.0) is None, "a verdict on the state before is no verdict"


def test_a_directory_that_is_overwritten_counts_up_from_what_was_published() -> None:
    trainer = Trainer(Settling(QUIET, recheck=5.0, newest=41, numbered=False))
    trainer.write(None, content=1)
    assert trainer.until_still() == [42]
    assert trainer.look(after=60.0) == []
    trainer.write(None, content=2)
    assert trainer.until_still() == [43]
    trainer.write(None, content=1)
    assert trainer.until_still() == [44], "what was there before the last one is another version again"


def test_the_first_number_of_a_directory_that_is_overwritten_is_1() -> None:
    trainer = Trainer(Settling(QUIET, recheck=5.0, numbered=False))
    trainer.write(None, content=1)
    assert trainer.until_still() == [1]


def test_a_number_that_is_still_to_come_is_waited_for_and_said_so() -> None:
    trainer = Trainer(Settling(QUIET, recheck=5.0, newest=3, numbered=False))
    trainer.write(None, content=1, pending="its number is still to come")
    assert trainer.until_still() == []
    assert trainer.refused == ["latest: its number is still to come"]
    trainer.there["latest"] = Sighting("latest", 7, state(1))
    assert trainer.until_still() == [7]
    trainer.there["latest"] = Sighting("latest", 5, state(2))
    assert trainer.until_still() == [5], "the trainer went back; whoever publishes decides what that means"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("remove"), st.integers(1, 4), st.none()),
        st.tuples(st.just("look"), st.sampled_from([0.0, 0.05, 0.2, 1.0, 2.0, 7.0]), st.none()),
    ),
    max_size=40,
)


@given(events=EVENTS, after=st.none() | st.integers(0, 4))
def test_whatever_a_trainer_does_only_settled_checkpoints_are_offered_each_once_and_in_order(
    events: list[tuple[str, float, bool | None]], after: int | None
) -> None:
    trainer = Trainer(Settling(QUIET, recheck=5.0, newest=after))
    for content, (kind, value, broken) in enumerate(events):
        if kind == "write":
            trainer.write(int(value), content, broken=bool(broken))
        elif kind == "remove":
            trainer.there.pop(f"step_{int(value)}", None)
        else:
            trainer.look(after=value)
    trainer.until_still()
    trainer.look(after=10.0)
    trainer.until_still()

    assert len(set(trainer.offered)) == len(trainer.offered)
    newest, known = (-1 if after is None else after), set()
    for number, _ in trainer.offered:
        again = number in known or (after is not None and number <= after)
        assert number > newest or again
        newest = number
        known.add(number)
    complete = [sighting for sighting in trainer.there.values() if sighting.fingerprint not in trainer.broken]
    last = max(complete, key=lambda sighting: sighting.number or 0, default=None)
    if last is not None and last.number is not None and (after is None or last.number > after):
        offered = (last.number, last.fingerprint.files[0].mtime_ns) in trainer.offered
        passed = any(number > last.number for number, _ in trainer.offered)
        assert offered or passed, "the newest complete checkpoint is never starved"
