"""A collection takes what nobody needs, and says why; whoever needs something keeps it (P15)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltad.delta.manifest import decode_manifest
from deltad.errors import IntegrityError, NotFoundError
from deltad.store.garbage import GRACE_SECONDS, Collected, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.objects import ObjectReader
from deltad.store.pins import Pin
from deltad.store.retention import Candidate, Retention, judge
from deltad.store.store import Store
from deltad.types import Digest, Version
from tests.kit.memory_disk import MemoryDisk
from tests.kit.rot import overwrite
from tests.kit.versions import SMALL_CHUNKS, Lineage, Published
from tests.kit.whole import read_version, whole_versions

STORE = Path("/store")
LIMITS = replace(SMALL_CHUNKS, pack_bytes=24 << 10)


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lineage_of(count: int, anchors: tuple[int, ...] = ()) -> Lineage:
    lineage = Lineage(limits=LIMITS, tensors=2)
    for number in range(count):
        lineage.publish(anchor=number in anchors)
    return lineage


LINEAGE = lineage_of(12, anchors=(4, 5, 9))
RUN = LINEAGE.versions[0].run


class Place:
    """A store in memory that has been open for long, with the first `count` versions of the lineage."""

    def __init__(self, count: int = 0) -> None:
        self.clock = Clock()
        self.disk = MemoryDisk()
        self.store = self.open()
        for version in LINEAGE.versions[:count]:
            version.commit_into(self.store)
        self.clock.now += GRACE_SECONDS + LEASE_SECONDS

    def open(self) -> Store:
        return Store.open(STORE, limits=LIMITS, files=self.disk, clock=self.clock)

    def collect(self, *, dry_run: bool = False, **retention: float) -> Collected:
        return collect(self.store, {RUN: Retention(**retention)}, dry_run=dry_run)  # type: ignore[arg-type]

    def numbers(self) -> list[int]:
        return [version.number for version in whole_versions(self.store, RUN)]


def why(collected: Collected, number: int) -> str:
    return next(found.why for found in collected.versions if found.thing == f"policy/v{number:06d}")


def test_without_a_bound_nothing_goes() -> None:
    place = Place(8)
    before = place.disk.tree()
    collected = place.collect()
    assert all(found.kept for found in (*collected.versions, *collected.objects))
    assert place.disk.tree() == before, "no pack is rewritten for nothing"
    assert "nothing bounds" in why(collected, 1)


def test_the_newest_ones_stay_and_all_that_leads_to_them_from_an_anchor() -> None:
    place = Place(8)
    collected = place.collect(versions=1)
    assert place.numbers() == [6, 7, 8]
    assert why(collected, 8) == "the newest version"
    assert why(collected, 7) == "on the path to v000008"
    assert why(collected, 3) == "5 versions are newer, and 1 are kept"
    needed = read_version(place.store, place.store.run(RUN).record(Version(1, 8)))
    needed |= {digest for version in LINEAGE.versions[5:8] for digest in version.objects}
    left = set(place.store.objects.sizes()) - needed
    assert all(digest in version.chunks for digest in left for version in LINEAGE.versions if digest in version.objects)
    assert len(left) < 3, "only what shares a pack with what is needed"


def test_space_comes_back_with_the_packs() -> None:
    place = Place(12)
    before = place.store.used_bytes()
    collected = place.collect(versions=2)
    assert place.numbers() == [10, 11, 12]
    assert collected.freed_bytes > before // 4
    assert place.store.used_bytes() < before // 2


def test_space_comes_back_from_a_pack_that_is_still_written_to() -> None:
    clock, disk = Clock(), MemoryDisk()
    roomy = replace(LIMITS, pack_bytes=64 << 20)
    store = Store.open(STORE, limits=roomy, files=disk, clock=clock)
    for version in LINEAGE.versions[:11]:
        version.commit_into(store)
    clock.now += GRACE_SECONDS + LEASE_SECONDS
    before = store.used_bytes()
    collect(store, {RUN: Retention(versions=1)})
    assert store.used_bytes() < before // 2
    LINEAGE.versions[11].commit_into(store)
    store.close()
    again = Store.open(STORE, limits=roomy, files=disk)
    assert [version.number for version in whole_versions(again, RUN)] == [10, 11, 12]


def test_age_counts_from_when_a_version_came_and_not_by_what_its_record_says() -> None:
    place = Place(6)
    place.clock.now += 1000
    LINEAGE.versions[6].commit_into(place.store)
    collected = place.collect(seconds=900)
    assert place.numbers() == [6, 7]
    assert "versions are kept for 900 s" in why(collected, 5)


def test_bytes_are_counted_from_the_newest_version_down() -> None:
    place = Place(12)
    sizes = {found.thing: found.bytes for found in place.collect(dry_run=True).versions}
    collected = place.collect(bytes=sizes["policy/v000012"] + sizes["policy/v000011"])
    assert place.numbers() == [10, 11, 12]
    assert why(collected, 11) == "within what is kept of this run"
    assert why(collected, 10) == "on the path to v000011"


def test_a_pin_keeps_a_version_with_its_path_and_outlives_a_restart() -> None:
    place = Place(12)
    place.store.run(RUN).pin(Version(1, 3), Pin("ana", "the paper's policy"))
    place.store.close()
    place.store = place.open()
    place.clock.now += LEASE_SECONDS + GRACE_SECONDS
    collected = place.collect(versions=1)
    assert place.numbers() == [1, 2, 3, 10, 11, 12]
    assert why(collected, 3) == "pinned by ana: the paper's policy"
    place.store.run(RUN).unpin(Version(1, 3))
    place.collect(versions=1)
    assert place.numbers() == [10, 11, 12]
    with pytest.raises(NotFoundError, match="v000003: not held here; what lay there was let go"):
        place.store.run(RUN).pin(Version(1, 3), Pin("ana", ""))


def test_pinning_twice_for_one_reason_changes_nothing_and_another_reason_replaces_it() -> None:
    run = Place(3).store.run(RUN)
    first = Pin("ana", "the paper's policy", 1_700_000_000.0)
    assert run.pin(Version(1, 2), first)
    assert not run.pin(Version(1, 2), Pin(first.by, first.why, 1_800_000_000.0))
    assert run.pins() == {Version(1, 2): first}
    assert run.pin(Version(1, 2), Pin("ben", "a baseline"))
    assert run.pins()[Version(1, 2)].by == "ben"
    assert run.unpin(Version(1, 2))
    assert not run.unpin(Version(1, 2))
    assert run.pins() == {}


def test_a_version_that_never_was_can_be_neither_pinned_nor_unpinned() -> None:
    run = Place(3).store.run(RUN)
    for change in (lambda: run.pin(Version(1, 9), Pin("ana", "")), lambda: run.unpin(Version(1, 9))):
        with pytest.raises(NotFoundError, match="policy/v000009: not held here; see"):
            change()


def test_a_pin_that_an_older_deltad_wrote_without_its_time_is_read() -> None:
    place = Place(3)
    place.store.run(RUN).pin(Version(1, 2), Pin("ana", ""))
    tree = place.disk.tree()
    (path,) = [path for path in tree if path.endswith(".pin")]
    place.disk = MemoryDisk({**tree, path: b'{"by":"ana","why":"kept"}'})
    assert place.open().run(RUN).pins() == {Version(1, 2): Pin("ana", "kept")}


def test_a_lease_keeps_the_way_to_the_newest_until_it_ends() -> None:
    place = Place(12)
    place.store.run(RUN).lease("replica a", Version(1, 7))
    collected = place.collect(versions=1)
    assert place.numbers() == [6, 7, 8, 9, 10, 11, 12]
    assert why(collected, 7) == "leased by replica a for 60 s"
    assert why(collected, 9) == "on the way to the newest from where replica a for 60 s holds v000007"
    place.clock.now += LEASE_SECONDS / 2
    place.store.run(RUN).lease("replica a", Version(1, 7))
    place.clock.now += LEASE_SECONDS - 1
    place.collect(versions=1)
    assert 7 in place.numbers()
    place.clock.now += 1
    place.collect(versions=1)
    assert place.numbers() == [10, 11, 12]
    with pytest.raises(NotFoundError, match="v000007"):
        place.store.run(RUN).lease("replica a", Version(1, 7))


def test_after_a_start_readers_have_time_to_say_what_they_hold() -> None:
    place = Place(12)
    place.store.close()
    place.store = place.open()
    assert "readers have 60 s" in why(place.collect(versions=1), 1)
    assert place.numbers() == list(range(1, 13))


def test_what_a_pull_asked_for_stays_however_long_it_takes() -> None:
    place = Place(3)
    late = LINEAGE.versions[3]
    with place.store.leases.work("the pull of policy"):
        late.put_into(place.store)
        place.clock.now += 100 * GRACE_SECONDS
        collected = place.collect(versions=1)
        assert any(found.why == "asked for since the pull of policy began" for found in collected.objects)
        assert place.store.run(RUN).commit(late.data)
    place.clock.now += 100 * GRACE_SECONDS
    place.collect(versions=1)
    assert place.numbers() == [1, 2, 3, 4]


def test_objects_of_no_version_go_once_nobody_has_asked_for_them_for_long() -> None:
    place = Place(1)
    digest = place.store.put(b"left by a publish that failed")
    place.clock.now += GRACE_SECONDS - 1
    place.collect()
    assert place.store.objects.sizes()[digest]
    place.clock.now += 1
    explained = {found.thing: found.why for found in place.collect(dry_run=True).objects}
    assert "nobody has asked for it for 600 s" in explained[f"object {digest.hex()}"]
    assert digest in place.store.objects.sizes()
    place.collect()
    assert digest not in place.store.objects.sizes()


def test_what_a_pull_had_before_a_restart_is_not_fetched_again() -> None:
    place = Place(1)
    half = dict(list(LINEAGE.versions[1].objects.items())[::2])
    for data in half.values():
        place.store.put(data)
    place.store.close()
    place.clock.now += 100 * GRACE_SECONDS
    place.store = place.open()
    place.clock.now += LEASE_SECONDS
    place.collect()
    assert half.keys() <= place.store.objects.sizes().keys()
    place.clock.now += GRACE_SECONDS
    place.collect()
    only = half.keys() - LINEAGE.versions[0].objects.keys()
    assert only
    assert only.isdisjoint(place.store.objects.sizes())


def test_a_dry_run_says_what_a_collection_then_does_and_changes_nothing() -> None:
    place = Place(12)
    before = place.disk.tree()
    planned = place.collect(versions=1, dry_run=True)
    assert place.disk.tree() == before
    assert place.collect(versions=1) == planned
    gone = {found.thing for found in planned.objects if not found.kept}
    left = {f"object {digest.hex()}" for digest in place.store.objects.sizes()}
    assert {found.thing for found in planned.objects if found.kept} <= left
    assert len(gone) > 20


def test_a_damaged_description_stops_the_collection_before_any_object_goes(tmp_path: Path) -> None:
    clock = Clock()
    store = Store.open(tmp_path / "s", limits=LIMITS, clock=clock)
    for version in LINEAGE.versions[:8]:
        version.commit_into(store)
    clock.now += GRACE_SECONDS + LEASE_SECONDS
    edge = LINEAGE.versions[7].record.variants[0].edges[0]
    manifest = decode_manifest(LINEAGE.versions[7].objects[Digest(edge.manifest)])
    overwrite(store, Digest(manifest.pages[0].digest), b"rot")
    before = set(store.objects.sizes())
    with pytest.raises(IntegrityError, match=manifest.pages[0].digest.hex()[2:]):
        collect(store, {RUN: Retention(versions=1)})
    assert set(store.objects.sizes()) == before


def test_while_a_description_of_a_kept_version_is_damaged_no_way_to_it_is_let_go(tmp_path: Path) -> None:
    clock = Clock()
    store = Store.open(tmp_path / "s", limits=LIMITS, clock=clock)
    for version in LINEAGE.versions[:4]:
        version.commit_into(store)
    clock.now += GRACE_SECONDS + LEASE_SECONDS
    manifest = Digest(LINEAGE.versions[3].record.variants[0].edges[0].manifest)
    overwrite(store, manifest, b"rot")
    store.objects.examine(manifest)
    with pytest.raises((IntegrityError, NotFoundError)):
        collect(store, {RUN: Retention(versions=1)})
    assert [record.version.number for record in store.run(RUN).records()] == [1, 2, 3, 4]


def test_the_newest_version_stays_whatever_the_bounds() -> None:
    candidates = [Candidate(version.record, age=1e9, bytes=1 << 60) for version in LINEAGE.versions]
    joins = Place(12).store.run(RUN).join
    verdicts = judge(candidates, Retention(versions=0, seconds=0.0, bytes=0), joins)
    assert [version.number for version, verdict in sorted(verdicts.items()) if verdict.kept] == [10, 11, 12]


class Life(RuleBasedStateMachine):
    """Versions come, readers come and go, the daemon restarts, and in between everything that can go goes."""

    @initialize()
    def start(self) -> None:
        self.place = Place(1)
        self.next = 1
        self.pinned: set[Version] = set()
        self.leased: dict[str, tuple[Version, float]] = {}
        self.gone: dict[str, set[Version]] = {}
        """What had been let go when a holder came: its lease cannot keep that."""
        self.reading: list[tuple[ObjectReader, bytes]] = []
        self.pulling: Published | None = None

    @property
    def store(self) -> Store:
        return self.place.store

    @precondition(lambda self: self.next < len(LINEAGE.versions) and self.pulling is None)
    @rule()
    def publish(self) -> None:
        LINEAGE.versions[self.next].commit_into(self.store)
        self.next += 1

    @precondition(lambda self: self.next < len(LINEAGE.versions) and self.pulling is None)
    @rule(part=st.floats(0, 1))
    def begin_a_pull(self, part: float) -> None:
        self.pulling = LINEAGE.versions[self.next]
        self.store.leases.set_work("pull", running=True)
        objects = sorted(self.pulling.objects.items())
        for digest, data in objects:
            if not self.store.has(digest) and len(objects) * part > 1:
                put = self.store.put_chunk if digest in self.pulling.chunks else self.store.put
                put(data)

    @precondition(lambda self: self.pulling is not None)
    @rule()
    def end_the_pull(self) -> None:
        assert self.pulling is not None
        held = self.store.objects.sizes()
        for digest, data in self.pulling.objects.items():
            if digest not in held:
                self.store.put(data)
        assert self.store.run(RUN).commit(self.pulling.data)
        self.store.leases.set_work("pull", running=False)
        self.pulling = None
        self.next += 1

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self.visible()))
        self.store.run(RUN).pin(version, Pin("ana", ""))
        self.pinned.add(version)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.pinned)))
        self.store.run(RUN).unpin(version)
        self.pinned.discard(version)

    @rule(data=st.data(), holder=st.sampled_from(["a", "b"]), seconds=st.sampled_from([1.0, 60.0]))
    def lease(self, data: st.DataObject, holder: str, seconds: float) -> None:
        version = data.draw(st.sampled_from(self.visible()))
        self.store.run(RUN).lease(holder, version, seconds)
        self.leased[holder] = (version, self.place.clock.now + seconds)
        self.gone[holder] = {Version(1, number) for number in range(1, self.next + 1)} - set(self.visible())

    @rule(data=st.data())
    def open_an_object(self, data: st.DataObject) -> None:
        version = LINEAGE.versions[data.draw(st.sampled_from(self.visible())).number - 1]
        digest = data.draw(st.sampled_from(sorted(version.objects)))
        self.reading.append((self.store.open_object(digest), version.objects[digest]))

    @rule(seconds=st.sampled_from([0.5, 30.0, 100.0, 10_000.0]))
    def wait(self, seconds: float) -> None:
        self.place.clock.now += seconds

    @precondition(lambda self: self.pulling is None)
    @rule()
    def restart(self) -> None:
        self.store.close()
        self.place.store = self.place.open()
        # Readers come back within the life of a lease, as they must.
        for holder, (version, ends) in self.leased.items():
            if ends > self.place.clock.now:
                self.store.run(RUN).lease(holder, version, ends - self.place.clock.now)

    @rule(
        versions=st.sampled_from([None, 1, 2, 5]),
        seconds=st.sampled_from([None, 0.0, 50.0]),
        size=st.sampled_from([None, 0, 20_000]),
    )
    def collect(self, versions: int | None, seconds: float | None, size: int | None) -> None:
        held = set(self.store.objects.sizes())
        collect(self.store, {RUN: Retention(versions, seconds, size)})
        if self.pulling is not None:
            assert held & set(self.pulling.objects) <= set(self.store.objects.sizes())

    def visible(self) -> list[Version]:
        return [record.version for record in self.store.run(RUN).records()]

    @invariant()
    def what_is_needed_is_there_and_whole(self) -> None:
        if not hasattr(self, "place"):
            return
        visible = set(whole_versions(self.store, RUN))
        newest = Version(1, self.next)
        assert newest in visible
        assert self.pinned <= visible
        for holder, (version, ends) in self.leased.items():
            if ends > self.place.clock.now:
                needed = {Version(1, number) for number in range(version.number, newest.number + 1)}
                assert needed - self.gone[holder] <= visible
        for reader, data in self.reading:
            assert reader.read(len(data) + 1, 0) == data


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
