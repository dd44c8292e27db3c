"""Objects, records and pointers: durable, checked on every read, and never two writers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deltad.daemon.origin import Origin
from deltad.delta.backend import choose, warm
from deltad.delta.encoding import sha256
from deltad.delta.manifest import decode_manifest
from deltad.errors import (
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from deltad.limits import Limits
from deltad.store.store import Store
from deltad.types import Digest, Version
from tests.kit.rot import lose, overwrite
from tests.kit.trainer import RUN, VARIANT, Trainer
from tests.kit.versions import Lineage

ROOT = Path(__file__).parents[2]


def test_an_object_is_read_back_by_its_digest_and_stored_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    digest = store.put(b"frames")
    inode = store.objects.extent(digest).path.stat().st_ino
    assert store.put(b"frames") == digest == sha256(b"frames")
    assert store.objects.extent(digest).path.stat().st_ino == inode
    assert store.read(digest) == b"frames"
    assert store.size(digest) == 6
    assert store.has(digest)


def test_an_object_that_is_not_held_is_named(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    missing = Digest(bytes(32))
    assert not store.has(missing)
    with pytest.raises(NotFoundError, match="0000"):
        store.read(missing)
    with pytest.raises(NotFoundError):
        store.size(missing)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"x", lambda b: bytes([b[0] ^ 1]) + b[1:]])
def test_a_damaged_object_is_never_returned(tmp_path: Path, damage: object) -> None:
    store = Store.open(tmp_path / "s")
    digest = store.put(b"frames")
    overwrite(store, digest, damage(b"frames"))  # type: ignore[operator]
    with pytest.raises(IntegrityError, match="SHA-256"):
        store.read(digest)


def test_a_damaged_object_is_mended_when_the_same_bytes_are_stored_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    digest = store.put(b"frames")
    overwrite(store, digest, b"frame5")
    store.put(b"frames")
    assert store.read(digest) == b"frames"


def test_a_second_daemon_on_one_store_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    with pytest.raises(StoreBusyError, match=f"process {os.getpid()}") as caught:
        Store.open(tmp_path / "s")
    assert caught.value.retryable
    store.close()
    Store.open(tmp_path / "s").close()


def test_a_lock_left_by_a_killed_daemon_is_taken_over(tmp_path: Path) -> None:
    code = "import os, sys; from deltad.store.store import Store; from pathlib import Path\n"
    code += "Store.open(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT, check=False)
    assert done.returncode == -9
    Store.open(tmp_path / "s").close()


def test_a_store_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    Store.open(tmp_path / "s").close()
    (tmp_path / "s" / "FORMAT").write_text("deltad store 7\n")
    with pytest.raises(FormatError, match=r"deltad store 2.*deltad store 7"):
        Store.open(tmp_path / "s")


def test_a_directory_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FormatError, match=r"thesis\.tex"):
        Store.open(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_store_that_cannot_be_created_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Store.open(tmp_path / "file" / "s")


def test_what_an_interrupted_write_left_is_removed(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    (store.scratch / "leftover").write_bytes(b"partial")
    store.close()
    assert list(Store.open(tmp_path / "s").scratch.iterdir()) == []


def test_a_reserve_of_free_space_is_kept(tmp_path: Path) -> None:
    limits = replace(Limits(), disk_reserve_bytes=1 << 62)
    store = Store.open(tmp_path / "s", limits=limits)
    with pytest.raises(StoreFullError, match="reserve") as caught:
        store.put(b"x")
    assert caught.value.retryable
    assert not store.has(sha256(b"x"))


def publish_with_little_room(trainer: Trainer, directory: Path) -> int:
    """Publish version 1 in a child whose files may not grow past 100 bytes: 0 if it met a StoreFullError."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            trainer.origin.publish(directory, 1)
        except StoreFullError as error:
            status = 0 if "free some space" in str(error) else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_full_disk_is_an_error_that_leaves_the_last_version_in_place(tmp_path: Path) -> None:
    warm(choose(), ["BF16", "F32"])  # what is compiled is kept on the disk, too, and the child has no room for that
    trainer = Trainer(tmp_path)
    trainer.step(0)
    directory = trainer.write(1, trainer.weights.changed(0.2, seed=9))
    assert publish_with_little_room(trainer, directory) == 0
    assert list(trainer.store.scratch.iterdir()) == []
    trainer.store.close()
    store = Store.open(tmp_path / "store")
    assert store.run(RUN).latest().version == Version(1, 0)
    assert Origin(store, RUN, VARIANT, choose()).publish(directory, 1).record.version == Version(1, 1)


def test_records_survive_a_restart(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for number in range(3):
        trainer.step(number)
    records = trainer.run.records()
    trainer.store.close()
    reopened = Store.open(tmp_path / "store")
    assert reopened.runs() == [RUN]
    assert reopened.run(RUN).records() == records
    assert reopened.run(RUN).latest() == records[-1]
    assert reopened.run(RUN).record_bytes(Version(1, 1)) == records[1].encode()


def test_a_version_whose_objects_are_not_all_held_is_not_committed(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "a")
    trainer.step(0)
    record = trainer.run.latest()
    for missing in trainer.store.objects.sizes():
        other = Store.open(tmp_path / missing.hex())
        for digest in trainer.store.objects.sizes():
            if digest != missing:
                other.put(trainer.store.read(digest))
        with pytest.raises(NotFoundError):
            other.run(RUN).commit(record.encode())
        assert other.run(RUN).latest() is None
        other.close()


def test_a_delta_whose_base_is_not_held_is_not_committed(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "a")
    trainer.step(0)
    trainer.step(1)
    other = Store.open(tmp_path / "b")
    for digest in trainer.store.objects.sizes():
        other.put(trainer.store.read(digest))
    with pytest.raises(NotFoundError, match="an edge from a version that is held"):
        other.run(RUN).commit(trainer.run.latest().encode())


def test_one_whole_edge_is_enough_where_another_is_held_in_part(tmp_path: Path) -> None:
    lineage = Lineage()
    lineage.publish()
    both = lineage.publish(anchor=True)
    anchor = decode_manifest(both.objects[Digest(both.record.variants[0].edges[1].manifest)])
    store = Store.open(tmp_path / "s")
    lineage.versions[0].commit_into(store)
    both.put_into(store)
    lose(store, Digest(anchor.pages[0].digest))
    assert store.run(both.run).commit(both.data)
    assert store.run(both.run).latest() == both.record


def test_latest_never_moves_back_and_replays_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.step(0)
    trainer.step(4)
    latest = trainer.run.latest()
    assert not trainer.run.commit(latest.encode())
    for change in (
        {"version": Version(1, 3), "sequence": 9, "parent": Version(1, 0)},
        {"version": Version(1, 5), "sequence": latest.sequence},
    ):
        with pytest.raises(ConflictError):
            trainer.run.commit(msgspec.structs.replace(latest, **change).encode())
    assert trainer.run.latest() == latest


def test_a_writer_of_an_older_epoch_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.step(0)
    trainer.origin.publish(trainer.write(0, trainer.weights.changed(0.1, seed=4)), 0, new_epoch=True)
    latest = trainer.run.latest()
    assert latest.version == Version(2, 0)
    zombie = msgspec.structs.replace(trainer.run.record(Version(1, 0)), version=Version(1, 7), sequence=8)
    with pytest.raises(ConflictError, match="epoch 2"):
        trainer.run.commit(zombie.encode())


def test_a_record_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.step(0)
    with pytest.raises(FormatError, match="run r"):
        trainer.run.commit(msgspec.structs.replace(trainer.run.latest(), run="other").encode())


def test_a_pointer_that_lags_behind_a_whole_record_is_rolled_forward(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.step(0)
    pointer = trainer.run.directory / "latest"
    old = pointer.read_bytes()
    trainer.step(1)
    pointer.write_bytes(old)
    trainer.store.close()
    reopened = Store.open(tmp_path / "store").run(RUN)
    assert reopened.latest().version == Version(1, 1)
    assert pointer.read_bytes() != old


@pytest.mark.parametrize("damage", ["pointer", "record", "renamed record", "foreign file", "foreign run"])
def test_damage_to_records_stops_the_start_with_the_file_named(tmp_path: Path, damage: str) -> None:
    trainer = Trainer(tmp_path)
    trainer.step(0)
    directory = trainer.run.directory
    record = directory / "records" / "e000001-v000000.record"
    if damage == "pointer":
        (directory / "latest").write_bytes(b"{}")
        named = "latest"
    elif damage == "record":
        record.write_bytes(record.read_bytes()[:-1])
        named = "version record"
    elif damage == "renamed record":
        record.rename(record.with_name("e000001-v000009.record"))
        named = "v000009"
    elif damage == "foreign file":
        (directory / "records" / "notes.txt").write_text("x")
        named = r"notes\.txt"
    else:
        (tmp_path / "store" / "runs" / "No Run").mkdir()
        named = "No Run"
    trainer.store.close()
    with pytest.raises((FormatError, IntegrityError), match=named):
        Store.open(tmp_path / "store")
