"""Which mode a version is coded in, and the reason that is given."""

import pytest

from deltad.protocol.mode import FASTEST_LINK, MODES, Reader, choose_mode

ALL = (0, 1, 2, 3)


def test_before_any_region_has_told_its_rate_it_is_dense() -> None:
    for readers in ([], [Reader("b")], [Reader("b", 0.0, ALL)]):
        choice = choose_mode("auto", readers)
        assert (choice.mode, choice.reason) == ("dense", "no region below has told what it pulls at")


@pytest.mark.parametrize(
    ("rate", "mode"),
    [
        (1e3, "dense"),
        (6.9e6, "dense"),
        (7.0e6, "mid"),
        (7.4e6, "mid"),
        (8.8e6, "fast"),
        (9.0e6, "blind"),
        (1e9, "blind"),
    ],
)
def test_the_faster_the_link_the_less_work_goes_into_a_byte(rate: float, mode: str) -> None:
    choice = choose_mode("auto", [Reader("b", rate, ALL)])
    assert choice.mode == mode
    assert choice.reason == f"b pulls at {rate / 1e6:.1f} MB/s"


def test_the_bounds_are_what_one_thread_gives_in_bytes_on_the_wire() -> None:
    """The table of the docstring: bytes of a delta for a byte of the model, times bytes of model a second."""
    for mode, share, rate in (("dense", 0.00160, 4.33e9), ("mid", 0.00166, 4.44e9), ("fast", 0.00192, 4.65e9)):
        assert FASTEST_LINK[mode] == pytest.approx(share * rate, rel=0.02)
    assert sorted(FASTEST_LINK, key=FASTEST_LINK.__getitem__) == list(MODES[:3])


def test_the_slowest_link_decides_and_is_named() -> None:
    readers = [Reader("near", 1e9, ALL), Reader("far", 2e6, ALL), Reader("silent", 0.0, ALL)]
    assert choose_mode("auto", readers).mode == "dense"
    assert choose_mode("auto", readers).reason == "far pulls at 2.0 MB/s"


def test_with_more_threads_a_faster_link_still_gets_fewer_bytes() -> None:
    reader = Reader("b", 35e6, ALL)
    assert [choose_mode("auto", [reader], threads=n).mode for n in (1, 4, 5, 6)] == ["blind", "fast", "mid", "dense"]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_configured_is_taken_whatever_the_links(mode: str) -> None:
    choice = choose_mode(mode, [Reader("b", 1e9, ALL)])
    assert (choice.mode, choice.reason) == (mode, "as configured")


def test_while_a_region_does_not_read_the_context_coder_it_is_blind() -> None:
    readers = [Reader("new", 1e6, ALL), Reader("old", 0.0, (0, 1, 3))]
    assert choose_mode("auto", readers).mode == "blind"
    assert choose_mode("auto", readers).reason == "old does not read coder 2 (context)"


def test_a_configured_mode_that_a_region_does_not_read_is_taken_and_the_region_named() -> None:
    old = [Reader("old", 1e6, (0, 1, 3))]
    assert choose_mode("mid", old).mode == "mid"
    assert choose_mode("mid", old).reason == "as configured, though old does not read coder 2 (context)"
    assert choose_mode("blind", old).reason == "as configured"


@pytest.mark.parametrize("coder", ["auto", *MODES])
def test_a_region_that_lacks_a_coder_of_any_delta_is_named(coder: str) -> None:
    readers = [Reader("new", 1e6, ALL), Reader("silent", 1e6), Reader("old", 1e6, (0, 1, 2))]
    assert choose_mode(coder, readers).mode == choose_mode(coder, readers[:2]).mode
    assert choose_mode(coder, readers).reason.endswith(", though old does not read coder 3 (packed)")
