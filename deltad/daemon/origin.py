"""Publishing a checkpoint directory as the next version of a run.

The order is the whole point. The checkpoint is read and encoded; chunks, pages, manifest and layout
become durable; the checkpoint is found unchanged since it was opened; the record makes the version
visible; and only then the baseline moves. Whatever fails before the record leaves the run as it was,
and the same checkpoint is simply compared again.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import structlog

from deltad.checkpoint.aligned import Aligned
from deltad.checkpoint.baseline import keep_baseline, open_baseline
from deltad.checkpoint.directory import Checkpoint, open_checkpoint, require_config
from deltad.client.messages import Seconds
from deltad.daemon.break_even import may_win, smaller_anchor
from deltad.delta import FORMAT
from deltad.delta.backend import Backend, Mode
from deltad.delta.codec import EdgeEncoder, sum_weights
from deltad.delta.digest import pack_sums, root_of
from deltad.delta.encoding import encode
from deltad.delta.layout import Layout
from deltad.delta.manifest import EdgeKind, Manifest, State
from deltad.delta.record import EdgeRef, VariantRecord, VersionRecord
from deltad.delta.weights import hash_weights
from deltad.errors import BaseMismatchError, CheckpointError, ConflictError, IntegrityError, NotFoundError
from deltad.protocol.mode import UNMEASURED, ModeChoice
from deltad.protocol.publish import is_gap
from deltad.store.disk import remove_tree
from deltad.store.edge_chunks import store_chunks
from deltad.store.mirror import Mirror
from deltad.store.needs import unreachable
from deltad.store.store import Store
from deltad.types import RunId, Variant, Version

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
    is this very one. `epoch_on_conflict`: bytes that contradict what was published open the next epoch instead
    of being refused; those that were published before do not. `if_changed`: weights equal to the newest
    version's are that version again. `settle`: seconds that the checkpoint was waited for. `coding`: how a
    delta is to be coded.
    """

    identity: str
    new_epoch: bool
    epoch_on_conflict: bool
    if_changed: bool
    settle: float
    coding: ModeChoice


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
        threads: int = 1,
    ) -> None:
        """`mirror` is the one that the daemon shares; without it, one of its own."""
        self._store = store
        self._run = store.run(run)
        self._variant = variant
        self._backend = backend
        self._publish_as = publish_as
        self._threads = threads
        self._mirror = mirror or Mirror(store, self._run, variant, backend, threads=threads)
        self._baseline = self._run.directory / "baseline" / variant

    def publish(self, directory: Path, number: int, **how: Unpack[PublishOptions]) -> Published:
        """Make the checkpoint in `directory` version `number` of the run.

        Raises CheckpointError, CheckpointChangedError (nothing was published), ConflictError,
        StoreFullError, StoreError.
        """
        started = time.monotonic()
        with (
            self._store.leases.work(f"the publish of {self._run.run}"),
            open_checkpoint(directory, publish_as=self._publish_as, limits=self._store.limits) as checkpoint,
        ):
            require_config(checkpoint)
            latest = self._run.latest()
            version = Version(latest.version.epoch if latest else 1, number)
            new_epoch = how.get("new_epoch", False)
            if latest is not None and number <= latest.version.number:
                on_conflict = how.get("epoch_on_conflict", False)
                known = self._same_as_known(checkpoint, version, new_epoch=new_epoch, on_conflict=on_conflict)
                if known is not None and (known == latest or not new_epoch):
                    return Published(known, already=True, seconds=Seconds())
                new_epoch = True
            if latest is not None and new_epoch:
                version = Version(version.epoch + 1, number)
            coding = how.get("coding", UNMEASURED)
            record = self._encode(checkpoint, version, latest, how.get("identity", ""), coding.mode)
            checkpoint.check_unchanged()
            if how.get("if_changed") and latest is not None and _same_variants(record, latest):
                return Published(latest, already=True, seconds=Seconds())
            self._run.commit(record.encode())
            keep_baseline(checkpoint, self._baseline, str(version), files=self._store.files)
        seconds = Seconds(settle=how.get("settle", 0.0), encode=time.monotonic() - started)
        is_anchor = record.variants[0].edges[0].kind is EdgeKind.ANCHOR
        return Published(record, already=False, seconds=seconds, coding=None if is_anchor else coding)

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
        sums = sum_weights(checkpoint.layout, checkpoint, self._backend, threads=self._threads)
        root = root_of(checkpoint.layout, sums)
        checkpoint.check_unchanged()
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

    def _encode(
        self, checkpoint: Checkpoint, version: Version, latest: VersionRecord | None, identity: str, mode: Mode
    ) -> VersionRecord:
        # First of all: if the layout that all versions share was damaged on disk, this mends it.
        self._store.put(checkpoint.layout.encode())
        for file in checkpoint.layout.files:
            self._store.put(checkpoint.file_bytes(file.name))
        manifest = self._encode_edge(checkpoint, version, latest, mode)
        data = encode(manifest)
        layout = checkpoint.layout
        edge = EdgeRef(
            kind=manifest.kind,
            base=None if manifest.base is None else manifest.base.version,
            manifest=self._store.put(data),
            size=len(data),
        )
        return VersionRecord(
            format=FORMAT,
            least_reader=FORMAT,
            run=self._run.run,
            version=version,
            parent=latest.version if latest else None,
            sequence=latest.sequence + 1 if latest else 1,
            variants=(
                VariantRecord(self._variant, layout.digest, len(layout.encode()), manifest.target.root, (edge,)),
            ),
            identity=identity,
            created_ns=time.time_ns(),
            source=checkpoint.directory.name,
        )

    def _encode_edge(
        self, checkpoint: Checkpoint, version: Version, latest: VersionRecord | None, mode: Mode
    ) -> Manifest:
        if latest is None:
            return self._anchor(checkpoint, version, "first version")
        before = self._mirror.layout(latest)
        if before.table_digest != checkpoint.layout.table_digest:
            return self._anchor(checkpoint, version, _what_changed(before, checkpoint, str(latest.id)))
        if latest.version in unreachable(self._store, self._run.run, self._store.objects.quarantine.damaged()):
            reason = f"what leads newcomers to {latest.version} is damaged"
            return self._anchor(checkpoint, version, reason)
        try:
            manifest = self._delta_from_any_baseline(checkpoint, version, latest, mode)
        except (IntegrityError, NotFoundError) as error:
            return self._anchor(checkpoint, version, f"the baseline cannot be rebuilt: {error}")
        if may_win(manifest.chunk_bytes, checkpoint.layout.weight_bytes):
            trial = self._anchor_encoder(checkpoint)
            if reason := smaller_anchor(trial, manifest.chunk_bytes, manifest.density):
                return self._anchor(checkpoint, version, reason)
        return manifest

    def _delta_from_any_baseline(
        self, checkpoint: Checkpoint, version: Version, latest: VersionRecord, mode: Mode
    ) -> Manifest:
        try:
            return self._delta(checkpoint, version, latest, mode)
        except BaseMismatchError as error:
            # The kept files are not what was published. The mirror is rebuilt from the store, whose
            # every byte is checked, and this checkpoint is compared with that instead.
            log.warning("baseline_damaged", run=self._run.run, error=str(error))
            remove_tree(self._baseline, self._store.files)
            return self._delta(checkpoint, version, latest, mode)

    def _delta(self, checkpoint: Checkpoint, version: Version, latest: VersionRecord, mode: Mode) -> Manifest:
        with ExitStack() as stack:
            base = self.baseline(latest)
            if base is None:
                base = open_checkpoint(self._mirror.advance(latest))
            stack.enter_context(base)
            encoder = EdgeEncoder(
                checkpoint.layout,
                checkpoint,
                self._backend,
                base=Aligned(checkpoint.layout, base),
                base_sums=self._mirror.sums(latest),
                limits=self._store.limits,
                mode=mode,
                threads=self._threads,
            )
            state = State(latest.version, latest.variant(self._variant).root)
            return self._store_edge(encoder, EdgeKind.DELTA, version, state, "")

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
        pages, chunk_bytes = store_chunks(self._store, encoder.chunks())
        layout = encoder.layout
        return Manifest(
            format=FORMAT,
            least_reader=FORMAT,
            kind=kind,
            run=self._run.run,
            variant=self._variant,
            layout=layout.digest,
            base=base,
            target=State(version, encoder.root),
            sums=pack_sums(encoder.sums),
            pages=pages,
            coders=encoder.coders,
            changed=int(encoder.changed.sum()),
            elements=sum(spec.lanes for spec in layout.tensors),
            chunk_bytes=chunk_bytes,
            reason=reason,
            tensor_sha256=hashes,
        )


def _same_variants(record: VersionRecord, latest: VersionRecord) -> bool:
    return [(v.name, v.layout, v.root) for v in record.variants] == [
        (v.name, v.layout, v.root) for v in latest.variants
    ]


def check_same_model(before: Layout, after: Layout, directory: Path, latest: str) -> None:
    """Raises CheckpointError where `directory` holds another model than `latest`: most tensors are not the same."""
    old, new = _table(before), _table(after)
    same = sum(old[name] == new[name] for name in old.keys() & new.keys())
    if 2 * same >= len(old):
        return
    # A trainer's fp32 copy of the same weights, as far as the table tells.
    wider = sum(("BF16", *new[name][1:]) == old[name] for name in old.keys() & new.keys() if new[name][0] == "F32")
    raise CheckpointError(
        f"{directory}",
        expected=f"the model of {latest} ({len(old)} tensors)",
        found=f"another one: only {same} of {len(new)} tensors have the same name, dtype and shape",
        hint='these weights are fp32; `publish_as = "bf16"` in the [[watch]] of the run publishes them in bf16'
        if 2 * (same + wider) >= len(old)
        else "publish another model as another run",
    )


def _table(layout: Layout) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {spec.name: (spec.dtype, spec.shape, spec.alias_of) for spec in layout.tensors}


def _what_changed(before: Layout, checkpoint: Checkpoint, latest: str) -> str:
    """Why an anchor is needed, in words. Raises CheckpointError for what is another model altogether."""
    check_same_model(before, checkpoint.layout, checkpoint.directory, latest)
    old, new = _table(before), _table(checkpoint.layout)
    added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    parts = [
        f"{len(names)} tensors {what} (first {names[0]})"
        for what, names in (("added", added), ("removed", removed), ("reshaped or retyped", changed))
        if names
    ]
    return "; ".join(parts)
