"""A whole version on disk, copied over live weights in place.

Reads safetensors alone, and only what the layout names. The directory is checked when it is opened, so
that a wrong one is refused before the first write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deltad.delta.backend import Lanes
from deltad.delta.layout import Layout
from deltad.errors import IntegrityError, NotFoundError, ReplicaError
from rollout_plugin.apply.live import LANE_DTYPES


class Export:
    """A checkpoint directory that holds the tensors of a layout.

    Raises ReplicaError, naming the tensor, for one that is not in the layout or has another dtype or shape
    there; and, since its daemon may remove the directory at any time, NotFoundError or IntegrityError for
    one that is missing or cut short, where another export can help. Tensors are mapped when they are
    copied, so opening costs no memory.
    """

    def __init__(self, directory: Path, layout: Layout) -> None:
        self.directory = directory
        self._layout = layout
        self._files: dict[str, Path] = {}
        try:
            for path in sorted(directory.glob("*.safetensors")):
                file: Any
                with safe_open(path, framework="pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
                    self._check(file, path)
        except OSError as error:
            raise NotFoundError(f"export {directory}", expected="files that can be read", found=str(error)) from None
        except SafetensorError as error:
            raise IntegrityError(f"export {directory}", expected="safetensors files", found=str(error)) from None
        for spec in layout.tensors:
            if not spec.alias_of and spec.name not in self._files:
                raise NotFoundError(f"export {directory}", expected=f"tensor {spec.name!r}", found="none of that name")

    def tensors(self) -> Iterator[tuple[int, Lanes]]:
        """Every tensor that holds weights, once: its place in the layout, and its lanes, good until the next one."""
        paths = sorted(set(self._files.values()))
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for i, spec in enumerate(self._layout.tensors):
                    if self._files.get(spec.name) == path and spec.lanes:
                        yield i, _lanes(file.get_tensor(spec.name), spec.type.lane_bytes)

    def _check(self, file: Any, path: Path) -> None:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            at = self._layout.index.get(name)
            if at is None:
                raise ReplicaError(f"export {path}", expected="tensors of the layout", found=f"{name!r}")
            spec, found = self._layout.tensors[at], file.get_slice(name)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if (shape, dtype) != (spec.shape, spec.dtype):
                raise ReplicaError(
                    f"export {path}: tensor {name!r}",
                    expected=f"{spec.dtype} {list(spec.shape)}",
                    found=f"{dtype} {list(shape)}",
                )


def check_whole(directory: Path, layout: Layout) -> None:
    """Raises what `Export` does, also for a file beside the weights that is missing or has another size."""
    Export(directory, layout)
    for spec in layout.files:
        path = directory / spec.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise NotFoundError(f"export {directory}", expected=f"file {spec.name!r}", found=str(error)) from None
        if size != spec.size:
            raise IntegrityError(f"export file {path}", expected=f"{spec.size} bytes", found=f"{size}")


def _lanes(tensor: torch.Tensor, lane_bytes: int) -> Lanes:
    lanes: Lanes = tensor.reshape(-1).view(LANE_DTYPES[lane_bytes]).numpy()
    return lanes
