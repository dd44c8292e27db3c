"""Letting go of what nobody needs, and saying of every version and object why it stays or goes.

Owns one invariant: an object is removed only if no version that is kept leads to it, no work under way has
asked for it, and nobody has asked for it lately. Versions go first, durably; objects after that, so whatever a
kill leaves is unused objects, which the next collection finds. Where a description is damaged, nobody can say
what it leads to: then nothing is removed, and the damage is named.
"""

from __future__ import annotations

from collections.abc import Collection as Container
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import structlog

from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import decode_manifest, decode_page
from deltad.delta.record import VersionRecord
from deltad.errors import FormatError, IntegrityError, NotFoundError
from deltad.store.retention import Candidate, Retention, Verdict, judge
from deltad.store.store import Store
from deltad.types import Digest, RunId, Version, VersionId

log = structlog.get_logger()

GRACE_SECONDS = 600.0
"""How long an object stays that belongs to no version, after it was last asked for."""
_EVERYTHING = Retention()


@dataclass(frozen=True, slots=True)
class Explained:
    """What becomes of one version or object, in words."""

    thing: str
    bytes: int
    kept: bool
    why: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did, or with `dry_run` would do: all versions, then all objects."""

    versions: tuple[Explained, ...]
    objects: tuple[Explained, ...]

    @property
    def freed_bytes(self) -> int:
        """What the objects that go take. The space of chunks comes back with that of their packs."""
        return sum(found.bytes for found in self.objects if not found.kept)


@dataclass(slots=True)
class _Needs:
    """Why objects stay or go: by digest the first version that leads to it."""

    kept: dict[Digest, VersionId] = field(default_factory=dict)
    released: dict[Digest, VersionId] = field(default_factory=dict)


def collect(
    store: Store, retentions: Mapping[RunId, Retention], *, grace: float = GRACE_SECONDS, dry_run: bool = False
) -> Collected:
    """Remove what `retentions` do not keep; a run that is not named there is kept whole. Blocks; one at a time.

    Raises IntegrityError or FormatError if a description is damaged, StoreError if the disk refuses. In
    either case everything that is visible is whole, and the next collection goes on.
    """
    collector = _Collector(store, grace, dry_run)
    versions = [found for run in store.held_runs() for found in collector.sift(run, retentions.get(run, _EVERYTHING))]
    return Collected(tuple(versions), tuple(collector.sweep()))


class _Collector:
    def __init__(self, store: Store, grace: float, dry_run: bool) -> None:
        self._store = store
        self._grace = grace
        self._dry_run = dry_run
        self._started = store.clock()
        self._needs = _Needs()
        self._layout: tuple[Digest, Layout] | None = None
        """The layout that was read last, and its name."""

    def sift(self, run: RunId, retention: Retention) -> list[Explained]:
        """Decide about the versions of a run, and let them go; then note what the others lead to."""
        records = self._store.run(run)
        sizes: dict[Version, int] = {}

        def judged(candidates: list[Candidate]) -> dict[Version, Verdict]:
            sized = [replace(found, bytes=self._size(found.record, sizes)) for found in candidates]
            return judge(sized, retention, records.join, settling=self._store.leases.settling())

        # Everything slow is done here, before readers and writers have to wait.
        candidates = records.candidates()
        verdicts = judged(candidates)
        for candidate in candidates:
            if not verdicts[candidate.record.version].kept:
                with suppress(IntegrityError, FormatError):  # what it leads to goes as what nobody leads to
                    self._note(candidate.record, self._needs.released)
        if self._store.objects.quarantine.damaged():
            # The graph leaves out what is set aside. If it describes one that is kept, this ends here, before any
            # way to that one is let go.
            for candidate in candidates:
                if verdicts[candidate.record.version].kept:
                    for _ in self._objects_of(candidate.record):
                        pass

        def choose(candidates: list[Candidate]) -> Container[Version]:
            # What has become droppable in between waits for the next time.
            again = judged(candidates)
            return [v for v, now in again.items() if not now.kept and v in verdicts and not verdicts[v].kept]

        if self._dry_run:
            left = [found.record for found in candidates if verdicts[found.record.version].kept]
        else:
            records.sift(choose)
            left = records.records()
        for record in (*left, *records.doubted_records()):
            self._note(record, self._needs.kept)
            if record.version in verdicts and not verdicts[record.version].kept:
                verdicts[record.version] = Verdict(True, "needed since a moment ago")
        return [
            Explained(f"{VersionId(run, version)}", sizes[version], verdict.kept, verdict.why)
            for version, verdict in verdicts.items()
        ]

    def sweep(self) -> list[Explained]:
        """Remove the objects that no version needs."""
        objects = self._store.objects
        explained, dead = [], []
        for digest, size in objects.sizes().items():
            verdict = self._judge(digest)
            explained.append(Explained(f"object {digest.hex()}", size, verdict.kept, verdict.why))
            if not verdict.kept:
                dead.append(digest)
        if not self._dry_run:
            objects.remove(dead, lambda digest: self._judge(digest).kept)
            objects.forget_asked(self._horizon())
            log.info("collected", objects=len(dead))
        return explained

    def _judge(self, digest: Digest) -> Verdict:
        """Asked again at the very moment of removing: somebody may have come to need it."""
        if version := self._needs.kept.get(digest):
            return Verdict(True, f"leads to {version}, which is kept")
        now, work = self._store.clock(), self._store.leases.oldest_work()
        asked, released = self._store.objects.last_asked(digest), self._needs.released.get(digest)
        if asked is not None and work is not None and asked >= work[0]:
            return Verdict(True, f"asked for since {work[1]} began")
        if asked is not None and asked >= self._started:
            return Verdict(True, "asked for just now")
        if asked is None and released is None:
            asked = self._store.leases.opened  # work that a restart cut off may ask for it yet
        if asked is not None and now - asked < self._grace:
            return Verdict(True, f"of no version that is kept, but asked for {now - asked:.0f} s ago")
        if released is not None:
            return Verdict(False, f"led to {released}, which is not kept")
        return Verdict(False, f"leads to no version, and nobody has asked for it for {now - (asked or 0.0):.0f} s")

    def _horizon(self) -> float:
        work = self._store.leases.oldest_work()
        return min(self._started - self._grace, self._started if work is None else work[0])

    def _size(self, record: VersionRecord, sizes: dict[Version, int]) -> int:
        if record.version not in sizes:
            size = 0
            run = self._store.run(RunId(record.run))
            for variant in record.variants:
                for ref in run.edges(record.version, variant.name):
                    size += run.edge(ref, record.id).bytes
            sizes[record.version] = size
        return sizes[record.version]

    def _note(self, record: VersionRecord, needs: dict[Digest, VersionId]) -> None:
        for digest in self._objects_of(record):
            needs.setdefault(digest, record.id)

    def _objects_of(self, record: VersionRecord) -> Iterator[Digest]:
        """All objects that lead to a version, through every edge to it that is held here.

        Raises IntegrityError or FormatError if one that leads on is damaged.
        """
        for variant in record.variants:
            yield Digest(variant.layout)
            layout = self._read_layout(Digest(variant.layout))
            yield from (Digest(file.digest) for file in layout.files)
            # An edge from a version that is gone here is still of use to a peer that holds it.
            for edge in self._store.run(RunId(record.run)).known_edges(record, variant, hidden=True):
                yield Digest(edge.manifest)
                try:
                    manifest = decode_manifest(self._read(edge.manifest), limits=self._store.limits)
                except NotFoundError:
                    continue
                for page in manifest.pages:
                    yield Digest(page.digest)
                    try:
                        data = self._read(page.digest)
                    except NotFoundError:
                        continue
                    chunks = decode_page(data, page, layout, limits=self._store.limits)
                    yield from (Digest(chunk.digest) for chunk in chunks)

    def _read_layout(self, digest: Digest) -> Layout:
        # Versions share it as a rule, and to parse it takes longer than all the rest of one.
        if self._layout is None or self._layout[0] != digest:
            self._layout = (digest, decode_layout(self._read(digest), limits=self._store.limits))
        return self._layout[1]

    def _read(self, digest: bytes) -> bytes:
        if Digest(digest) in self._store.objects.quarantine:
            # Not held, but not because nobody wants it: nobody can say what it leads to.
            raise IntegrityError(f"object {digest.hex()}", found="damaged, and set aside", hint="see `deltad status`")
        return self._store.objects.read_unasked(Digest(digest))
