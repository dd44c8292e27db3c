"""The versions of one run, and the edges that lead to them.

Order of writes in `commit`, with what a crash leaves in each gap:

1. all objects that the record names are durable (the caller wrote them; checked here);
2. the record, under its final name. Killed before: unused objects are left, and publishing again
   reuses them. Killed after: the record is whole and all it names is durable, so opening the store
   syncs its name and rolls `latest` forward to it;
   Where derived edges lead to it, their entries in the catalogue come just before. Killed in between: an entry
   that leads nowhere is left, and the next start removes it;
3. `latest`, replaced atomically. Killed before the directory's sync: the old or the new pointer, and
   the old one is rolled forward as above.

Order in `sift`, which lets versions go: `dropping`, which names them all, is durable; their records are
removed, and that is durable; `dropping` is removed. From the first step on they are gone: a start that finds
`dropping` finishes. Derived edges from or to them follow, or are removed by the next start. Their objects are
removed after that, by the caller.

`target` is replaced atomically, alone, and under the same lock as `sift`: a version that a fleet is held at here
is not let go, and one that was let go is not held at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from deltad.delta.layout import decode_layout
from deltad.delta.manifest import Manifest, decode_manifest
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord, decode_record
from deltad.errors import ConflictError, DeltadError, FormatError, IntegrityError, NotFoundError
from deltad.limits import Limits
from deltad.protocol.publish import check_same, check_successor, is_gap
from deltad.protocol.target import Targets
from deltad.store.derived import DerivedEdge, DerivedEdges, derived_edge, edge_bytes
from deltad.store.disk import FileSystem
from deltad.store.forks import Forks
from deltad.store.graph import Edge, VersionGraph
from deltad.store.leases import LEASE_SECONDS, Leases
from deltad.store.objects import ObjectStore
from deltad.store.path import Path as EdgePath
from deltad.store.pins import Pin, Pins
from deltad.store.record_files import RecordFiles
from deltad.store.retention import Candidate
from deltad.store.run_graph import Answer, RunGraph
from deltad.store.targets import TargetFile
from deltad.store.watch_epochs import WatchEpochs
from deltad.store.whole import WholeEdges
from deltad.types import Digest, RunId, Version, VersionId


class RunStore:
    """One run's records in one store. Methods may be called from any thread."""

    def __init__(
        self,
        run: RunId,
        directory: Path,
        objects: ObjectStore,
        *,
        scratch: Path,
        limits: Limits,
        files: FileSystem,
        leases: Leases,
        clock: Callable[[], float],
        forks: Forks,
        find_run: Callable[[RunId], RunStore | None],
    ) -> None:
        """`find_run` finds the other runs of the store, at once."""
        self.run = run
        self.directory = directory
        self._objects = objects
        self._limits = limits
        self._leases = leases
        self._clock = clock
        self._forks = forks
        self._find_run = find_run
        self._whole = WholeEdges(objects, limits)
        self._record_files = RecordFiles(run, directory, scratch, files, limits)
        self._pins = Pins(directory / "pins", scratch, files)
        self._derived = DerivedEdges(directory / "edges", scratch, files)
        self._targets = TargetFile(directory / "target", scratch, files)
        self.watch_epochs = WatchEpochs(directory / "watch", scratch, files)
        self._writer = threading.Lock()
        """Held for a whole commit."""
        self._lock = threading.RLock()
        """Held only to look at or change what follows, so that readers never wait for the disk."""
        self._records: dict[Version, VersionRecord] = {}
        self._since: dict[Version, float] = {}
        """When each version came, by the monotonic clock of this life."""
        self._latest: Version | None = None
        self._doubted: dict[Version, tuple[VersionRecord, str]] = {}
        """What lies here and counts as not held, and what speaks against it."""
        self._weighed: dict[Digest, tuple[int, tuple[int, ...]]] = {}
        """Bytes and coders of the edges that records name, by manifest."""
        self._load()
        self.graph = RunGraph(self)

    def latest(self) -> VersionRecord | None:
        """The newest durable version."""
        with self._lock:
            return None if self._latest is None else self._records[self._latest]

    def record(self, version: Version) -> VersionRecord:
        """Raises NotFoundError for a version that is not held here."""
        with self._lock:
            record = self._records.get(version)
        if record is None:
            raise self._not_held(version, self.records())
        return record

    def find(self, version: Version) -> VersionRecord | None:
        """A version, if it is held."""
        with self._lock:
            return self._records.get(version)

    def sibling(self, run: RunId) -> RunStore | None:
        """Another run of the store, or this one."""
        return self if run == self.run else self._find_run(run)

    def record_bytes(self, version: Version) -> bytes:
        """The record as its publisher wrote it."""
        return self.record(version).encode()

    def records(self) -> list[VersionRecord]:
        """All versions that are held, in ascending order."""
        with self._lock:
            return [self._records[version] for version in sorted(self._records)]

    def doubt(self, against: Callable[[VersionRecord], str]) -> None:
        """Count every version as not held that something speaks against, and every other one as held; removes nothing.

        `against` says what that is, in words, or nothing. A doubted version is held again once its record came anew.
        """
        with self._writer, self.graph.held():
            known = {**self._records, **{version: record for version, (record, _) in self._doubted.items()}}
            found = {version: words for version, record in known.items() if (words := against(record))}
            with self._lock:
                self._doubted = {version: (known[version], words) for version, words in found.items()}
                self._records = {version: record for version, record in known.items() if version not in found}
                self._since = {version: self._since.get(version, self._clock()) for version in self._records}
                self._latest = max(self._records, default=None)
            for version, record in known.items():
                (self._forks.forget if version in found else self._forks.note)(record)
            self.graph.forget()

    def doubts(self) -> Mapping[Version, str]:
        """The versions that lie here and count as not held, with what speaks against each."""
        with self._lock:
            return {version: words for version, (_, words) in sorted(self._doubted.items())}

    def doubted_records(self) -> list[VersionRecord]:
        """The records of those versions. What they lead to stays, since a doubt may end."""
        with self._lock:
            return [record for record, _ in self._doubted.values()]

    def hide_edges(self, manifests: Collection[Digest]) -> None:
        """Take no path over these derived edges, and offer them to nobody, in this life; removes nothing."""
        with self._writer, self.graph.held(), self._lock:
            self._derived.hide(manifests)
            self.graph.forget()

    def commit(self, data: bytes, derived: Collection[Digest] = ()) -> bool:
        """Make a version durable and `latest`. False if the very same version was durable before.

        `derived`: manifests of edges to it that its record does not name. Raises ConflictError when the rules of
        `deltad.protocol.publish` forbid it, NotFoundError when an object that it needs is not held, FormatError or
        IntegrityError when its parts disagree.
        """
        record = decode_record(data, limits=self._limits)
        if record.run != self.run:
            raise FormatError(f"{record.id}", expected=f"a version of run {self.run}")
        with self._writer:
            known = self._records.get(record.version)
            if known is not None:
                check_same(known, record)
                return False
            check_successor(None if self._latest is None else self._records[self._latest], record)
            with self._forks.coming(record):
                edges = [self._derived_edge(record, manifest, local=False) for manifest in derived]
                for variant in record.variants:
                    self._check_complete(record, variant, [edge.ref for edge in edges if edge.variant == variant.name])
            # Whatever fails from here on may leave a record, of which the next start makes a version.
            for edge in edges:
                self._derived.add(edge)
            self._record_files.add(record, data)
            with self._lock:
                self._records[record.version] = record
                self._since[record.version] = self._clock()
                self._latest = record.version
                self._doubted.pop(record.version, None)
            self.graph.grew(record.version)
            return True

    def pin(self, version: Version, pin: Pin) -> bool:
        """Keep a version whatever the retention says; durable on return. False if it was pinned for that reason before.

        A new reason, or another's, replaces the one before. Raises NotFoundError, StoreError.
        """
        with self._writer:
            self.record(version)
            before = self._pins.all().get(version)
            if before is not None and (before.by, before.why) == (pin.by, pin.why):
                return False
            self._pins.add(version, pin)
            return True

    def unpin(self, version: Version) -> bool:
        """Leave a version to the retention again. False if it was not pinned. Raises NotFoundError, StoreError."""
        with self._writer:
            self.record(version)
            return self._pins.remove(version)

    def pins(self) -> Mapping[Version, Pin]:
        """What is pinned now. Waits for nobody."""
        return self._pins.all()

    def targets(self) -> Targets:
        """What was said about the target; it never waits for the disk."""
        return self._targets.now

    def move_target(self, move: Callable[[Targets], Targets]) -> bool:
        """Say something about the target; see `TargetFile.change`. No version is let go meanwhile."""
        with self._writer:
            return self._targets.change(move)

    def lease(self, holder: str, version: Version, seconds: float = LEASE_SECONDS) -> None:
        """`holder` reads this version, and will want the newer ones. Replaces its earlier lease of any run.

        Raises NotFoundError for a version that is not held, or not any more.
        """
        with self._lock:
            if version not in self._records:
                raise self._not_held(version, [self._records[known] for known in sorted(self._records)])
            self._leases.renew(holder, self.run, version, seconds)

    def _not_held(self, version: Version, held: list[VersionRecord]) -> NotFoundError:
        gone = "; what lay there was let go by the retention, or never pulled" if is_gap(version, held) else ""
        return NotFoundError(f"{VersionId(self.run, version)}", found=f"not held here{gone}", hint="see `deltad log`")

    def candidates(self) -> list[Candidate]:
        """All versions in ascending order, each with what speaks for keeping it; `bytes` is not filled in."""
        with self._writer, self._lock:
            return self._candidates()

    def _candidates(self) -> list[Candidate]:
        now, leases, pins = self._clock(), self._leases.of(self.run), self._pins.all()
        targets, forks = self._targets.now.named(), self._forks.of(self.run)
        return [
            Candidate(
                record,
                age=now - self._since[version],
                pinned=str(pins.get(version, "")),
                leased=leases.get(version, ""),
                target=str(targets.get(version, "")),
                forked=forks.get(version, ""),
            )
            for version, record in sorted(self._records.items())
        ]

    def sift(self, choose: Callable[[list[Candidate]], Collection[Version]]) -> None:
        """Let go of the versions that `choose` names; durable on return, and no lease or pin comes in between.

        The newest is never among them. Raises StoreError; then those that are not gone for good are still held.
        """
        with self._writer:
            self._record_files.finish_dropping()
            with self.graph.held(), self._lock:
                chosen = {version: self._records[version] for version in choose(self._candidates())}
                if self._latest in chosen:
                    raise ValueError(f"{self._latest} is the newest version")
                if held := chosen.keys() & self._targets.now.named().keys():
                    raise ValueError(f"a fleet is held at {min(held)}")
                for version in chosen:
                    del self._records[version], self._since[version]
                self.graph.forget()
            try:
                self._record_files.drop(sorted(chosen, reverse=True))
                self._derived.keep({*self._records, *self._doubted})
                for record in chosen.values():
                    self._forks.forget(record)
                    for variant in record.variants:
                        for edge in variant.edges:
                            self._weighed.pop(Digest(edge.manifest), None)
            except DeltadError:
                with self._lock:
                    left = {version: record for version, record in chosen.items() if self._record_files.holds(version)}
                    if not self._record_files.is_dropping():
                        self._records |= left
                        self._since |= dict.fromkeys(left, self._clock())
                    self.graph.forget()
                raise

    def add_edge(self, manifest: Digest, *, local: bool = False) -> DerivedEdge:
        """Take a derived edge between two versions that are held into the catalogue; durable on return.

        A `local` one is offered to nobody. Raises NotFoundError where it, or a version, is not held whole, and
        FormatError or IntegrityError where it contradicts their records.
        """
        with self._writer:
            record = self.record(self._read_manifest(manifest).target.version)
            edge = self._derived_edge(record, manifest, local=local)
            if missing := self._missing(record, record.variant(edge.variant), edge.ref):
                raise NotFoundError(f"{record.id} variant {edge.variant}", expected="an edge held whole", found=missing)
            self._derived.add(edge)
            self.graph.grew(record.version)
            return edge

    def drop_edges(self, manifests: Collection[Digest]) -> None:
        """Take derived edges out of the catalogue; a collection removes their objects.

        Raises ConflictError, and changes nothing, if nothing else would lead newcomers to a version that is held;
        StoreError.
        """
        with self._writer, self.graph.held():
            for edge in self._derived.all():
                if Digest(edge.manifest) in manifests and self._hangs_on(edge, manifests):
                    raise ConflictError(
                        f"the {edge.kind} to {VersionId(self.run, edge.target)} variant {edge.variant}",
                        expected="another way to that version from an anchor",
                        found="none",
                        hint="it is kept while the version is",
                    )
            self._derived.remove(manifests)
            self.graph.forget()

    def _hangs_on(self, edge: DerivedEdge, gone: Collection[Digest]) -> bool:
        """Whether newcomers come to the target of an edge, and do not without those that are to go."""
        led, left = (self.graph.is_led_to(edge.target, edge.variant, without) for without in ((), gone))
        return led and not left

    def derived(self, *, hidden: bool = False) -> list[DerivedEdge]:
        """All derived edges of the run, with or without the hidden ones."""
        with self._lock:
            return self._derived.all(hidden=hidden)

    def edges(self, version: Version, variant: str) -> tuple[EdgeRef, ...]:
        """The edges to a version that are held whole and start from a version that is held; anchors too.

        May read the disk. Raises NotFoundError for a version that is not held.
        """
        record = self.record(version)
        part = record.variant(variant)
        edges = self.known_edges(record, part)
        edges = [edge for edge in edges if (base := record.base(edge)) is None or self._held(base) is not None]
        edges = [edge for edge in edges if self._objects.is_held(Digest(edge.manifest))]
        if len(edges) > 1:
            # A version is committed when one edge to it is whole; of another, some objects may have come too.
            edges = [edge for edge in edges if not self._missing(record, part, edge, unasked=True)]
        return tuple(edges)

    def way_in(self, version: Version, variant: str) -> EdgeRef:
        """An edge to a version that is held whole: of several, the one that its record names first.

        Raises NotFoundError if there is none any more, since a part of each is damaged.
        """
        edges = self.edges(version, variant)
        if not edges:
            thing = f"{VersionId(self.run, version)} variant {variant}"
            raise NotFoundError(thing, expected="an edge that is held whole", found="none", hint="see `deltad status`")
        return edges[0]

    def known_edges(self, record: VersionRecord, variant: VariantRecord, *, hidden: bool = False) -> list[EdgeRef]:
        """The edges that a record names, whatever is held of them, and those that were derived, `hidden` ones too."""
        with self._lock:
            derived = self._derived.to(record.version, hidden=hidden)
        return [*variant.edges, *(edge.ref for edge in derived if edge.variant == variant.name)]

    def edge(self, ref: EdgeRef, target: VersionId) -> Edge:
        """What the graph knows of an edge that is held. May read the disk."""
        digest = Digest(ref.manifest)
        total, coders = self.weight(ref)
        with self._lock:
            derived = self._derived.get(digest) is not None
        base = self.record(target.version).base(ref)
        return Edge(ref.kind, base, target, digest, ref.size, total, coders, derived=derived)

    def weight(self, ref: EdgeRef) -> tuple[int, tuple[int, ...]]:
        """What a reader of an edge that is held fetches, in bytes, and its coders. May read the disk."""
        digest = Digest(ref.manifest)
        with self._lock:
            derived = self._derived.get(digest)
        if derived is not None:
            return derived.total_bytes, derived.coders
        if digest not in self._weighed:
            manifest = decode_manifest(self._objects.read_unasked(digest), limits=self._limits)
            self._weighed[digest] = edge_bytes(manifest, ref.size), manifest.coders
        return self._weighed[digest]

    def path(
        self,
        record: VersionRecord,
        variant: str,
        held: Collection[Version] = (),
        *,
        elsewhere: Collection[VersionId] = (),
        anchors: bool = True,
        local: bool = True,
        avoid: Collection[Digest] = (),
    ) -> EdgePath:
        """The cheapest path to a version from one of `held`, or else from an anchor where `anchors` allows.

        `elsewhere`: versions of other runs that are held as well, for a run that forks one. Without `local`, over no
        edge that stays on this host; over none of the edges `avoid`. May read the disk. Raises NotFoundError if
        nothing that is held leads there.
        """
        if not local:
            avoid = [*avoid, *(Digest(edge.manifest) for edge in self.derived() if edge.local)]
        return self.graph.path(record, variant, held, elsewhere, anchors=anchors, avoid=avoid)

    def anchors_elsewhere(self, variant: str) -> list[Digest]:
        """The manifests of anchors of other runs, from which ways to versions of a fork begin; none for another run."""
        if not self.graph.runs(variant):
            return []
        return self.ask_graph(
            variant,
            lambda graph: [
                edge.manifest for edge in graph.edges() if edge.base is None and edge.target.run != self.run
            ],
        )

    def derived_on(self, path: EdgePath) -> frozenset[Digest]:
        """The manifests of those edges on a path that no record names."""
        return frozenset(
            Digest(hop.edge.manifest)
            for hop in path.hops
            if hop.edge not in (edge for variant in hop.record.variants for edge in variant.edges)
        )

    def join(self, version: Version, variant: str) -> Edge | None:
        """The last edge of the cheapest way to a version from an anchor; None if there is none. May read the disk."""
        return self.graph.join(version, variant)

    def mend_records(self) -> tuple[int, str]:
        """Compare the records and `latest` on the disk with what they are in memory, and write anew what is damaged.

        Returns the bytes that were read, and the files that were written, in words. Raises StoreError.
        """
        read, mended = 0, list[str]()
        for record in self.records():
            with self._writer:
                if record.version in self._records:
                    size, written = self._record_files.mend(record, latest=record.version == self._latest)
                    read, mended = read + size, mended + written
        return read, ", ".join(mended)

    def ask_graph(self, variant: str, question: Callable[[VersionGraph], Answer]) -> Answer:
        """The answer to a question about the version graph, which stays as it is meanwhile. May read the disk."""
        return self.graph.ask(variant, question)

    def read_manifest(self, edge: EdgeRef) -> Manifest:
        """Raises NotFoundError, IntegrityError or FormatError."""
        return self._read_manifest(Digest(edge.manifest))

    def _read_manifest(self, digest: Digest) -> Manifest:
        return decode_manifest(self._objects.read(digest), limits=self._limits)

    def _derived_edge(self, record: VersionRecord, digest: Digest, *, local: bool) -> DerivedEdge:
        data = self._objects.read(digest)
        manifest = decode_manifest(data, limits=self._limits)
        if manifest.target.version != record.version:
            raise IntegrityError(
                f"manifest {digest.hex()}",
                expected=f"an edge to {record.id}",
                found=f"one to {manifest.target.version}",
            )
        return derived_edge(manifest, digest, len(data), local=local)

    def _check_complete(self, record: VersionRecord, variant: VariantRecord, derived: Collection[EdgeRef]) -> None:
        layout = decode_layout(self._objects.read(Digest(variant.layout)), limits=self._limits)
        for file in layout.files:
            if not self._objects.has(Digest(file.digest)):
                raise NotFoundError(f"{record.id}: file {file.name} {file.digest.hex()}", found="not held here")
        missing = [self._missing(record, variant, edge) for edge in (*variant.edges, *derived)]
        if "" not in missing:
            raise NotFoundError(
                f"{record.id} variant {variant.name}",
                expected="an edge from a version that is held here, or an anchor",
                found="; ".join(missing),
            )

    def _missing(self, record: VersionRecord, variant: VariantRecord, edge: EdgeRef, *, unasked: bool = False) -> str:
        base = record.base(edge)
        held = None if base is None else self._held(base)
        return self._whole.missing(record, variant, edge, held, unasked=unasked)

    def _held(self, base: VersionId) -> VersionRecord | None:
        """A version of this run, or one of another that this one forks, and which never waits for this one."""
        run = self.sibling(base.run)
        return None if run is None else run.find(base.version)

    def _load(self) -> None:
        self._targets.load()
        self.watch_epochs.load()
        self._records = self._record_files.load()
        self._pins.load()
        self._derived.load(self._records)
        self._since = dict.fromkeys(self._records, self._clock())
        for record in self._records.values():
            self._forks.note(record)
        self._latest = max(self._records, default=None)
