"""Whether a checkpoint holds the model that a run has: what changed in its tensor table, in words."""

from __future__ import annotations

from pathlib import Path

from deltad.checkpoint.directory import Checkpoint
from deltad.delta.layout import Layout
from deltad.errors import CheckpointError


def check_same_table(before: Layout, checkpoint: Checkpoint, base: str) -> None:
    """Raises CheckpointError where a checkpoint has other tensors than the version that it is to be made from."""
    if before.table_digest != checkpoint.layout.table_digest:
        raise CheckpointError(
            f"{checkpoint.directory}",
            expected=f"the tensors of {base}, from which it is to begin",
            found=what_changed(before, checkpoint, base),
            hint="begin from a version of the same layout, or publish this one by itself",
        )


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


def what_changed(before: Layout, checkpoint: Checkpoint, latest: str) -> str:
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
