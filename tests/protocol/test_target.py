"""Whose statement about the target counts, in whatever order statements arrive (P31)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.errors import FormatError, LimitError
from deltad.protocol.target import (
    EVERYONE,
    FLEETS,
    MOST_SEQUENCE,
    REASON_CHARACTERS,
    REMEMBERED,
    Statement,
    Targets,
    check_notice,
    check_statement,
)
from deltad.types import Version

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def said(sequence: int, version: Version | None = V1, fleet: str = EVERYONE, why: str = "") -> Statement:
    return Statement(sequence, version, fleet, "root", why, 0.0, "a")


def say(targets: Targets, version: Version | None, fleet: str = EVERYONE) -> Targets:
    return targets.say(version, fleet, by="root", why="", when=0.0, daemon="a")


def say_here(targets: Targets, version: Version | None) -> Targets:
    return targets.say_here(version, by="ana", why="", when=0.0, daemon="b")


def held(targets: Targets, fleet: str = "b") -> Version | None:
    statement = targets.held(fleet)
    return None if statement is None else statement.version


def test_a_fleet_that_nobody_spoke_of_follows_the_newest() -> None:
    assert held(Targets()) is None
    assert Targets().standing("b") is None


def test_a_statement_about_everyone_holds_every_fleet_until_the_release() -> None:
    hold = say(Targets(), V1)
    assert (held(hold, "a"), held(hold, "b")) == (V1, V1)
    released = say(hold, None)
    assert held(released) is None
    assert [statement.version for statement in released.history] == [V1, None]


def test_a_statement_about_one_fleet_leaves_the_others_where_they_were_held() -> None:
    targets = say(say(Targets(), V1), V2, "b")
    assert (held(targets, "a"), held(targets, "b")) == (V1, V2)
    assert held(say(targets, None, "b"), "b") is None
    assert held(say(targets, None, "b"), "a") == V1


def test_a_later_statement_about_everyone_replaces_those_about_single_fleets() -> None:
    targets = say(say(Targets(), V2, "b"), V1)
    assert (held(targets, "a"), held(targets, "b")) == (V1, V1)
    assert len(targets.heard) == 1


def test_saying_what_stands_again_says_nothing() -> None:
    hold = say(Targets(), V1)
    assert say(hold, V1) is hold
    assert say(hold, V1, "b") is hold
    assert say(Targets(), None) == Targets()
    apart = say(hold, V2, "b")
    assert say(apart, V1) is not apart, "the fleet of b is held elsewhere, and is meant too"


def test_another_reason_for_what_stands_is_noted_and_changes_nothing_else() -> None:
    hold = Targets().say(V1, EVERYONE, by="ana", why="reward fell", when=0.0, daemon="a")
    again = hold.say(V1, EVERYONE, by="bo", why="until the evaluation is done", when=1.0, daemon="a")
    assert held(again) == V1
    assert [(said.by, said.why) for said in again.history] == [
        ("ana", "reward fell"),
        ("bo", "until the evaluation is done"),
    ]
    assert again.say(V1, EVERYONE, by="cy", why="", when=2.0, daemon="a") is again, "no reason takes none away"
    here = Targets().say_here(V1, by="ana", why="one", when=0.0, daemon="b")
    other = here.say_here(V1, by="ana", why="two", when=1.0, daemon="b")
    assert other.own is not None
    assert other.own.why == "two"
    assert other.say_here(V1, by="ana", why="two", when=2.0, daemon="b") is other


def test_at_a_region_the_last_to_speak_wins() -> None:
    heard = Targets().hear([said(1, V1)])
    own = say_here(heard, V2)
    assert held(own) == V2, "the region spoke after it heard of statement 1"
    assert held(own.hear([said(2, V3, fleet="c")])) == V2, "what concerns another fleet takes nothing away"
    assert held(own.hear([said(2, V3)])) == V3, "a newer statement from above replaces what was said here"
    assert held(own.hear([said(2, None)])) is None
    again = say_here(own.hear([said(2, V3)]), V2)
    assert held(again) == V2


def test_what_was_said_at_a_region_concerns_its_own_fleet_alone_and_is_not_passed_on() -> None:
    own = say_here(Targets(), V2)
    assert held(own, "c") is None
    assert own.after(0) == ()


def test_a_region_withdraws_what_it_said_and_not_what_was_said_above() -> None:
    own = say_here(Targets().hear([said(1, V1)]), V2)
    withdrawn = say_here(own, None)
    assert held(withdrawn) == V1
    assert say_here(withdrawn, None) is withdrawn
    replaced = own.hear([said(2, V3)])
    assert say_here(replaced, None) is replaced


def test_a_region_that_says_what_stands_says_nothing() -> None:
    heard = Targets().hear([said(1, V1)])
    assert say_here(heard, V1) is heard
    own = say_here(heard, V2)
    assert say_here(own, V2) is own
    assert say_here(Targets(), None) == Targets()


def test_every_version_that_a_fleet_is_held_at_is_named_with_who_and_why() -> None:
    targets = say_here(Targets().hear([said(1, V1, why="bad"), said(2, V3, fleet="c")]), V2)
    assert set(targets.named()) == {V1, V2, V3}
    assert str(targets.named()[V1]) == "all fleets are held at it by root at a: bad"
    assert str(targets.named()[V3]) == "the fleet of c is held at it by root at a"
    assert set(targets.hear([said(3, None)]).named()) == set(), "what was replaced is not named"


MOVES = st.lists(st.tuples(st.sampled_from([None, V1, V2, V3]), st.sampled_from([EVERYONE, "b", "c"])), max_size=12)


@given(MOVES, st.randoms(use_true_random=False))
def test_notices_in_any_order_and_any_number_of_times_end_where_the_newest_leads(moves, rng) -> None:
    origin, notices = Targets(), []
    for version, fleet in moves:
        origin = say(origin, version, fleet)
        notices += [(known, origin.after(known)) for known in (0, rng.randrange(0, origin.sequence + 1))]
    below = Targets()
    delivered = rng.sample(notices, len(notices)) + rng.choices(notices, k=len(notices)) if notices else []
    for known, notice in delivered:
        # A daemon asks for what is above the highest number that it knows; an answer may be old by then.
        if known <= below.sequence:
            before = below
            below = below.hear(notice)
            assert below.sequence >= before.sequence
            if not notice or notice[-1].sequence <= before.sequence:
                assert below is before, "an older one that arrives late changes nothing"
    below = below.hear(origin.after(below.sequence))
    assert below.heard == origin.heard
    for fleet in ("a", "b", "c"):
        assert held(below, fleet) == held(origin, fleet)


def test_the_history_is_bounded() -> None:
    targets = Targets()
    for number in range(2 * REMEMBERED):
        targets = say(targets, Version(1, number))
    assert len(targets.history) == REMEMBERED
    assert targets.history[-1].version == Version(1, 2 * REMEMBERED - 1)


MALFORMED = {
    "no number": {"sequence": 0},
    "a number too large": {"sequence": MOST_SEQUENCE + 1},
    "a version of epoch 0": {"version": Version(0, 1)},
    "a negative version": {"version": Version(1, -1)},
    "a version too large": {"version": Version(1, 10**15)},
    "an epoch too large": {"version": Version(10**9, 1)},
    "a fleet that is a path": {"fleet": "../b"},
    "a daemon without a name": {"daemon": ""},
    "an endless reason": {"why": "x" * (REASON_CHARACTERS + 1)},
    "an endless name": {"by": "x" * 257},
}


@pytest.mark.parametrize("wrong", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_statement_is_refused_and_nothing_changes(wrong: dict[str, object]) -> None:
    forged = msgspec.structs.replace(said(5), **wrong)
    with pytest.raises(FormatError, match="target"):
        check_statement(forged)
    if forged.sequence:
        with pytest.raises(FormatError):
            Targets().hear([said(1), forged])


def test_a_notice_is_ascending_above_what_was_asked_for_and_not_too_long() -> None:
    check_notice([said(3), said(4, fleet="b")], 2)
    for statements in ([said(2)], [said(4), said(3)], [said(3), said(3)]):
        with pytest.raises(FormatError, match="ascending"):
            check_notice(statements, 2)
    with pytest.raises(LimitError):
        check_notice([], 0)
    with pytest.raises(LimitError):
        check_notice([said(n, fleet=f"f{n}") for n in range(1, FLEETS + 2)], 0)


def test_no_more_fleets_are_held_apart_than_a_notice_can_tell_of() -> None:
    targets = Targets()
    for number in range(FLEETS):
        targets = say(targets, V1, f"f{number}")
    with pytest.raises(LimitError, match=f"at most {FLEETS} fleets"):
        say(targets, V1, "one-more")
    assert len(say(targets, V2).heard) == 1
