"""A version of two precisions: each has weights, edges and a way of its own, and both are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.daemon.versions import Versions
from deltad.delta.backend import choose
from deltad.errors import NotFoundError
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.mirror import LONG_WALK, Mirror
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import Variant, Version, parse_run
from tests.kit.checkpoints import read_checkpoint
from tests.kit.versions import Lineage, Published, joined

RUN = parse_run("policy")
WIDE, NARROW = Variant("bf16"), Variant("fp8")


class Place:
    """Versions 1 to `count` of both variants, in a store that has been open for long."""

    def __init__(self, home: Path, count: int = 6, anchors: tuple[int, ...] = (4,)) -> None:
        self.now = 1000.0
        self.store = Store.open(home / "store", clock=lambda: self.now)
        self.run = self.store.run(RUN)
        self.wide = Lineage(tensors=2, variant=WIDE)
        self.narrow = Lineage(tensors=1, variant=NARROW, seed=5)
        self.versions: list[Published] = []
        for number in range(1, count + 1):
            narrow = self.narrow.publish(anchor=number in anchors)
            self.versions.append(joined(self.wide.publish(), narrow))
            self.versions[-1].commit_into(self.store)
        self.now += GRACE_SECONDS + LEASE_SECONDS

    def way(self, variant: Variant, number: int) -> list[int]:
        path = self.run.path(self.run.record(Version(1, number)), variant)
        return [hop.record.version.number for hop in path.hops]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_each_variant_has_a_way_of_its_own(place: Place) -> None:
    assert place.way(WIDE, 6) == [1, 2, 3, 4, 5, 6]
    assert place.way(NARROW, 6) == [4, 5, 6]
    skip = place.narrow.skip(place.narrow.versions[3], place.narrow.versions[5])
    skip.put_into(place.store)
    place.run.add_edge(skip.manifest)
    assert place.way(NARROW, 6) == [4, 6]
    assert place.way(WIDE, 6) == [1, 2, 3, 4, 5, 6]


def test_each_variant_is_rebuilt_with_its_own_weights(place: Place, tmp_path: Path) -> None:
    for variant, lineage in ((WIDE, place.wide), (NARROW, place.narrow)):
        mirror = Mirror(place.store, place.run, variant, choose())
        for number in (3, 6):
            directory = tmp_path / f"{variant}-{number}"
            record = place.run.record(Version(1, number))
            assert mirror.export(record, directory) == record.variant(variant).root
            assert read_checkpoint(directory).equals(lineage.versions[number - 1].weights)


def test_a_replica_of_either_variant_is_led_on_by_deltas(place: Place) -> None:
    versions = Versions(place.store, RUN, choose(), daemon="a")
    for variant in (WIDE, NARROW):
        reply = versions.next_for(variant, Version(1, 4))
        assert reply is not None
        assert [step.version for step in reply.steps] == ["v000005", "v000006"]
        assert [bytes.fromhex(step.root) for step in reply.steps] == [
            place.run.record(Version(1, number)).variant(variant).root for number in (5, 6)
        ]


def test_a_description_names_the_roots_of_both(place: Place) -> None:
    info = Versions(place.store, RUN, choose(), daemon="a").latest()
    assert info is not None
    record = place.run.record(Version(1, 6))
    assert (info.variant, info.root) == (WIDE, record.variant(WIDE).root.hex())
    assert info.others == {NARROW: record.variant(NARROW).root.hex()}


def test_a_version_stays_while_either_variant_needs_it(place: Place) -> None:
    collect(place.store, {RUN: Retention(versions=1)})
    assert place.way(WIDE, 6) == [1, 2, 3, 4, 5, 6]
    assert place.way(NARROW, 6) == [4, 5, 6]
    skip = place.wide.skip(place.wide.versions[0], place.wide.versions[4])
    skip.put_into(place.store)
    place.run.add_edge(skip.manifest)
    place.now += GRACE_SECONDS
    collect(place.store, {RUN: Retention(versions=1)})
    assert [record.version.number for record in place.run.records()] == [1, 4, 5, 6]
    assert place.way(WIDE, 6) == [1, 5, 6]
    assert place.way(NARROW, 6) == [4, 5, 6]


def test_a_version_is_not_committed_with_one_variant_alone(place: Place) -> None:
    wide, narrow = place.wide.publish(), place.narrow.publish()
    both = joined(wide, narrow)
    wide.put_into(place.store)
    with pytest.raises(NotFoundError):
        place.run.commit(both.data)
    narrow.put_into(place.store)
    assert place.run.commit(both.data)


async def test_the_mirror_of_each_variant_catches_up(tmp_path: Path) -> None:
    place = Place(tmp_path, count=LONG_WALK + 2, anchors=())
    versions = Versions(place.store, RUN, choose(), daemon="a")
    for variant in (WIDE, NARROW):
        versions.mirror(variant).verify(place.run.latest(), tmp_path / "scratch")  # a reader had a long way
    await versions.advance_mirror()
    newest = place.versions[-1].version
    for variant in (WIDE, NARROW):
        assert list(versions.mirror(variant).generations()) == [newest]
