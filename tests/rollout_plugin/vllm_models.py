"""Tiny checkpoints of the architectures that the vLLM engine is tested with: random, so that tests are quick."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 500,  # not a multiple of 64, so the engine pads it
    "initializer_range": 0.3,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}


def qwen3(directory: Path) -> Path:
    config = Qwen3Config(**_SIZE, head_dim=32, tie_word_embeddings=True)
    return _write(directory, Qwen3ForCausalLM, config)


def llama_fp16(directory: Path) -> Path:
    config = LlamaConfig(**_SIZE, head_dim=32, tie_word_embeddings=False)
    return _write(directory, LlamaForCausalLM, config, torch.float16)


def llama_fp32(directory: Path) -> Path:
    config = LlamaConfig(**_SIZE, head_dim=32, tie_word_embeddings=False)
    return _write(directory, LlamaForCausalLM, config, torch.float32)


def qwen3_moe(directory: Path) -> Path:
    config = Qwen3MoeConfig(**_SIZE, **_EXPERTS, head_dim=32, num_experts=8, tie_word_embeddings=False)
    return _write(directory, Qwen3MoeForCausalLM, config)


def deepseek_v3(directory: Path) -> Path:
    """Latent attention at the sizes that vLLM's kernels take on a CPU, one dense layer and one of experts."""
    config = DeepseekV3Config(
        **{**_SIZE, "num_key_value_heads": 4},
        **_EXPERTS,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        tie_word_embeddings=False,
    )
    written = _write(directory, DeepseekV3ForCausalLM, config)
    path = written / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "topk_method": "noaux_tc"}))
    return written


def hybrid(directory: Path) -> Path:
    """Linear attention in every layer but the last."""
    config = Qwen3NextConfig(
        **_SIZE,
        **_EXPERTS,
        head_dim=128,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=8,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"],
        tie_word_embeddings=False,
    )
    return _write(directory, Qwen3NextForCausalLM, config)


def _write(directory: Path, model: Callable[[Any], Any], config: Any, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(5)
    model(config).to(dtype).save_pretrained(directory)
    return directory
