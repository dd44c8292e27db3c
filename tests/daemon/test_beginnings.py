"""Epochs that begin from an older version, and runs that begin from another run's: what is published, and refused."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltad.daemon.origin import Origin
from deltad.daemon.versions import Versions
from deltad.delta.backend import choose
from deltad.delta.backend.numpy import NumpyBackend
from deltad.delta.layout import Layout, TensorSpec
from deltad.delta.manifest import EdgeKind, Manifest, decode_page
from deltad.delta.record import VersionRecord
from deltad.errors import CheckpointError, ConflictError, DeltadError, NotFoundError
from deltad.store.garbage import GRACE_SECONDS, collect
from deltad.store.leases import LEASE_SECONDS
from deltad.store.needs import find_needs
from deltad.store.objects import Health
from deltad.store.rederive import Rederiver
from deltad.store.retention import Retention
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version, VersionId, parse_run
from tests.kit.checkpoints import MODEL, write_checkpoint
from tests.kit.rot import flip
from tests.kit.trainer import RUN, VARIANT, Trainer, edges_since
from tests.kit.weights import ArrayWeights

FORK = parse_run("fork")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """At version 5, with a distance from version 1 that shows in bytes."""
    trainer = Trainer(tmp_path)
    for number in range(6):
        trainer.step(number, density=0.02 * number)
        if number == 1:
            trainer.first = trainer.weights  # type: ignore[attr-defined]
    return trainer


def resumed(trainer: Trainer, seed: int = 50) -> ArrayWeights:
    """The weights of version 1, one step on."""
    weights: ArrayWeights = trainer.first  # type: ignore[attr-defined]
    return weights.changed(0.01, seed=seed)


def manifest(trainer: Trainer, record: VersionRecord) -> Manifest:
    return trainer.run.read_manifest(record.variants[0].edges[0])


def refused(trainer: Trainer, error: type[DeltadError], match: str, **how: object) -> None:
    """A publish is refused, and nothing has changed."""
    before = trainer.run.records()
    directory = how.pop("directory", None) or trainer.write(2, resumed(trainer))
    with pytest.raises(error, match=match):
        trainer.origin.publish(directory, 2, **how)  # type: ignore[arg-type]
    assert trainer.run.records() == before


def fork_of(trainer: Trainer, tmp_path: Path) -> Trainer:
    """The trainer of another run in the same store."""
    return Trainer(tmp_path / "fork", FORK, trainer.store)


# Epochs.


def test_a_resumed_run_goes_on_from_the_version_that_was_named(trainer: Trainer) -> None:
    weights = resumed(trainer)
    plain = trainer.origin.publish(trainer.write(6, weights), 6).record
    record = trainer.origin.publish(trainer.write(2, weights), 2, begin_from=VersionId(RUN, Version(1, 1))).record
    assert (record.version, record.parent, record.sequence) == (Version(2, 2), Version(1, 1), 8)
    made = manifest(trainer, record)
    assert (made.kind, made.base and made.base.version) == (EdgeKind.DELTA, Version(1, 1))
    assert made.chunk_bytes < manifest(trainer, plain).chunk_bytes / 4
    assert trainer.export(record.version).equals(weights)
    later = weights.changed(0.01, seed=3)
    following = trainer.origin.publish(trainer.write(3, later), 3).record
    assert (following.version, following.parent) == (Version(2, 3), Version(2, 2))
    assert trainer.export(following.version).equals(later)
    assert trainer.export(Version(1, 5)).equals(trainer.weights)


def test_whoever_lacks_the_version_resumed_from_is_led_on_from_the_newest_one(trainer: Trainer) -> None:
    record = trainer.origin.publish(
        trainer.write(2, resumed(trainer)), 2, begin_from=VersionId(RUN, Version(1, 1))
    ).record
    assert [edge.base for edge in record.variants[0].edges] == [Version(1, 1), Version(1, 5)]
    versions = Versions(trainer.store, RUN, choose(), daemon="a")
    for served in (Version(1, 1), Version(1, 5)):
        reply = versions.next_for(VARIANT, served)
        assert reply is not None
        assert [(step.base, step.version) for step in reply.steps] == [(str(served), "v000002@e2")]
        assert reply.steps[0].root == record.variants[0].root.hex()
    trainer.mirror.advance(trainer.run.record(Version(1, 5)))
    assert edges_since(trainer.mirror, record, trainer.store) == 1
    assert trainer.export(record.version).equals(resumed(trainer))
    resumed_at_newest = trainer.origin.publish(trainer.write(3), 3, begin_from=record.id).record
    assert [edge.base for edge in resumed_at_newest.variants[0].edges] == [record.version]


def test_a_resume_leaves_the_mirror_where_it_is(trainer: Trainer) -> None:
    trainer.mirror.advance(trainer.run.record(Version(1, 5)))
    record = trainer.origin.publish(
        trainer.write(2, resumed(trainer)), 2, begin_from=VersionId(RUN, Version(1, 1))
    ).record
    assert list(trainer.mirror.generations()) == [Version(1, 5)]
    assert manifest(trainer, record).kind is EdgeKind.DELTA
    assert trainer.export(record.version).equals(resumed(trainer))


def test_a_resume_beside_a_damaged_generation_leaves_the_kept_checkpoint_of_another_version(trainer: Trainer) -> None:
    generation = trainer.mirror.advance(trainer.run.record(Version(1, 1)))
    (weights,) = generation.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    newest, base = trainer.run.record(Version(1, 5)), VersionId(RUN, Version(1, 1))
    assert trainer.origin.publish(trainer.write(2), 2, begin_from=base, if_changed=True).record == newest
    kept = trainer.origin.baseline(newest)
    assert kept is not None
    kept.close()


def test_the_same_resume_twice_opens_one_epoch_and_other_bytes_another(trainer: Trainer) -> None:
    base = VersionId(RUN, Version(1, 1))
    directory = trainer.write(2, resumed(trainer))
    first = trainer.origin.publish(directory, 2, begin_from=base)
    trainer.origin.publish(trainer.write(3, resumed(trainer).changed(0.01, seed=4)), 3)
    directory = trainer.write(2, resumed(trainer))
    again = trainer.origin.publish(directory, 2, begin_from=base, epoch=1)
    assert (again.already, again.record) == (True, first.record)
    other = trainer.origin.publish(trainer.write(2, resumed(trainer, seed=51)), 2, begin_from=base)
    assert (other.already, other.record.version) == (False, Version(3, 2))


def test_the_version_after_the_one_resumed_from_is_no_epoch_that_was_opened(trainer: Trainer) -> None:
    known = trainer.write(5)
    record = trainer.origin.publish(known, 5, begin_from=VersionId(RUN, Version(1, 4))).record
    assert (record.version, record.parent) == (Version(2, 5), Version(1, 4))


def test_what_cannot_be_resumed_from_is_named_and_nothing_changes(trainer: Trainer, tmp_path: Path) -> None:
    refused(trainer, NotFoundError, "r/v000009: not held", begin_from=VersionId(RUN, Version(1, 9)))
    layout = Layout(MODEL.format, (*MODEL.tensors[:-1], TensorSpec("scale", "F32", (2,))), MODEL.files)
    directory = write_checkpoint(tmp_path / "other", ArrayWeights.random(layout), layout=layout)
    words = "tensors of r/v000001.*1 tensors reshaped or retyped"
    refused(trainer, CheckpointError, words, directory=directory, begin_from=VersionId(RUN, Version(1, 1)))


def test_a_version_that_was_let_go_cannot_be_resumed_from(tmp_path: Path) -> None:
    now = 1000.0
    trainer = Trainer(tmp_path, store=Store.open(tmp_path / "store", clock=lambda: now))
    trainer.step(0)
    trainer.first = trainer.weights  # type: ignore[attr-defined]
    for number in range(1, 4):
        trainer.weights = ArrayWeights.random(MODEL, seed=number)
        trainer.origin.publish(trainer.write(number), number)
    now += GRACE_SECONDS + LEASE_SECONDS
    collect(trainer.store, {RUN: Retention(versions=1)})
    refused(trainer, NotFoundError, "r/v000001: not held", begin_from=VersionId(RUN, Version(1, 1)))


class CollectingBackend(NumpyBackend):
    """Lets go, at its first frame, of all that a run does not keep."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.gone: list[str] | None = None

    def encode(self, *arguments: Any, **options: Any) -> Any:
        if self.gone is None:
            collected = collect(self.trainer.store, {RUN: Retention(versions=1)})
            self.gone = [found.thing for found in collected.versions if not found.kept]
        return super().encode(*arguments, **options)


@pytest.mark.parametrize("run", [RUN, FORK])
def test_a_collection_in_the_midst_leaves_the_version_that_is_begun_from(tmp_path: Path, run: RunId) -> None:
    now = 1000.0
    trainer = Trainer(tmp_path, store=Store.open(tmp_path / "store", clock=lambda: now))
    weights = [ArrayWeights.random(MODEL, seed=number) for number in range(4)]
    for number in range(4):
        trainer.origin.publish(trainer.write(number, weights[number]), number)
    now += GRACE_SECONDS + LEASE_SECONDS
    backend = CollectingBackend(trainer)
    origin = Origin(trainer.store, run, VARIANT, backend)
    directory = trainer.write(2, weights[1].changed(0.01, seed=9))
    record = origin.publish(directory, 2, begin_from=VersionId(RUN, Version(1, 1))).record
    assert record.parent == Version(1, 1)
    assert backend.gone == ["r/v000000"], "what is newer than a version that is held stays too"
    now += GRACE_SECONDS + LEASE_SECONDS
    collect(trainer.store, {RUN: Retention(versions=1)})
    held = [record.version for record in trainer.run.records()]
    assert held == [Version(1, 1), Version(2, 2)] if run == RUN else held == [Version(1, 1), Version(1, 3)]


def test_of_two_living_publishers_the_one_of_the_older_epoch_is_refused(trainer: Trainer) -> None:
    trainer.origin.publish(trainer.write(2, resumed(trainer)), 2, begin_from=VersionId(RUN, Version(1, 1)), epoch=1)
    older = trainer.write(6, trainer.weights.changed(0.01, seed=6))
    with pytest.raises(ConflictError, match=r"epoch 2, which is at v000002@e2.*one of epoch 1.*stop this one"):
        trainer.origin.publish(older, 6, epoch=1)
    with pytest.raises(ConflictError, match=r"up to 2, the newest one.*epoch 3"):
        trainer.origin.publish(older, 6, epoch=3)
    assert trainer.origin.publish(older, 6, epoch=2).record.version == Version(2, 6)


# Forks.


def test_the_first_version_of_a_fork_is_a_small_delta_from_the_other_run(trainer: Trainer, tmp_path: Path) -> None:
    fork = fork_of(trainer, tmp_path)
    fork.weights = resumed(trainer)
    record = fork.origin.publish(fork.write(0), 0, begin_from=VersionId(RUN, Version(1, 1))).record
    assert (record.version, record.parent_run, record.parent, record.sequence) == (Version(1, 0), RUN, Version(1, 1), 1)
    made = manifest(fork, record)
    assert made.base is not None
    assert (made.kind, made.base.run, made.base.version) == (EdgeKind.DELTA, RUN, Version(1, 1))
    anchor = manifest(trainer, trainer.run.record(Version(1, 0)))
    assert made.chunk_bytes < anchor.chunk_bytes / 20
    assert record.variants[0].layout == trainer.run.record(Version(1, 1)).variants[0].layout
    assert fork.export(record.version).equals(fork.weights)
    assert fork.mirror.verify(record, tmp_path / "verified") == (record.variants[0].root, [])
    assert fork.step(1) == Version(1, 1)
    assert fork.run.record(Version(1, 1)).parent_run == ""
    assert fork.export(Version(1, 1)).equals(fork.weights)


def test_a_fork_is_rebuilt_from_the_nearest_generation_of_the_other_run(trainer: Trainer, tmp_path: Path) -> None:
    trainer.mirror.advance(trainer.run.record(Version(1, 5)))
    fork = fork_of(trainer, tmp_path)
    fork.weights = trainer.weights
    base = VersionId(RUN, Version(1, 5))
    record = fork.origin.publish(fork.write(0), 0, begin_from=base).record
    assert edges_since(fork.mirror, record, fork.store, trainer.mirror) == 1
    generation = trainer.mirror.generations()[Version(1, 5)]
    (damaged,) = generation.glob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-64] + bytes(64))
    assert fork.export(record.version).equals(fork.weights), "it is built from the anchor then"
    assert generation.exists(), "and another run's generation is not ours to remove"
    shutil.rmtree(generation)
    assert edges_since(fork.mirror, record, fork.store, trainer.mirror) == 7
    shutil.rmtree(fork.run.directory / "baseline")
    fork.step(1)
    assert fork.export(Version(1, 1)).equals(fork.weights)


def test_a_fork_of_a_fork_is_rebuilt_across_all_three_runs(trainer: Trainer, tmp_path: Path) -> None:
    fork = fork_of(trainer, tmp_path)
    fork.weights = resumed(trainer)
    fork.origin.publish(fork.write(0), 0, begin_from=VersionId(RUN, Version(1, 1)))
    third = Trainer(tmp_path / "third", parse_run("third"), trainer.store)
    third.weights = fork.weights.changed(0.01, seed=9)
    record = third.origin.publish(third.write(0), 0, begin_from=VersionId(FORK, Version(1, 0))).record
    assert third.export(record.version).equals(third.weights)
    assert edges_since(third.mirror, record, third.store, fork.mirror, trainer.mirror) == 4


def test_the_same_fork_twice_begins_one_run_and_another_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    fork = fork_of(trainer, tmp_path)
    base = VersionId(RUN, Version(1, 5))
    first = fork.origin.publish(fork.write(0, trainer.weights), 0, begin_from=base)
    again = fork.origin.publish(fork.write(0, trainer.weights), 0, begin_from=base)
    assert (again.already, again.record) == (True, first.record)
    with pytest.raises(ConflictError, match=r"a run without versions.*fork/v000000.*as another run"):
        fork.origin.publish(fork.write(0, resumed(trainer)), 0, begin_from=base)
    assert fork.run.records() == [first.record]


def test_what_cannot_be_forked_is_named_and_no_run_begins(trainer: Trainer, tmp_path: Path) -> None:
    fork = fork_of(trainer, tmp_path)
    fork.first = trainer.weights  # type: ignore[attr-defined]
    refused(
        fork, NotFoundError, "run nobody: .*none of that name", begin_from=VersionId(parse_run("nobody"), Version(1, 1))
    )
    refused(fork, NotFoundError, "r/v000009: not held", begin_from=VersionId(RUN, Version(1, 9)))
    assert parse_run("nobody") not in trainer.store.held_runs()


def test_an_origin_of_its_own_store_forks_what_it_pulled(tmp_path: Path) -> None:
    """Another process opened the store since: nothing of the other run's origin is needed."""
    trainer = Trainer(tmp_path)
    trainer.step(0)
    trainer.store.close()
    with_fork = Store.open(tmp_path / "store")
    origin = Origin(with_fork, FORK, VARIANT, choose())
    directory = write_checkpoint(tmp_path / "fork_0", trainer.weights.changed(0.01, seed=1))
    assert origin.publish(directory, 0, begin_from=VersionId(RUN, Version(1, 0))).record.parent_run == RUN
    with_fork.close()
    again = Store.open(tmp_path / "store")
    record = again.run(FORK).record(Version(1, 0))
    assert [hop.record.run for hop in again.run(FORK).path(record, VARIANT).hops] == [RUN, FORK]


def test_a_damaged_chunk_of_a_fork_is_made_again_beside_the_version_that_it_starts_from(
    trainer: Trainer, tmp_path: Path
) -> None:
    fork = fork_of(trainer, tmp_path)
    base = VersionId(RUN, Version(1, 1))
    record = fork.origin.publish(fork.write(0, resumed(trainer)), 0, begin_from=base).record
    layout, store = fork.mirror.layout(record), fork.store
    (page, *_) = fork.run.read_manifest(record.variants[0].edges[0]).pages
    damaged = Digest(decode_page(store.read(Digest(page.digest)), page, layout)[0].digest)
    fork.mirror.advance(record)
    flip(store, damaged, 11)
    assert store.objects.examine(damaged) is Health.DAMAGED
    maker = Rederiver(store, fork.mirror, choose(), lambda _: None)
    maker.make(record, list(find_needs(store, [damaged]).values()))
    assert store.objects.quarantine.damaged() == []
    assert fork.export(record.version).equals(resumed(trainer))


def test_a_version_whose_description_was_damaged_is_told_of_again_once_that_is_healed(trainer: Trainer) -> None:
    versions = Versions(trainer.store, RUN, choose(), daemon="a")
    damaged = Digest(trainer.run.record(Version(1, 3)).variants[0].edges[0].manifest)
    data = trainer.store.read(damaged)
    trainer.store.objects.quarantine.add(damaged, "where it lay", b"")
    assert [info.version for info in versions.all()] == [str(Version(1, number)) for number in (0, 1, 2, 4, 5)]
    trainer.store.put(data)
    assert [info.version for info in versions.all()] == [str(Version(1, number)) for number in range(6)]


async def test_what_a_publish_replaces_is_removed_once_it_was_told_of(trainer: Trainer) -> None:
    versions = Versions(trainer.store, RUN, choose(), daemon="a")
    baselines = trainer.run.directory / "baseline"
    trainer.origin.tidy()
    await versions.publish(trainer.origin, trainer.write(6, resumed(trainer)), 6)
    while versions.deeds:
        await asyncio.gather(*versions.deeds)
    assert [path.name for path in baselines.iterdir()] == [VARIANT]
