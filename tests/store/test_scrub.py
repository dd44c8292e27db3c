"""The scrub finds a flipped bit anywhere, sets it aside, goes on where it was, and keeps to its budget (P16)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.delta.encoding import sha256
from deltad.errors import FormatError, IntegrityError, NotFoundError
from deltad.limits import Limits
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.objects import Health
from deltad.store.pack import PAGE
from deltad.store.quarantine import EVIDENCE_BYTES, EVIDENCE_SECONDS
from deltad.store.retention import Retention
from deltad.store.scrub import YIELD_SECONDS, Pace, Pacer, Progress, decode_progress
from deltad.store.scrubber import Scrubber
from deltad.store.store import Store
from deltad.types import Digest
from tests.kit.rot import flip, lose, overwrite
from tests.kit.versions import SMALL_CHUNKS, Lineage
from tests.kit.whole import whole_versions

LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for _ in range(3):
        lineage.publish()
    return lineage


@pytest.fixture
def store(tmp_path: Path, lineage: Lineage) -> Store:
    store = Store.open(tmp_path / "s", limits=LIMITS)
    lineage.fill(store)
    return store


def reopened(store: Store) -> Store:
    store.close()
    return Store.open(store.path, limits=LIMITS)


def scrub(store: Store) -> None:
    """One pass over everything but mirrors."""
    scrubber = Scrubber(store)
    while scrubber.step([]) is not None:
        pass


def test_a_whole_store_is_read_to_its_last_byte_and_nothing_is_set_aside(store: Store, lineage: Lineage) -> None:
    scrubber, read = Scrubber(store), 0
    while (piece := scrubber.step([])) is not None:
        read += piece.bytes
    objects = sum(len(data) for data in lineage.objects().values())
    assert read > objects + sum(len(version.data) for version in lineage.versions)
    assert scrubber.total == objects
    assert store.objects.quarantine.entries() == []
    assert not (store.path / "quarantine").exists()


def test_every_object_with_a_flipped_bit_is_set_aside_and_held_again_once_it_is_stored(
    store: Store, lineage: Lineage
) -> None:
    objects = lineage.objects()
    for at, (digest, data) in enumerate(objects.items()):
        flip(store, digest, at * 37 % len(data), at % 8)
    scrub(store)
    for again in (store, reopened(store)):
        assert set(again.objects.quarantine.damaged()) == objects.keys()
        for digest in objects:
            assert not again.has(digest)
            with pytest.raises(NotFoundError, match="damaged, and set aside"):
                again.open_object(digest)
    for version in lineage.versions:
        version.put_into(again)
    for last in (again, reopened(again)):
        assert last.objects.quarantine.damaged() == []
        assert whole_versions(last, lineage.versions[0].run) == [version.version for version in lineage.versions]


def test_what_was_wrong_is_known_byte_by_byte_once_the_right_bytes_are_there(store: Store, lineage: Lineage) -> None:
    digest, data = next((d, data) for d, data in lineage.objects().items() if d in lineage.versions[1].chunks)
    flip(store, digest, 5, 0)
    scrub(store)
    (before,) = store.objects.quarantine.entries()
    extent = store.objects.place(digest)
    assert extent is not None
    assert before.place == f"{extent.path} from byte {extent.offset}"
    evidence = (store.path / "quarantine" / digest.hex()).read_bytes().partition(b"\n")[2]
    assert evidence == data[:5] + bytes([data[5] ^ 1]) + data[6:]
    store.put_chunk(data)
    (after,) = store.objects.quarantine.entries()
    assert after.healed
    assert after.difference == f"byte 5 was 0x{data[5] ^ 1:02x}, not 0x{data[5]:02x}"


@pytest.mark.parametrize("where", ["header", "padding"])
@pytest.mark.parametrize("sealed", [True, False], ids=["in a full pack", "in the pack that is written to"])
def test_damage_around_a_whole_chunk_moves_the_chunk_and_the_next_start_is_not_in_the_way(
    tmp_path: Path, where: str, sealed: bool
) -> None:
    limits = replace(Limits(), pack_bytes=4 * PAGE)
    store = Store.open(tmp_path / "s", limits=limits)
    chunks = [bytes([i]) * 3000 for i in range(6)]
    for chunk in chunks:
        store.put_chunk(chunk)
    digest = sha256(chunks[1] if sealed else chunks[4])
    place = store.objects.extent(digest)
    assert place.path.with_suffix(".index").exists() == sealed
    flip(store, digest, -3 if where == "header" else place.size + 1)
    scrub(store)
    assert store.objects.extent(digest) != place
    assert store.objects.quarantine.entries() == []
    store.close()
    again = Store.open(tmp_path / "s", limits=limits)
    assert [again.read(sha256(chunk)) for chunk in chunks] == chunks
    assert again.objects.extent(digest) != place


def test_a_record_with_a_flipped_bit_is_written_anew_from_memory(store: Store, lineage: Lineage) -> None:
    (path, *_) = sorted((store.path / "runs" / lineage.run / "records").iterdir())
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    scrub(store)
    assert path.read_bytes() == before


def test_a_read_that_meets_damage_makes_the_object_suspect_and_a_suspect_is_examined(
    store: Store, lineage: Lineage
) -> None:
    digest = lineage.versions[0].layout.digest
    flip(store, digest, 3)
    with pytest.raises(IntegrityError, match="fetched or made again"):
        store.read(digest)
    assert store.objects.suspects() == [digest]
    assert store.objects.suspects() == []
    assert store.objects.examine(digest) is Health.DAMAGED
    assert store.objects.examine(digest) is Health.GONE


def test_what_a_version_needs_and_is_gone_counts_as_damaged_until_it_is_stored_again(
    store: Store, lineage: Lineage
) -> None:
    version = lineage.versions[1]
    last = list(lineage.versions[2].chunks)
    manifest = Digest(version.record.variants[0].edges[0].manifest)
    lose(store, manifest)
    scrub(store)
    assert store.objects.quarantine.damaged() == [manifest]
    version.put_into(store)
    assert store.objects.quarantine.entries()[0].difference == "it was lost"
    # Rot at the very end of the pack that is written to is taken for a torn write by the next start.
    end = max((store.objects.extent(digest) for digest in last), key=lambda extent: (extent.path, extent.offset))
    (gone,) = (digest for digest in last if store.objects.extent(digest) == end)
    flip(store, gone, 4)
    again = reopened(store)
    assert not again.has(gone)
    assert again.objects.quarantine.damaged() == []
    scrub(again)
    assert again.objects.quarantine.damaged() == [gone]
    again.put_chunk(lineage.versions[2].objects[gone])
    assert whole_versions(again, version.run)[-1] == lineage.versions[2].version


def test_an_edge_that_was_never_pulled_is_no_loss(tmp_path: Path) -> None:
    lineage = Lineage(limits=LIMITS, tensors=2)
    lineage.publish()
    both = lineage.publish(anchor=True)
    store = Store.open(tmp_path / "s", limits=LIMITS)
    lineage.fill(store)
    scrub(store)
    anchor = Digest(both.record.variants[0].edges[1].manifest)
    lose(store, anchor)
    scrub(store)
    assert store.objects.quarantine.damaged() == []
    delta = Digest(both.record.variants[0].edges[0].manifest)
    lose(store, delta)
    scrub(store)
    assert store.objects.quarantine.damaged() == [delta]


def test_a_file_that_the_disk_cannot_give_back_is_damaged_too(store: Store, lineage: Lineage) -> None:
    digest = lineage.versions[0].layout.digest
    overwrite(store, digest, b"")
    assert store.objects.examine(digest) is Health.DAMAGED
    store.put(lineage.versions[0].layout.encode())
    assert store.objects.quarantine.entries()[0].difference == ""
    assert store.read(digest) == lineage.versions[0].layout.encode()


def test_a_start_goes_on_where_the_scrub_was_and_a_lost_cursor_costs_a_pass(store: Store) -> None:
    first = Scrubber(store, wall=lambda: 100.0)
    keys = []
    while (piece := first.step([])) is not None:
        keys.append(piece.key)
    assert keys == sorted(set(keys))
    assert first.progress == Progress("", 100.0, 100.0)
    begun = Scrubber(store, wall=lambda: 200.0)
    for _ in range(7):
        begun.step([])
    begun.save()
    again = Scrubber(reopened(store), wall=lambda: 300.0)
    rest = []
    while (piece := again.step([])) is not None:
        rest.append(piece.key)
    versions = [key for key in keys if key.startswith("0")]
    assert rest == [keys[6]] * len(versions) + keys[7:], "each life looks for what is missing, and then goes on"
    assert again.progress == Progress("", 300.0, 200.0)
    (store.path / "scrub").write_bytes(b"\xff rot")
    assert Scrubber(store, wall=lambda: 400.0).progress == Progress(began=400.0)


@given(data=st.binary(max_size=80))
def test_any_bytes_in_place_of_the_cursor_are_a_cursor(data: bytes) -> None:
    assert isinstance(decode_progress(data, 7.0), Progress)


def test_many_flips_at_once_take_the_memory_of_one_and_their_evidence_stays_within_its_bound(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    size, count = 4 << 20, EVIDENCE_BYTES // (4 << 20) + 6
    digests = []
    for i in range(count):
        digests.append(store.put_chunk(i.to_bytes(2, "little") * (size // 2)))
        flip(store, digests[-1], 1000)
    tracemalloc.start()
    scrub(store)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * size
    assert sorted(store.objects.quarantine.damaged()) == sorted(digests)
    kept = [one.kept for one in store.objects.quarantine.entries()]
    assert sum(kept) <= EVIDENCE_BYTES
    assert kept.count(0) == 6
    again = Store.open(reopened_path(store))
    assert sorted(again.objects.quarantine.damaged()) == sorted(digests)
    # What was healed makes room for what is damaged.
    again.put_chunk((0).to_bytes(2, "little") * (size // 2))
    another = again.put_chunk(b"\xee" * size)
    flip(again, another, 5)
    assert again.objects.examine(another) is Health.DAMAGED
    assert [one.kept for one in again.objects.quarantine.entries() if one.digest == another] == [size]


def reopened_path(store: Store) -> Path:
    store.close()
    return store.path


def test_a_foreign_file_in_the_quarantine_stops_the_start_by_name(store: Store) -> None:
    (store.path / "quarantine").mkdir()
    (store.path / "quarantine" / "thesis.tex").write_text("x")
    store.close()
    with pytest.raises(FormatError, match=r"thesis\.tex"):
        Store.open(store.path, limits=LIMITS)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_set_aside_and_led_to_by_nothing_goes_with_a_collection_and_evidence_after_a_while(
    tmp_path: Path,
) -> None:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for number in range(4):
        lineage.publish(anchor=number == 2)
    clock = Clock()
    store = Store.open(tmp_path / "s", limits=LIMITS, clock=clock)
    lineage.fill(store)
    old, kept = lineage.versions[1], lineage.versions[3]
    gone = Digest(old.record.variants[0].edges[0].manifest)
    healed = next(iter(kept.chunks))
    for digest in (gone, healed):
        flip(store, digest, 2)
        store.objects.examine(digest)
    store.put_chunk(kept.objects[healed])
    clock.now += GRACE_SECONDS + LEASE_SECONDS
    # Nobody can say what the damaged manifest leads to, so nothing that it may lead to is removed.
    with pytest.raises(IntegrityError, match=gone.hex()):
        collect(store, {})
    assert gone in store.objects.quarantine
    collect(store, {store.runs()[0]: Retention(versions=1)})
    clock.now += GRACE_SECONDS
    collect(store, {store.runs()[0]: Retention(versions=1)})
    assert [one.digest for one in store.objects.quarantine.entries()] == [healed]
    clock.now += EVIDENCE_SECONDS
    collect(store, {})
    assert store.objects.quarantine.entries() == []
    assert list((store.path / "quarantine").iterdir()) == []
    assert whole_versions(store, store.runs()[0])[-1] == kept.version


@given(
    total=st.integers(1, 1 << 40),
    budget=st.integers(1 << 10, 1 << 30),
    pieces=st.lists(st.tuples(st.integers(0, 8 << 20), st.floats(0, 5)), min_size=1, max_size=60),
)
def test_no_more_is_read_in_any_time_than_the_budget_allows(
    total: int, budget: int, pieces: list[tuple[int, float]]
) -> None:
    pacer, now, read = Pacer(Pace(10.0, budget), 0.0), 0.0, []
    for size, idle in pieces:
        while rest := pacer.rest(now, total, busy=False):
            now += rest
        pacer.read(size)
        read.append((now, size))
        now += idle
    for i, (since, first) in enumerate(read):
        for end in range(i + 1, len(read)):
            at, between = read[end][0], sum(size for _, size in read[i:end])
            assert between <= budget * (at - since + 1) * 1.001 + first + 1


def test_everything_is_read_once_in_the_time_that_it_is_given() -> None:
    pacer, now, left = Pacer(Pace(1000.0, 1 << 30), 0.0), 0.0, 100 << 20
    while left > 0:
        now += pacer.rest(now, 100 << 20, busy=False)
        pacer.read(1 << 20)
        left -= 1 << 20
    assert 980 <= now <= 1000


def test_the_scrub_gives_way_to_work_but_not_for_ever() -> None:
    pacer = Pacer(Pace(1.0, 1 << 30), 0.0)
    assert pacer.rest(0.0, 1000, busy=True) > 0
    assert pacer.rest(YIELD_SECONDS - 1, 1000, busy=True) > 0
    assert pacer.rest(YIELD_SECONDS, 1000, busy=True) == 0
    assert pacer.rest(YIELD_SECONDS + 1, 1000, busy=False) == 0
    assert pacer.rest(YIELD_SECONDS + 2, 1000, busy=True) > 0, "the next work is given way to again"
