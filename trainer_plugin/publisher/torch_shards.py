"""The shards of torch's tensors: modules, state dicts, DTensors on any mesh; and what torch knows of ranks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from deltad.client.handover import ShardSpec
from deltad.delta.backend import Lanes
from deltad.errors import UsageError
from trainer_plugin.publisher.shards import Held

_DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def collect(tensors: nn.Module | Mapping[str, torch.Tensor], publish_as: str) -> list[Held]:
    """What this rank holds of every tensor, in order of names; of tied ones the first name's.

    `bf16` publishes floating tensors rounded to bfloat16, to nearest even. Raises UsageError, naming the tensor, for
    what cannot be published as it is.
    """
    named = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    held: list[Held] = []
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in named.items():
        local, shape, offset = _local(name, tensor.detach())
        identity = (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, offset, shape)
        if local.numel() and identity in seen:
            continue  # tied: it is published under the name that came first
        seen.add(identity)
        held.append(_held(name, local, shape, offset, publish_as))
    return sorted(held, key=lambda shard: shard.spec.name)


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """This rank's part of a tensor, the whole shape, and where the part lies there."""
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, tuple(tensor.shape), (0,) * tensor.dim()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise UsageError(f"tensor {name!r}", expected="a sharded or replicated DTensor", found="a partial one")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise UsageError(
            f"tensor {name!r}", expected=f"a local part of {list(shape)}", found=f"one of {list(local.shape)}"
        )
    if not local.numel():
        offset = (0,) * tensor.dim()
    return local, tuple(tensor.shape), tuple(offset)


def _held(name: str, local: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], publish_as: str) -> Held:
    rounds = publish_as == "bf16" and local.dtype in (torch.float32, torch.float64, torch.float16)
    dtype = torch.bfloat16 if rounds else local.dtype
    if dtype not in _DTYPES:
        raise UsageError(f"tensor {name!r}", expected=f"a dtype of {', '.join(_DTYPES.values())}", found=str(dtype))
    if local.device.type != "cpu":
        raise UsageError(f"tensor {name!r}", expected="a tensor in the host's memory", found=f"one on {local.device}")
    if not local.is_contiguous():
        raise UsageError(
            f"tensor {name!r}",
            expected="a contiguous tensor",
            found=f"strides {list(local.stride())}",
            hint="publish a contiguous copy of it",
        )
    flat = local.view(-1)
    width = _UNSIGNED[dtype.itemsize]

    def read(start: int, count: int) -> Lanes:
        part = flat[start : start + count]
        lanes: Lanes = (part.to(torch.bfloat16) if rounds else part).view(width).numpy()
        return lanes

    return Held(ShardSpec(name, _DTYPES[dtype], shape, offset, tuple(local.shape)), read)


@dataclass(frozen=True, slots=True)
class Distributed:
    """This process among the ranks of torch.distributed."""

    rank: int
    world: int
    session: str
    agree: Callable[[bool], bool]


def distributed() -> Distributed | None:
    """The ranks of the default process group; None where there is none. All ranks have to ask at once."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.new_group(backend="gloo")
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0, group=group)

    def agree(busy: bool) -> bool:
        flag = torch.from_numpy(np.array([busy], np.int32))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    return Distributed(dist.get_rank(), dist.get_world_size(), names[0], agree)
