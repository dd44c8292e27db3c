"""Applying a disk-delta to a checkpoint that belongs to nobody else, in place.

Every tensor's new bytes are summed while they are written and compared with what the trainer wrote; so after an error
the checkpoint is to be thrown away, and after success all of the changed tensors are the trainer's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltad.checkpoint.disk_delta.decoding import Bytes, Section, decoder
from deltad.checkpoint.disk_delta.index import DiskDelta
from deltad.checkpoint.files import is_weights, list_names, open_inside, read_bounded
from deltad.checkpoint.safetensors import read_header
from deltad.delta.layout import FILE_NAMES, Layout
from deltad.delta.threads import in_order
from deltad.errors import CheckpointError, IntegrityError
from deltad.limits import DEFAULT_LIMITS, Limits

_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a tensor of the checkpoint are."""

    path: Path
    offset: int
    size: int


def apply_disk_delta(
    delta: DiskDelta, checkpoint: Path, layout: Layout, *, limits: Limits = DEFAULT_LIMITS, threads: int = 1
) -> None:
    """Turn `checkpoint`, a directory with the weights of the delta's base, into its new version.

    `layout` is the base's: an alias has no bytes in `checkpoint`, and a delta may name it as long as it stays equal to
    the tensor that it is tied to. Non-weight files in the delta's directory replace those of the same name.

    Raises CheckpointError for a delta that does not fit the checkpoint, IntegrityError for bytes whose checksum is
    another: then `checkpoint` is spoilt. MissingPackageError, OSError.
    """
    places = _places(checkpoint, limits)
    aliases = {spec.name: spec.alias_of for spec in layout.tensors if spec.alias_of}
    for name in delta.pieces:
        if name not in places and name not in aliases:
            raise CheckpointError(
                f"{delta.directory}: tensor {name[:120]!r}",
                expected=f"a tensor of version {delta.base_version}",
                found="none of that name",
                hint="a delta changes values only; write a full checkpoint where the model changes",
            )
    for name in delta.pieces.keys() & aliases.keys():
        _check_alias(delta, name, aliases[name], places)
    with _opened({places[name].path for name in delta.pieces if name in places}) as descriptors:

        def change(name: str) -> None:
            place = places[name]
            descriptor = descriptors[place.path]
            _decode(delta, name, place, descriptor, lambda data, at: _write(descriptor, data, at))

        for _ in in_order(change, sorted(delta.pieces.keys() - aliases.keys()), threads):
            pass
    _take_files(delta, checkpoint, limits)


def _places(checkpoint: Path, limits: Limits) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for name in list_names(checkpoint, limits=limits):
        if not is_weights(name) or name.endswith(".json"):
            continue
        path = checkpoint / name
        with path.open("rb") as file:
            header = read_header(file.fileno(), os.fstat(file.fileno()).st_size, f"{path}", limits=limits)
        places |= {entry.spec.name: _Place(path, entry.offset, entry.spec.bytes) for entry in header.entries}
    return places


@contextmanager
def _opened(paths: set[Path]) -> Iterator[Mapping[Path, int]]:
    descriptors: dict[Path, int] = {}
    try:
        for path in paths:
            descriptors[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _check_alias(delta: DiskDelta, name: str, source: str, places: Mapping[str, _Place]) -> None:
    """Raises CheckpointError unless an alias is after the delta what the tensor is that it is tied to.

    Called before anything is written: the old bytes of both are those of `source`.
    """
    place = places[source]
    with _opened({place.path}) as descriptors:
        old = delta.checksum.begin()
        new = _decode(
            delta, name, place, descriptors[place.path], lambda data, at: None, lambda lanes: old.update(lanes.data)
        )
    piece = delta.pieces.get(source)
    if new != (old.hexdigest() if piece is None else piece.checksum):
        raise CheckpointError(
            f"{delta.directory}: tensor {name[:120]!r}",
            expected=f"the bytes of {source}, which it is tied to in version {delta.base_version}",
            found="others",
            hint="write a full checkpoint, from which on the two are apart",
        )


def _decode(  # noqa: PLR0917
    delta: DiskDelta,
    name: str,
    place: _Place,
    descriptor: int,
    take: Callable[[Bytes, int], None],
    look: Callable[[Bytes], object] = lambda old: None,
) -> str:
    """Decode one tensor over the bytes at `place`; `take` gets the new bytes with their offsets in the file.

    Returns their checksum. Raises CheckpointError, IntegrityError if it is not the trainer's.
    """
    piece = delta.pieces[name]
    thing = f"{delta.directory}: tensor {name[:120]!r}"
    total = delta.checksum.begin()
    with open_inside(delta.home, piece.shard) as file:
        decoding = decoder(delta.encoding, Section(file.fileno(), piece.offset, piece.size), place.size, thing)
        for start in range(0, place.size, _WINDOW_BYTES):
            at = place.offset + start
            old = np.frombuffer(os.pread(descriptor, min(_WINDOW_BYTES, place.size - start), at), np.uint8)
            look(old)
            new = decoding.next(old)
            total.update(new.data)
            take(new, at)
        decoding.end()
    found = total.hexdigest()
    if found != piece.checksum:
        raise IntegrityError(
            thing,
            expected=f"{delta.checksum} {piece.checksum} of its new bytes, as its trainer wrote",
            found=found,
            hint=f"the base is not the version {delta.base_version} that the trainer had, or the file is damaged",
        )
    return found


def _write(descriptor: int, data: Bytes, offset: int) -> None:
    view = data.data
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _take_files(delta: DiskDelta, checkpoint: Path, limits: Limits) -> None:
    for name in sorted(FILE_NAMES.intersection(list_names(delta.home, limits=limits))):
        with open_inside(delta.home, name) as file:
            data = read_bounded(file, delta.home / name, limits.file_bytes)
        (checkpoint / name).unlink(missing_ok=True)  # it may share its inode with another export's
        (checkpoint / name).write_bytes(data)
