"""Four gloo ranks that publish models over one mesh after another; started by the test as `python -m`.

Each case is a model of the same weights and steps, sharded otherwise. Rank 0 prints a line of JSON a case: the versions
and their roots, and the root of the same weights gathered, which is computed from them and never published.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from deltad.delta import FORMAT
from deltad.delta.codec import sum_weights
from deltad.delta.digest import root_of
from deltad.delta.layout import Layout, TensorSpec
from tests.kit.weights import ArrayWeights
from trainer_plugin.publisher import Publisher

WIDTH, VOCABULARY, EXPERTS = 24, 37, 4


class Model(nn.Module):
    """What shards badly: a size that no mesh divides, experts, a tied head, one number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH, bias=False)
        self.experts = nn.Parameter(torch.empty(EXPERTS, WIDTH, 5))
        self.scale = nn.Parameter(torch.empty(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight


def weights(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole weights of a step, the same on every rank: a few elements change with each."""
    model = Model()
    state = {}
    for name, tensor in model.state_dict().items():
        if name == "head.weight":
            continue
        source = torch.Generator().manual_seed(len(name))
        value = torch.randn(tensor.shape, generator=source) * 0.02
        for i in range(1, step + 1):
            source = torch.Generator().manual_seed(1000 * i + len(name))
            value = torch.where(torch.rand(tensor.shape, generator=source) < 0.03, value * 1.01, value)
        state[name] = value.to(dtype)
    return state


def gathered_root(state: dict[str, torch.Tensor], dtype: torch.dtype) -> str:
    names = sorted(state)
    kind, width = ("BF16", torch.uint16) if dtype is torch.bfloat16 else ("F32", torch.uint32)
    layout = Layout(FORMAT, tuple(TensorSpec(name, kind, tuple(state[name].shape)) for name in names))
    arrays = [state[name].to(dtype).contiguous().view(-1).view(width).numpy() for name in names]
    return root_of(layout, sum_weights(layout, ArrayWeights(arrays))).hex()


def fsdp(mesh: DeviceMesh) -> Model:
    model = Model()
    fully_shard(model, mesh=mesh)
    return model


def load(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                parameter.copy_(distribute_tensor(state[name], parameter.device_mesh, parameter.placements))
            else:
                parameter.copy_(state[name])


def by_hand(mesh: DeviceMesh, placements: dict[str, list[Shard | Replicate]]) -> dict[str, torch.Tensor]:
    state = weights(0, torch.bfloat16)
    whole: list[Shard | Replicate] = [Replicate()] * mesh.ndim
    return {name: distribute_tensor(tensor, mesh, placements.get(name, whole)) for name, tensor in state.items()}


def refill(held: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    for name, tensor in held.items():
        assert isinstance(tensor, DTensor)
        fresh = distribute_tensor(state[name], tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(fresh.to_local())


MATRICES = ("up.weight", "down.weight", "embed.weight")
BY_HAND: dict[str, tuple[int, dict[str, list[Shard | Replicate]]]] = {
    "rows": (1, {name: [Shard(0)] for name in MATRICES}),
    "columns": (1, {name: [Shard(1)] for name in MATRICES}),
    "experts": (1, {"experts": [Shard(0)], "up.weight": [Shard(0)], "up.bias": [Shard(0)]}),
    "rows-and-columns": (2, {name: [Shard(0), Shard(1)] for name in ("up.weight", "down.weight", "experts")}),
    "innermost": (2, {"experts": [Shard(2), Shard(1)]}),
}
"""Placements by tensor, over a mesh of one dimension or of two; what is not named every rank holds."""
CASES = ("fsdp", "hsdp", "fsdp-fp32-as-bf16", *BY_HAND)


def publish_case(case: str, meshes: dict[int, DeviceMesh], socket: str) -> list[list[str]]:
    """Three steps of one case: each version's name, kind and root, and the root of the gathered weights."""
    dtype = torch.float32 if case == "fsdp-fp32-as-bf16" else torch.bfloat16
    model: nn.Module | None = None
    held: dict[str, torch.Tensor] = {}
    if case in BY_HAND:
        dimensions, placements = BY_HAND[case]
        held = by_hand(meshes[dimensions], placements)
    else:
        model = fsdp(meshes[2 if case == "hsdp" else 1]).to(dtype)
    publisher = Publisher(
        f"{case}-{dist.get_world_size()}",
        socket=socket,
        files={"config.json": b"{}"} if dist.get_rank() == 0 else None,
        publish_as="bf16" if dtype is torch.float32 else "source",
    )
    made = []
    for step in range(3):
        state = weights(step, dtype)
        if model is None:
            refill(held, state)
        else:
            load(model, state)
        outcome = publisher.publish(step, held if model is None else model).wait(60)
        version = outcome.version
        assert version is not None, outcome.reason
        made.append([version.version, version.kind, version.root, gathered_root(state, torch.bfloat16)])
    return made


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    meshes = {
        1: init_device_mesh("cpu", (world,)),
        2: init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner")),
    }
    for case in CASES:
        made = publish_case(case, meshes, sys.argv[1])
        if dist.get_rank() == 0:
            print(json.dumps({"case": case, "versions": made}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
