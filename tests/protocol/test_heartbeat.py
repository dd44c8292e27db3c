"""A publisher that falls silent, or whose old heartbeats come again, is told of by the receiver's own clock (P27)."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta import FORMAT
from deltad.delta.encoding import encode
from deltad.delta.heartbeat import Heartbeat, decode_heartbeat
from deltad.delta.keys import SigningKey
from deltad.delta.signing import is_signed_by, sign
from deltad.errors import FormatError, IntegrityError, UntrustedError
from deltad.protocol.heartbeat import Pulse
from deltad.protocol.trust import Scope, TrustedKey, TrustList
from deltad.types import Version

KEY, DERIVER = SigningKey.from_seed(bytes([1] * 32)), SigningKey.from_seed(bytes([2] * 32))
V1, V2 = Version(1, 1), Version(1, 2)


def beat(number: int, latest: Version | None = V1) -> Heartbeat:
    return Heartbeat(FORMAT, "policy", number, latest)


def test_silence_is_told_of_after_a_while_and_ends_with_a_newer_heartbeat() -> None:
    pulse = Pulse(100.0)
    assert pulse.trouble(None, 160.0) == ""
    assert "no signed heartbeat of the publisher for 61 s" in pulse.trouble(None, 161.0)
    assert "there never was one" in pulse.trouble(None, 161.0)
    assert pulse.hear(beat(1), 162.0)
    assert pulse.trouble(V1, 222.0) == ""
    assert "the last was heartbeat 1 of policy, at policy/v000001" in pulse.trouble(V1, 223.0)


def test_the_same_heartbeat_again_does_not_end_the_silence() -> None:
    pulse = Pulse(0.0)
    assert pulse.hear(beat(7), 0.0)
    for now in range(1, 70):
        assert not pulse.hear(beat(7), float(now))
    assert "frozen, or replays" in pulse.trouble(V1, 70.0)


@pytest.mark.parametrize("replayed", [beat(6), beat(7, V2)])
def test_an_older_one_or_another_of_the_same_number_is_refused_and_changes_nothing(replayed: Heartbeat) -> None:
    pulse = Pulse(0.0)
    pulse.hear(beat(7), 0.0)
    with pytest.raises(IntegrityError, match="expected a number above 7"):
        pulse.hear(replayed, 50.0)
    assert pulse.last == beat(7)
    assert pulse.trouble(V1, 61.0)


def test_an_upstream_that_withholds_the_version_that_its_publisher_names_is_told_of() -> None:
    pulse = Pulse(0.0)
    for number in range(1, 100):
        pulse.hear(beat(number, V2), float(number))
        assert pulse.trouble(V1, float(number)) == "" or number > 61
    assert "the publisher has been at v000002 for" in pulse.trouble(V1, 99.0)
    assert pulse.trouble(V2, 99.0) == ""


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), max_size=40))
def test_the_highest_number_counts_in_whatever_order_they_come(heard: list[tuple[int, int]]) -> None:
    pulse, now, highest, since = Pulse(0.0), 0.0, 0, 0.0
    for number, later in heard:
        now += later
        try:
            newer = pulse.hear(beat(number), now)
        except IntegrityError:
            newer = False
        if number > highest:
            assert newer
            highest, since = number, now
        assert (pulse.trouble(V1, now) != "") == (now - since > 60.0)


def test_only_a_publishers_key_may_sign_one_and_no_signature_of_another_kind_does() -> None:
    trust = TrustList(
        [TrustedKey(KEY.public, frozenset({Scope.PUBLISH})), TrustedKey(DERIVER.public, frozenset({Scope.DERIVE}))]
    )
    trust.check_heartbeat(sign(beat(1), KEY))
    for bad in (beat(1), sign(beat(1), DERIVER), msgspec.structs.replace(sign(beat(1), KEY), number=2)):
        with pytest.raises(UntrustedError):
            trust.check_heartbeat(bad)


def test_it_is_read_back_as_it_was_signed_and_nothing_else_is_read() -> None:
    made = sign(beat(1), KEY)
    assert decode_heartbeat(made.encode()) == made
    assert is_signed_by(decode_heartbeat(made.encode()), KEY.public)
    for bad in (b"", b"\x80", encode(beat(0)), encode(msgspec.structs.replace(beat(1), run="../x")), b"x" * 9000):
        with pytest.raises(FormatError):
            decode_heartbeat(bad)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        decode_heartbeat(data)
