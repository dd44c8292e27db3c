"""Disk-delta directories in and out. What one leads to is its base version, rebuilt aside, with the delta applied.

From there on it is published like any other checkpoint, so that what travels is our own delta, from the bits that are
held here to the trainer's. Owns one invariant: no bit of it is published whose checksum was not the trainer's.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deltad.checkpoint.disk_delta import (
    Checksum,
    Encoding,
    WrittenDelta,
    apply_disk_delta,
    find_disk_delta,
    is_named,
    write_disk_delta,
)
from deltad.delta.record import VersionRecord
from deltad.errors import BaseMissingError, ConflictError, UsageError
from deltad.store.disk import remove_tree, store_error
from deltad.store.leases import READ_SECONDS
from deltad.store.mirror import Mirror
from deltad.store.store import Store
from deltad.types import Version


def find_named(name: str, records: Sequence[VersionRecord]) -> VersionRecord | None:
    """The version that others call `name`: by identity, by the name of the directory it came from, or by its number.

    Of several, the newest. `records` ascend.
    """
    newest = sorted(records, key=lambda record: record.version, reverse=True)
    for named in (
        lambda record: record.identity == name,
        lambda record: record.source == name,
        lambda record: is_named(str(record.version.number), name),
    ):
        for record in newest:
            if named(record):
                return record
    return None


@contextmanager
def whole(
    directory: Path, store: Store, mirror: Mirror, *, base: Version | None = None, threads: int = 1
) -> Iterator[tuple[Path, str]]:
    """The checkpoint to publish for `directory`, and the identity that its trainer gave it, if any.

    That is `directory` itself, unless it holds a disk-delta, which applies to `base` or else to the version that it
    names. Raises BaseMissingError where its base is not held,
    CheckpointError, IntegrityError, StoreError.
    """
    delta = find_disk_delta(directory, limits=store.limits)
    if delta is None:
        yield directory, ""
        return
    run = store.run(mirror.run)
    record = find_named(delta.base_version, run.records()) if base is None else run.record(base)
    if record is None:
        raise BaseMissingError(
            f"{directory}",
            expected=f"version {delta.base_version!r} of run {run.run}, which it applies to",
            found="not held here",
            hint="it is taken as soon as that version is; a full checkpoint begins a chain anew",
        )
    holder = f"the disk-delta {directory} ({uuid.uuid4().hex[:8]})"
    run.lease(holder, record.version, READ_SECONDS)
    scratch = store.scratch / f"applied-{uuid.uuid4().hex}"
    applied = scratch / directory.name
    try:
        mirror.export(record, applied)
        try:
            apply_disk_delta(delta, applied, mirror.layout(record), limits=store.limits, threads=threads)
        except OSError as error:
            raise store_error(error, applied, 0) from error
        yield applied, "" if delta.version.isdigit() else delta.version
    finally:
        remove_tree(scratch, store.files)
        store.leases.release(holder)


def export_disk_delta(  # noqa: PLR0917
    mirror: Mirror,
    base: VersionRecord,
    target: VersionRecord,
    directory: Path,
    encoding: str,
    checksum: str,
    *,
    threads: int = 1,
) -> WrittenDelta:
    """Write what turns `base` into `target` as a disk-delta, for replicas that others' loaders feed.

    Raises UsageError for an encoding or checksum that is none, ConflictError for versions of different tensors, and
    what `write_disk_delta` raises.
    """
    if encoding not in tuple(Encoding):
        raise UsageError(f"encoding {encoding[:40]!r}", expected=" or ".join(Encoding))
    named = Checksum.named(checksum)
    if named is None:
        raise UsageError(f"checksum {checksum[:40]!r}", expected=" or ".join(Checksum))
    layout = mirror.layout(target)
    if layout.table_digest != mirror.layout(base).table_digest:
        raise ConflictError(
            f"a delta from {base.id} to {target.id}",
            expected="two versions of the same tensors",
            found="others",
            hint="export the version whole",
        )
    with mirror.state(base) as old, mirror.state(target) as new:
        return write_disk_delta(
            directory,
            layout,
            old,
            new,
            version=name_of(target),
            base_version=name_of(base),
            encoding=Encoding(encoding),
            checksum=named,
            threads=threads,
        )


def name_of(record: VersionRecord) -> str:
    """What a version is called in disk-delta directories: its identity or, without one, its number in six digits."""
    return record.identity or f"{record.version.number:06d}"
