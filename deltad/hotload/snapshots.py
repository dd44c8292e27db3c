"""Snapshots in a bucket: what lies there under an identity, and bringing it here.

A snapshot is the files directly below `<identity>/`: a checkpoint, or a disk-delta. Its index is written last, so
without it the snapshot is not there yet. Nothing that the bucket says is believed but names that are known, and sizes
that fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltad.checkpoint.files import INDEX_NAME, SINGLE_NAME, is_weights
from deltad.checkpoint.safetensors import parse_json
from deltad.delta.layout import FILE_NAMES
from deltad.errors import CheckpointError, LimitError, StoreFullError
from deltad.limits import Limits
from deltad.store.bucket.port import Bucket

_AT_ONCE = 4
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that is whole: its files, name → (size, tag), and what its index says of itself."""

    identity: str
    files: Mapping[str, tuple[int, str]]
    metadata: Mapping[str, Any]

    @property
    def base(self) -> str:
        """The identity that it applies to by its own word; empty for a full one."""
        return str(self.metadata.get("base_version", "")) if self.is_delta else ""

    @property
    def is_delta(self) -> bool:
        return "delta_encoding" in self.metadata

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


async def look(bucket: Bucket, identity: str, *, limits: Limits) -> Snapshot:
    """What lies in the bucket under an identity. Raises CheckpointError where it is not whole, LimitError,
    and what the bucket raises."""
    thing = f"snapshot {bucket.url}/{identity}"
    files: dict[str, tuple[int, str]] = {}
    async for key in bucket.keys(f"{identity}/"):
        name = key.removeprefix(f"{identity}/")
        if "/" in name or not (is_weights(name) or name in FILE_NAMES):
            continue
        if len(files) == limits.checkpoint_files:
            raise LimitError(thing, expected=f"at most {limits.checkpoint_files} files", found="more of them")
        files[name] = (0, "")
    turn = asyncio.Semaphore(_AT_ONCE)

    async def measure(name: str) -> None:
        async with turn:
            found = await bucket.head(f"{identity}/{name}")
        files[name] = (found.size, found.stamp.tag)

    await asyncio.gather(*(measure(name) for name in list(files)))
    if _ADAPTER in files:
        raise CheckpointError(
            thing, expected="a checkpoint of all weights", found=f"{_ADAPTER}: adapters are not loaded here yet"
        )
    if INDEX_NAME not in files and SINGLE_NAME not in files:
        raise CheckpointError(
            thing,
            expected=INDEX_NAME,
            found="files without it" if files else "nothing there",
            hint="upload the index last, when all else is there",
        )
    metadata: Mapping[str, Any] = {}
    if INDEX_NAME in files:
        found = await bucket.read(f"{identity}/{INDEX_NAME}", limits.index_bytes)
        index = parse_json(found[0] if found else b"", f"{thing}/{INDEX_NAME}", what="text")
        shards = set(index.get("weight_map", {}).values()) if isinstance(index, dict) else set()
        if missing := sorted(str(name) for name in shards - files.keys()):
            raise CheckpointError(thing, expected=f"every file that its index names, such as {missing[0][:120]}")
        if isinstance(index, dict) and isinstance(index.get("metadata"), dict):
            metadata = index["metadata"]
    return Snapshot(identity, files, metadata)


async def fetch(bucket: Bucket, snapshot: Snapshot, directory: Path, *, free_bytes: int) -> None:
    """Bring a snapshot's files into a new directory. Raises StoreFullError before anything, and what the bucket does.

    A file that changed since it was looked at is refused where it has another size; what else was changed is found by
    the checksums that a snapshot carries.
    """
    if snapshot.bytes > free_bytes:
        raise StoreFullError(
            f"{directory}", expected=f"room for {snapshot.bytes} bytes of snapshot {snapshot.identity!r}", found="less"
        )
    await asyncio.to_thread(directory.mkdir, parents=True)
    turn = asyncio.Semaphore(_AT_ONCE)

    async def bring(name: str, size: int) -> None:
        async with turn:
            with (directory / name).open("xb") as file:
                if size:
                    async for piece in bucket.stream(f"{snapshot.identity}/{name}", 0, size):
                        await asyncio.to_thread(file.write, piece)

    async with asyncio.TaskGroup() as group:
        for name, (size, _) in snapshot.files.items():
            group.create_task(bring(name, size))
