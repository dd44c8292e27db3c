"""A link rests when nobody can be reached, says why once, and tells its rate."""

import random

import pytest

from deltad.errors import ConfigError, DeniedError, PeerError, UnavailableError
from deltad.relay.link import Link

REFUSED = UnavailableError("http://peer", found="connection refused")
DENIED = DeniedError("http://peer", expected="a token that it accepts", found="HTTP 401")
WRONG = PeerError("http://peer: chunk 00", expected="5 bytes", found="6 bytes")


def new() -> Link:
    return Link(first_delay=1.0, longest_delay=8.0, denied_delay=100.0, rng=random.Random(0))


def test_it_rests_longer_each_time_nobody_is_reached_up_to_the_longest() -> None:
    link, now = new(), 0.0
    for longest in (1.0, 2.0, 4.0, 8.0, 8.0, 8.0):
        link.failed(REFUSED, now, reachable=False)
        assert longest / 2 <= link.rests_until - now <= longest
        now = link.rests_until
    link.succeeded()
    assert link.rests_until == 0.0
    link.failed(REFUSED, now, reachable=False)
    assert link.rests_until - now <= 1.0, "an answer makes it impatient again"


def test_many_requests_that_fail_at_once_count_as_one_failure() -> None:
    link = new()
    for _ in range(20):
        link.failed(REFUSED, 0.0, reachable=False)
    assert link.rests_until <= 1.0


@pytest.mark.parametrize("error", [DENIED, ConfigError("token file", expected="a token")])
def test_it_rests_long_when_the_token_is_no_good(error: DeniedError | ConfigError) -> None:
    link = new()
    link.failed(error, 0.0, reachable=True)
    assert link.rests_until == 100.0
    link.retry_now()
    assert link.resting(0.0) == ""


def test_a_request_that_fails_by_itself_does_not_make_the_link_rest() -> None:
    link = new()
    link.succeeded()
    link.failed(WRONG, 0.0, reachable=True)
    assert link.up
    assert link.resting(0.0) == ""
    assert link.error is WRONG


def test_the_same_trouble_is_news_once_and_again_after_it_was_over() -> None:
    link = new()
    assert link.failed(REFUSED, 0.0, reachable=False)
    assert not link.failed(REFUSED, 5.0, reachable=False)
    assert link.succeeded()
    assert not link.succeeded()
    assert link.failed(REFUSED, 9.0, reachable=False)
    assert link.failed(DENIED, 99.0, reachable=True)
    assert link.failed(WRONG, 99.0, reachable=True)
    assert not link.failed(WRONG, 100.0, reachable=True)


def test_it_says_for_how_long_it_rests_and_why() -> None:
    link = new()
    link.failed(DENIED, 0.0, reachable=True)
    assert link.resting(40.0) == "waiting 60.0 s before trying again: HTTP 401"
    assert link.resting(100.0) == ""


def test_the_rate_is_that_of_the_last_seconds() -> None:
    link = new()
    assert link.rate(0.0) == 0.0
    for second in range(10):
        link.received(1000, float(second))
    assert link.rate(9.0) == pytest.approx(1200.0)
    assert link.rate(60.0) == 0.0
    assert link.bytes_received == 10_000
