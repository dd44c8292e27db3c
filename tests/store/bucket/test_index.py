"""A pointer is read whole or not at all, never goes back, and what it stopped naming stays for as long as the grace."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.manifest import EdgeKind
from deltad.errors import ConflictError, DeltadError, FormatError, LimitError
from deltad.protocol.target import Statement
from deltad.store.bucket.index import (
    INDEX_FORMAT,
    Entry,
    Index,
    IndexEdge,
    Owner,
    check_advance,
    hints_to_newest,
    object_key,
    object_of,
    parse_index,
    parse_owner,
    pointer_key,
    run_of,
)
from deltad.store.bucket.sweep import Unneeded
from deltad.types import Digest, RunId, Version

RUN = RunId("policy")


def edge(to: int, base: int | None, *, total: int = 200, variant: str = "bf16", size: int = 100) -> IndexEdge:
    kind = EdgeKind.ANCHOR if base is None else EdgeKind.DELTA
    start = None if base is None else Version(1, base)
    return IndexEdge(variant, kind, start, bytes([to, base or 0]) * 16, size, total, (1,))


def entry(number: int, *edges: IndexEdge) -> Entry:
    return Entry(Version(1, number), bytes([number]) * 32, 500, number, edges or (edge(number, number - 1),))


INDEX = Index(
    INDEX_FORMAT,
    RUN,
    7,
    (entry(1, edge(1, None)), entry(2), entry(4, edge(4, 2))),
    (Statement(1, Version(1, 2), "", "an operator", "a bad step", 0.0, "origin"),),
    skipped=1,
)


def test_a_pointer_comes_back_as_it_was_written() -> None:
    assert parse_index(INDEX.encode(), RUN) == INDEX
    owner = Owner(INDEX_FORMAT, "origin", "boot-1")
    assert parse_owner(owner.encode()) == owner


@given(st.data())
def test_any_byte_that_changed_on_the_way_is_noticed(data: st.DataObject) -> None:
    written = INDEX.encode()
    at = data.draw(st.integers(0, len(written) - 1))
    turned = bytes([written[at] ^ data.draw(st.integers(1, 255))])
    for found in (written[:at] + turned + written[at + 1 :], written[:at], written[:at] + written[at + 1 :]):
        with pytest.raises(DeltadError):
            parse_index(found, RUN)


@given(st.binary(max_size=300))
def test_whatever_lies_there_is_refused_with_a_reason(data: bytes) -> None:
    for parse in (lambda: parse_index(data, RUN), lambda: parse_owner(data)):
        with pytest.raises(FormatError, match="expected a line with the SHA-256"):
            parse()


Change = Callable[[Index], Index]
replace = msgspec.structs.replace


def with_entry(**changes: object) -> Change:
    return lambda index: replace(index, entries=(*index.entries[:2], replace(index.entries[2], **changes)))


def with_edge(**changes: object) -> Change:
    return with_entry(edges=(replace(edge(4, 2), **changes),))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: replace(index, format=2),
        lambda index: replace(index, run="other"),
        lambda index: replace(index, serial=0),
        lambda index: replace(index, skipped=-1),
        lambda index: replace(index, entries=()),
        lambda index: replace(index, entries=index.entries[::-1]),
        lambda index: replace(index, targets=index.targets * 300),
        lambda index: replace(index, targets=(replace(index.targets[0], sequence=0),)),
        with_entry(version=Version(0, 4)),
        with_entry(version=Version(1, 2)),
        with_entry(sequence=2),
        with_entry(record=b"short"),
        with_entry(size=0),
        with_entry(size=1 << 30),
        with_edge(variant="../up"),
        with_edge(base=None),
        with_edge(base=Version(1, 4)),
        with_edge(base_run="NO"),
        with_edge(manifest=b""),
        with_edge(size=0),
        with_edge(size=201),
        with_edge(total_bytes=-1),
        with_edge(coders=tuple(range(100))),
    ],
)
def test_a_pointer_that_cannot_be_is_refused_as_a_whole(change: Change) -> None:
    with pytest.raises((FormatError, LimitError)):
        parse_index(change(INDEX).encode(), RUN)


def test_a_pointer_above_its_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(LimitError, match="at most 1048576 bytes"):
        parse_index(bytes((1 << 20) + 1), RUN)


@given(
    known=st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3)),
    new=st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3)),
)
def test_a_pointer_takes_the_place_of_another_only_if_it_is_ahead(
    known: tuple[int, int, int], new: tuple[int, int, int]
) -> None:
    def index(epoch: int, number: int, serial: int) -> Index:
        return replace(INDEX, serial=serial, entries=(replace(entry(1), version=Version(epoch, number)),))

    check_advance(None, index(*new))
    if new[:2] >= known[:2] and new[2] > known[2]:
        check_advance(index(*known), index(*new))
    else:
        with pytest.raises(ConflictError):
            check_advance(index(*known), index(*new))


def test_keys_are_read_back_and_foreign_names_are_nobodys() -> None:
    digest = Digest(bytes(range(32)))
    assert object_of(object_key(digest)) == digest
    assert run_of(pointer_key(RUN)) == RUN
    for key in ("objects/", "objects/AB", f"objects/{'A' * 64}", "other"):
        assert object_of(key) is None
    for key in ("runs/", "runs/latest", "runs/a/b/latest", "runs/../latest", "runs/policy", "runs/policy/latest/x"):
        assert run_of(key) is None


def test_the_way_on_is_told_and_nothing_beside_it() -> None:
    index = replace(INDEX, entries=(*INDEX.entries, entry(5), entry(6, edge(6, 5), edge(6, 1, total=150))))
    told = [(hint.edge.base, hint.target.number) for hint in hints_to_newest(index, Version(1, 4))]
    assert told == [(Version(1, 4), 5), (Version(1, 5), 6)]
    assert [hint.target.number for hint in hints_to_newest(index, Version(1, 1))] == [6]
    assert [hint.target.number for hint in hints_to_newest(index, None)] == [1, 6]


@given(
    looks=st.lists(
        st.tuples(st.floats(0.0, 60.0), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4))), max_size=30
    ),
    grace=st.floats(0.0, 100.0),
)
def test_an_object_goes_only_after_it_was_unneeded_at_every_look_for_as_long_as_the_grace(
    looks: list[tuple[float, set[int], set[int]]], grace: float
) -> None:
    unneeded, now = Unneeded(grace), 0.0
    since: dict[int, float] = {}
    for passed, listed, needed in looks:
        now += passed
        since = {name: since.get(name, now) for name in listed - needed}
        digests = [{Digest(bytes([name])) for name in names} for names in (listed, needed)]
        due = {digest[0] for digest in unneeded.due(*digests, now)}
        assert due == {name for name, began in since.items() if now - began >= grace}
