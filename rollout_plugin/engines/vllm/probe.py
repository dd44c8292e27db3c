"""Finding where the elements of a checkpoint lie in a model's tensors, by letting the model load their positions.

Takes whatever builds a model from named tensors, so it knows no engine and no architecture: what the model's own
loading does to positions, it does to weights. Owns the invariant that nothing of the model goes unexplained: a
tensor that was computed from the checkpoint, and not copied, refuses the model by name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deltad.delta.layout import Layout
from deltad.errors import ReplicaError
from rollout_plugin.engines.vllm.digits import Positions
from rollout_plugin.engines.vllm.held import flat, held_tensors
from rollout_plugin.engines.vllm.pieces import NOTHING, Ids, Piece, find_pieces

Build = Callable[[Iterable[tuple[str, torch.Tensor]]], torch.nn.Module]
"""Makes a model as the engine has it, from the tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Map:
    """The pieces of all tensors; and, of tensors that hold some, the lanes that hold nothing of the checkpoint."""

    pieces: tuple[Piece, ...]
    padding: tuple[tuple[str, Ids], ...]


def find_map(layout: Layout, build: Build) -> Map:
    """Build the model once a pass. Raises ReplicaError for one that cannot be followed in place."""
    positions = Positions(layout)
    seen: dict[str, list[torch.Tensor]] = {}
    for number in range(positions.passes):
        model = build(_checkpoint(layout, positions, number))
        for name, tensor in held_tensors(model).items():
            plain = flat(tensor)
            seen.setdefault(name, []).append((tensor if plain is None else plain).clone())
        del model
    names = [spec.name for spec in layout.tensors]
    pieces: list[Piece] = []
    padding: list[tuple[str, Ids]] = []
    for name, tensors in seen.items():
        if len({tuple(tensor.shape) for tensor in tensors}) > 1 or len(tensors) < positions.passes:
            raise _unexplained(name, "one that is there in some loads only")
        read = positions.read(tensors)
        if read.computed:
            raise _unexplained(name, "values that were computed from it, or that nothing has set")
        found = find_pieces(name, read.ids, positions.starts, names)
        pieces += found
        if found and (rest := np.flatnonzero(read.ids == NOTHING)).size:
            padding.append((name, rest))
    return Map(tuple(pieces), tuple(padding))


def check_padding(found: Map, held: dict[str, torch.Tensor]) -> None:
    """Raises ReplicaError where a lane that no checkpoint fills is not zero beside lanes that one does."""
    for name, lanes in found.padding:
        plain = flat(held[name]) if name in held else None
        if plain is None or bool(plain[torch.from_numpy(lanes)].count_nonzero()):
            raise _unexplained(name, f"{lanes.size} elements that no tensor of the layout fills, and that are not zero")


def cached(directory: Path | None, key: bytes, find: Callable[[], Map]) -> Map:
    """The map of this key, from a file if there is a good one, else found and kept.

    What a damaged file could do is noticed by the first read-back: no root would be right.
    """
    if directory is None:
        return find()
    path = directory / f"{hashlib.sha256(key).hexdigest()[:40]}.npz"
    try:
        return _load(path)
    except (OSError, ValueError, KeyError, EOFError):
        found = find()
        directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
        _save(temporary, found)
        temporary.replace(path)
        return found


def _checkpoint(layout: Layout, positions: Positions, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    for at, spec in enumerate(layout.tensors):
        yield spec.name, positions.tensor(at, number)


def _unexplained(name: str, found: str) -> ReplicaError:
    return ReplicaError(
        f"engine tensor {name!r}",
        expected="copies of the checkpoint's elements, or what does not depend on it",
        found=found,
        hint="its updates could not be followed in place; this model needs a whole load for each version",
    )


def _save(path: Path, found: Map) -> None:
    def joined(arrays: list[Ids]) -> Ids:
        return np.concatenate([np.zeros(0, np.int64), *arrays])

    head = {
        "pieces": [[piece.tensor, piece.held, piece.length.size] for piece in found.pieces],
        "padding": [[name, lanes.size] for name, lanes in found.padding],
    }
    np.savez(
        path,
        head=np.frombuffer(json.dumps(head).encode(), np.uint8),
        canonical=joined([piece.canonical for piece in found.pieces]),
        local=joined([piece.local for piece in found.pieces]),
        length=joined([piece.length for piece in found.pieces]),
        padding=joined([lanes for _, lanes in found.padding]),
    )


def _load(path: Path) -> Map:
    with np.load(path, allow_pickle=False) as file:
        head = json.loads(file["head"].tobytes())
        runs = [file[name] for name in ("canonical", "local", "length")]
        padding = file["padding"]
    ends = np.cumsum([0, *(size for _, _, size in head["pieces"])])
    pieces = tuple(
        Piece(tensor, held, *(array[ends[i] : ends[i + 1]] for array in runs))
        for i, (tensor, held, _) in enumerate(head["pieces"])
    )
    ends = np.cumsum([0, *(size for _, size in head["padding"])])
    return Map(pieces, tuple((name, padding[ends[i] : ends[i + 1]]) for i, (name, _) in enumerate(head["padding"])))
