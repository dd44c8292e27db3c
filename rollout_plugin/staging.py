"""Bringing a version beside the live weights: fetched, checked and decoded, while the engine generates.

Nothing here writes a live byte, and nothing of a version is believed before it was checked: digests,
base roots, layout, tensor sums against the root, every position against its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltad.client.messages import (
    ExportReply,
    ExportRequest,
    NextReply,
    RegisterRequest,
    StateRequest,
    Step,
    VersionInfo,
)
from deltad.delta.backend import Backend
from deltad.delta.codec import Patch, Weights, read_patches
from deltad.delta.coding import Coder
from deltad.delta.digest import U64
from deltad.delta.layout import Layout, decode_layout
from deltad.delta.manifest import Manifest, decode_manifest, decode_page
from deltad.delta.overlay import Overlay
from deltad.delta.threads import default_threads
from deltad.errors import BaseMismatchError, FormatError, IntegrityError, ReplicaError
from deltad.types import Digest, RunId, Variant, Version, parse_digest, parse_version
from rollout_plugin.apply.export import Export
from rollout_plugin.engines import Engine, LiveTensors, Loader, Writes


class Daemon(Protocol):
    """What a replica needs of its daemon; `deltad.client.Client` has it."""

    def register_replica(self, request: RegisterRequest) -> None: ...
    def unregister_replica(self, replica: str) -> None: ...
    def next(self, replica: str, *, after: Version | str = "", wait: float = 0.0) -> NextReply: ...
    def report_state(self, replica: str, request: StateRequest) -> None: ...
    def export(self, run: str, request: ExportRequest) -> ExportReply: ...
    def version(self, run: str, version: Version | str) -> VersionInfo: ...
    def object(self, digest: Digest | str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class StagedStep:
    """One delta. `sums` are those of all tensors after it, shape [tensors, 2]."""

    version: Version
    sums: U64


@dataclass(frozen=True, slots=True)
class StagedDeltas:
    """Deltas that lead, in order, from what is served to `version`. `writes` does the same steps."""

    version: Version
    root: Digest
    steps: tuple[StagedStep, ...]
    writes: Writes


@dataclass(frozen=True, slots=True)
class StagedEngine:
    """A new engine that holds `version`: the first load."""

    version: Version
    root: Digest
    engine: Engine


@dataclass(frozen=True, slots=True)
class StagedExport:
    """A whole version on disk, to be copied over the live weights."""

    version: Version
    root: Digest
    export: Export


Staging = StagedDeltas | StagedEngine | StagedExport


class Stager:
    """Stages versions of one run and variant."""

    def __init__(
        self, daemon: Daemon, *, run: RunId, variant: Variant, replica: str, load: Loader, backend: Backend
    ) -> None:
        self._daemon = daemon
        self._run = run
        self._variant = variant
        self._replica = replica
        self._load = load
        self._backend = backend

    def deltas(self, steps: Sequence[Step], live: LiveTensors, served: Digest) -> StagedDeltas:
        """Fetch, check and decode `steps`, which start from `live`, whose root is `served`.

        What is coded by context is read beside the weights that it starts from: the live ones, with what the
        steps before it will do on top.

        Raises BaseMismatchError for a manifest on another base, ReplicaError for another layout, and what the
        client and the parsers raise.
        """
        root, beside = served, Overlay(live, live.layout)
        staged: list[StagedStep] = []
        changes: list[tuple[Patch, ...]] = []
        for step in steps:
            manifest = decode_manifest(self._daemon.object(step.manifest))
            self._check_manifest(manifest, step, root)
            self._check_layout(Digest(manifest.layout), live.layout, passing=step is not steps[-1])
            by_context = Coder.CONTEXT in manifest.coders
            patches = tuple(self._patches(manifest, live.layout, beside if by_context else None))
            beside.add(patches)
            staged.append(StagedStep(manifest.target.version, manifest.tensor_sums(live.layout)))
            changes.append(patches)
            root = Digest(manifest.target.root)
        return StagedDeltas(staged[-1].version, root, tuple(staged), live.stage(changes, self._backend))

    def whole(self, target: Version, engine: Engine | None) -> StagedEngine | StagedExport:
        """Have the daemon write `target` as a checkpoint; load it where there is no engine yet.

        Raises ReplicaError where layout and engine do not fit each other, and what the client raises.
        """
        reply = self._daemon.export(self._run, ExportRequest(version=str(target), replica=self._replica))
        info = self._daemon.version(self._run, reply.version)
        if info.variant != self._variant:
            raise ReplicaError(f"{self._run}/{info.version}", expected=f"variant {self._variant}", found=info.variant)
        if info.root != reply.root:
            raise IntegrityError(f"export of {info.version}", expected=f"root {info.root}", found=reply.root)
        version, root, directory = parse_version(info.version), parse_digest(info.root), Path(reply.directory)
        if engine is None:
            layout = decode_layout(self._daemon.object(info.layout))
            return StagedEngine(version, root, self._load(directory, layout, version))
        self._check_layout(parse_digest(info.layout), engine.live.layout)
        return StagedExport(version, root, Export(directory, engine.live.layout))

    def _check_manifest(self, manifest: Manifest, step: Step, root: Digest) -> None:
        thing = f"manifest of {step.base} → {step.version}"
        if (manifest.run, manifest.variant) != (self._run, self._variant):
            raise FormatError(
                thing, expected=f"run {self._run}, variant {self._variant}", found=f"{manifest.run}, {manifest.variant}"
            )
        if manifest.base is None or manifest.base.root != root:
            raise BaseMismatchError(
                thing,
                expected=f"base root {root.hex()}, which is served",
                found=manifest.base.root.hex() if manifest.base else "an anchor, which has none",
                hint="nothing was touched",
            )
        if (str(manifest.target.version), manifest.target.root.hex()) != (step.version, step.root):
            raise FormatError(
                thing, expected=f"to lead to root {step.root}", found=f"{manifest.target.version}, another root"
            )

    def _check_layout(self, digest: Digest, served: Layout, *, passing: bool = False) -> None:
        """A version may bring another tokenizer, but no other tensors, nor another config than the engine's own.

        One that is only `passing`, on the way to a newer one, is never served: its config does not matter.
        """
        if digest == served.digest:
            return
        layout = decode_layout(self._daemon.object(digest))
        if layout.table_digest != served.table_digest:
            raise ReplicaError(
                "layout of the target",
                expected="the tensors that the engine was loaded with",
                found="other names, dtypes or shapes",
                hint="restart the replica: it loads the new model",
            )
        if not passing and not _config(layout):
            raise ReplicaError(
                "layout of the target",
                expected="the config.json that the engine was built from",
                found="none",
                hint="no engine can be built from it: publish a version with its config.json",
            )
        if not passing and _config(layout) != _config(served):
            raise ReplicaError(
                "layout of the target",
                expected="the config.json that the engine was built from",
                found="another one",
                hint="restart the replica: it loads the new model",
            )

    def _patches(self, manifest: Manifest, layout: Layout, base: Weights | None) -> Iterator[Patch]:
        # The live weights stay as they are until the commit, so frames may be decoded ahead.
        return read_patches(self._chunks(manifest, layout), layout, self._backend, base=base, threads=default_threads())

    def _chunks(self, manifest: Manifest, layout: Layout) -> Iterator[bytes]:
        for ref in manifest.pages:
            page = self._fetch(ref.digest, ref.size, "manifest page")
            for chunk in decode_page(page, ref, layout):
                yield self._fetch(chunk.digest, chunk.size, "chunk")

    def _fetch(self, digest: bytes, size: int, what: str) -> bytes:
        data = self._daemon.object(Digest(digest))
        if len(data) != size:
            raise IntegrityError(f"{what} {digest.hex()}", expected=f"{size} bytes", found=f"{len(data)}")
        return data


def _config(layout: Layout) -> bytes:
    return next((file.digest for file in layout.files if file.name == "config.json"), b"")
