"""Publishing a checkpoint directory as the next version of a run.

The order is the whole point. The checkpoint is read and encoded; chunks, pages, manifest and layout
become durable; the checkpoint is found unchanged since it was opened; the record makes the version
visible; and only then the baseline moves. Whatever fails before the record leaves the run as it was,
and the same checkpoint is simply compared again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import structlog

from deltad.checkpoint.aligned import Aligned
from deltad.checkpoint.baseline import drop_replaced, keep_baseline, open_baseline
from deltad.checkpoint.directory import Checkpoint, open_checkpoint, require_config
from deltad.client.messages import Cache, Seconds
from deltad.daemon.applying import whole
from deltad.daemon.break_even import may_win, smaller_anchor
from deltad.daemon.same_model import check_same_table, what_changed
from deltad.delta import FORMAT
from deltad.delta.backend import Backend, Mode
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.digest import U64, pack_sums, root_of
from deltad.delta.encoding import encode
from deltad.delta.keys import SigningKey
from deltad.delta.layout import Layout
from deltad.delta.manifest import ChunkRef, EdgeKind, Manifest, PageRef, State
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.delta.signing import sign
from deltad.delta.weights import Weights, hash_weights
from deltad.errors import BaseMismatchError, ConflictError, IntegrityError, NotFoundError
from deltad.protocol.mode import UNMEASURED, ModeChoice
from deltad.protocol.publish import check_writer, is_gap
from deltad.store.disk import remove_tree
from deltad.store.edge_chunks import store_chunks, store_pages
from deltad.store.leases import READ_SECONDS
from deltad.store.mirror import Mirror
from deltad.store.needs import Unreachable
from deltad.store.store import Store
from deltad.types import Digest, RunId, Variant, Version, VersionId

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Published:
    """What `Origin.publish` did. `already` means that the very same version was durable before.

    `coding` is how its delta was coded and why; None for an anchor.
    """

    record: VersionRecord
    already: bool
    seconds: Seconds
    coding: ModeChoice | None = None


class PublishOptions(TypedDict, total=False):
    """How to publish.

    `identity`: the caller's own name for the version. `new_epoch`: open the next epoch, unless the newest version
    is this very one. `begin_from`: open the next epoch with a version that is made from this one or, where it is
    another run's, begin a run as its fork; what was begun so before is not begun again. `epoch`: the one that the
    publisher writes in, if it says so. `epoch_on_conflict`: bytes that contradict what was published open the next
    epoch instead of being refused; those that were published before do not. `if_changed`: weights equal to the
    newest version's are that version again. `settle`: seconds that the checkpoint was waited for. `coding`: how a
    delta is to be coded. `delta_base`: the version that a disk-delta applies to, whatever it calls it. `cache`: what is
    to become of replicas' caches. `opens` is told of an epoch that is about to be opened, before it is visible.
    """

    identity: str
    new_epoch: bool
    begin_from: VersionId
    epoch: int
    epoch_on_conflict: bool
    if_changed: bool
    settle: float
    coding: ModeChoice
    delta_base: Version
    cache: Cache
    opens: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a version goes: its name and sequence, the version that it is made from, and a mirror of that one's run.

    `left` is the newest of the epoch before where another version is resumed from.
    """

    version: Version
    sequence: int
    parent: VersionRecord | None
    mirror: Mirror
    left: VersionRecord | None = None


@dataclass(frozen=True, slots=True)
class Handed:
    """What ranks handed over of a step, all together: the changes from version `base`.

    `sums` and `base_sums` are the element sums of the target and of the base, shape [tensors, 2].
    """

    layout: Layout
    files: Mapping[str, bytes]
    base: Version
    chunks: tuple[ChunkRef, ...]
    sums: U64
    base_sums: U64
    coders: tuple[int, ...]
    changed: int


class Origin:
    """The one writer of a run on this host. `publish` blocks; the caller allows one at a time."""

    def __init__(
        self,
        store: Store,
        run: RunId,
        variant: Variant,
        backend: Backend,
        *,
        publish_as: str = "source",
        mirror: Mirror | None = None,
        key: SigningKey | None = None,
        threads: int = 1,
    ) -> None:
        """`mirror` is the one that the daemon shares; without it, one of its own. `key` signs what is published."""
        self._store = store
        self._run = store.run(run)
        self._variant = variant
        self._backend = backend
        self._publish_as = publish_as
        self._threads = threads
        self._key = key
        self._mirror = mirror or Mirror(store, self._run, variant, backend, threads=threads)
        self._unreachable = Unreachable(store, run)
        self._baseline = self._run.directory / "baseline" / variant

    def publish(self, directory: Path, number: int, **how: Unpack[PublishOptions]) -> Published:
        """Make the checkpoint in `directory`, or what a disk-delta there leads to, version `number` of the run.

        Raises CheckpointError, CheckpointChangedError (nothing was published), ConflictError; BaseMissingError for a
        disk-delta whose base is not held; StoreFullError, StoreError; NotFoundError where it begins from a version
        that is not held.
        """
        started = time.monotonic()
        with (
            self._store.leases.work(f"the publish of {self._run.run}"),
            self._beginning(how.get("begin_from")) as begun,
            whole(directory, self._store, self._mirror, base=how.get("delta_base"), threads=self._threads) as made,
            open_checkpoint(made[0], publish_as=self._publish_as, limits=self._store.limits) as checkpoint,
        ):
            require_config(checkpoint)
            latest = self._run.latest()
            version = Version(latest.version.epoch if latest else 1, number)
            if begun is not None and (known := self._begun_before(checkpoint, version, begun, latest)):
                return Published(known, already=True, seconds=Seconds())
            if epoch := how.get("epoch", 0):
                check_writer(self._run.run, latest, epoch)
            new_epoch = how.get("new_epoch", False) or begun is not None
            if latest is not None and begun is None and number <= latest.version.number:
                on_conflict = how.get("epoch_on_conflict", False)
                known = self._same_as_known(checkpoint, version, new_epoch=new_epoch, on_conflict=on_conflict)
                if known is not None and (known == latest or not new_epoch):
                    return Published(known, already=True, seconds=Seconds())
                new_epoch = True
            if latest is not None and new_epoch:
                version = Version(version.epoch + 1, number)
            coding = how.get("coding", UNMEASURED)
            place = _Place(version, latest.sequence + 1 if latest else 1, latest, self._mirror)
            if begun is not None:
                left = None if latest == begun else latest
                place = replace(place, parent=begun, mirror=self._mirror_of(begun), left=left)
            record = self._encode(checkpoint, place, how.get("identity", "") or made[1], coding.mode)
            checkpoint.check_unchanged()
            if how.get("if_changed") and latest is not None and _same_variants(record, latest):
                return Published(latest, already=True, seconds=Seconds())
            record = sign(record, self._key) if self._key else record
            if latest is not None and version.epoch > latest.version.epoch and (opens := how.get("opens")):
                opens(version.epoch)
            self._run.commit(record.encode())
            keep_baseline(checkpoint, self._baseline, str(version), files=self._store.files)
        seconds = Seconds(settle=how.get("settle", 0.0), encode=time.monotonic() - started)
        is_anchor = record.variants[0].edges[0].kind is EdgeKind.ANCHOR
        return Published(record, already=False, seconds=seconds, coding=None if is_anchor else coding)

    def publish_handed(self, handed: Handed, number: int, **how: Unpack[PublishOptions]) -> Published:
        """Make what ranks handed over against the newest version the next one. Their chunks are durable.

        Raises ConflictError where the run has gone on meanwhile, BaseMismatchError where the ranks compared with
        other weights than were published.
        """
        started = time.monotonic()
        latest = self._run.latest()
        if epoch := how.get("epoch", 0):
            check_writer(self._run.run, latest, epoch)
        if latest is not None and self._key is not None and not latest.key_id:
            raise BaseMismatchError(
                f"{latest.id}",
                expected="a base that is signed, now that a key signs",
                found="one that was published before",
                hint="hand over this step whole: it becomes an anchor for whoever trusts the key",
            )
        if latest is None or latest.version != handed.base or number <= latest.version.number:
            raise ConflictError(
                f"step {number} of run {self._run.run}, made from {handed.base}",
                expected=f"a step after {latest.version}, the newest, made from it"
                if latest
                else "a run with versions",
                found="another",
                hint="hand over this step whole; if the trainer resumed from an earlier step, with `resume_from`",
            )
        layout = handed.layout
        if self._mirror.layout(latest).table_digest != layout.table_digest:
            raise BaseMismatchError(f"{latest.id}", expected="the tensors that the ranks hold", found="others")
        wrong = np.flatnonzero((self._mirror.sums(latest) != handed.base_sums).any(axis=1))
        if wrong.size:
            raise BaseMismatchError(
                f"what the ranks compared {layout.tensors[int(wrong[0])].name!r} with",
                expected=f"the weights of {latest.id}",
                found="others",
                hint="hand over this step whole",
            )
        self._store.put(layout.encode())
        for file in layout.files:
            self._store.put(handed.files[file.name])
        version = Version(latest.version.epoch, number)
        pages = store_pages(self._store, handed.chunks)
        state = State(latest.version, self._root_of(latest))
        coders, changed = handed.coders, handed.changed
        manifest = self._manifest(layout, EdgeKind.DELTA, version, handed.sums, pages, coders, changed, base=state)
        edge = self._put_manifest(manifest)
        place = _Place(version, latest.sequence + 1, latest, self._mirror)
        record = self._record(layout, place, (edge,), manifest.target.root, how.get("identity", ""), "memory")
        record = sign(record, self._key) if self._key else record
        self._run.commit(record.encode())
        seconds = Seconds(settle=how.get("settle", 0.0), encode=time.monotonic() - started)
        return Published(record, already=False, seconds=seconds, coding=how.get("coding"))

    def tidy(self) -> None:
        """Remove what the last publish left behind: the files of the baseline that it replaced.

        Not while another one is under way; left undone, the next publish does it.
        """
        drop_replaced(self._baseline, self._store.files)

    @contextmanager
    def _beginning(self, base: VersionId | None) -> Iterator[VersionRecord | None]:
        """The version that a new epoch, or a fork, begins from; it is kept until what is made from it is durable.

        Raises NotFoundError for one that is not held.
        """
        if base is None:
            yield None
            return
        run = self._store.find_run(base.run)
        if run is None:
            raise NotFoundError(f"run {base.run}", expected="a run that is held here", found="none of that name")
        holder = f"the publish of {self._run.run} from {base} ({uuid.uuid4().hex[:8]})"
        run.lease(holder, base.version, READ_SECONDS)
        try:
            yield run.record(base.version)
        finally:
            self._store.leases.release(holder)

    def _begun_before(
        self, checkpoint: Checkpoint, version: Version, base: VersionRecord, latest: VersionRecord | None
    ) -> VersionRecord | None:
        """The version with which the newest epoch began from `base`, if it holds these very weights.

        Raises ConflictError for a fork of a run that has begun, CheckpointError for another layout than the base's.
        """
        check_same_table(self._mirror_of(base).layout(base), checkpoint, f"{base.id}")
        forks = base.run != self._run.run
        if latest is None:
            return None
        first = next(record for record in self._run.records() if record.version.epoch == version.epoch)
        again = (first.version, first.parent, first.parent_run) == (version, base.version, base.run if forks else "")
        if again and self._root(checkpoint) == self._root_of(first):
            return first
        if forks:
            raise ConflictError(
                f"a fork of {base.id}",
                expected=f"a run without versions, as a fork is the first of its run {self._run.run}",
                found=f"{latest.id}",
                hint="publish it as another run, or open a new epoch from a version of this one (`--resume-from`)",
            )
        return None

    def _mirror_of(self, base: VersionRecord) -> Mirror:
        if base.run == self._run.run:
            return self._mirror
        run = self._store.run(RunId(base.run))
        return Mirror(self._store, run, self._variant, self._backend, threads=self._threads)

    def _root(self, checkpoint: Checkpoint) -> Digest:
        sums = sum_weights(checkpoint.layout, checkpoint, self._backend, threads=self._threads)
        checkpoint.check_unchanged()
        return root_of(checkpoint.layout, sums)

    def _root_of(self, record: VersionRecord) -> bytes:
        return record.variant(self._variant).root

    def baseline(self, record: VersionRecord) -> Checkpoint | None:
        """The kept checkpoint of a version, if it is still what it was; the caller closes it."""
        return open_baseline(self._baseline, str(record.version), publish_as=self._publish_as)

    def _same_as_known(
        self, checkpoint: Checkpoint, version: Version, *, new_epoch: bool, on_conflict: bool
    ) -> VersionRecord | None:
        """The durable record if it holds these very weights; None if a new epoch is to be opened.

        A version that was let go can be compared with nothing: whether its checkpoint says anything new is not
        guessed, and only a caller who asks for a new epoch in so many words is given one.
        """
        try:
            known = self._run.record(version)
        except NotFoundError:
            held = self._run.records()
            gap = is_gap(version, held)
            if new_epoch or (on_conflict and not gap):
                return None
            raise ConflictError(
                f"{checkpoint.directory}",
                expected=f"a number above {held[-1].version.number}, the newest of run {self._run.run}",
                found=f"{version.number}" + (", where versions lay that the retention let go" if gap else ""),
                hint="if the trainer resumed from an earlier step, publish with a new epoch (`--new-epoch`)",
            ) from None
        root = self._root(checkpoint)
        if root == known.variant(self._variant).root:
            return known
        if new_epoch or on_conflict:
            return None
        raise ConflictError(
            f"{checkpoint.directory}",
            expected=f"root {known.variant(self._variant).root.hex()}, as published for {known.id}",
            found=f"root {root.hex()}",
            hint="a published version never changes; use another number, or a new epoch (`--new-epoch`)",
        )

    def _encode(self, checkpoint: Checkpoint, place: _Place, identity: str, mode: Mode) -> VersionRecord:
        # First of all: if the layout that all versions share was damaged on disk, this mends it.
        self._store.put(checkpoint.layout.encode())
        for file in checkpoint.layout.files:
            self._store.put(checkpoint.file_bytes(file.name))
        manifests = self._encode_edges(checkpoint, place, mode)
        edges = tuple(self._put_manifest(manifest) for manifest in manifests)
        root = manifests[0].target.root
        return self._record(checkpoint.layout, place, edges, root, identity, checkpoint.directory.name)

    def _record(  # noqa: PLR0917
        self, layout: Layout, place: _Place, edges: tuple[EdgeRef, ...], root: bytes, identity: str, source: str
    ) -> VersionRecord:
        return VersionRecord(
            format=FORMAT,
            least_reader=FORMAT,
            run=self._run.run,
            version=place.version,
            parent=place.parent.version if place.parent else None,
            sequence=place.sequence,
            variants=(VariantRecord(self._variant, layout.digest, len(layout.encode()), root, edges),),
            parent_run=place.parent.run if place.parent and place.parent.run != self._run.run else "",
            identity=identity,
            created_ns=time.time_ns(),
            source=source,
        )

    def _put_manifest(self, manifest: Manifest) -> EdgeRef:
        data = encode(manifest)
        base = None if manifest.base is None else manifest.base.version
        return EdgeRef(manifest.kind, base, self._store.put(data), len(data))

    def _encode_edges(self, checkpoint: Checkpoint, place: _Place, mode: Mode) -> list[Manifest]:
        """The edge from the parent first. One from the newest of the epoch before leads on whoever lacks the parent."""
        first = self._encode_edge(checkpoint, place, mode)
        left = place.left
        if first.kind is not EdgeKind.ANCHOR and self._key is not None and place.parent and not place.parent.key_id:
            # Whoever trusts a key alone takes nothing that lies before: it begins here.
            return [first, self._anchor(checkpoint, place.version, "the first version that is signed")]
        if left is None or first.kind is EdgeKind.ANCHOR:
            return [first]
        if self._mirror.layout(left).table_digest != checkpoint.layout.table_digest:
            return [first]
        try:
            second = self._delta_from_any_baseline(checkpoint, place, left, mode)
        except (IntegrityError, NotFoundError) as error:
            log.warning("no_edge_from_newest", run=self._run.run, newest=str(left.version), error=str(error))
            return [first]
        # One that is as large as an anchor helps nobody.
        return [first] if may_win(second.chunk_bytes, checkpoint.layout.weight_bytes) else [first, second]

    def _encode_edge(self, checkpoint: Checkpoint, place: _Place, mode: Mode) -> Manifest:
        version, parent = place.version, place.parent
        if parent is None:
            return self._anchor(checkpoint, version, "first version")
        before = place.mirror.layout(parent)
        if before.table_digest != checkpoint.layout.table_digest:
            return self._anchor(checkpoint, version, what_changed(before, checkpoint, str(parent.id)))
        damaged = self._store.objects.quarantine.damaged()
        if parent.run == self._run.run and parent.version in self._unreachable.without(damaged):
            return self._anchor(checkpoint, version, f"what leads newcomers to {parent.version} is damaged")
        try:
            manifest = self._delta_from_any_baseline(checkpoint, place, parent, mode)
        except (IntegrityError, NotFoundError) as error:
            return self._anchor(checkpoint, version, f"the baseline cannot be rebuilt: {error}")
        if may_win(manifest.chunk_bytes, checkpoint.layout.weight_bytes):
            trial = self._anchor_encoder(checkpoint)
            if reason := smaller_anchor(trial, manifest.chunk_bytes, manifest.density):
                return self._anchor(checkpoint, version, reason)
        return manifest

    def _delta_from_any_baseline(
        self, checkpoint: Checkpoint, place: _Place, parent: VersionRecord, mode: Mode
    ) -> Manifest:
        try:
            return self._delta(checkpoint, place, parent, mode)
        except BaseMismatchError as error:
            # The kept files are not what was published. The mirror is rebuilt from the store, whose
            # every byte is checked, and this checkpoint is compared with that instead.
            if not self._keeps(parent):
                raise
            log.warning("baseline_damaged", run=self._run.run, error=str(error))
            remove_tree(self._baseline, self._store.files)
            return self._delta(checkpoint, place, parent, mode)

    def _delta(self, checkpoint: Checkpoint, place: _Place, parent: VersionRecord, mode: Mode) -> Manifest:
        with ExitStack() as stack:
            encoder = EdgeEncoder(
                checkpoint.layout,
                checkpoint,
                self._backend,
                base=self._base(stack, checkpoint.layout, place, parent),
                base_sums=place.mirror.sums(parent),
                limits=self._store.limits,
                mode=mode,
                threads=self._threads,
            )
            run = "" if parent.run == self._run.run else parent.run
            state = State(parent.version, self._root_of(parent), run)
            return self._store_edge(encoder, EdgeKind.DELTA, place.version, state, "")

    def _base(self, stack: ExitStack, layout: Layout, place: _Place, parent: VersionRecord) -> Weights:
        """The weights of the version that a delta is made on, until `stack` ends."""
        base = self.baseline(parent) if parent.run == self._run.run else None
        if base is None and parent != self._run.latest():
            # The mirror stays where it is: it never goes back.
            return stack.enter_context(place.mirror.state(parent))
        if base is None:
            base = open_checkpoint(self._mirror.advance(parent))
        return Aligned(layout, stack.enter_context(base))

    def _keeps(self, record: VersionRecord) -> bool:
        """Whether the kept checkpoint is this version's, and is what deltas from it are made on."""
        if record.run != self._run.run or (kept := self.baseline(record)) is None:
            return False
        kept.close()
        return True

    def _anchor(self, checkpoint: Checkpoint, version: Version, reason: str) -> Manifest:
        log.info("anchor_cut", run=self._run.run, version=str(version), reason=reason)
        hashes = hash_weights(checkpoint.layout, checkpoint, threads=self._threads)
        return self._store_edge(self._anchor_encoder(checkpoint), EdgeKind.ANCHOR, version, None, reason, hashes)

    def _anchor_encoder(self, checkpoint: Checkpoint) -> EdgeEncoder:
        return EdgeEncoder(
            checkpoint.layout, checkpoint, self._backend, limits=self._store.limits, threads=self._threads
        )

    def _store_edge(  # noqa: PLR0917
        self,
        encoder: EdgeEncoder,
        kind: EdgeKind,
        version: Version,
        base: State | None,
        reason: str,
        hashes: bytes = b"",
    ) -> Manifest:
        pages = store_chunks(self._store, encoder.chunks())
        changed = int(encoder.changed.sum())
        return self._manifest(
            encoder.layout,
            kind,
            version,
            encoder.sums,
            pages,
            encoder.coders,
            changed,
            base=base,
            reason=reason,
            hashes=hashes,
        )

    def _manifest(  # noqa: PLR0917
        self,
        layout: Layout,
        kind: EdgeKind,
        version: Version,
        sums: U64,
        pages: tuple[tuple[PageRef, ...], int],
        coders: tuple[int, ...],
        changed: int,
        *,
        base: State | None,
        reason: str = "",
        hashes: bytes = b"",
    ) -> Manifest:
        return Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=kind,
            run=self._run.run,
            variant=self._variant,
            layout=layout.digest,
            base=base,
            target=State(version, root_of(layout, sums)),
            sums=pack_sums(sums),
            pages=pages[0],
            coders=coders,
            changed=changed,
            elements=sum(spec.lanes for spec in layout.tensors),
            chunk_bytes=pages[1],
            reason=reason,
            tensor_sha256=hashes,
        )


def _same_variants(record: VersionRecord, latest: VersionRecord) -> bool:
    return [(v.name, v.layout, v.root) for v in record.variants] == [
        (v.name, v.layout, v.root) for v in latest.variants
    ]
