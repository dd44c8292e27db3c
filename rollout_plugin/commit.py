"""Making a staged version live, in place, while generation stands still.

Owns the invariant of a commit: when the pause ends, the weights are the new version or the old one, as
the sums that followed every write say; if neither can be said, the engine is fenced before the pause
ends, so that no step ever reads a mix.
"""

from __future__ import annotations

import time

import numpy as np

from deltad.delta.backend import Backend
from deltad.delta.codec import Patch, apply_patch, sum_weights
from deltad.delta.digest import U64, root_of
from deltad.errors import IntegrityError
from deltad.protocol.activate import Broken, Committed, RolledBack
from rollout_plugin.engines import Engine, LiveTensors
from rollout_plugin.staging import StagedDeltas, StagedExport


def commit_deltas(
    engine: Engine, staged: StagedDeltas, served: U64, backend: Backend
) -> Committed | RolledBack | Broken:
    """Write all steps. `served` are the sums of what is served now, as read back; they are left as they are.

    Whatever fails before the version flips is undone by the inverse patches in reverse order.
    """
    with engine.pause():
        begun = time.monotonic()
        sums = served.copy()
        undo: list[Patch] = []
        try:
            engine.live.check_live()
            for step in staged.steps:
                for patch in step.patches:
                    undo.append(_write(patch, engine.live, sums, backend))  # noqa: PERF401 (a failure keeps the rest)
                _check_sums(engine.live, sums, step.sums, f"commit of {step.version}")
            engine.version = staged.version
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                for patch in reversed(undo):
                    _write(patch, engine.live, sums, backend)
                _check_sums(engine.live, sums, served, "roll back")
            except Exception as second:
                reason = f"{reason}; and it could not be undone: {type(second).__name__}: {second}"
                engine.fence(reason)
                return Broken(reason)
            return RolledBack(reason)
        return Committed(time.monotonic() - begun)


def commit_export(engine: Engine, staged: StagedExport, backend: Backend) -> Committed | Broken:
    """Copy a whole version over the live weights, and read it back before generation goes on."""
    with engine.pause():
        begun = time.monotonic()
        live = engine.live
        try:
            live.check_live()
            staged.export.copy_into(live)
            found = root_of(live.layout, sum_weights(live.layout, live, backend))
            if found != staged.root:
                raise IntegrityError(
                    f"copy of {staged.version}", expected=f"root {staged.root.hex()}", found=found.hex()
                )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            engine.fence(reason)
            return Broken(reason)
        engine.version = staged.version
        return Committed(time.monotonic() - begun)


def _write(patch: Patch, live: LiveTensors, sums: U64, backend: Backend) -> Patch:
    """Apply one patch; returns the one that undoes it."""
    spec = live.layout.tensors[patch.tensor]
    old = apply_patch(patch, live.whole(patch.tensor), spec, sums, backend)
    return patch.inverted(old, spec)


def _check_sums(live: LiveTensors, found: U64, expected: U64, what: str) -> None:
    wrong = np.flatnonzero((found != expected).any(axis=1))
    if wrong.size:
        raise IntegrityError(
            f"{what}: tensor {live.layout.tensors[int(wrong[0])].name!r}",
            expected="the sum in its manifest",
            found="another one",
            hint=f"{wrong.size} of {len(live.layout.tensors)} tensors are wrong",
        )
