"""How vLLM loads a model whose weights will be written in place: as its own loader does, but with nothing packed away.

On a CPU vLLM packs the weights of linear layers for oneDNN or AMX, and computes with the packed copy: a write to the
parameter would change nothing. Here each layer keeps its weight and computes with it. Registered as the load format
`deltad`. Owns the invariant that no layer computes with a copy that an update would not reach, as far as linear
layers go; `held_tensors` sees the other copies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from deltad.errors import ReplicaError

FORMAT = "deltad"

_Weights = list[tuple[torch.nn.Module, torch.nn.Parameter, torch.Tensor | None]]


class InPlaceLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader for safetensors, and every linear layer computes with its parameter afterwards."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))
        self._weights: _Weights = []

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        self._weights = _plain_weights(model)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        _unpack(self._weights)
        self._weights = []
        return model


def build(vllm_config: VllmConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """A second model of this configuration, loaded from `weights` by the model's own code, beside the first.

    The first one's layers stay registered where the engine looks for them.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    device = torch.device(config.device_config.device)
    with set_default_torch_dtype(config.model_config.dtype), device:
        model: Any = initialize_model(vllm_config=config, model_config=config.model_config)
    model.load_weights(iter(weights))
    plain = _plain_weights(model)
    process_weights_after_loading(model, config.model_config, device)
    _unpack(plain)
    built: torch.nn.Module = model
    return built


def check_unpacked(model: torch.nn.Module) -> None:
    """Raises ReplicaError, naming the layer, for one that computes with a packed copy of its weight."""
    for name, module in model.named_modules():
        linear = vars(module).get("cpu_linear")
        if linear is not None and linear is not plain_linear:
            weight = getattr(module, "weight", None)
            empty = isinstance(weight, torch.Tensor) and not weight.numel()
            raise ReplicaError(
                f"engine layer {name!r}",
                expected="one that computes with its parameter",
                found="one that vLLM packed for oneDNN or AMX" + (", and its parameter is empty" if empty else ""),
                hint=f"a write to the parameter would change nothing: load the model with load_format={FORMAT!r}",
            )


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a layer that is not packed computes."""
    return torch.nn.functional.linear(x, weight, bias)


def _plain_weights(model: torch.nn.Module) -> _Weights:
    found: _Weights = []
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() == 2:
            found.append((module, weight, bias.data if isinstance(bias, torch.Tensor) else None))
    return found


def _unpack(weights: _Weights) -> None:
    for module, weight, bias in weights:
        if "cpu_linear" not in vars(module):
            continue
        if not module.get_parameter("weight").numel():
            module.weight = weight
        if bias is not None:
            module.get_parameter("bias").data = bias
        module.cpu_linear = plain_linear  # type: ignore[assignment]
