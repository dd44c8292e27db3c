"""Who may add which version to a run: pure rules over records.

The order of a run is (epoch, number). Within an epoch it only grows; a newer epoch may start at any
number; an older epoch may never write again.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltad.delta.record import VersionRecord
from deltad.errors import ConflictError
from deltad.types import RunId, Version


def check_successor(latest: VersionRecord | None, record: VersionRecord) -> None:
    """Raise ConflictError unless `record` may follow `latest` in its run."""
    if latest is None:
        return
    if record.version.epoch < latest.version.epoch:
        raise _overtaken(f"{record.id}", latest, record.version.epoch)
    if record.version <= latest.version:
        raise ConflictError(
            f"{record.id}",
            expected=f"a number above {latest.version.number} within epoch {latest.version.epoch}",
            found=str(record.version.number),
            hint="open a new epoch to publish from an earlier step",
        )
    if record.sequence <= latest.sequence:
        raise ConflictError(
            f"{record.id}",
            expected=f"a sequence above {latest.sequence}",
            found=str(record.sequence),
            hint="the record is a replay, or the publisher lost its state",
        )


def is_gap(version: Version, held: Sequence[VersionRecord]) -> bool:
    """Whether versions that were published are missing where `version` would lie among those that are held.

    `held` is in ascending order, without `version`. A run counts its versions in `sequence`, whatever their
    numbers: where two neighbours do not follow each other in it, something lay between them. Above the newest
    nothing is missing, since that one is never let go.
    """
    above = next((record for record in held if record.version > version), None)
    below = next((record for record in reversed(held) if record.version < version), None)
    return above is not None and above.sequence > (below.sequence if below else 0) + 1


def check_writer(run: RunId, latest: VersionRecord | None, epoch: int) -> None:
    """Raise ConflictError unless a publisher that says it writes in `epoch` of a run may still do so."""
    newest = latest.version.epoch if latest else 1
    if latest is not None and epoch < newest:
        raise _overtaken(f"run {run}", latest, epoch)
    if epoch > newest:
        raise ConflictError(f"run {run}", expected=f"an epoch up to {newest}, the newest one", found=f"epoch {epoch}")


def _overtaken(thing: str, latest: VersionRecord, epoch: int) -> ConflictError:
    return ConflictError(
        thing,
        expected=f"a publisher of epoch {latest.version.epoch}, which is at {latest.version}",
        found=f"one of epoch {epoch}",
        hint="another trainer has opened the run since; stop this one, or let it open an epoch of its own "
        "(`--resume-from`)",
    )


def check_same(known: VersionRecord, record: VersionRecord) -> None:
    """Raise ConflictError unless both records of one version say the same about it.

    `created_ns` and `source` may differ: they say when and from where, not what.
    """
    for variant in record.variants:
        root = next((v.root for v in known.variants if v.name == variant.name), None)
        if root != variant.root:
            raise ConflictError(
                f"{record.id} variant {variant.name}",
                expected=f"root {root.hex() if root else 'of no such variant'}, as published",
                found=f"root {variant.root.hex()}",
                hint="a published version never changes; publish under another number, or open a new epoch",
            )
