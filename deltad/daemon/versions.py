"""All versions of one run at this daemon: publishing, exporting, verifying and describing them.

Heavy work runs in worker threads, one deed a run at a time, so that a publish and a mirror advance
never meet. Invariant: whatever a caller is told is durable is durable.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Unpack

import structlog

from deltad.client.messages import NextReply, Seconds, VerifyReply, VersionInfo
from deltad.daemon.describe import describe, describe_step
from deltad.daemon.notes import Note, Notes
from deltad.daemon.origin import Origin, Published, PublishOptions
from deltad.delta.backend import Backend
from deltad.delta.record import VersionRecord
from deltad.errors import IntegrityError, NotFoundError, UsageError
from deltad.store.mirror import Mirror
from deltad.store.path import find_path
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant, Version

log = structlog.get_logger()

TAIL = 16
"""Edges behind the mirror's generation at which it advances."""


class Versions:
    """One run. Methods belong to the event loop's thread; the blocking parts go elsewhere."""

    def __init__(self, store: Store, run: RunId, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self.run = run
        self.records = store.run(run)
        self._notes = Notes(self.records.directory / "notes")
        self._deed = asyncio.Lock()
        self._described: dict[Version, VersionInfo] = {}

    def info(self, version: Version) -> VersionInfo:
        """Raises NotFoundError for a version that is not held."""
        if version not in self._described:
            record = self.records.record(version)
            self._described[version] = describe(self._store, self.records, record, self._notes.read(version))
        return self._described[version]

    def all(self) -> list[VersionInfo]:
        """Ascending, without those whose description is damaged on this disk."""
        found = []
        for record in self.records.records():
            try:
                found.append(self.info(record.version))
            except (IntegrityError, NotFoundError) as error:
                log.error("version_unreadable", version=str(record.id), error=str(error))
        return found

    def latest(self) -> VersionInfo | None:
        record = self.records.latest()
        return None if record is None else self.info(record.version)

    def note(self, version: Version, *, seconds: Seconds | None = None, pulled_bytes: int | None = None) -> None:
        """Remember what was measured about a version."""
        known = self._notes.read(version)
        self._notes.write(
            version,
            Note(
                seconds=known.seconds if seconds is None else seconds,
                pulled_bytes=known.pulled_bytes if pulled_bytes is None else pulled_bytes,
            ),
        )
        self._described.pop(version, None)

    async def publish(self, origin: Origin, directory: Path, number: int, **how: Unpack[PublishOptions]) -> Published:
        """See `Origin.publish`."""
        async with self._deed:
            published = await asyncio.to_thread(origin.publish, directory, number, **how)
        if not published.already:
            self.note(published.record.version, seconds=published.seconds)
        return published

    async def export(self, version: Version, variant: Variant | None, directory: Path) -> str:
        """Write a version at `directory`, which must be absent or empty; returns its root in hex."""
        record = self.records.record(version)
        async with self._deed:
            root = await asyncio.to_thread(self._export, record, variant, directory)
        return root.hex()

    async def verify(self, version: Version) -> VerifyReply:
        """Rebuild a version from what is stored, read it back and compare."""
        record = self.records.record(version)
        async with self._deed:
            return await asyncio.to_thread(self._verify, record)

    async def advance_mirror(self) -> None:
        """Let the mirror catch up if its tail has grown long. Off the path of any commit."""
        record = self.records.latest()
        if record is None:
            return
        mirror = self._mirror(record, None)
        async with self._deed:
            if await asyncio.to_thread(mirror.tail, record) > TAIL:
                await asyncio.to_thread(mirror.advance, record)
                log.info("mirror_advanced", run=self.run, version=str(record.version))

    def next_for(self, variant: Variant, served: Version | None) -> NextReply | None:
        """What a replica should do that serves `served`; None while that is the newest."""
        target = self.records.latest()
        if target is None or target.version == served:
            return None
        reply = NextReply(target=str(target.version), reload=True)
        if served is None:
            return reply
        try:
            path = find_path(target, variant, held={served}, record=self.records.record, anchors=False)
        except NotFoundError:
            return reply
        steps = tuple(describe_step(self.records, hop, variant) for hop in path.hops)
        return NextReply(target=str(target.version), steps=steps)

    def _mirror(self, record: VersionRecord, variant: Variant | None) -> Mirror:
        name = record.variants[0].name if variant is None else record.variant(variant).name
        return Mirror(self._store, self.records, Variant(name), self._backend)

    def _export(self, record: VersionRecord, variant: Variant | None, directory: Path) -> Digest:
        if not directory.is_absolute():
            raise UsageError(f"{directory}", expected="an absolute path")
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory}", expected="a directory that is absent or empty", found="something in it")
        return self._mirror(record, variant).export(record, directory)

    def _verify(self, record: VersionRecord) -> VerifyReply:
        mirror = self._mirror(record, None)
        expected = record.variants[0].root
        found, wrong = mirror.verify(record, self._store.scratch / f"verify-{self.run}-{record.version}")
        tensors = sum(not spec.alias_of for spec in mirror.layout(record).tensors)
        return VerifyReply(str(record.version), expected.hex(), found.hex(), found == expected, tensors, tuple(wrong))
