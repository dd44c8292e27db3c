"""All versions of one run at this daemon: publishing, exporting, verifying and describing them.

Heavy work runs in worker threads: publishes one at a time, exports and mirror advances one at a time,
neither waiting for the other. Invariant: whatever a caller is told is durable is durable.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec
import structlog

from deltad.client.messages import Cache, NextReply, PinReply, Step, VerifyReply, VersionInfo
from deltad.daemon.applying import export_disk_delta
from deltad.daemon.describe import describe, describe_step, pin_info
from deltad.daemon.inverses import Inverses
from deltad.daemon.notes import Note, Notes
from deltad.daemon.origin import Handed, Origin, Published, PublishOptions
from deltad.daemon.targets import goal
from deltad.delta.backend import Backend
from deltad.delta.keys import SigningKey
from deltad.delta.layout import decode_layout
from deltad.delta.record import VersionRecord
from deltad.errors import FormatError, IntegrityError, NotFoundError, UsageError
from deltad.store.derive import Deriver
from deltad.store.leases import READ_SECONDS
from deltad.store.mirror import Mirror
from deltad.store.pins import Pin
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant, Version, parse_version

log = structlog.get_logger()

_STRICTER: tuple[Cache, ...] = ("keep", "", "new-requests-only", "reset")


class Versions:
    """One run. Methods belong to the event loop's thread; the blocking parts go elsewhere."""

    def __init__(
        self,
        store: Store,
        run: RunId,
        backend: Backend,
        *,
        daemon: str,
        key: SigningKey | None = None,
        shares: bool = True,
        threads: int = 1,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`daemon` is the name of this one, whose fleet is led; `key` signs what it makes, which stays on this host
        unless it `shares`. `on_change` is called when `next_for` may have another answer, though no version came."""
        self._store = store
        self._daemon = daemon
        self._key = key
        self._shares = shares
        self._backend = backend
        self._threads = threads
        self.run = run
        self.records = store.run(run)
        self._notes = Notes(self.records.directory / "notes", store.files)
        self._publishing = asyncio.Lock()
        self._described: dict[Version, VersionInfo] = {}
        self._unreadable: set[Version] = set()
        """Those of which it was said that their description is damaged; they are tried again each time."""
        self._weight_bytes: dict[bytes, int] = {}
        self._mirrors: dict[str, Mirror] = {}
        self._inverses: dict[str, Inverses] = {}
        self._on_change = on_change
        self._caches: dict[Version, Cache] = {}
        self._coming: Cache = ""
        """The cache policy of what is being published."""
        self.deeds: set[asyncio.Task[Any]] = set()
        """Publishes that are under way, and what follows them; a drain waits for them."""

    def info(self, version: Version) -> VersionInfo:
        """Raises NotFoundError for a version that is not held, IntegrityError for a damaged description."""
        if version not in self._described:
            record = self.records.record(version)
            size = self._size(Digest(record.variants[0].layout))
            pin = self.records.pins().get(version)
            self._described[version] = describe(self.records, record, size, self._notes.read(version), pin)
        return self._described[version]

    def _size(self, layout: Digest) -> int:
        """Bytes of all weights; nearly all versions share one layout, so it is read once."""
        if layout not in self._weight_bytes:
            data = self._store.read(layout)
            self._weight_bytes[layout] = decode_layout(data, limits=self._store.limits).weight_bytes
        return self._weight_bytes[layout]

    def all(self) -> list[VersionInfo]:
        """Ascending, without those whose description is damaged on this disk."""
        found, unreadable = [], set()
        for record in self.records.records():
            try:
                found.append(self.info(record.version))
            except (IntegrityError, NotFoundError, FormatError) as error:
                unreadable.add(record.version)
                if record.version not in self._unreadable:
                    log.error("version_unreadable", version=str(record.id), error=str(error))
        self._unreadable = unreadable
        return found

    def latest(self) -> VersionInfo | None:
        record = self.records.latest()
        return None if record is None else self.info(record.version)

    def note(self, version: Version, note: Note) -> None:
        """Remember what was measured about a version: when it was published here, or pulled."""
        self._notes.write(version, note)
        self._caches[version] = note.cache
        self._described.pop(version, None)

    def forget_gone(self) -> bool:
        """Forget what was noted about versions that are not held any more. False if there are none."""
        gone = self._described.keys() - {record.version for record in self.records.records()}
        for version in gone:
            del self._described[version]
            self._notes.forget(version)
            self._caches.pop(version, None)
        return bool(gone)

    def named(self, text: str) -> Version:
        """A version as people write it: without an epoch, the newest epoch that has it, or else the first."""
        version = parse_version(text)
        if "@" in text:
            return version
        held = (record.version for record in self.records.records())
        return max((found for found in held if found.number == version.number), default=version)

    async def publish(self, origin: Origin, directory: Path, number: int, **how: Unpack[PublishOptions]) -> Published:
        """See `Origin.publish`. What has begun goes on to its end, whatever becomes of the caller."""
        return await self._do(origin, lambda: origin.publish(directory, number, **how), how.get("cache", ""))

    async def publish_handed(
        self, origin: Origin, handed: Handed, number: int, **how: Unpack[PublishOptions]
    ) -> Published:
        """See `Origin.publish_handed`, and `publish`."""
        return await self._do(origin, lambda: origin.publish_handed(handed, number, **how))

    async def _do(self, origin: Origin, publish: Callable[[], Published], cache: Cache = "") -> Published:
        deed = asyncio.create_task(self._publish(origin, publish, cache))
        self._watch(deed)
        return await asyncio.shield(deed)

    def _watch(self, deed: asyncio.Task[Any]) -> None:
        self.deeds.add(deed)
        deed.add_done_callback(self.deeds.discard)

    async def _publish(self, origin: Origin, publish: Callable[[], Published], cache: Cache) -> Published:
        async with self._publishing:
            self._coming = cache
            published = await asyncio.to_thread(publish)
            if not published.already:
                note = Note(published.seconds, cache=cache)
                if coding := published.coding:
                    note = msgspec.structs.replace(note, coder=coding.mode, coder_reason=coding.reason)
                self.note(published.record.version, note)
        if not published.already:
            self._watch(asyncio.create_task(self._tidy(origin)))
        return published

    async def _tidy(self, origin: Origin) -> None:
        """After a publish, when whoever asked for it has been told."""
        async with self._publishing:
            await asyncio.to_thread(origin.tidy)

    async def export(self, version: Version, variant: Variant | None, directory: Path) -> str:
        """Write a version at `directory`, which must be absent or empty; returns its root in hex."""
        with self._reading(version, f"the export to {directory}") as record:
            return (await asyncio.to_thread(self._export, record, variant, directory)).hex()

    async def export_disk_delta(
        self, version: Version, base: Version | None, directory: Path, encoding: str, checksum: str
    ) -> str:
        """Write what leads from `base`, or the version before, to a version at `directory`; returns the version's root.

        In the layout of `deltad.checkpoint.disk_delta`. Raises NotFoundError, UsageError, StoreError; ConflictError
        where the two are not of one model.
        """
        with self._reading(version, f"the export to {directory}") as record:
            before = base or _parent(record)
            with self._reading(before, f"the export to {directory}") as base_record:
                _check_empty(directory)
                export = partial(export_disk_delta, self.mirror(Variant(record.variants[0].name)), base_record, record)
                await asyncio.to_thread(export, directory, encoding, checksum, threads=self._threads)
            return record.variants[0].root.hex()

    async def verify(self, version: Version) -> VerifyReply:
        """Rebuild a version from what is stored, read it back and compare."""
        with self._reading(version, "the verification") as record:
            return await asyncio.to_thread(self._verify, record)

    async def pin(self, version: Version, pin: Pin) -> PinReply:
        """Keep a version whatever the retention says; durable on return. Raises NotFoundError, StoreError."""
        changed = await asyncio.to_thread(self.records.pin, version, pin)
        return self._pin_reply(version, changed)

    async def unpin(self, version: Version) -> PinReply:
        """Leave a version to the retention again. Raises NotFoundError, StoreError."""
        changed = await asyncio.to_thread(self.records.unpin, version)
        return self._pin_reply(version, changed)

    def _pin_reply(self, version: Version, changed: bool) -> PinReply:
        self._described.pop(version, None)
        return PinReply(str(version), pin_info(self.records.pins().get(version)), changed)

    async def advance_mirror(self) -> None:
        """Let the mirrors catch up whose time it is. Off the path of any commit."""
        record = self.records.latest()
        if record is None:
            return
        for variant in record.variants:
            mirror = self.mirror(Variant(variant.name))
            if await asyncio.to_thread(mirror.is_due, record):
                with self._reading(record.version, "the mirror"):
                    await asyncio.to_thread(mirror.advance, record)
                log.info("mirror_advanced", run=self.run, version=str(record.version), variant=variant.name)

    def next_for(self, variant: Variant, served: Version | None) -> NextReply | None:
        """What a replica should do that serves `served`; None while that is the target, or a way is being made."""
        target = goal(self.records, self._daemon)
        if target is None or target.version == served:
            return None
        steps = () if served is None else self.way(variant, served, target)
        if steps is None:
            return None
        cache = self._cache_between(served, target.version)
        return NextReply(target=str(target.version), steps=steps, reload=not steps, cache=cache)

    def set_cache(self, version: Version, cache: Cache) -> None:
        """From now on replicas that commit a version treat their caches so."""
        if self._cache_of(version) != cache:
            self.note(version, msgspec.structs.replace(self._notes.read(version), cache=cache))

    def _cache_between(self, served: Version | None, target: Version) -> Cache:
        """The strictest policy of all versions that one commit brings."""
        found = [self._cache_of(target)]
        if served is not None:
            passed = (record.version for record in self.records.records() if served < record.version < target)
            found += (self._cache_of(version) for version in passed)
        return max(found, key=_STRICTER.index)

    def _cache_of(self, version: Version) -> Cache:
        if version not in self._caches:
            note = self._notes.read(version)
            if note == Note() and self._publishing.locked():
                return self._coming  # its note is not written yet
            self._caches[version] = note.cache
        return self._caches[version]

    def way(self, variant: Variant, served: Version, target: VersionRecord) -> tuple[Step, ...] | None:
        """The deltas that lead from what is served to `target`, backwards too; none where it must be loaded whole.

        None while a way back is being made: `on_change` says when to ask again.
        """
        try:
            path = self.records.path(target, variant, [served], anchors=False)
        except NotFoundError:
            held = served in {record.version for record in self.records.records()}
            if held and target.version < served and self._inverses_of(variant).coming(served, target.version):
                return None
            return ()
        return tuple(describe_step(self.records, hop, variant) for hop in path.hops)

    def mirrors(self) -> list[Mirror]:
        """The mirrors of all variants of the newest version."""
        latest = self.records.latest()
        return [self.mirror(Variant(variant.name)) for variant in (latest.variants if latest else ())]

    def deriver(self, variant: Variant) -> Deriver:
        """What makes edges of a variant."""
        mirror = self.mirror(variant)
        return Deriver(
            self._store,
            self.records,
            variant,
            mirror,
            self._backend,
            key=self._key,
            shares=self._shares,
            threads=self._threads,
        )

    def _inverses_of(self, variant: Variant) -> Inverses:
        if variant not in self._inverses:
            self._inverses[variant] = Inverses(self.deriver(variant), self._on_change)
        return self._inverses[variant]

    def mirror(self, variant: Variant) -> Mirror:
        """The one mirror of a variant."""
        if variant not in self._mirrors:
            self._mirrors[variant] = Mirror(self._store, self.records, variant, self._backend, threads=self._threads)
        return self._mirrors[variant]

    @contextmanager
    def _reading(self, version: Version, why: str) -> Iterator[VersionRecord]:
        """Keep a version, and what leads to it, while it is read. Raises NotFoundError."""
        holder = f"{why} ({self.run}/{version}, {uuid.uuid4().hex[:8]})"
        self.records.lease(holder, version, READ_SECONDS)
        try:
            yield self.records.record(version)
        finally:
            self._store.leases.release(holder)

    def _export(self, record: VersionRecord, variant: Variant | None, directory: Path) -> Digest:
        _check_empty(directory)
        name = record.variants[0].name if variant is None else record.variant(variant).name
        return self.mirror(Variant(name)).export(record, directory)

    def _verify(self, record: VersionRecord) -> VerifyReply:
        mirror = self.mirror(Variant(record.variants[0].name))
        expected = record.variants[0].root
        found, wrong = mirror.verify(record, self._store.scratch / f"verify-{self.run}-{record.version}")
        tensors = sum(not spec.alias_of for spec in mirror.layout(record).tensors)
        return VerifyReply(str(record.version), expected.hex(), found.hex(), found == expected, tensors, tuple(wrong))


def _parent(record: VersionRecord) -> Version:
    if record.parent is None or record.parent_run:
        raise UsageError(
            f"a delta that leads to {record.id}",
            expected="a version before it in its run",
            found="the first one",
            hint="export it whole, or name a base",
        )
    return record.parent


def _check_empty(directory: Path) -> None:
    if not directory.is_absolute():
        raise UsageError(f"{directory}", expected="an absolute path")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}", expected="a directory that is absent or empty", found="a file")
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory}", expected="a directory that is absent or empty", found="something in it")
