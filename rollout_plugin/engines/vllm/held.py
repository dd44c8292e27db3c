"""Every tensor that a model computes with, whoever keeps it.

A model may keep what it made of its weights outside its parameters: as attributes of a layer, or inside the
object that computes for it. What is not found here would go on unseen with old weights, so the search goes
wherever an engine has been seen to keep such a thing. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_DEPTH = 3
_OWN = ("_parameters", "_buffers", "_modules")


def held_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors kept elsewhere, by name. Empty ones, and views of others here, are left out."""
    found: dict[str, torch.Tensor] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    for name, tensor in _all(model):
        if not tensor.numel() or tensor.is_meta:
            continue
        storage, begin = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        end = begin + _reach(tensor)
        mine = ranges.setdefault(storage, [])
        if any(first <= begin and end <= last for first, last in mine):
            continue
        mine.append((begin, end))
        found[name] = tensor.detach()
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's own elements in the order in which they lie in memory, as a view; None if there are gaps."""
    strides, shape = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -shape[d]))
    dense = tensor.permute(order)
    return dense.reshape(-1) if dense.is_contiguous() else None


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _all(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    seen: set[int] = set()
    package = type(model).__module__.split(".")[0]
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN:
                yield from _inside(f"{name}.{key}" if name else key, value, seen, _DEPTH, package)


def _inside(name: str, value: object, seen: set[int], depth: int, package: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, torch.nn.Module | type | str | bytes | int | float):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(at), each) for at, each in enumerate(value)]
    elif type(value).__module__.split(".")[0] == package:
        items = list(getattr(value, "__dict__", {}).items())
    else:
        return
    for key, each in items:
        yield from _inside(f"{name}.{key}", each, seen, depth - 1, package)
