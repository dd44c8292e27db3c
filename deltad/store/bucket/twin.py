"""Keeping what a store holds of its runs in a bucket as well: objects first, the run's pointer last.

Order of writes, with what a kill leaves in each gap:

1. `owner`: this daemon's name and the id of its life. Whoever claims a prefix later is the one who may go on;
2. objects, each created under its digest, in any order. Killed before the pointer: nobody is told of them, and the
   next life uses what is there;
3. the pointer, replaced on condition that it still is the one that was read. Killed before the reply: the next life
   reads it, and finds that it is done.

It may not change the store. Owns one invariant: whatever a pointer names was whole in the bucket before it was
written, and is not removed (`sweep`) before the pointer has not named it for as long as the grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from deltad.delta.encoding import sha256
from deltad.delta.layout import decode_layout
from deltad.delta.manifest import decode_manifest, decode_page
from deltad.delta.record import EdgeRef, VersionRecord, decode_record
from deltad.errors import ConflictError, DeltadError, FormatError, IntegrityError, NotFoundError
from deltad.store.bucket.index import (
    INDEX_FORMAT,
    OWNER,
    Entry,
    Index,
    IndexEdge,
    Owner,
    check_advance,
    object_key,
    parse_index,
    parse_owner,
    pointer_key,
)
from deltad.store.bucket.port import PART_BYTES, Bucket, Stamp
from deltad.store.runs import RunStore
from deltad.store.store import Store
from deltad.types import DIGEST_BYTES, Digest, RunId, Version

log = structlog.get_logger()

AT_A_TIME = 8
"""Uploads."""
_ASKED_FIRST = 64 << 10
"""Whether an object of at least this size is there is asked before it is sent."""
VERSIONS = 1000
"""A pointer names at most this many versions, the newest, and those on the way to them."""
_ROOM = 64
"""For the digits of a pointer's counters."""


@dataclass(frozen=True, slots=True)
class Advanced:
    """What one advance of a run's pointer brought. `skipped`: versions that were passed over on the way."""

    newest: Version
    bytes: int
    skipped: int


@dataclass(slots=True)
class _Known:
    index: Index | None
    stamp: Stamp | None


class Twin:
    """All runs of a store below one prefix. Methods belong to the event loop's thread, one at a time.

    `pace` is awaited with the run and the number of bytes before an object goes up; `on_sent` is told of it after.
    """

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        *,
        daemon: str,
        boot: str,
        pace: Callable[[RunId, int], Awaitable[None]],
        on_sent: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.bucket = bucket
        self._store = store
        self._owner = Owner(INDEX_FORMAT, daemon, boot)
        self._pace = pace
        self._on_sent = on_sent
        self._claimed: Stamp | None = None
        self._known: dict[RunId, _Known] = {}
        self._led: dict[RunId, dict[bytes, bytes]] = {}
        """Of what pointers name, what it leads to, so that a sweep reads only what is new."""

    async def claim(self) -> None:
        """Say that this life of this daemon writes here. Raises ConflictError where another daemon does."""
        found = await self._read_owner()
        if found is not None and found[0].daemon != self._owner.daemon:
            raise ConflictError(
                self.bucket.url,
                expected=f"a prefix that {self._owner.daemon} writes to",
                found=f"one of {found[0].daemon}",
                hint="give each daemon a prefix of its own",
            )
        if found is None or found[0] != self._owner:
            stamp = None if found is None else found[1]
            self._claimed = await self.bucket.swap(OWNER, self._owner.encode(), stamp)
        else:
            self._claimed = found[1]

    async def check_claim(self) -> None:
        """Raises ConflictError unless this life still is the one that writes here."""
        if self._claimed is None:
            await self.claim()
        found = await self._read_owner()
        if found is None or found[0] != self._owner:
            self._claimed = None
            raise ConflictError(
                self.bucket.url,
                expected=f"this life of {self._owner.daemon} as the one who writes",
                found=f"{found[0].daemon}, started elsewhere" if found else "nobody",
                hint="a second daemon of that name runs; stop one of them",
            )

    async def index(self, run: RunId) -> Index | None:
        """What the run's pointer says now; None where there is none."""
        return (await self._load(run)).index

    async def advance(self, run: RunId) -> Advanced | None:
        """Bring the newest version of a run into the bucket, and what leads there; None if nothing changed.

        Raises ConflictError where another writes here, or is ahead, and what the bucket and the store raise.
        """
        if self._claimed is None:
            await self.claim()
        known = self._known.get(run) or await self._load(run)
        records = self._store.run(run)
        with self._store.leases.work(f"the twin of {run} in {self.bucket.url}"):
            if known.index is not None:
                # What leads on from there is what is brought next. Without it, there is a way from an anchor.
                with suppress(NotFoundError):
                    records.lease(f"the twin in {self.bucket.url} ({run})", known.index.newest)
            most = self._store.limits.json_body_bytes
            index = await asyncio.to_thread(_next_index, records, known.index, most)
            if index is None:
                return None
            check_advance(known.index, index)
            data = index.encode()
            parse_index(data, run, limits=self._store.limits)  # what readers would refuse must not be written
            lacking = await asyncio.to_thread(_lacking, self._store, records, known.index, index)
            sent = await self.bring(run, lacking)
            for entry in index.entries:
                if known.index is None or known.index.entry(entry.version) is None:
                    sent += await self._bring(run, Digest(entry.record), records.record_bytes(entry.version))
            try:
                stamp = await self.bucket.swap(pointer_key(run), data, known.stamp)
            except BaseException:
                # It may have been written for all that is known; whoever wrote it, it is read again.
                self._known.pop(run, None)
                raise
            self._known[run] = _Known(index, stamp)
        before = known.index
        return Advanced(index.newest, sent, index.skipped - (before.skipped if before else 0))

    async def bring(self, run: RunId, digests: Iterable[Digest]) -> int:
        """Bring objects that the store holds and the bucket may lack; returns the bytes that went up."""
        room, sent = asyncio.Semaphore(AT_A_TIME), 0
        trouble: DeltadError | None = None

        async def bring_one(digest: Digest) -> None:
            nonlocal sent
            try:
                went = await self._bring(run, digest, await asyncio.to_thread(self._store.read, digest))
                sent += went
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as uploads:
                for digest in digests:
                    await room.acquire()
                    uploads.create_task(bring_one(digest))
        except* DeltadError as errors:
            trouble = _first(errors)
        if trouble is not None:
            raise trouble
        return sent

    async def objects_of(self, index: Index) -> set[Digest]:
        """Every object that a pointer leads to, as told by descriptions in the store or else in the bucket.

        Raises IntegrityError, FormatError or NotFoundError where one of those is damaged or gone.
        """
        run = RunId(index.run)
        known, self._led[run] = self._led.get(run, {}), {}
        for entry in index.entries:
            parts = (entry.record, *(edge.manifest for edge in entry.edges))
            if not all(part in known for part in parts):
                known |= await self._learn(run, entry)
            if nobody := [part for part in parts if part not in known]:
                raise FormatError(
                    f"pointer of {run} in {self.bucket.url}: {entry.version}",
                    expected="edges of variants that its record has",
                    found=f"one of manifest {nobody[0].hex()}",
                )
            self._led[run] |= {part: known[part] for part in parts}
        packed = b"".join(self._led[run].values())
        return {Digest(packed[at : at + DIGEST_BYTES]) for at in range(0, len(packed), DIGEST_BYTES)}

    async def _learn(self, run: RunId, entry: Entry) -> dict[bytes, bytes]:
        """What a record, without its edges, and the manifest of each edge lead to: digests, one behind the other."""
        limits = self._store.limits
        held = self._store.run(run).find(entry.version)
        if held is None or held.digest != entry.record:
            held = decode_record(await self._content(entry.record, entry.size), limits=limits)
        led = {entry.record: entry.record}
        for variant in held.variants:
            layout = decode_layout(await self._content(variant.layout, variant.layout_size), limits=limits)
            led[entry.record] += variant.layout + b"".join(file.digest for file in layout.files)
            for edge in (edge for edge in entry.edges if edge.variant == variant.name):
                manifest = decode_manifest(await self._content(edge.manifest, edge.size), limits=limits)
                found = [edge.manifest]
                for page in manifest.pages:
                    chunks = decode_page(await self._content(page.digest, page.size), page, layout, limits=limits)
                    found += [page.digest, *(chunk.digest for chunk in chunks)]
                led[edge.manifest] = b"".join(found)
        return led

    async def _content(self, digest: bytes, most: int) -> bytes:
        key = object_key(digest)
        try:
            return await asyncio.to_thread(self._store.objects.read_unasked, Digest(digest))
        except (NotFoundError, IntegrityError):
            found = await self.bucket.read(key, most)
        if found is None or sha256(found[0]) != digest:
            raise IntegrityError(f"{self.bucket.url}/{key}", expected="bytes with that SHA-256", found="others")
        return found[0]

    async def _read_owner(self) -> tuple[Owner, Stamp] | None:
        try:
            found = await self.bucket.read(OWNER, self._store.limits.json_body_bytes)
        except NotFoundError:
            return None
        assert found is not None
        return parse_owner(found[0]), found[1]

    async def _load(self, run: RunId) -> _Known:
        limits = self._store.limits
        try:
            found = await self.bucket.read(pointer_key(run), limits.json_body_bytes)
        except NotFoundError:
            self._known[run] = _Known(None, None)
        else:
            assert found is not None
            self._known[run] = _Known(parse_index(found[0], run, limits=limits), found[1])
        return self._known[run]

    async def _bring(self, run: RunId, digest: Digest, data: bytes) -> int:
        """The bytes that went up: none where they are there already, as after a kill."""
        key = object_key(digest)
        if len(data) >= _ASKED_FIRST and await self._has(key, len(data)):
            return 0
        await self._pace(run, len(data))
        # What goes up in parts cannot be created on condition; it becomes visible in one step all the same.
        if len(data) > PART_BYTES or not await self.bucket.create(key, data):
            if len(data) <= PART_BYTES and await self._has(key, len(data)):
                return 0
            await self.bucket.put(key, data)  # new, or of another size than its name allows
        self._on_sent(len(data))
        return len(data)

    async def _has(self, key: str, size: int) -> bool:
        try:
            return (await self.bucket.head(key)).size == size
        except NotFoundError:
            return False


def _next_index(records: RunStore, known: Index | None, most: int) -> Index | None:
    """What the pointer should say next, in at most so many bytes if that can be; None if it says so now. Blocks."""
    latest = records.latest()
    if latest is None:
        return None
    edges = {entry.version: _kept(records, entry) for entry in (known.entries if known else ())}
    before = [version for version in edges if version < latest.version and records.find(version) is not None]
    needed = {latest.version}
    for variant in latest.variants:
        # The way on for those that hold what was there before, and, which no one can do without, the way in.
        for held in (before[-1:], []):
            for hop in records.path(latest, variant.name, held, local=False).hops:
                if hop.record.run == records.run:  # what a fork starts from is in the twin of its own run
                    found = _index_edge(records, hop.record, variant.name, hop.edge)
                    edges.setdefault(hop.record.version, {})[found.manifest] = found
                    needed |= {hop.record.version} if not held else set()
    whole = sorted(version for version, found in edges.items() if found)
    kept = VERSIONS
    while True:
        chosen = sorted({*whole[-kept:], *needed})
        entries = tuple(_entry(records.record(version), edges[version]) for version in chosen)
        index = Index(INDEX_FORMAT, records.run, 1, entries, records.targets().heard)
        if kept == 1 or len(index.encode()) <= most - _ROOM:
            break
        kept //= 2
    if known is None:
        return index
    if (known.entries, known.targets) == (index.entries, index.targets):
        return None
    passed = latest.sequence - known.entries[-1].sequence - sum(version > known.newest for version in chosen)
    return msgspec.structs.replace(index, serial=known.serial + 1, skipped=known.skipped + max(passed, 0))


def _first(errors: BaseExceptionGroup[DeltadError]) -> DeltadError:
    """One of several failures that came together."""
    found = errors.exceptions[0]
    return found if isinstance(found, DeltadError) else _first(found)


def _kept(records: RunStore, entry: Entry) -> dict[bytes, IndexEdge]:
    """The edges of an entry that the store still knows of, and whose base it still holds."""
    record = records.find(entry.version)
    if record is None:
        return {}
    known = {e.manifest for variant in record.variants for e in records.known_edges(record, variant)}
    kept = {}
    for edge in entry.edges:
        base_run = records.sibling(RunId(edge.base_run or records.run))
        held = edge.base is None or (base_run is not None and base_run.find(edge.base) is not None)
        if held and edge.manifest in known:
            kept[edge.manifest] = edge
    return kept


def _entry(record: VersionRecord, edges: Mapping[bytes, IndexEdge]) -> Entry:
    data = record.encode()
    ordered = sorted(edges.values(), key=lambda edge: (edge.variant, edge.manifest))
    return Entry(record.version, sha256(data), len(data), record.sequence, tuple(ordered))


def _index_edge(records: RunStore, record: VersionRecord, variant: str, edge: EdgeRef) -> IndexEdge:
    size, coders = records.weight(edge)
    base = record.base(edge)
    elsewhere = base.run if base is not None and base.run != records.run else ""
    return IndexEdge(variant, edge.kind, edge.base, edge.manifest, edge.size, size, coders, elsewhere)


def _lacking(store: Store, records: RunStore, known: Index | None, index: Index) -> list[Digest]:
    """The objects that what is new in `index` leads to, each once. Blocks."""
    before = {entry.version: entry for entry in (known.entries if known else ())}
    held = [record for version in before if (record := records.find(version)) is not None]
    layouts = {variant.layout for record in held for variant in record.variants}
    found: dict[Digest, None] = {}
    for entry in index.entries:
        old = before.get(entry.version)
        fresh = set(entry.edges) - set(old.edges if old else ())
        record = records.record(entry.version)
        for variant in record.variants if fresh else ():
            layout = decode_layout(store.read(Digest(variant.layout)), limits=store.limits)
            if variant.layout not in layouts:
                found |= dict.fromkeys([Digest(variant.layout), *(Digest(file.digest) for file in layout.files)])
            for edge in fresh:
                if edge.variant == variant.name:
                    manifest = decode_manifest(store.read(Digest(edge.manifest)), limits=store.limits)
                    found[Digest(edge.manifest)] = None
                    for page in manifest.pages:
                        found[Digest(page.digest)] = None
                        chunks = decode_page(store.read(Digest(page.digest)), page, layout, limits=store.limits)
                        found |= dict.fromkeys(Digest(chunk.digest) for chunk in chunks)
    return list(found)
