"""What is damaged where nobody can be asked for it is made again from weights that are here, to the very same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deltad.daemon.origin import Origin
from deltad.delta.backend import Mode, choose
from deltad.delta.manifest import EdgeKind, decode_page
from deltad.protocol.mode import ModeChoice
from deltad.store.disk import Disk, File
from deltad.store.needs import Unreachable, find_needs, unreachable
from deltad.store.objects import Health
from deltad.store.rederive import Rederiver
from deltad.store.store import Store
from deltad.types import Digest, Version
from tests.kit.rot import flip
from tests.kit.trainer import RUN, Trainer
from tests.kit.whole import whole_versions


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def publish(trainer: Trainer, number: int, mode: Mode = "dense") -> Version:
    """Publish the next version in a mode."""
    if number:
        trainer.weights = trainer.weights.changed(0.05, seed=number)
    how = ModeChoice(mode, "for a test")
    return trainer.origin.publish(trainer.write(number), number, coding=how).record.version


def objects_of(trainer: Trainer, number: int, kind: str) -> list[Digest]:
    """The chunks, pages, manifest, layout or files of a version."""
    record = trainer.run.record(Version(1, number))
    layout, edge = trainer.mirror.layout(record), record.variants[0].edges[0]
    manifest = trainer.run.read_manifest(edge)
    pages = [(page, decode_page(trainer.store.read(Digest(page.digest)), page, layout)) for page in manifest.pages]
    return {
        "layout": [Digest(record.variants[0].layout)],
        "file": [Digest(file.digest) for file in layout.files],
        "manifest": [Digest(edge.manifest)],
        "page": [Digest(page.digest) for page, _ in pages],
        "chunk": [Digest(chunk.digest) for _, chunks in pages for chunk in chunks],
    }[kind]


def damage(trainer: Trainer, number: int, *kinds: str) -> list[Digest]:
    """Flip a bit in every such object, and let it be found."""
    damaged = [digest for kind in kinds for digest in objects_of(trainer, number, kind)]
    for digest in damaged:
        flip(trainer.store, digest, 11)
    for digest in damaged:
        assert trainer.store.objects.examine(digest) is Health.DAMAGED
    return damaged


def make_again(trainer: Trainer, number: int) -> None:
    needs = find_needs(trainer.store, trainer.store.objects.quarantine.damaged())
    maker = Rederiver(trainer.store, trainer.mirror, choose(), trainer.origin.baseline)
    maker.make(trainer.run.record(Version(1, number)), list(needs.values()))


@pytest.mark.parametrize("mode", ["blind", "fast", "mid", "dense"])
def test_chunks_and_pages_of_the_newest_delta_are_made_from_its_checkpoint_and_the_chain_below(
    trainer: Trainer, mode: Mode
) -> None:
    for number in range(3):
        publish(trainer, number, mode)
    assert damage(trainer, 2, "chunk", "page")
    make_again(trainer, 2)
    assert trainer.store.objects.quarantine.damaged() != [], "what a damaged page lists is not known yet"
    make_again(trainer, 2)
    assert trainer.store.objects.quarantine.damaged() == []
    assert len(whole_versions(trainer.store, RUN)) == 3
    assert list(trainer.store.scratch.iterdir()) == []


def test_an_anchor_is_made_from_the_mirror_that_is_at_its_version(trainer: Trainer) -> None:
    publish(trainer, 0)
    trainer.mirror.advance(trainer.run.latest())
    publish(trainer, 1)
    shutil.rmtree(trainer.checkpoints)
    assert damage(trainer, 0, "chunk")
    assert unreachable(trainer.store, RUN, trainer.store.objects.quarantine.damaged()) == [Version(1, 0), Version(1, 1)]
    make_again(trainer, 0)
    assert trainer.store.objects.quarantine.damaged() == []
    assert unreachable(trainer.store, RUN, []) == []
    assert len(whole_versions(trainer.store, RUN)) == 2


def test_the_layout_and_the_files_of_a_version_are_made_from_the_mirror(trainer: Trainer) -> None:
    publish(trainer, 0)
    trainer.mirror.advance(trainer.run.latest())
    publish(trainer, 1)
    layout, file = objects_of(trainer, 0, "layout"), objects_of(trainer, 0, "file")
    damage(trainer, 0, "file")
    damage(trainer, 0, "layout")
    for _ in range(2):
        make_again(trainer, 0)
    assert [trainer.store.has(digest) for digest in (*layout, *file)] == [True, True]


def test_what_cannot_be_made_stays_set_aside_and_the_next_publish_is_whole(trainer: Trainer) -> None:
    for number in range(3):
        publish(trainer, number)
    lost = damage(trainer, 1, "chunk")
    make_again(trainer, 1)
    assert trainer.store.objects.quarantine.damaged() == lost
    assert unreachable(trainer.store, RUN, lost) == [Version(1, 1), Version(1, 2)]
    (need,) = find_needs(trainer.store, lost).values()
    assert f"{need}" == "chunk of the delta to r/v000001 (embed.weight to scale)"
    publish(trainer, 3)
    assert trainer.kind(3) is EdgeKind.ANCHOR
    reason = trainer.run.read_manifest(trainer.run.latest().variants[0].edges[0]).reason
    assert reason == "what leads newcomers to v000002 is damaged"
    assert unreachable(trainer.store, RUN, lost) == [Version(1, 1), Version(1, 2)]
    publish(trainer, 4)
    assert trainer.kind(4) is EdgeKind.DELTA
    assert trainer.export(Version(1, 4)).equals(trainer.weights)


def test_a_wrong_baseline_gives_no_wrong_bytes(trainer: Trainer) -> None:
    publish(trainer, 0)
    publish(trainer, 1)
    lost = damage(trainer, 1, "chunk")
    other = Trainer(trainer.checkpoints / "other")
    publish(other, 0)
    other.weights = trainer.weights.changed(0.01, seed=50)
    Origin(other.store, RUN, trainer.mirror._variant, choose()).publish(other.write(1), 1)
    maker = Rederiver(trainer.store, trainer.mirror, choose(), other.origin.baseline)
    needs = find_needs(trainer.store, lost)
    maker.make(trainer.run.record(Version(1, 1)), list(needs.values()))
    assert trainer.store.objects.quarantine.damaged() == lost


class Counting(Disk):
    """Counts the files that are opened to be read."""

    opened = 0

    def open(self, path: Path) -> File:
        self.opened += 1
        return super().open(path)


def test_while_something_is_damaged_a_publish_reads_the_descriptions_of_its_own_version_alone(tmp_path: Path) -> None:
    disk = Counting()
    trainer = Trainer(tmp_path, store=Store.open(tmp_path / "store", files=disk))
    for number in range(9):
        publish(trainer, number)
    damage(trainer, 8, "chunk")
    asked, damaged = Unreachable(trainer.store, RUN), trainer.store.objects.quarantine.damaged()
    assert asked.without(damaged) == [Version(1, 8)]
    before = disk.opened
    assert asked.without(damaged) == [Version(1, 8)]
    assert disk.opened == before
    publish(trainer, 9)
    before = disk.opened
    assert asked.without(damaged) == [Version(1, 8)]
    assert disk.opened - before <= 4, "layout, manifest and page of the new one"


def test_what_a_damaged_page_hid_is_seen_once_it_is_healed(trainer: Trainer) -> None:
    for number in range(3):
        publish(trainer, number)
    (page,), store = objects_of(trainer, 1, "page"), trainer.store
    data, chunks = store.read(page), [store.read(digest) for digest in objects_of(trainer, 1, "chunk")]
    damage(trainer, 1, "chunk", "page")
    asked = Unreachable(store, RUN)
    assert asked.without(store.objects.quarantine.damaged()) == [Version(1, 1), Version(1, 2)]
    store.put(data)
    assert asked.without(store.objects.quarantine.damaged()) == [Version(1, 1), Version(1, 2)]
    for chunk in chunks:
        store.put_chunk(chunk)
    assert asked.without(store.objects.quarantine.damaged()) == []
