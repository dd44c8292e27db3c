"""What deltad adds to a worker of vLLM: one method, through which a replica reaches the rank's live weights.

vLLM mixes the class into its own worker (`worker_extension_cls`), in each rank's process. Owns the invariant that
no error leaves the method as an exception: an executor that meets one stops listening to the other ranks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from deltad.client.messages import ErrorReply
from deltad.delta.backend import choose, warm
from deltad.delta.layout import Layout, decode_layout
from deltad.errors import DeltadError
from rollout_plugin.engines.vllm.held import held_tensors
from rollout_plugin.engines.vllm.loader import build, check_unpacked
from rollout_plugin.engines.vllm.probe import Map, cached, check_padding, find_map
from rollout_plugin.engines.vllm.rank import Rank

CLASS = f"{__name__}.Follower"
METHOD = "deltad"


class Follower:
    """Mixed into `vllm.v1.worker.worker_base.WorkerBase`."""

    def deltad(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Do what `Rank` does, or `bind` it first: (True, what it returned) or (False, an ErrorReply)."""
        worker: Any = self
        try:
            if method == "bind":
                worker.deltad_rank = _bind(worker, *arguments)
                return True, None
            if method == "check":
                arguments = (held_tensors(worker.model_runner.get_model()),)
            elif method == "set_levels":
                levels, count = arguments
                arguments = (levels[_rank()], count)
            return True, getattr(worker.deltad_rank, method)(*arguments)
        except DeltadError as error:
            return False, ErrorReply(error.kind, f"rank {_rank()}: {error}", error.retryable, error.exit_code)
        except Exception as error:
            return False, ErrorReply("", f"rank {_rank()}: {type(error).__name__}: {error}", False, 70)


def _rank() -> int:
    return int(get_tensor_model_parallel_rank())


def _bind(worker: Any, layout_bytes: bytes, cache: str) -> Rank:
    """Find, or read from the cache, where the layout's tensors lie in this rank. Raises ReplicaError."""
    model = worker.model_runner.get_model()
    check_unpacked(model)
    layout = decode_layout(layout_bytes)
    found = _map(worker, layout, Path(cache) if cache else None)
    held = held_tensors(model)
    check_padding(found, held)
    backend = choose()
    warm(backend, sorted({spec.dtype for spec in layout.tensors}))
    return Rank(layout, held, found.pieces, backend)


def _map(worker: Any, layout: Layout, cache: Path | None) -> Map:
    config = worker.vllm_config
    key = (
        vllm.__version__,
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        layout.table_digest.hex(),
        config.model_config.hf_config.to_json_string(),
        str(config.model_config.dtype),
        str(config.parallel_config),
        str(_rank()),
        str(get_tensor_model_parallel_world_size()),
    )
    return cached(cache, "\0".join(key).encode(), lambda: find_map(layout, partial(build, config)))
