"""Making a staged version live, in place, while generation stands still.

Owns the invariant of a commit: when the pause ends, the weights are the new version or the old one, as
the sums that followed every write say; if neither can be said, the engine is fenced before the pause
ends, so that no step ever reads a mix.
"""

from __future__ import annotations

import time

import numpy as np

from deltad.delta.backend import Backend
from deltad.delta.digest import U64, root_of
from deltad.delta.layout import Layout
from deltad.errors import IntegrityError
from deltad.protocol.activate import Broken, Committed, RolledBack
from rollout_plugin.engines import Engine
from rollout_plugin.staging import StagedDeltas, StagedExport


def commit_deltas(
    engine: Engine, staged: StagedDeltas, served: U64, cache: str = ""
) -> Committed | RolledBack | Broken:
    """Write all steps. `served` are the sums of what is served now, as read back; they are left as they are. `cache` is
    as in `Engine.flip`.

    Whatever fails before the version flips is undone by the inverse writes in reverse order.
    """
    with engine.pause():
        begun = time.monotonic()
        layout = engine.live.layout
        try:
            engine.live.check_live()
            for i, step in enumerate(staged.steps):
                _check_sums(layout, served + staged.writes.write(i), step.sums, f"commit of {step.version}")
            engine.flip(staged.version, cache)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                _check_sums(layout, served + staged.writes.undo(), served, "roll back")
            except Exception as second:
                reason = f"{reason}; and it could not be undone: {type(second).__name__}: {second}"
                engine.fence(reason)
                return Broken(reason)
            return RolledBack(reason)
        return Committed(time.monotonic() - begun)


def commit_export(engine: Engine, staged: StagedExport, backend: Backend, cache: str = "") -> Committed | Broken:
    """Copy a whole version over the live weights, and read it back before generation goes on."""
    with engine.pause():
        begun = time.monotonic()
        live = engine.live
        try:
            live.check_live()
            live.copy_from(staged.export)
            found = root_of(live.layout, live.sums(backend))
            if found == staged.root:
                engine.flip(staged.version, cache)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            engine.fence(reason)
            return Broken(reason)
        if found != staged.root:
            wrong = IntegrityError(f"copy of {staged.version}", expected=f"root {staged.root.hex()}", found=found.hex())
            engine.fence(str(wrong))
            return Broken(str(wrong), wrong_root=True)
        return Committed(time.monotonic() - begun)


def _check_sums(layout: Layout, found: U64, expected: U64, what: str) -> None:
    wrong = np.flatnonzero((found != expected).any(axis=1))
    if wrong.size:
        raise IntegrityError(
            f"{what}: tensor {layout.tensors[int(wrong[0])].name!r}",
            expected="the sum in its manifest",
            found="another one",
            hint=f"{wrong.size} of {len(layout.tensors)} tensors are wrong",
        )
