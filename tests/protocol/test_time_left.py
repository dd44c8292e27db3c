"""How long it will take is told from how it went, and not before enough went."""

from __future__ import annotations

import pytest

from deltad.protocol.time_left import TimeLeft


def test_it_goes_on_as_it_went() -> None:
    left = TimeLeft()
    assert left.seconds("v000001", 10, 100, 50.0) is None
    assert left.seconds("v000001", 40, 100, 60.0) == pytest.approx(20.0)
    assert left.seconds("v000001", 100, 100, 80.0) == 0.0


@pytest.mark.parametrize(("done", "now"), [(12, 60.0), (90, 50.5)])
def test_a_few_parts_or_a_moment_say_nothing(done: int, now: float) -> None:
    left = TimeLeft()
    left.seconds("v000001", 10, 100, 50.0)
    assert left.seconds("v000001", done, 100, now) is None


def test_another_thing_is_told_from_its_own_start() -> None:
    left = TimeLeft()
    left.seconds("v000001", 0, 100, 0.0)
    assert left.seconds("v000001", 50, 100, 10.0) == pytest.approx(10.0)
    assert left.seconds("v000002", 5, 100, 10.0) is None
    assert left.seconds("v000002", 15, 100, 11.0) == pytest.approx(8.5)
