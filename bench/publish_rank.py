"""One gloo rank of `bench.publish`; started as `python -m bench.publish_rank SOCKET LAYERS WIDTH STEPS DIRECTORY`.

An FSDP2 model of LAYERS square matrices in bf16, a few of whose weights are changed in place before each step. Rank 0
prints a JSON array: for each rank what publishing from memory took, and for rank 0 what the same took by a checkpoint.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.memory import reset_peak, resident
from deltad.client import Client
from deltad.client.messages import PublishRequest
from trainer_plugin.publisher import Handle, Publisher

DENSITY = 0.004
MEMORY, WATCHED = "memory", "watched"
"""The runs that are published."""
_LONG = 300.0


@dataclass(slots=True)
class Taken:
    """What one rank took, in seconds and bytes, by step.

    `memcpy`: one copy of its shard, at the same time on all ranks. `inside`: in `publish` and at a fence that follows
    at once. `durable`: until the version was. `alone` and `beside`: a step of training without and with a publish
    beside it. `handed` and `deltas`: chunk bytes of this rank, and of the whole version. `extra`: resident at the most
    beyond one copy of the shard. `saved`: the same steps gathered, saved and published as a checkpoint.
    """

    shard: int = 0
    memcpy: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    extra: int = 0
    saved: list[float] = field(default_factory=list)
    saved_deltas: list[int] = field(default_factory=list)


class Trainer:
    """The model on this rank, and the step that it is at."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(torch.bfloat16)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.parts: list[torch.Tensor] = []
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            self.parts.append(parameter.to_local().detach().view(-1))
        self._batch = torch.zeros(1, width, dtype=torch.bfloat16)
        self.number = 0

    def step(self) -> None:
        """Move a few weights by one unit in the last place, and wait for the other ranks."""
        self.number += 1
        source = torch.Generator().manual_seed(self.number * 1000 + dist.get_rank())
        for part in self.parts:
            at = torch.randint(part.numel(), (int(part.numel() * DENSITY),), generator=source)
            part.view(torch.int16)[at] += 1
        dist.barrier()

    def train(self) -> None:
        """A forward and a backward pass, whose gradients nobody uses."""
        self.model(self._batch).float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)


def publisher_of(run: str, socket: str) -> Publisher:
    return Publisher(run, socket=socket, files={"config.json": b"{}"} if dist.get_rank() == 0 else None)


def timed(work: Callable[[], object]) -> float:
    """How long something takes that all ranks begin at once."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def from_memory(trainer: Trainer, publisher: Publisher, steps: int, taken: Taken) -> None:
    room = [torch.empty_like(part) for part in trainer.parts]

    def copy_all() -> None:
        for target, part in zip(room, trainer.parts, strict=True):
            target.copy_(part)

    def publish() -> Handle:
        return publisher.publish(trainer.number, trainer.model)

    copy_all()
    trainer.train()
    for _ in range(2):  # whatever happens once has happened then
        trainer.step()
        publish().wait(_LONG)
    for _ in range(steps):
        taken.memcpy.append(timed(copy_all))
        taken.alone.append(timed(trainer.train))
        trainer.step()
        begun = time.perf_counter()
        handle = publish()
        publisher.fence()
        taken.inside.append(time.perf_counter() - begun)
        outcome = handle.wait(_LONG)
        taken.durable.append(time.perf_counter() - begun)
        assert outcome.version is not None, outcome.reason
        taken.handed.append(outcome.chunk_bytes)
        taken.deltas.append(outcome.version.delta_bytes)
        trainer.step()
        handle = publish()
        taken.beside.append(timed(trainer.train))
        assert handle.wait(_LONG).version is not None


def extra_memory(trainer: Trainer, publisher: Publisher, taken: Taken) -> None:
    """Publish a run from its first version on, and see what is resident beyond what was."""
    gc.collect()
    before = resident("VmRSS")
    reset_peak()
    for _ in range(3):
        trainer.step()
        assert publisher.publish(trainer.number, trainer.model).wait(_LONG).version is not None
    taken.extra = resident("VmHWM") - before - taken.shard


def by_checkpoint(trainer: Trainer, client: Client, directory: Path, steps: int, taken: Taken) -> None:
    """Gather, save and publish; the daemon is told of the directory, so that nothing waits for it to settle."""
    for i in range(steps + 1):
        trainer.step()
        begun = time.perf_counter()
        state = {}
        for name, tensor in trainer.model.state_dict().items():
            whole = tensor.full_tensor()
            if dist.get_rank() == 0:
                state[name] = whole
        if dist.get_rank() == 0:
            target = directory / f"step_{trainer.number}"
            target.mkdir(parents=True)
            (target / "config.json").write_bytes(b"{}")
            save_file(state, target / "model.safetensors")
            reply = client.publish(WATCHED, PublishRequest(str(target)))
            if i:  # the first one is an anchor
                taken.saved.append(time.perf_counter() - begun)
                taken.saved_deltas.append(reply.version.delta_bytes)
            for old in directory.iterdir():
                if old != target:
                    shutil.rmtree(old)


def main(socket: str, layers: int, width: int, steps: int, directory: Path) -> None:
    dist.init_process_group("gloo")
    trainer = Trainer(layers, width)
    taken = Taken(shard=sum(part.numel() * part.element_size() for part in trainer.parts))
    publisher = publisher_of(MEMORY, socket)
    from_memory(trainer, publisher, steps, taken)
    del publisher
    extra_memory(trainer, publisher_of("resident", socket), taken)
    by_checkpoint(trainer, Client(socket), directory, steps, taken)
    gathered: list[dict[str, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, asdict(taken))
    if dist.get_rank() == 0:
        print(json.dumps(gathered), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
