"""A checkpoint's tensors under the indices of another layout with the same tensors."""

from __future__ import annotations

from deltad.checkpoint.directory import Checkpoint
from deltad.delta.backend import Lanes
from deltad.delta.layout import Layout
from deltad.errors import IntegrityError


class Aligned:
    """Implements `deltad.delta.codec.Weights` for `layout` on top of `checkpoint`, matching by name.

    The two differ where a layout has aliases: a file may hold an alias or leave it out. Raises
    IntegrityError if a tensor that carries weights is missing or has another dtype or shape.
    """

    def __init__(self, layout: Layout, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._at: list[int] = []
        for spec in layout.tensors:
            at = checkpoint.layout.index.get(spec.name, -1)
            found = checkpoint.layout.tensors[at] if at >= 0 else None
            if not spec.alias_of and (found is None or (found.dtype, found.shape) != (spec.dtype, spec.shape)):
                raise IntegrityError(
                    f"{checkpoint.directory}: tensor {spec.name!r}",
                    expected=f"{spec.dtype} {list(spec.shape)}",
                    found=f"{found.dtype} {list(found.shape)}" if found else "none",
                )
            self._at.append(at)

    def lanes(self, tensor: int, start: int, count: int) -> Lanes:
        return self._checkpoint.lanes(self._at[tensor], start, count)

    def release(self, tensor: int, start: int, count: int) -> None:
        self._checkpoint.release(self._at[tensor], start, count)
