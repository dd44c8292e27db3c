"""Who hands over what: every element once, whatever the ranks hold alike; and a step is whole or nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.client.handover import HandedOver, HandOver, JoinRequest, ShardSpec
from deltad.errors import BaseMismatchError, ConflictError, UsageError
from deltad.protocol.assembly import Session, Share, arrange
from deltad.types import Version

SHAPE = (6, 5)


def joins(*shards: list[ShardSpec], files: tuple[tuple[str, bytes], ...] = ()) -> list[JoinRequest]:
    return [JoinRequest("s", rank, len(shards), tuple(held), files) for rank, held in enumerate(shards)]


def rows(begin: int, end: int, name: str = "w") -> ShardSpec:
    return ShardSpec(name, "BF16", SHAPE, (begin, 0), (end - begin, SHAPE[1]))


@given(
    st.lists(st.integers(1, 5), max_size=4, unique=True).map(lambda cuts: [0, *sorted(cuts), 6]),
    st.integers(1, 4),
    st.data(),
)
def test_every_element_is_handed_over_once_whoever_holds_it(
    borders: list[int], world: int, data: st.DataObject
) -> None:
    cells = [rows(a, b) for a, b in itertools.pairwise(borders)]
    held: list[list[ShardSpec]] = [[] for _ in range(world)]
    for cell in cells:
        for rank in data.draw(st.sets(st.integers(0, world - 1), min_size=1)):
            held[rank].append(cell)
    found = arrange(joins(*held))
    handed = [request.shards[i] for request, numbers in zip(joins(*held), found.owned, strict=True) for i in numbers]
    assert sorted(handed, key=lambda shard: shard.offset) == cells
    assert sum(rect.lanes for shards in found.shards for rect in shards) == 30


def test_what_all_ranks_hold_alike_is_dealt_out_evenly() -> None:
    held = [ShardSpec(f"w{i}", "BF16", SHAPE, (0, 0), SHAPE) for i in range(8)]
    assert [len(numbers) for numbers in arrange(joins(*[held] * 4)).owned] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[rows(0, 3)], [rows(4, 6)]], "hold all 30 elements between them, found 25"),
        ([[rows(0, 4)], [rows(3, 6)]], "found overlaps"),
        ([[rows(0, 3)], [ShardSpec("w", "BF16", (7, 5), (3, 0), (4, 5))]], r"BF16 \[6, 5\], as another rank has it"),
        ([[rows(0, 7)]], "a shard within"),
        ([[ShardSpec("w", "F4", (8,), (0,), (8,))]], "a dtype of whole bytes"),
    ],
)
def test_ranks_that_do_not_add_up_are_refused_and_the_tensor_named(ranks: list[list[ShardSpec]], said: str) -> None:
    with pytest.raises(UsageError, match=f"'w'.*{said}"):
        arrange(joins(*ranks))


def test_files_that_differ_are_refused_by_name() -> None:
    one, other = joins([rows(0, 6)], [rows(0, 6)], files=(("config.json", b"1"),))
    other = JoinRequest(other.session, 1, 2, other.shards, (("config.json", b"2"),))
    with pytest.raises(UsageError, match=r"config.json"):
        arrange([one, other])


def session() -> Session:
    made = Session("s", 2)
    for request in joins([rows(0, 3)], [rows(3, 6)]):
        made.join(request)
    return made


SHARE = Share((), HandedOver(b"\0" * 16, b"\0" * 16, 0, ()))


BASE = Version(1, 0)


def head(rank: int, number: int, base: Version | None = BASE, identity: str = "") -> HandOver:
    return HandOver("s", rank, number, base, identity)


def test_a_step_is_whole_when_every_rank_has_delivered() -> None:
    made = session()
    step = made.begin(head(0, 1))
    assert made.begin(head(1, 1)) is step
    assert not made.deliver(step, 1, SHARE)
    assert made.missing() == [0]
    assert made.deliver(step, 0, SHARE)


def test_a_rank_may_come_once_and_only_with_the_base_and_the_name_that_the_others_have() -> None:
    made = session()
    made.begin(head(0, 1))
    with pytest.raises(ConflictError, match="a second time"):
        made.begin(head(0, 1))
    with pytest.raises(BaseMismatchError, match="as rank 0 has"):
        made.begin(head(1, 1, None))
    with pytest.raises(ConflictError, match="another name"):
        made.begin(head(1, 1, identity="other"))


def test_a_later_step_leaves_an_earlier_one_behind_for_good() -> None:
    made = session()
    left = made.begin(head(0, 1))
    later = made.begin(head(1, 2))
    with pytest.raises(ConflictError, match="given up: rank 1 went on to step 2"):
        made.deliver(left, 0, SHARE)
    with pytest.raises(ConflictError, match="step 2, which other ranks have begun"):
        made.begin(head(0, 1))
    assert made.begin(head(0, 2)) is later


def test_a_share_with_sums_of_other_shards_is_refused() -> None:
    made = session()
    step = made.begin(head(0, 1))
    with pytest.raises(UsageError, match="16 bytes for each of its 1 shards"):
        made.deliver(step, 0, Share((), HandedOver(b"\0" * 32, b"\0" * 16, 0, ())))


def test_a_rank_that_joins_again_with_other_shards_is_told_which() -> None:
    made = session()
    with pytest.raises(ConflictError, match=r"others of 'w'.*a new layout is a new session"):
        made.join(JoinRequest("s", 0, 2, (rows(0, 2),)))
